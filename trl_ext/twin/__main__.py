"""`python -m trl_ext.twin JOB.json`: run one simulation and print its answer as one line of JSON."""

import json
import sys
import warnings
from pathlib import Path

from trl_ext.twin.driver import PREFIX
from trl_ext.twin.simulation import Simulation


def main() -> None:
    warnings.filterwarnings("ignore")
    simulation = Simulation(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    from trl_ext.twin.run import run

    answer = run(simulation)
    print(PREFIX + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
