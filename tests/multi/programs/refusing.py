"""Worker of test_refusals: rank 1 ends in a sentence; rank 0 waits, as in a collective, until the launcher ends it."""

import os
import signal

from trl_ext.errors import ConfigError
from trl_ext.scripts.exit import user_errors

if __name__ == "__main__":
    with user_errors():
        if os.environ["RANK"] == "1":
            raise ConfigError("Rank 1 has no rollouts. Give the whole checkpoint.")
        signal.pause()
