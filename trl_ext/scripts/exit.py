"""How a command ends when its user made a mistake: one sentence and exit code 2. Our own bugs keep their traceback."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from trl_ext.errors import TrlExtError

USER_ERROR = 2  # the exit code that argparse uses as well


@contextmanager
def user_errors() -> Iterator[None]:
    """Print a TrlExtError without traceback, once per machine, and exit with code 2."""
    try:
        yield
    except TrlExtError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"\nerror: {error}\n", file=sys.stderr, flush=True)
        sys.exit(USER_ERROR)
