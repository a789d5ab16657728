"""The quickstart on a card, in one process, ours and TRL's: held-out answers that are right over seconds of training.

Its model and data are `make quickstart`'s, in the folder that TRL_EXT_CACHE names (docs/reference/evidence/cards.md
says how they get to a machine that downloads nothing).

    python -m benchmarks.gpu.quickstart
"""

import os
import sys
from typing import Any

from benchmarks.gpu import part
from benchmarks.quickstart.assets import cache_folder, prepare
from benchmarks.quickstart.model import GGUF
from benchmarks.quickstart.race import race

SEEDS = (42, 43, 44)
NAMES = tuple(f"quickstart/{seed}/{library}" for seed in SEEDS for library in ("trl_ext", "trl"))
TINY = {"max_steps": 2, "every": 1, "per_device_train_batch_size": 8}


def work(name: str, device: str, scale: str) -> dict[str, Any]:
    if not (cache_folder() / "model").is_dir() and not os.environ.get(GGUF):
        lacks = f"Its model is neither in {cache_folder()} nor named by {GGUF}."
        return {"status": "skipped", "reason": lacks}
    _, seed, library = name.split("/")
    found = race(library, prepare(), device, int(seed), **(TINY if scale == "tiny" else {}))
    told = ", ".join(f"{right:.0%} at {seconds:.1f} s" for _, seconds, right in found["curve"])
    return {**found, "says": f"held-out answers right: {told}"}


if __name__ == "__main__":
    sys.exit(part.main("quickstart", __doc__, NAMES, work))
