"""What happens to a card's allocator besides allocations: when weights reach it, and when its cache is emptied.

Fake tensors do not say whether they are on the host or on the card. The weights reach the card when the trainer is
built, under ZeRO-3 when the engine has split them; until then they were loaded to the host.

The cache is emptied by accelerate when training begins, by DeepSpeed 0.19 (ZeRO-1 and 2) before it flattens a group of
weights, by our rehearsal before step 1, and by transformers in every n-th step with `torch_empty_cache_steps`. ZeRO-3
never does it in a step. TRL also does before it wakes a sleeping vLLM, which the twin does not run.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from accelerate.utils.memory import clear_device_cache
from transformers import TrainerCallback

from trl_ext.twin import adapters
from trl_ext.twin.trace import Trace


@contextlib.contextmanager
def emptied_caches(trace: Trace) -> Iterator[None]:
    """Calls that empty a GPU's cache stand in the trace: accelerate's before training, and DeepSpeed's while it
    flattens weights; transformers' with `torch_empty_cache_steps`. On a processor they do nothing."""
    plain = clear_device_cache

    def clear(garbage_collection: bool = False) -> None:
        plain(garbage_collection)
        trace.empty_cache()

    names: list[tuple[str, Any]] = [
        ("accelerate.utils.memory:clear_device_cache", clear),
        ("transformers.trainer:clear_device_cache", clear),
    ]
    if "deepspeed" in sys.modules:
        kind = "deepspeed.accelerator.cpu_accelerator:CPU_Accelerator"
        names.append((f"{kind}.empty_cache", lambda accelerator: trace.empty_cache()))
    with adapters.replaced(*names):
        yield


class CacheAtTheStart(TrainerCallback):
    """What the allocator has on a card when training begins: weights that ZeRO-3 has split in host memory, and no
    cache if there was a rehearsal, whose last act is to empty it. Added before `TrainingBegins`."""

    def __init__(self, trace: Trace, zero_stage: int):
        self._trace = trace
        self._splits_weights = zero_stage == 3

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step > 0:
            return
        if self._splits_weights:
            self._trace.land()
        if args.memory_rehearsal is not False:
            self._trace.empty_cache()
