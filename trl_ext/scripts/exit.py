"""How a command ends when its user made a mistake, one sentence and exit code 2, or when memory ran out, exit code 5.

Our own bugs keep their traceback.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from trl_ext.errors import OutOfMemoryError, TrlExtError

USER_ERROR = 2  # the exit code that argparse uses as well
OUT_OF_MEMORY = 5


@contextmanager
def user_errors() -> Iterator[None]:
    """Print a TrlExtError without traceback, once per machine, and exit with code 2; with 5 if memory ran out."""
    try:
        yield
    except OutOfMemoryError as error:
        if error.is_own:  # on whichever rank it is
            print(f"\nerror: {error}\n", file=sys.stderr, flush=True)
        sys.exit(OUT_OF_MEMORY)
    except TrlExtError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"\nerror: {error}\n", file=sys.stderr, flush=True)
        sys.exit(USER_ERROR)
