"""Checks of training arguments for values that cannot work, before anything is loaded.

TRL and transformers accept most of these values: the run then ends in their traceback, trains NaN, or ignores the
setting. Values for which they raise a clear error are not checked here.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from trl_ext.compat.liger import HEADS
from trl_ext.compat.swap import swapped
from trl_ext.compat.vllm import STARTS_VARIABLE
from trl_ext.doctor.build_locks import warn_once
from trl_ext.errors import ConfigError
from trl_ext.memory.contradictions import SHARED, Row, check, holds
from trl_ext.rewards import LARGEST

# A setting that is refused if it is given, a condition over the settings that the condition's parameters name, and the
# end of the sentence "name=1 has no effect ...", with the reason and the remedy.
Idle = tuple[str, Callable[..., bool], str]


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers that a setting may have; None is always allowed.

    Args:
        low, high: The two ends.
        ends: "[" and "]" include an end, "(" and ")" exclude it.
        advice: A sentence after the error: why, or what to set instead.
        unset: A number outside the range that means "not set".
    """

    low: float
    high: float = math.inf
    ends: str = "[)"
    advice: str = ""
    unset: float | None = None

    def holds(self, value: float) -> bool:
        """Return True if the value is within the range or means unset; NaN never is."""
        if value == self.unset:
            return True
        from_low = value >= self.low if self.ends[0] == "[" else value > self.low
        return from_low and (value <= self.high if self.ends[1] == "]" else value < self.high)

    def in_words(self) -> str:
        """Return the end of the sentence "it must be ..."; "" if every finite number is allowed."""
        low = {"[": f"at least {self.low:g}", "(": f"above {self.low:g}"}[self.ends[0]] if self.low > -math.inf else ""
        high = {"]": f"at most {self.high:g}", ")": f"below {self.high:g}"}[self.ends[1]]
        high = high if self.high < math.inf else ""
        return " and ".join(filter(None, [low, high]))


FINITE = Range(-math.inf, ends="()")
NOT_NEGATIVE = Range(0)
POSITIVE = Range(0, ends="()")
FRACTION = Range(0, 1, "[]")
COUNT = Range(1)

RANGES = {
    **dict.fromkeys(
        "learning_rate weight_decay warmup_steps neftune_noise_alpha eval_steps entropy_coef_delta "
        "max_tool_calling_iterations center_rewards_coefficient stop_token_id vf_coef "
        "critic_warmup_steps".split(),
        NOT_NEGATIVE,
    ),
    **dict.fromkeys(
        "adam_epsilon num_train_epochs logging_steps ddp_timeout sapo_temperature_neg sapo_temperature_pos kl_target "
        "kl_horizon value_learning_rate".split(),
        POSITIVE,
    ),
    **dict.fromkeys(
        "per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps eval_accumulation_steps "
        "num_generations num_generations_eval max_completion_length num_iterations steps_per_generation "
        "generation_batch_size sequence_parallel ref_model_sync_steps vllm_tensor_parallel_size vllm_max_model_length "
        "max_length pad_to_multiple_of response_length num_ppo_epochs num_mini_batches total_episodes "
        "local_rollout_forward_batch_size reward_tokens_per_forward memory_prompt_length global_batch".split(),
        COUNT,
    ),
    **dict.fromkeys(
        "vespo_k_pos vespo_k_neg vespo_lambda_pos vespo_lambda_neg entropy_coef entropy_coef_min entropy_coef_max "
        "entropy_target router_aux_loss_coef gate_above".split(),
        FINITE,
    ),
    **dict.fromkeys("min_p ref_model_mixup_alpha gamma lam".split(), FRACTION),
    **dict.fromkeys(("adam_beta1", "adam_beta2"), Range(0, 1)),
    **dict.fromkeys(("epsilon", "epsilon_high"), Range(0, ends="[]")),
    **dict.fromkeys(("delta", "off_policy_mask_threshold", "cliprange"), Range(0, ends="(]")),
    **dict.fromkeys(("beta", "kl_coef"), Range(0, advice="0 needs no reference model.")),
    **dict.fromkeys(("top_p", "top_entropy_quantile"), Range(0, 1, "(]", "1 keeps all tokens.")),
    "max_grad_norm": Range(0, ends="[]", advice="0 leaves gradients as they are."),
    "max_steps": Range(1, advice="-1 trains for num_train_epochs.", unset=-1),
    "save_steps": Range(0, ends="()", advice='To save no checkpoint, set save_strategy="no".'),
    "save_total_limit": Range(1, advice="To keep all checkpoints, leave it out."),
    "dataloader_num_workers": Range(0, 16 * (os.cpu_count() or 1), "[]", "Each is a process of this machine."),
    "temperature": Range(0, ends="()", advice="Logits are divided by it; eval_temperature=0 evaluates greedily."),
    "eval_temperature": Range(0, advice="0 decodes greedily."),
    "top_k": Range(0, advice="0 keeps all tokens."),
    "repetition_penalty": Range(0, ends="()", advice="1 is no penalty."),
    "vllm_gpu_memory_utilization": Range(0, 1, "(]"),
    "vllm_importance_sampling_clip_max": Range(1, ends="[]", advice="Ratios of an unmoved policy are 1."),
    "vllm_importance_sampling_cap": Range(1, ends="[]", advice="Ratios of an unmoved policy are 1."),
    "vllm_importance_sampling_clip_min": Range(0, 1, "[]", "Ratios of an unmoved policy are 1."),
    "oversample": Range(1, 100, "[]", "1 samples as many groups as an update takes."),
    "cliprange_value": Range(0, ends="(]", advice="null: values are not clipped."),
    "missing_eos_penalty": Range(0, advice="It is subtracted from the score."),
    "score_clip": Range(0, ends="(]", advice="null: scores are not clipped."),
}

# The other setting, with its value, without which a setting has no effect.
ONLY_WHERE = {
    "num_train_epochs": ("max_steps", -1),
    "logging_steps": ("logging_strategy", "steps"),
    "save_steps": ("save_strategy", "steps"),
    "eval_steps": ("eval_strategy", "steps"),
    "top_k": ("use_vllm", False),  # vLLM uses -1 for all tokens
}

# TRL reads these words only after the first generation. A test compares them with TRL's source.
CHOICES = {
    "loss_type": ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"),
    "importance_sampling_level": ("token", "sequence"),
    "scale_rewards": ("group", "batch", "none"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
}
PATHS = ("output_dir", "resume_from_checkpoint", "memory", "deepspeed", "chat_template_path")
# Keys of generation_kwargs that would silently override a setting, with the setting.
_SET_ELSEWHERE = {
    **dict.fromkeys(("max_new_tokens", "max_length", "max_tokens"), "max_completion_length"),
    **dict.fromkeys(("num_return_sequences", "n"), "num_generations"),
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")},
}
# Settings by which vLLM samples, besides the temperature, with the values that keep the whole distribution.
_WHOLE: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("top_p", "repetition_penalty"), (None, 1)),
    **dict.fromkeys(("min_p", "presence_penalty", "frequency_penalty"), (None, 0)),
    "top_k": (None, 0, -1),
    **dict.fromkeys(("allowed_token_ids", "structured_outputs", "vllm_structured_outputs_regex"), (None,)),
    **dict.fromkeys(("bad_words", "logits_processors", "min_tokens"), (None, 0, [])),
    "logit_bias": (None, {}),
}

# Keys of generation_kwargs whose processors of logits know no continuous batching.
_DROPPED_BY_CONTINUOUS = {"min_length", "min_new_tokens", "no_repeat_ngram_size"}
# Contradictions between settings of a run, for all trainers.
# fmt: off
RUN: tuple[Row, ...] = (
    *SHARED,
    (lambda max_tokens_per_forward: max_tokens_per_forward is not None and max_tokens_per_forward < 2,
     "a forward cannot hold a row. Set it to the tokens that fit, such as 8192."),
    (lambda layer_kernels, packing: layer_kernels and packing is False,
     "the kernels are used where rows are packed. Remove one of the two."),
    (lambda use_liger_kernel, layer_kernels: use_liger_kernel and layer_kernels is False,
     "both are about the same layers. Remove one of the two."),
    (lambda use_liger_kernel, liger_kernel_config, layer_kernels:
        use_liger_kernel and any((liger_kernel_config or {}).get(name) for name in HEADS),
     f"layers are replaced and no head. Leave {', '.join(HEADS)} out of liger_kernel_config."),
    (lambda global_batch, memory: global_batch and memory is None,
     "it has no effect without memory. Set memory='auto', or remove it."),
    (lambda memory_prompt_length, memory: memory_prompt_length and memory is None,
     "it has no effect without memory. Set memory='auto', or remove it."),
    (lambda generation_ahead, vllm_importance_sampling_correction:
        generation_ahead and not vllm_importance_sampling_correction,
     "samples of older weights need the correction. Leave the second out."),
    (lambda use_transformers_continuous_batching, repetition_penalty:
        use_transformers_continuous_batching and repetition_penalty != 1,
     "transformers drops the penalty there. Remove one of the two."),
    (lambda use_transformers_continuous_batching, generation_kwargs:
        use_transformers_continuous_batching and not _DROPPED_BY_CONTINUOUS.isdisjoint(generation_kwargs or ()),
     f"transformers drops {', '.join(sorted(_DROPPED_BY_CONTINUOUS))} there, or fails. Remove one of the two."),
    (lambda max_tokens_per_forward, max_completion_length:
        max_tokens_per_forward is not None and max_tokens_per_forward <= (max_completion_length or math.inf),
     "a forward cannot hold one completion and its prompt. Raise the first or lower the second."),
    (lambda oversample, scale_rewards: oversample != 1 and scale_rewards == "batch",
     "the scale of the whole batch counts groups that oversampling leaves out. Set one of the two to its default."),
    (lambda oversample, multi_objective_aggregation:
        oversample != 1 and multi_objective_aggregation == "normalize_then_sum",
     "the sum over the whole batch counts groups that oversampling leaves out. Set one of the two to its default."),
    (lambda sync_ref_model, beta: sync_ref_model and beta == 0,
     "without a KL penalty there is no reference to move. Leave sync_ref_model out, or set beta."),
    (lambda load_best_model_at_end, eval_strategy: load_best_model_at_end and eval_strategy == "no",
     "without evaluation no checkpoint is the best. Set eval_strategy and save_strategy, or leave the first out."),
)
# fmt: on


def setting(default: Any, purpose: str, **others: Any) -> Any:
    """Return a field of a config with its `--help` text and other metadata, such as its choices."""
    return field(default=default, metadata={"help": purpose, **others})


def check_types(config: Any) -> None:
    """Raise ConfigError for a value of another type than its setting's, or beyond 64 bits, in the settings that our
    configs add to TRL's. Turn whole numbers that are written as a float into an int."""
    for name, hint in _added_settings(type(config)).items():
        value, types = getattr(config, name), {get_origin(one) or one for one in get_args(hint) or (hint,)}
        if int in types and isinstance(value, float) and value.is_integer():  # total_episodes=1e5
            value = int(value)
            setattr(config, name, value)
        _check_type(name, value, types)


def _added_settings(kind: type) -> dict[str, Any]:
    """Return the settings that our classes of config add to TRL's, with their type hints, by name."""
    ours = [base for base in kind.__mro__ if base.__module__.startswith("trl_ext")]
    theirs = {name for base in kind.__mro__ if base not in ours for name in vars(base).get("__annotations__", ())}
    theirs |= {"memory", "contradictions", "choices"}  # parse_memory reads memory, which may be a plan or a path
    return {name: hint for name, hint in get_type_hints(ours[0]).items() if name not in theirs}


def _check_type(name: str, value: Any, hinted: set[Any]) -> None:
    """Raise ConfigError for a value of none of these types, or beyond 64 bits.

    A float may be an int; a list may be a text or a tuple; a bool is no number.
    """
    types = hinted | ({int} if float in hinted else {str, tuple} if list in hinted else set())
    if not isinstance(value, tuple(types)) or (isinstance(value, bool) and bool not in types):
        wanted = " or ".join(sorted(one.__name__.replace("NoneType", "None") for one in types))
        raise ConfigError(f"{name}={value!r} must be of type {wanted}.")
    if isinstance(value, int | float) and math.isfinite(value) and abs(value) >= 2**63:
        raise ConfigError(f"{name}={value!r} must be below 2**63.")


def check_numbers(config: Any) -> None:
    """Raise ConfigError for the first number of a config that is out of its range. It runs before TRL's
    `__post_init__`, where a batch size of 0 would be a ZeroDivisionError."""
    for name, text in vars(config).items():
        if isinstance(text, str):
            check_text(name, text)
    for name, allowed in RANGES.items():
        value = getattr(config, name, None)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            continue
        if allowed.holds(float(value)):  # float: PPO passes TRL a subclass of int with other comparisons
            continue
        if name in ONLY_WHERE and getattr(config, ONLY_WHERE[name][0], None) != ONLY_WHERE[name][1]:
            continue
        words = ", ".join(filter(None, ["" if math.isfinite(value) else "a finite number", allowed.in_words()]))
        raise ConfigError(f"{name}={value} must be {words}. {allowed.advice}".rstrip())


def check_text(name: str, text: str) -> None:
    """Raise ConfigError for a text that no file can hold, and for one of PATHS with a name that is too long."""
    if "\0" in text or (name in PATHS and max(map(len, text.split("/"))) > 255):
        raise ConfigError(f"{name}={text[:40]!r}... is too long, or holds a NUL character. Give another.")
    if any("\ud800" <= char <= "\udfff" for char in text):  # how Python reads such bytes
        raise ConfigError(f"{name}={text!a} is not UTF-8. Give another, or set PYTHONUTF8=1 if the locale is C.")


def check_settings(args: Any) -> None:
    """Raise ConfigError for training arguments that cannot work, whichever class they have. Trainers call it before
    they load anything: plain TRL configs are accepted there, and fields can be set late."""
    check_deepspeed_file(getattr(args, "deepspeed", None))  # plain TRL configs have not checked it
    check_anywhere(args)
    if getattr(args, "vllm_server_options", None) and STARTS_VARIABLE not in os.environ:
        raise ConfigError(
            f"vllm_server_options={args.vllm_server_options!r} is for servers that trl-ext starts. Launch with "
            "--vllm_servers N, or leave it out, and give these words to `vllm serve`."
        )
    if args.fp16 and args.device.type == "cpu":
        raise ConfigError("fp16=True has no effect on a CPU, which would train in fp32. Set bf16=True, or neither.")
    dtype = (getattr(args, "model_init_kwargs", None) or {}).get("dtype")
    if str(dtype).removeprefix("torch.") in ("float16", "half") and args.device.type == "cpu":
        raise ConfigError(f"dtype={dtype} rounds an optimizer step on a CPU away. Set it to float32 or bfloat16.")


def check_anywhere(args: Any) -> None:
    """Raise ConfigError for training arguments that cannot work on any machine."""
    check_values(args, type(args))
    _check_weights(getattr(args, "reward_weights", None) or ())
    check_correction(args)
    _check_options(args)
    _check_without_effect(args)


def check_values(settings: Any, kind: type) -> None:
    """Raise ConfigError for numbers, words and contradictions in settings of this class of config, built or not."""
    check_numbers(settings)
    check_choices(settings, kind)
    check(settings, getattr(kind, "contradictions", RUN))


def check_choices(settings: Any, kind: type) -> None:
    """Raise ConfigError for a word that its setting cannot have in this class of config."""
    own = fields(kind) if is_dataclass(kind) else ()
    listed = {one.name: one.metadata["choices"] for one in own if "choices" in one.metadata}
    for name, choices in {**CHOICES, **listed, **getattr(kind, "choices", {})}.items():
        value = getattr(settings, name, None)
        # TRL takes True and False for scale_rewards.
        if value is not None and not isinstance(value, bool) and value not in choices:
            raise ConfigError(f"{name}={value!r} is unknown. Use one of: {', '.join(map(str, choices))}.")


def is_given(config: Any, name: str) -> bool:
    """Return True if a field of a config does not have its default."""
    default = default_of(next(field for field in fields(config) if field.name == name))
    return bool(getattr(config, name) != default)


def default_of(field: Field[Any]) -> Any:
    """Return the default of a dataclass's field; MISSING if it has none."""
    return field.default if field.default_factory is MISSING else field.default_factory()


def check_effects(config: Any, table: Iterable[Idle]) -> None:
    """Raise ConfigError for the first setting that does not have its default and has no effect with the others."""
    for name, is_idle, why in table:
        if is_given(config, name) and holds((is_idle, why), vars(config)):
            raise ConfigError(f"{name}={getattr(config, name)!r} has no effect {why}")


def choose_precision(config: Any) -> None:
    """Set bf16 to False if it is unset and the machine has no accelerator.

    `__post_init__` calls it before TRL's, which would set it to True and fail. With `use_cpu` TRL's default stays:
    bf16 autocast on the CPU.
    """
    import torch
    from transformers.utils import is_torch_bf16_gpu_available, is_torch_xla_available

    if config.bf16 is None and not config.fp16 and not config.use_cpu:
        if not (torch.accelerator.is_available() or is_torch_bf16_gpu_available() or is_torch_xla_available()):
            config.bf16 = False


def _check_weights(weights: Iterable[float]) -> None:
    for number, weight in enumerate(weights, 1):
        if not abs(weight) <= LARGEST:  # NaN compares as False
            raise ConfigError(f"reward_weights: weight {number} is {weight}. Give finite numbers up to {LARGEST:g}.")


def check_correction(args: Any) -> None:
    """Raise ConfigError if vLLM's importance ratios would compare log-probabilities of different distributions.

    vLLM's are over the tokens that it may sample, the trainer's over the vocabulary: with top_p=0.9 every token has a
    ratio of 0.9 or less, and a completion of 24 tokens, in TRL's default mode, 0.08.
    """
    if not (getattr(args, "use_vllm", False) and args.vllm_importance_sampling_correction):
        return
    needs_correction = getattr(args, "generation_ahead", 0)
    other_way = "" if needs_correction else ", or set vllm_importance_sampling_correction=False"
    given = vars(args) | (args.generation_kwargs if isinstance(args.generation_kwargs, dict) else {})
    for name in (name for name, whole in _WHOLE.items() if given.get(name) not in whole):
        raise ConfigError(
            f"{name}={given[name]!r} has vLLM sample from a part of the model's distribution, or from another, and "
            "vllm_importance_sampling_correction compares its log-probabilities with the whole: completions would "
            f"have almost no weight. Leave {name} out{other_way}."
        )


def _check_options(args: Any) -> None:
    """Raise ConfigError for keys in a mapping that another setting decides, or that torch does not accept."""
    for name, value in vars(args).items():
        if name.endswith("_kwargs") and not isinstance(value, Mapping | None):
            raise ConfigError(f"{name}={value!r} must be a mapping of options to their values.")
    generation = getattr(args, "generation_kwargs", None) or {}
    for name in generation.keys() & _SET_ELSEWHERE.keys():
        raise ConfigError(
            f"generation_kwargs has {name}={generation[name]}, which would overrule {_SET_ELSEWHERE[name]}. Set "
            f"{_SET_ELSEWHERE[name]} instead."
        )
    if generation.get("do_sample") is False:
        raise ConfigError(
            "generation_kwargs has do_sample=False, with which all completions of a prompt are the same and nothing "
            "is learnt. Leave it out; eval_temperature=0 evaluates greedily."
        )
    if mode := getattr(args, "torch_compile_mode", None):
        from torch._inductor import list_mode_options

        if mode not in list_mode_options():
            raise ConfigError(f"torch_compile_mode={mode!r} is unknown. Use one of: {', '.join(list_mode_options())}.")
    if getattr(args, "gradient_checkpointing_kwargs", None):
        from trl_ext.trainers.forward.checkpointing import check_layer_options

        check_layer_options(args)


_NO_VLLM = "without use_vllm=True. Set both, or leave it out."


def _check_without_effect(args: Any) -> None:
    """Raise ConfigError for a setting that has no effect because of another setting's value."""
    if not getattr(args, "use_vllm", True):
        of_vllm = [name for name in map(str, vars(args)) if name.startswith("vllm_")]
        check_effects(args, [(name, lambda: True, _NO_VLLM) for name in of_vllm])
    if getattr(args, "optim_args", None):
        from transformers import Trainer

        try:
            with swapped(args, optim_args=None):
                plain = Trainer.get_optimizer_cls_and_kwargs(args)
            is_read = Trainer.get_optimizer_cls_and_kwargs(args) != plain
        except (ValueError, ImportError):  # transformers reports it later
            return
        if not is_read:
            raise ConfigError(f"optim_args={args.optim_args!r} has no effect with optim={args.optim!s}. Leave it out.")


def check_deepspeed_file(name: Any) -> None:
    """Raise ConfigError for a DeepSpeed file that is not a JSON mapping, or whose stage is not the launcher's.

    First, with DeepSpeed, warn of locks that it would wait for: TRL's `__post_init__` starts its communication, which
    may be compiled then. transformers compares the file's other values with the training arguments.
    """
    if name or os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true":
        warn_once()
    if not isinstance(name, str) or not Path(name).is_file():
        return
    try:
        content = json.loads(Path(name).read_text(encoding="utf-8"))
        stage = content.get("zero_optimization", {}).get("stage", 0)
    except ValueError as error:
        raise ConfigError(f"The DeepSpeed file {name} is not valid JSON: {error}.") from error
    except AttributeError:
        raise ConfigError(f"The DeepSpeed file {name} holds no mapping. Write one JSON object: {{...}}.") from None
    launched = os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", str(stage))
    if launched != str(stage):
        raise ConfigError(
            f"The DeepSpeed file {name} has stage {stage}, but the run was launched with stage {launched}, which "
            "would be ignored. Give the stage in one place."
        )
