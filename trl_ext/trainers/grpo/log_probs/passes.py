"""The passes before an update: log-probabilities of the old policy and the reference, by the update's forwards.

In half precision a token's log-probability depends on the shape of the forward, by hundredths of a nat. TRL asks for
the passes of a whole generation before it is known which rows an update forwards together. So the passes wait for the
advantages, and use the same forwards as the updates: the ratio of an unmoved policy is exactly 1.
Legend: B rows, C completion tokens.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.grpo_trainer import GRPOTrainer as TRLGRPOTrainer
from trl.trainer.utils import use_adapter

from trl_ext.trainers.grpo.log_probs.old_policy import OldPolicy
from trl_ext.trainers.rows.images import whole_rows
from trl_ext.trainers.step.exchange import agreed_num_forwards
from trl_ext.trainers.step.forward import PrefixBackward, StepForward, running
from trl_ext.trainers.step.plan import StepPlanner, StepWindow
from trl_ext.trainers.step.rows import Rollouts

OLD, REFERENCE = "old_per_token_logps", "ref_per_token_logps"
# TRL's arguments for images, which are passed on if rollouts have them.
_IMAGES = [*inspect.signature(TRLGRPOTrainer._get_per_token_logps_and_entropies).parameters][8:]


class UpdatePasses:
    """Delays TRL's passes of a generation, made by `log_probs`, until its updates can be planned.

    PPO uses TRL's passes: its targets need the log-probabilities before its updates are planned.
    """

    def __init__(self, trainer: Any, old_policy: OldPolicy, planner: StepPlanner, log_probs: Callable[..., Any]):
        self._trainer, self._old_policy, self._planner, self._forward = trainer, old_policy, planner, log_probs
        self._is_waiting = False
        self._due: list[str] = []

    @property
    def _can_wait(self) -> bool:
        return self._is_waiting and not self._old_policy.is_trls_alone

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Give TRL placeholders for its passes inside the block, in training."""
        self._is_waiting = self._trainer.memory_kind == "grpo" and self._trainer.model.training
        try:
            yield
        finally:
            self._is_waiting = False

    def placeholder(self, num_rows: int, width: int) -> torch.Tensor | None:
        """Return [B, C] of NaN for a pass that waits; None for other forwards."""
        if not self._can_wait:
            return None
        return torch.full((num_rows, width), torch.nan, device=self._trainer.accelerator.device)

    def take(self, rollouts: Rollouts) -> None:
        """Remove the placeholders from rollouts, and record the passes that they need. Called inside `waiting`."""
        if not self._can_wait:
            return
        trainer, args = self._trainer, self._trainer.args
        for name in (OLD, REFERENCE):
            rollouts.pop(name, None)
        is_moved = args.gradient_accumulation_steps % (args.steps_per_generation * trainer.num_iterations) != 0
        self._due = [*([OLD] if is_moved else []), *([REFERENCE] if trainer.beta else [])]

    def make(self, micro_batches: Sequence[Rollouts]) -> None:
        """Add the log-probabilities of the due passes to the micro-batches of a generation. Collective."""
        trainer, planner, due = self._trainer, self._planner, self._due
        self._due = []
        if not due:
            return
        with (
            torch.no_grad(),
            disable_gradient_checkpointing(trainer.model, trainer.args.gradient_checkpointing_kwargs),
        ):
            for number, (begin, end) in enumerate(planner.windows(micro_batches)):
                # The first update starts from the current policy, unless later iterations repeat its rows.
                names = due if number or trainer.num_iterations > 1 else [one for one in due if one != OLD]
                window = planner.window(micro_batches, begin, end)
                planner.count(window, len(names))
                for name in names:
                    with self._model(name) as model:
                        self._add(name, model, window, micro_batches[begin:end])

    @contextmanager
    def _model(self, name: str) -> Iterator[Any]:
        """Yield the model of a pass: as in TRL the policy, the reference, or the policy without its adapter."""
        trainer = self._trainer
        if name == OLD or trainer.ref_model is not None:
            yield trainer.model if name == OLD else trainer.ref_model
            return
        bare = trainer.accelerator.unwrap_model(trainer.model)
        with use_adapter(bare, adapter_name="ref" if "ref" in bare.peft_config else None):
            yield trainer.model

    def _add(self, name: str, model: Any, window: StepWindow, micro_batches: Sequence[Rollouts]) -> None:
        """Add the log-probabilities of a pass to the rows of a window, here and on their home ranks. Collective."""
        trainer, accelerator = self._trainer, self._trainer.accelerator
        group = trainer.step_settings.group
        num_rows, width = micro_batches[0]["completion_ids"].shape
        of_all = torch.zeros(
            (accelerator.num_processes, len(micro_batches), num_rows, agreed_num_forwards(width, accelerator)),
            device=accelerator.device,
        ).flatten(end_dim=2)
        for forward in window.forwards:
            if not isinstance(forward, StepForward):
                assert isinstance(forward, PrefixBackward)
                forward.cache.clear()
                continue
            with running(forward):
                batch = forward.batch()
                images = {one: batch[one] for one in _IMAGES if one in batch}
                columns = batch["completion_ids"].size(1)
                logps = self._forward(model, *whole_rows(batch), columns, **images)[0]  # as in the loss
            rows, members = forward.rows, list(forward.members)
            if name not in rows.rollouts:
                rows.rollouts[name] = torch.zeros(rows.rollouts["completion_ids"].shape, device=logps.device)
            rows.rollouts[name][members, : logps.size(1)] = logps[: len(members)]
            if not forward.is_whole and (group is None or group.rank == 0):  # one of the processes that share rows
                of_all[[rows.numbers[i] for i in members], : logps.size(1)] = logps[: len(members)]
        if name in micro_batches[0]:  # rows that stay on their rank
            return
        own = accelerator.reduce(of_all, reduction="sum").unflatten(0, (-1, len(micro_batches), num_rows))
        for micro_batch, logps in zip(micro_batches, own[accelerator.process_index], strict=True):
            micro_batch[name] = logps[:, :width]
