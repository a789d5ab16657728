"""The decision whether a trainer packs: by its setting and by a check on the real model, with the reason if not."""

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel, Trainer
from transformers.utils import is_liger_kernel_available, logging

from trl_ext.compat.liger import LayerKernels
from trl_ext.compat.peft import adds_virtual_tokens
from trl_ext.compat.swap import swapped
from trl_ext.compat.torch import capability_of, computes_below_float32
from trl_ext.errors import ConfigError, PackingError
from trl_ext.memory.cards import FASTER_ATTENTION
from trl_ext.monitor.log_keys import FASTER, KERNELS, WHY_PADDED
from trl_ext.monitor.phases import PhaseClock
from trl_ext.packing.attention import take_segments
from trl_ext.packing.check import CheckResult
from trl_ext.packing.families.rope import begin_anew as begin_positions_anew
from trl_ext.packing.families.rope import kinds_of, original_length
from trl_ext.packing.families.state import begin_anew, carries_state, kernels_of_training
from trl_ext.packing.kernels import kernels_in_words
from trl_ext.packing.ulysses import SequenceGroup
from trl_ext.trainers.fit.rehearsal.state import random_numbers_restored
from trl_ext.trainers.step.sequence_parallel import check_models, size_of_groups
from trl_ext.trainers.step.settings import StepCounts, StepSettings

if TYPE_CHECKING:
    from peft import PeftModel

logger = logging.get_logger(__name__)

TAKEN_UNASKED = ("cuda",)  # devices on which `layer_kernels` is on by default


def kernels_before_a_run(args: Any) -> str:
    """Return a sentence about the kernels that the layers will use on a card."""
    if args.layer_kernels is False or not args.packing:
        return f"transformers' own: {'layer_kernels' if args.packing else 'packing'} is false."
    if not is_liger_kernel_available():
        return "transformers' own: liger-kernel is not installed."
    return "on a card Liger's, if the self-check finds the same numbers with them."


class PackingSwitch(Trainer):
    """Mixin of a trainer, which gives the reasons against packing, the models to switch, and the self-check.

    Attributes:
        _packs: True if forwards are flat rows.
        _check_is_due: True if the self-check must run before the first packed forward.
        _attention_before: Configs of the models, each with its former attention implementation.
        _carries_state: True if some model has layers that carry state along the row.
        _share_prompt: True if rows with a common prompt share one copy of it.
        _why_unshared: Reason why prompts are not shared although they should be; else empty.
        why_padded: Reason why rows are padded although packing was not turned off; else empty.
        layer_kernels: The kernels of norms, positions and MLPs, in words.
        faster_checkpointing: Options that would fit on the card and make updates shorter, in words; or empty.
        _max_tokens: Most tokens of a forward; None if no budget is set.
        clock, counts: Seconds by phase, tokens and metrics of forwards since the last optimizer step.
        _metrics: TRL's lists by name for "train" and "eval".
    """

    model: "PreTrainedModel | PeftModel"
    _packs = False
    _check_is_due = False
    _attention_before: Sequence[tuple[Any, str | None]] = ()
    _carries_state = False
    _why_unshared = ""
    why_padded = ""
    layer_kernels = "transformers' own"
    faster_checkpointing = ""
    clock = PhaseClock()  # for objects made without the constructor, which gives each trainer a separate clock
    _metrics: Any

    def __init__(self, *args: Any, **kwargs: Any):
        """Overrides transformers.Trainer.__init__: starts the clock and the counts."""
        self.clock = PhaseClock(sync=torch.cuda.synchronize if torch.cuda.is_available() else None, outside="other")
        self.counts = StepCounts()
        super().__init__(*args, **kwargs)
        self._max_tokens: int | None = getattr(self.args, "max_tokens_per_forward", None)
        self._share_prompt: bool = getattr(self.args, "share_prompt", True)

    @property
    def step_settings(self) -> StepSettings:
        """Return the current settings that forwards are planned by. Collective once, if processes share rows."""
        caches = self._packs and self._share_prompt and self._can_cache_prefixes
        return StepSettings(
            packs=self._packs,
            share_prompt=self._share_prompt,
            max_tokens=self._max_tokens,
            group=self.sequence_group,
            caches_prefixes=caches,
        )

    @property
    def _can_cache_prefixes(self) -> bool:
        """Return True if the keys of a prefix can be cached for several forwards.

        False if layers carry state, which would have to be cached as well; under FSDP, which frees a layer's weights
        after its first backward; and under reentrant checkpointing, which gives no graph of the keys.
        """
        options = self.args.gradient_checkpointing_kwargs
        reentrant = isinstance(options, dict) and options.get("use_reentrant", False)
        return not (self._carries_state or self.is_fsdp_enabled or (self.args.gradient_checkpointing and reentrant))

    @property
    def num_sharing(self) -> int:
        """Return the number of processes that share each row."""
        return size_of_groups(self.args)

    @cached_property
    def sequence_group(self) -> SequenceGroup | None:
        """Return the group of processes that share rows; None if processes forward separate rows. Collective once."""
        size = self.num_sharing
        return SequenceGroup.of_world(size, self.args.ddp_timeout) if size > 1 else None

    def _why_not_packing(self) -> str:
        """Return a reason that is known without a forward; empty if there is none."""
        return "prompt tuning puts virtual tokens before every row" if adds_virtual_tokens(self.model) else ""

    def _longest_row_tokens(self) -> int | None:
        """Return the most tokens that a row can have; None if unknown."""
        return None

    def _models(self) -> list[PreTrainedModel]:
        """Return the models that forward flat rows, unwrapped."""
        raise NotImplementedError

    def _self_check(self, model: Any) -> CheckResult:
        """Compare packed with unpacked results on `model`, wrapped as training calls it."""
        raise NotImplementedError

    def check_options(self, model: Any) -> dict[str, Any]:
        """Return the options of a self-check of packing for an unwrapped model of this trainer."""
        return {
            "config": model.config.get_text_config(),
            "device": self.accelerator.device,
            "autocast": self.accelerator.autocast,
            "half_precision": self.accelerator.mixed_precision != "no"
            or computes_below_float32(model.dtype, self.accelerator.device),
            "share_prompt": self._share_prompt,
            "group": self.sequence_group,
        }

    def _start_packing(self) -> None:
        """Switch the models to packed attention, and check them now, or later if weights are to be sharded."""
        check_models(self._models(), self.num_sharing)
        reason = self._why_not_packing()
        if reason:
            self._stop_packing(reason)
            return
        before: list[tuple[Any, str | None]] = []
        self._attention_before = before
        state_is_shared = True
        try:
            for model in self._models():
                before.append((model.config, take_segments(model.config)))
                self._carries_state |= carries_state(model.config)
                state_is_shared &= begin_anew(model)
                begin_positions_anew(model)
        except PackingError as error:
            self._stop_packing(str(error).removesuffix(" Set packing=False."))
            return
        configs = [config for model in self._models() if kinds_of(config := model.config.get_text_config())]
        longest = self._longest_row_tokens() if configs else None
        if any(longest is None or longest > original_length(config) for config in configs):
            self._stop_sharing(
                "its positions depend on the length of a row, and rows of "
                f"{longest or 'any number of'} tokens may be longer than it was first trained on"
            )
        if not state_is_shared:
            self._stop_sharing("its layers carry state along the row, by functions that are not known here")
        self._packs = True
        # DeepSpeed moves or shards the weights when training starts; they cannot be forwarded before.
        self._check_is_due = True
        if not self.is_deepspeed_enabled and not self.is_fsdp_enabled:
            self.check_packing(self.model)

    def check_packing(self, model: Any) -> None:
        """Run the self-check if it is due, and return to padding on all ranks if it fails on any. Collective."""
        if not self._check_is_due:
            return
        self._check_is_due = False
        # The wrapper's own flag may differ from the model's, whose flag TRL reads.
        was_training = self.model.training
        self.model.eval()
        try:
            result, is_exact = self._check_on_all_ranks(model)
            if not is_exact and self._carries_state and self._stop_sharing(str(result)):
                result, is_exact = self._check_on_all_ranks(model)
            if is_exact:
                self._take_layer_kernels(model, result)
        finally:
            self.model.train(was_training)
        if not is_exact:
            self._packs = False
            self._stop_packing(str(result))
        elif self._why_unshared and self.accelerator.is_main_process:
            logger.warning(f"{self._model_name} is packed without sharing prompts: {self._why_unshared}.")

    @random_numbers_restored()
    def _check_on_all_ranks(self, model: Any) -> tuple[CheckResult, bool]:
        """Return this rank's result of the self-check, and whether it is exact on all. Collective."""
        result = self._self_check(model)
        if self._carries_state:
            # Rows without prefixes use other kernels; Mamba-2 has a separate kernel for training.
            with kernels_of_training(self._models()), swapped(self, _share_prompt=False):
                unshared = self._self_check(model)
            result = unshared if result.is_exact else result
        return result, not self._is_on_any_rank(not result.is_exact)

    def _is_on_any_rank(self, here: bool) -> bool:
        flag = torch.tensor(float(here), device=self.accelerator.device)
        return self.accelerator.reduce(flag, reduction="sum").item() > 0

    def _take_layer_kernels(self, model: Any, plain: CheckResult) -> None:
        """Use fused layer kernels on all ranks if the self-check with them equals `plain`, without them. Collective.

        Raises:
            ConfigError: if they were asked for, but there are none or their results differ.
        """
        setting = getattr(self.args, "layer_kernels", None)
        is_asked = bool(setting or self.args.use_liger_kernel)
        if setting is False or not (is_asked or self.accelerator.device.type in TAKEN_UNASKED):
            return
        kernels = [LayerKernels(one) for one in self._models()]
        options = self.args.liger_kernel_config or {}
        why, has_failed = next(filter(None, [one.put_in(options) for one in kernels]), ""), False
        if not self._is_on_any_rank(bool(why)):
            result, _ = self._check_on_all_ranks(model)
            why = result.why_not(plain)
            has_failed = self._is_on_any_rank(bool(why))
            if not has_failed:
                self.layer_kernels = "Liger's"
                return
        for one in kernels:
            one.take_out()
        why = why.rstrip(".") or "they cannot be used in another process"
        if is_asked:
            name = "layer_kernels" if setting else "use_liger_kernel"
            raise ConfigError(f"{name}=True, but {self._model_name} has no fused layer kernels: {why}. Leave it out.")
        self.layer_kernels += f" ({why})"
        if has_failed and self.accelerator.is_main_process:
            logger.warning(
                f"Fused layer kernels are off, and {self._model_name} computes with transformers' own layers: {why}. "
                "The results are the same and take more time. layer_kernels=False leaves this warning out."
            )

    def _stop_sharing(self, reason: str) -> bool:
        """Stop sharing prompts between rows; return False if they were not shared before."""
        was_sharing, self._share_prompt = self._share_prompt, False
        if was_sharing:
            self._why_unshared = reason
        return was_sharing

    @property
    def _model_name(self) -> str:
        return self.model.config._name_or_path or type(self.model).__name__

    def _stop_packing(self, reason: str) -> None:
        for config, name in reversed(self._attention_before):  # models may share a config
            config._attn_implementation = name
        reason = reason.rstrip(".")  # an exception's sentence has its own full stop
        if getattr(self.args, "packing_is_required", False):
            size = self.num_sharing
            asked, advice = "packing=True", "Leave packing unset or set it to False"
            if self._max_tokens is not None:
                asked, advice = f"max_tokens_per_forward={self._max_tokens} cuts packed rows", "Leave it out"
            if size > 1:
                asked, advice = f"sequence_parallel={size} shares packed rows", "Leave it out"
            raise PackingError(
                f"{asked}, but {self._model_name} cannot be packed: {reason}. {advice} to train on padded batches."
            )
        self.why_padded = reason
        if self.accelerator.is_main_process:
            logger.warning(
                f"Packing is off, and {self._model_name} is trained on padded batches: {reason}. The results are the "
                "same and take more time. packing=False leaves this warning out, packing=True stops here instead."
            )

    def _attention_in_words(self) -> str:
        config, precision = self.model.config.get_text_config(), self.accelerator.mixed_precision
        size = getattr(config, "head_dim", None) or config.hidden_size // getattr(config, "num_attention_heads", 1)
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, self.model.dtype)
        base = config._attn_implementation or "eager"
        return kernels_in_words(base, self.accelerator.device, dtype, size, packs=self._packs)

    def _faster_attention(self, attention: str) -> str:
        """Return a sentence with the attention that is faster on this card than that in use; "" if there is none."""
        is_slower = attention.startswith(("PyTorch's varlen kernel", "flash_attention_2"))
        major = capability_of(self.accelerator.device)
        # Version 4, if it was asked for and does not take the rows, has been warned of.
        was_tried = "4" in str(self.model.config.get_text_config()._attn_implementation)
        if not is_slower or was_tried or major not in FASTER_ATTENTION:
            return ""
        faster, _, way = FASTER_ATTENTION[major]
        return f"{faster} would be faster on this card for long rows: {way}"

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Overrides transformers.Trainer.log: adds text to the history, from which the report is made."""
        super().log(logs, start_time)
        entry: dict[str, Any] = self.state.log_history[-1]  # trackers take no text
        attention = self._attention_in_words()
        entry[KERNELS] = f"attention: {attention}; layers: {self.layer_kernels}"
        if faster := ". ".join(filter(None, (self._faster_attention(attention), self.faster_checkpointing))):
            entry[FASTER] = faster
        if self.why_padded:
            entry[WHY_PADDED] = self.why_padded

    def _log_step(self) -> None:
        """Log tokens of all ranks and seconds of this rank since the last optimizer step. Collective."""
        self.add_metric("packing/is_on", float(self._packs))
        for name, value in self.counts.take_tokens(self.accelerator).items():
            self.add_metric(name, value)
        for name, seconds in self.clock.take().items():
            self.add_metric(f"phase/{name}_s", seconds)

    @property
    def metrics_mode(self) -> str:
        """The key of TRL's metrics to which this forward adds: "train" or "eval"."""
        return "train" if self.model.training else "eval"

    def add_metric(self, name: str, value: float) -> None:
        """Add a value that TRL averages in the next log entry of training."""
        self._metrics["train"][name].append(value)
