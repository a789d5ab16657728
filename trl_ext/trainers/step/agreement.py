"""Agreement between ranks after a forward ran out of memory on one of them: all run it again in halves."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import DistributedType

from trl_ext.compat.swap import swapped
from trl_ext.errors import OutOfMemoryError
from trl_ext.trainers.step.out_of_memory import is_out_of_memory

# With these, a forward has no collective inside the bare model.
_PLAIN = ("NO", "MULTI_GPU", "MULTI_CPU", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_HPU", "MULTI_MUSA")


class SplitNeeded(Exception):
    """Raised on all ranks if a forward failed on some rank; all run it again in halves."""


class Agreement:
    """Informs all ranks if one of them ran out of memory."""

    def __init__(self, accelerator: Any):
        self._accelerator = accelerator
        self._flags: torch.Tensor | None = None

    def exchange(self, failed: bool, is_stuck: bool) -> tuple[bool, bool]:
        """Return whether any rank failed, and whether a failed rank cannot cut its forward. Collective."""
        assert self._flags is not None
        # 1 means success: the tests' memory twin runs this on fake tensors, whose values are all 1.
        self._flags.copy_(torch.tensor([not failed, not (failed and is_stuck)], dtype=torch.int32))
        torch.distributed.all_reduce(self._flags, op=torch.distributed.ReduceOp.MIN)
        all_fine, all_can_cut = self._flags.tolist()
        return not all_fine, not all_can_cut

    @contextmanager
    def over(self, model: Any, is_stuck: bool) -> Iterator[None]:
        """Make every forward with gradient inside the block end in the same way on all ranks.

        Args:
            model: As training calls it, wrapped.
            is_stuck: True if this rank's forward cannot be cut.

        Raises:
            SplitNeeded: Some ranks failed, and all of them can cut.
            OutOfMemoryError: Another rank failed and cannot cut; that rank raises the allocator's error itself.
        """
        if self._flags is None:  # allocated while there is memory
            self._flags = torch.zeros(2, dtype=torch.int32, device=self._accelerator.device)
        bare = getattr(model, "module", model)
        plain = bare.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return plain(*args, **kwargs)
            try:
                output = plain(*args, **kwargs)
            except RuntimeError as error:
                if not is_out_of_memory(error) or self.exchange(failed=True, is_stuck=is_stuck)[1]:
                    raise
            else:
                failed, stuck = self.exchange(failed=False, is_stuck=is_stuck)
                if not failed:
                    return output
                if stuck:
                    raise OutOfMemoryError.of_another_rank()
            # After the except block no variable holds the error, whose traceback holds the activations.
            raise SplitNeeded

        with swapped(bare, forward=forward):
            yield


def why_ranks_cannot_agree(accelerator: Any, size_of_groups: int = 1) -> str:
    """Return why a forward that fails on one rank fails on all; "" if ranks can agree.

    `size_of_groups`: processes that share each row.
    """
    if size_of_groups > 1:
        return "under sequence_parallel the others of its group wait for this one's tokens inside the forward"
    kind = accelerator.distributed_type
    if kind == DistributedType.DEEPSPEED:
        stage = accelerator.state.deepspeed_plugin.zero_stage
        return "" if stage < 3 else "under ZeRO-3 the other ranks wait for this one's weights inside the forward"
    parallel = getattr(accelerator, "parallelism_config", None)
    if kind.value not in _PLAIN or (getattr(parallel, "tp_size", 1) or 1) > 1:
        return "the model is spread over the ranks, which wait for this one inside the forward"
    return ""
