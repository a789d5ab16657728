"""Exit codes of a command. Each but 1 comes with a sentence instead of a traceback.

0    the run is complete
1    a bug, whose traceback is printed; or a signal after which nothing could be saved
2    a mistake of the user, or a gradient that is not finite
5    memory ran out
6    another process of the run, or its vLLM server, is stopped, dead or cut off
73   checkpoints cannot be written, for a reason that does not pass
75   SIGTERM or Ctrl-C: a checkpoint was saved, and the run can be resumed
130  Ctrl-C before the first step, or a second Ctrl-C: nothing was saved
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb

from trl_ext.errors import (
    CANNOT_SAVE,
    LOST_PROCESS,
    ConfigError,
    LostProcessError,
    OutOfMemoryError,
    StorageError,
    TrlExtError,
)

USER_ERROR = 2  # the exit code that argparse uses as well
OUT_OF_MEMORY = 5
INTERRUPTED = 130
_LAUNCHER_S = 5.0  # within which a launcher sees that a process has ended

# Packages that check settings and model files, and whose messages are fit for users.
_LIBRARIES = frozenset(
    "accelerate bitsandbytes datasets deepspeed huggingface_hub numpy peft pydantic safetensors tokenizers torch "
    "transformers trl vllm httpx requests".split()
)
_REFUSALS = (ValueError, OSError, ImportError, TypeError, AssertionError)


@contextmanager
def user_errors() -> Iterator[None]:
    """Print a TrlExtError without traceback, once per machine, and exit with its code."""
    try:
        yield
    except OutOfMemoryError as error:
        if error.is_own:  # on whichever rank it is
            print(f"\nerror: {error}\n", file=sys.stderr, flush=True)
        sys.exit(OUT_OF_MEMORY)
    except LostProcessError as error:
        if error.says:
            _print_once(f"\nerror: {error}\n")
            error.says = False  # so that SIGTERM does not print it again
        sys.stdout.flush()
        if error.has_ended:
            # Gives the launcher time to see the lost process's exit code; it then ends this process.
            time.sleep(_LAUNCHER_S)
        os._exit(LOST_PROCESS)  # Python's own shutdown may wait for the lost process
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print("\nInterrupted. Nothing was saved since the last checkpoint.\n", file=sys.stderr, flush=True)
        sys.exit(INTERRUPTED)
    except TrlExtError as error:
        _print_once(f"\nerror: {error}\n")
        sys.exit(CANNOT_SAVE if isinstance(error, StorageError) else USER_ERROR)
    except (ImportError, AttributeError, TypeError):
        from trl_ext.compat.versions import seam_problem

        if not (problem := seam_problem()):
            raise
        _print_once(f"\nerror: {problem}\n")
        sys.exit(USER_ERROR)


def _print_once(sentence: str) -> None:
    """Print to stderr without secrets, on any rank, unless a process of this launch on this machine printed the same.

    torch's launcher gives each process a file, `<attempt>/<local rank>/error.json`, in a folder of the launch. A file
    there holds the printed sentences, under a lock that is freed when its holder ends.
    """
    from trl_ext.rewards.text.secrets import public

    sentence, error_file = public(sentence), os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not error_file or not Path(error_file).parents[1].is_dir():  # another launcher, or one process
        print(sentence, file=sys.stderr, flush=True)
        return
    import fcntl

    with (Path(error_file).parents[1] / "printed").open("a+", encoding="utf-8") as printed:
        fcntl.flock(printed, fcntl.LOCK_EX)
        printed.seek(0)
        if sentence not in printed.read():
            print(sentence, file=sys.stderr, flush=True)
            printed.write(sentence)


@contextmanager
def refusals(opening: str = "The run cannot start", has_begun: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Turn a library's error about settings or model files into a ConfigError with the library's words.

    For code before the first step only. Errors of our code or the user's are raised unchanged.

    Args:
        opening: First words of the message.
        has_begun: Returns True once the first step has begun; errors are unchanged from then on.
    """
    try:
        yield
    except Exception as error:
        sentence = None if has_begun() or isinstance(error, TrlExtError) else _refusal(error, opening)
        if sentence is None:
            raise
        raise ConfigError(sentence) from error


def _refusal(error: Exception, opening: str) -> str | None:
    """Return the sentence for a library's error, None if the error is not about settings or files."""
    frames = list(walk_tb(error.__traceback__))
    places = [(frame.f_globals.get("__name__", ""), line) for frame, line in frames]
    # For json or os, the calling library counts.
    known_places = (place for place in reversed(places) if place[0].partition(".")[0] not in sys.stdlib_module_names)
    module, line = next(known_places, ("", 0))
    library = module.partition(".")[0]
    if library not in _LIBRARIES:
        return None
    from trl_ext.scripts.data.dataset import unloadable
    from trl_ext.trainers.step.out_of_memory import is_out_of_memory  # imports torch

    if is_out_of_memory(error):
        return None
    # In `from_pretrained` any error is about the folder, even a KeyError.
    loaders = (frame.f_locals for frame, _ in frames if frame.f_code.co_name == "from_pretrained")
    paths = (names.get("pretrained_model_name_or_path") for names in loaders)
    what = next((str(path) for path in paths if path), None)
    # RuntimeErrors of torch come from devices and other processes; of other libraries, from packages and options.
    known = _REFUSALS if library == "torch" else (*_REFUSALS, RuntimeError, AttributeError, OverflowError)
    is_of_hub = library in ("httpx", "requests")  # their errors have no common base
    if what is None and not is_of_hub and not isinstance(error, known):
        return None
    if what and not Path(what).exists() and (is_of_hub or isinstance(error, OSError)):
        return unloadable(what, error)
    words = " ".join(str(error).split()).rstrip(".")
    opening = f"{what} cannot be loaded" if what else opening
    return f"{opening}: {words} ({type(error).__name__} in {module}, line {line})."
