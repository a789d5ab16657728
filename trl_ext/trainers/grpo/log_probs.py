"""Log-probabilities before an update, of the old policy and the reference, without forwards of other shapes.

The old policy's are taken from the update's forward if the policy has not changed since. With vLLM, TRL corrects the
policy gradient by the ratio of the old policy's probability to the sampler's, and forwards the whole batch once more
for it. In the first optimizer step after a generation the trained policy is the old policy, so the detached
log-probabilities of the update are the same numbers. The ratio is computed here by TRL's formula. A placeholder
detects a TRL with another formula.

Later steps, the reference and PPO's targets take passes by the update's forwards. In half precision a token's
log-probability depends on the shape of the forward, by hundredths of a nat. TRL asks for the passes of a whole
generation before it is known which rows an update forwards together. So the passes wait for the plan, and use the same
forwards as the updates: the ratio of an unmoved policy is exactly 1, and its KL to itself 0.

Legend: B rows, T completion tokens.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from transformers import TrainerState
from transformers.utils import logging
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.grpo_trainer import GRPOTrainer as TRLGRPOTrainer
from trl.trainer.utils import use_adapter

from trl_ext.trainers.checkpoints.ranks import gathered
from trl_ext.trainers.generation.pushes import PushWatch, compared
from trl_ext.trainers.rows.images import whole_rows
from trl_ext.trainers.step.exchange import agreed_num_forwards
from trl_ext.trainers.step.forward import PrefixBackward, StepForward, running
from trl_ext.trainers.step.plan import StepPlanner, StepWindow
from trl_ext.trainers.step.rows import Rollouts, counted_tokens
from trl_ext.trainers.step.trainer import StepTrainer

logger = logging.get_logger(__name__)

# TRL's metrics of the pass.
_DIFFERENCE, _RATIO = "sampling/sampling_logp_difference", "sampling/importance_sampling_ratio"
OLD, REFERENCE = "old_per_token_logps", "ref_per_token_logps"
# TRL's arguments for images, which are passed on if rollouts have them.
_IMAGES = [*inspect.signature(TRLGRPOTrainer._get_per_token_logps_and_entropies).parameters][8:]


class LogProbTrainer(StepTrainer, Protocol):
    """A GRPO trainer with the passes before its updates; the names are TRL's.

    Args:
        state: Of transformers: the steps taken.
        memory_kind: "grpo" or "ppo".
        optimizer: Its optimizer, made when training begins.
        use_vllm: Whether vLLM samples.
        vllm_importance_sampling_correction: Whether the loss is weighted by the ratio to the sampler's probability.
        vllm_importance_sampling_mode: As in `GRPOConfig`; the bounds of the ratio are `clip_min` and `clip_max`.
        beta: Weight of the penalty on the KL to the reference; 0 makes no pass of it.
        ref_model: The reference; None if it is the policy without its adapter.
    """

    state: TrainerState
    memory_kind: str
    optimizer: Any
    use_vllm: bool
    vllm_importance_sampling_correction: bool
    vllm_importance_sampling_mode: str
    vllm_importance_sampling_clip_min: float | None
    vllm_importance_sampling_clip_max: float | None
    beta: float
    ref_model: Any


class OldPolicy:
    """Replaces the old policy's forward by the update's."""

    def __init__(self, trainer: LogProbTrainer):
        self._trainer = trainer
        self._sampled: Sequence[Sequence[float | None]] | None = None
        self._has_told = self.is_trls_alone = False
        self._sampled_at: int | None = None
        self._inputs: dict[str, Any] | None = None
        self._compared: list[torch.Tensor] = []
        self._pushes = PushWatch()

    @property
    def is_left_out(self) -> bool:
        """True if the pass is left out; equal on all ranks."""
        trainer = self._trainer
        return not self.is_trls_alone and trainer.use_vllm and trainer.vllm_importance_sampling_correction

    def skip_next_forward(self, sampled: Sequence[Sequence[float | None]] | None) -> None:
        """Skip TRL's next forward, which is the old policy's; `sampled` are the sampler's log-probabilities by row."""
        self._sampled = sampled if self.is_left_out else None
        if self._trainer.model.training:
            self._sampled_at = self._trainer.state.global_step

    def placeholder(self, num_rows: int, width: int) -> torch.Tensor | None:
        """Return a placeholder of the pass, [B, T] near the sampler's log-probabilities; None for other forwards."""
        if self._sampled is None:
            return None
        # The tokens of a row differ by 0.1 in total, so that the bounds of the ratios do not clip the difference.
        logps = torch.full((num_rows, width), 0.1 / width)
        logps[1::2] *= -1
        for own, known in zip(logps, self._sampled, strict=True):
            own[: len(known)] += torch.tensor([torch.nan if logp is None else logp for logp in known])
        self._sampled = None
        is_first = not self._has_told and self._trainer.memory_kind == "grpo"  # PPO makes the pass for its targets
        if is_first and self._trainer.accelerator.is_main_process:
            logger.warning(
                "The forward of the old policy is left out: the policy does not change between sampling and the first "
                "update, whose own log-probabilities are compared with vLLM's."
            )
        self._has_told = True
        return logps.to(self._trainer.accelerator.device)

    def remove_placeholder(self, rollouts: dict[str, Any], metrics: dict[str, list[float]]) -> bool:
        """Remove results of the placeholder from rollouts and metrics. Collective.

        Return False if TRL's ratios have another formula; the pass is then kept from now on.
        """
        if not self.is_left_out:
            return True
        ours, theirs = self._ratio(rollouts), rollouts["importance_sampling_ratio"]
        is_known = ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=1e-4)
        is_known = all(gathered(self._trainer.args, is_known))
        for name in ("old_per_token_logps", "importance_sampling_ratio"):
            del rollouts[name]
        for name in [name for name in metrics if name.startswith((_DIFFERENCE, _RATIO))]:
            metrics[name].pop()
            if not metrics[name]:
                del metrics[name]
        self.is_trls_alone = not is_known
        if not is_known and self._trainer.accelerator.is_main_process:
            logger.warning("This TRL makes vLLM's importance ratios in another way than trl_ext: they are left to it.")
        return is_known

    @contextmanager
    def around_loss(self, inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield a copy of `inputs` for one forward of the loss; `add_ratios` adds the old policy's numbers to it."""
        # In half precision a forward of another shape rounds differently, and an unmoved policy's ratio is not 1.
        is_unmoved = self._trainer.model.training and self._trainer.state.global_step == self._sampled_at
        own = {name: one for name, one in inputs.items() if not (is_unmoved and name == "old_per_token_logps")}
        self._inputs = own
        try:
            yield own
        finally:
            self._inputs = None
        if self.is_left_out and "importance_sampling_ratio" not in inputs:  # rows of the rehearsal have ratios
            self._compared.append(self._comparison(own))

    def add_ratios(self, logps: torch.Tensor) -> None:
        """Add the old policy's numbers to inputs of the loss that lack them, from the update's `logps` [B, T]."""
        if self._inputs is None:
            return
        self._inputs.setdefault("old_per_token_logps", logps.detach())
        if self.is_left_out and "importance_sampling_ratio" not in self._inputs:
            self._inputs["importance_sampling_ratio"] = self._ratio(self._inputs)

    def _ratio(self, rollouts: dict[str, Any]) -> torch.Tensor:
        """Return the importance ratio of rollouts, in the shape of `importance_ratio`."""
        trainer = self._trainer
        return importance_ratio(
            rollouts["old_per_token_logps"] - rollouts["sampling_per_token_logps"],
            counted_tokens(rollouts),
            trainer.vllm_importance_sampling_mode,
            trainer.vllm_importance_sampling_clip_min,
            trainer.vllm_importance_sampling_clip_max,
        )

    def log(self, metrics: dict[str, list[float]]) -> None:
        """Append TRL's metrics of the pass, over all tokens since the last call and all ranks, and in training look
        whether pushed weights arrive. Collective."""
        if not self.is_left_out:
            return
        nothing = torch.tensor([0.0] * 5 + [-torch.inf] * 3, device=self._trainer.accelerator.device)
        own, self._compared = _join(torch.stack([nothing, *self._compared])), []
        values = _join(self._trainer.accelerator.gather(own[None]))
        difference, num_differences, ratio, num_ratios, _, *extremes = values.tolist()
        # Without a token, all are 0 as in TRL.
        largest, largest_ratio, smallest_ratio = (one if one > -torch.inf else 0.0 for one in extremes)
        metrics[f"{_DIFFERENCE}/mean"].append(difference / max(num_differences, 1))
        metrics[f"{_DIFFERENCE}/max"].append(largest)
        metrics[f"{_RATIO}/min"].append(0.0 - smallest_ratio)
        metrics[f"{_RATIO}/mean"].append(ratio / max(num_ratios, 1))
        metrics[f"{_RATIO}/max"].append(largest_ratio)
        if self._trainer.model.training:
            self._pushes.look(values[[0, 4]], self._move(), self._trainer.state, metrics)

    def _move(self) -> float | None:
        """Return how far the policy may be from the weights that sampled, in learning rates.

        Samples that were generated ahead have the weights of the block before, but for the first block. None within a
        block that a resumed run has from its checkpoint: it may be the first.
        """
        if not getattr(self._trainer.args, "generation_ahead", 0) or self._sampled_at == 0:
            return 0.0
        return None if self._sampled_at is None else self._trainer.optimizer.param_groups[0]["lr"]

    def _comparison(self, inputs: dict[str, Any]) -> torch.Tensor:
        """Return [8]: sum and number of differences and of ratios; the sum of `1 - p` over the tokens that have a
        difference; the largest difference and ratio; minus the smallest ratio.

        A token that vLLM could not score has no difference and the ratio 1.
        """
        mask = counted_tokens(inputs).bool()
        difference = (inputs["old_per_token_logps"] - inputs["sampling_per_token_logps"]).abs()
        difference = difference[mask & ~difference.isnan()].float()
        ratio = inputs["importance_sampling_ratio"].float()
        is_of_sequences = self._trainer.vllm_importance_sampling_mode.startswith("sequence")
        # A row without tokens only keeps this rank in step with the others.
        ratio = ratio[mask.any(dim=1)].flatten() if is_of_sequences else ratio[mask]
        none = difference.new_tensor([-torch.inf])
        sums = [part for values in (difference, ratio) for part in (values.sum(), values.new_tensor(len(values)))]
        uncertainty = compared(inputs["old_per_token_logps"][mask], inputs["sampling_per_token_logps"][mask])[1]
        largest = (torch.cat([values, none]).max() for values in (difference, ratio, -ratio))
        return torch.stack([*sums, uncertainty, *largest])


def _join(comparisons: torch.Tensor) -> torch.Tensor:
    """Return the merged comparison [8] of several [N, 8]."""
    return torch.cat([comparisons[:, :5].sum(dim=0), comparisons[:, 5:].amax(dim=0)])


def importance_ratio(
    log_ratio: torch.Tensor, mask: torch.Tensor, mode: str, clip_min: float | None, clip_max: float | None
) -> torch.Tensor:
    """Return TRL's ratio of the old policy's probability to the sampler's: [B, T] of tokens or [B, 1] of sequences.

    Args:
        log_ratio: [B, T]; NaN where the sampler gave none, which counts as 0.
        mask: [B, T] 1 where a token counts; the ratio of the others is 1 before the bounds.
        mode: `vllm_importance_sampling_mode`: of tokens or of sequences, truncated to the bounds or 0 outside them.
        clip_min, clip_max: The bounds, or None.
    """
    level, _, what = mode.partition("_")
    log_ratio = torch.nan_to_num(log_ratio * mask, nan=0.0)
    ratio = torch.exp(log_ratio.sum(dim=-1, keepdim=True) if level == "sequence" else log_ratio)
    low, high = -torch.inf if clip_min is None else clip_min, torch.inf if clip_max is None else clip_max
    return ratio.clamp(low, high) if what == "truncate" else ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


class UpdatePasses:
    """Delays TRL's passes of a generation, made by `log_probs`, until its updates can be planned."""

    def __init__(
        self, trainer: LogProbTrainer, old_policy: OldPolicy, planner: StepPlanner, log_probs: Callable[..., Any]
    ):
        self._trainer, self._old_policy, self._planner, self._forward = trainer, old_policy, planner, log_probs
        self._is_waiting = False
        self.precede_targets = False  # True while a subclass's targets wait for the passes
        self._due: list[str] = []

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Give TRL placeholders for its passes inside the block, in training."""
        self._is_waiting = self._trainer.model.training
        try:
            yield
        finally:
            self._is_waiting = False

    def placeholder(self, num_rows: int, width: int) -> torch.Tensor | None:
        """Return [B, T] of NaN for a pass that waits; None for other forwards."""
        if not self._is_waiting or self._old_policy.is_trls_alone:
            return None
        return torch.full((num_rows, width), torch.nan, device=self._trainer.accelerator.device)

    def take(self, rollouts: Rollouts) -> None:
        """Remove TRL's passes from rollouts, and record the passes that they need. Called inside `waiting`."""
        if not self._is_waiting:
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
                is_own = not (number or trainer.num_iterations > 1 or self.precede_targets)
                names = [one for one in due if one != OLD] if is_own else due
                window = planner.window(micro_batches, begin, end)
                planner.count(window, len(names))
                for name in names:
                    with self._model(name) as model:
                        self._add(name, model, window, micro_batches[begin:end])

    @contextmanager
    def _model(self, name: str) -> Iterator[Any]:
        """Yield the model of a pass: as in TRL the policy, the reference, or the policy without its adapter."""
        trainer = self._trainer
        if name != REFERENCE or trainer.ref_model is not None:
            yield trainer.ref_model if name == REFERENCE else trainer.model
            return
        bare = trainer.accelerator.unwrap_model(trainer.model)
        with use_adapter(bare, adapter_name="ref" if "ref" in bare.peft_config else None):
            yield trainer.model

    def _columns(self, name: str, model: Any, batch: Rollouts) -> Rollouts:
        """Return the columns [b, T'] of a pass for the batch of the running forward, by name."""
        images = {one: batch[one] for one in _IMAGES if one in batch}
        return {name: self._forward(model, *whole_rows(batch), batch["completion_ids"].size(1), **images)[0]}

    def _add(self, name: str, model: Any, window: StepWindow, micro_batches: Sequence[Rollouts]) -> None:
        """Add the columns of a pass to the rows of a window, here and on their home ranks. Collective.

        Args:
            name: Of the column that is added.
            model: The model of the pass, as training calls it.
            window: The plan of the rows.
            micro_batches: The rows that get the column.
        """
        trainer, accelerator = self._trainer, self._trainer.accelerator
        group = trainer.step_settings.group
        num_rows, width = micro_batches[0]["completion_ids"].shape
        shape = accelerator.num_processes, len(micro_batches), num_rows, agreed_num_forwards(width, accelerator)
        of_all: dict[str, torch.Tensor] = {}
        for forward in window.forwards:
            if not isinstance(forward, StepForward):
                assert isinstance(forward, PrefixBackward)
                forward.cache.clear()
                continue
            with running(forward):
                columns = self._columns(name, model, forward.batch())
            rows, members = forward.rows, list(forward.members)
            for column, found in columns.items():
                values = found[: len(members)].float()  # FSDP2's mixed precision returns bfloat16
                if column not in rows.rollouts:
                    rows.rollouts[column] = torch.zeros(rows.rollouts["completion_ids"].shape, device=values.device)
                rows.rollouts[column][members, : values.size(1)] = values
                if column not in of_all:
                    of_all[column] = torch.zeros(shape, device=accelerator.device).flatten(end_dim=2)
                if not forward.is_whole and (group is None or group.rank == 0):  # one of the processes that share rows
                    of_all[column][[rows.numbers[i] for i in members], : values.size(1)] = values
        for column, whole in of_all.items():
            if column in micro_batches[0]:  # rows that stay on their rank
                continue
            own = accelerator.reduce(whole, reduction="sum").unflatten(0, (-1, len(micro_batches), num_rows))
            for micro_batch, values in zip(micro_batches, own[accelerator.process_index], strict=True):
                micro_batch[column] = values[:, :width]
