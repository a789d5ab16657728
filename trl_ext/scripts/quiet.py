"""The console of a run: rank 0 prints warnings and bars of libraries, and all ranks print errors.

Without this each process would print the same bars and warnings. Messages of our code and the user's are not filtered.
"""

import logging
import os
import sys
import warnings
from contextlib import suppress
from importlib import import_module
from typing import Any

# Libraries that all processes call in the same way.
_LIBRARIES = r"(accelerate|datasets|deepspeed|huggingface_hub|peft|torch|transformers|trl)(\.|$)"
_UNHEEDED = r"`torch\.distributed\.\w+` is deprecated"  # DeepSpeed's and accelerate's code
_OMP, _NO_ACCELERATOR = "Setting OMP_NUM_THREADS", "Setting accelerator to CPU"


def quiet_launcher() -> None:
    """Drop lines of torch's launcher and DeepSpeed about their defaults."""
    # Drops the banner only; PyTorch still sets one thread a process.
    logging.getLogger("torch.distributed.run").addFilter(lambda record: _OMP not in str(record.msg))
    logging.getLogger("DeepSpeed").addFilter(_is_news)


def quiet_libraries() -> None:
    """Let only rank 0 show bars and warnings of libraries, and bars only on a terminal."""
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
    """Drop the line that DeepSpeed prints in each process about its compiled communication."""
    with suppress(ImportError):
        # By name: the attribute `deepspeed.comm.torch` is PyTorch.
        backend: Any = import_module("deepspeed.comm.torch")
        backend.print = lambda *args, **options: None


def _is_news(record: logging.LogRecord) -> bool:
    """Return False for DeepSpeed's line that there is no accelerator, if PyTorch finds none either."""
    if _NO_ACCELERATOR not in str(record.msg):
        return True
    import torch

    return torch.accelerator.is_available()
