"""Every error that trl_ext raises on purpose.

    TrlExtError
    ├── ConfigError      a key, a value or a combination that cannot work (also a ValueError)
    │   └── ArgumentError    a keyword that a config does not take (also a TypeError)
    ├── DataError        the dataset lacks rows or columns (also a ValueError)
    ├── RuleError        a rule is built wrongly or raised while scoring (also a ValueError)
    ├── PackingError     rows cannot be packed, or the model is not exact when packed (also a ValueError)
    ├── SupportError     a version or an optional package is missing (also an ImportError)
    ├── StorageError     checkpoints cannot be written, and waiting would not help (also a RuntimeError)
    ├── GradientError    a gradient is not finite, so its optimizer step is not taken (also a RuntimeError)
    ├── SamplerError     vLLM does not have the weights that were pushed to it (also a RuntimeError)
    ├── OutOfMemoryError memory ran out and a smaller chunk could not be tried (also a RuntimeError)
    └── LostProcessError another process of the run is stopped, dead or cut off (also a RuntimeError)

Each message gives the problem, with its value, and then the remedy. Any other exception is a bug of ours.

Trainers end a process themselves with two exit codes: LOST_PROCESS, and SAVED_ON_SIGNAL after SIGTERM or Ctrl-C.
`did_you_mean` is the hint of a message about an unknown name.
"""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches

LOST_PROCESS = 6
CANNOT_SAVE = 73  # EX_CANTCREAT of sysexits.h
SAVED_ON_SIGNAL = 75  # EX_TEMPFAIL of sysexits.h: try again later


class TrlExtError(Exception):
    """Base of all errors that trl_ext raises on purpose."""


class ConfigError(TrlExtError, ValueError):
    """A key, a value or a combination of settings that cannot work."""


class ArgumentError(ConfigError, TypeError):
    """A keyword that the constructor of a config does not take."""


class DataError(TrlExtError, ValueError):
    """The dataset is empty or lacks a column."""


class RuleError(TrlExtError, ValueError):
    """A rule is built wrongly, or raised while it scored a row."""


class PackingError(TrlExtError, ValueError):
    """Rows cannot be packed, or a model gives different numbers packed than alone."""


class SupportError(TrlExtError, ImportError):
    """A version outside the support window, or an optional package that is not installed."""


class StorageError(TrlExtError, RuntimeError):
    """No checkpoint can be written any more, for a lasting reason such as a read-only file system."""


class GradientError(TrlExtError, RuntimeError):
    """The norm of a gradient is infinite or NaN; its optimizer step would make all weights NaN."""


class SamplerError(TrlExtError, RuntimeError):
    """The sampler's log-probabilities differ from the trainer's as if pushed weights had not arrived."""


class OutOfMemoryError(TrlExtError, RuntimeError):
    """Memory ran out and no smaller chunk could be tried. Its cause is the allocator's error.

    Attributes:
        is_own: True if memory ran out in this process, False if another process's failure ends this process.
    """

    is_own = True

    @classmethod
    def of_another_rank(cls) -> "OutOfMemoryError":
        """Return the error for a rank that had enough memory, when another rank had not."""
        error = cls(
            "Another process ran out of memory in this forward; its message names the place and settings that fit."
        )
        error.is_own = False
        return error


class LostProcessError(TrlExtError, RuntimeError):
    """Another process of this run does not answer, or has ended.

    Attributes:
        says: True if the message is still to be printed; only in some processes, as it would be the same in all.
        has_ended: True if the other process has ended, False if it only does not answer.
    """

    def __init__(self, message: str, says: bool = True, has_ended: bool = False):
        super().__init__(message)
        self.says, self.has_ended = says, has_ended


def refuse_first(problems: Mapping[str, object], kind: type[TrlExtError] = ConfigError) -> None:
    """Raise an error with the first sentence whose condition is true: `{sentence: condition}`."""
    for sentence, is_so in problems.items():
        if is_so:
            raise kind(sentence)


def did_you_mean(word: object, choices: Iterable[str]) -> str:
    """Return a hint with the choice that is most like an unknown word, or "" if none is like it.

    Example:
        >>> did_you_mean("golden", ["kind", "gold"])
        "Did you mean 'gold'?"
    """
    close = get_close_matches(str(word), list(choices), n=1, cutoff=0.5)
    return f"Did you mean '{close[0]}'?" if close else ""
