"""The console of a run: one process speaks for all, and says only what its user can heed.

Where several processes load a model, each would show its bar, and each the same warnings of the same libraries.
Errors, and what our own code and the user's say, are printed by every process.
"""

import logging
import os
import sys
import warnings
from contextlib import suppress
from importlib import import_module
from typing import Any

# Libraries that all processes call alike.
_LIBRARIES = r"(accelerate|datasets|deepspeed|huggingface_hub|peft|torch|transformers|trl)(\.|$)"
_UNHEEDED = r"`torch\.distributed\.\w+` is deprecated"  # DeepSpeed's and accelerate's code
_OMP, _NO_ACCELERATOR = "Setting OMP_NUM_THREADS", "Setting accelerator to CPU"


def quiet_launcher() -> None:
    """Leave out what torch's launcher and DeepSpeed say of their own defaults."""
    # A banner; PyTorch's choice of one thread a process stays.
    logging.getLogger("torch.distributed.run").addFilter(lambda record: _OMP not in str(record.msg))
    logging.getLogger("DeepSpeed").addFilter(_is_news)


def quiet_libraries() -> None:
    """Let rank 0 alone show bars and warnings of libraries, and bars on a terminal only."""
    from transformers.utils import logging as transformers_logging

    quiet_launcher()
    warnings.filterwarnings("ignore", message=_UNHEEDED, category=FutureWarning)
    is_first = os.environ.get("RANK", "0") == "0"
    if not (is_first and sys.stderr.isatty()):
        import datasets

        transformers_logging.disable_progress_bar()
        datasets.disable_progress_bars()
    if not is_first:
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()
        transformers_logging.set_verbosity_error()
        warnings.filterwarnings("ignore", module=_LIBRARIES)


def quiet_deepspeed() -> None:
    """Leave out DeepSpeed's line, one a process, that its communication was compiled."""
    with suppress(ImportError):
        # Not as an attribute: there `deepspeed.comm.torch` is PyTorch.
        backend: Any = import_module("deepspeed.comm.torch")
        backend.print = lambda *args, **options: None


def _is_news(record: logging.LogRecord) -> bool:
    """Return False for DeepSpeed's finding that there is no accelerator, where PyTorch finds none either."""
    if _NO_ACCELERATOR not in str(record.msg):
        return True
    import torch

    return torch.accelerator.is_available()
