"""Settings that cannot work together, as tables: the condition, the reason, and the remedy.

Configs read the tables when they are made; so do trainers before they load anything, scripts, `trl-ext check`, the
launcher before it starts processes, and the planner.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

from trl_ext.errors import ConfigError
from trl_ext.memory.options import OPTIONS

# A condition over the settings that its parameters name, and sentences with the reason and the remedy.
Row = tuple[Callable[..., bool], str]


@cache  # the planner makes thousands of jobs
def names_of(row: Row) -> tuple[str, ...]:
    """Return the settings that a row reads."""
    code = row[0].__code__
    return code.co_varnames[: code.co_argcount]


def holds(row: Row, settings: Mapping[str, Any]) -> bool:
    """Return True if the settings contradict each other as the row describes."""
    return bool(row[0](*(settings[name] for name in names_of(row))))


def would_hold(row: Row, settings: Any, changes: Mapping[str, Any]) -> bool:
    """Return True if settings, given as attributes, contradict each other as the row describes after some changes."""
    return bool(row[0](*(changes.get(name, getattr(settings, name)) for name in names_of(row))))


def check(settings: Any, table: Iterable[Row]) -> None:
    """Raise ConfigError for the first contradiction, with the values of its settings.

    A row is skipped if one of its settings is missing, as in a plain TRL config."""
    for row in table:
        names = names_of(row)
        try:
            values = [getattr(settings, name) for name in names]
        except AttributeError:
            continue
        if row[0](*values):
            given = ", ".join(f"{name}={value!r}" for name, value in zip(names, values, strict=True))
            raise ConfigError(f"{given}: {row[1]}")


# fmt: off
SHARED: tuple[Row, ...] = (  # for runs and for the planner's jobs
    (lambda sequence_parallel, packing: sequence_parallel > 1 and packing is False,
     "GPUs share packed rows alone. Set packing, or leave sequence_parallel out."),
    (lambda max_tokens_per_forward, packing: max_tokens_per_forward and packing is False,
     "padded batches have no such bound. Remove one of the two."),
    (lambda generation_ahead: generation_ahead not in (0, 1),
     "samples are at most one block older than the policy. Set 0 or 1."),
    (lambda generation_ahead, vllm_mode, use_vllm: generation_ahead and not (use_vllm and vllm_mode == "server"),
     "vLLM servers generate while this process trains. Set use_vllm=True and vllm_mode='server', or start with "
     "--vllm_servers 1."),
)
OF_FSDP: tuple[Row, ...] = (  # for jobs, and for launched runs
    (lambda fsdp, sequence_parallel: fsdp and sequence_parallel > 1,
     "rows are shared under DDP and DeepSpeed. Use ZeRO-3 (--config_file zero3), or leave sequence_parallel out."),
    (lambda fsdp, trainer, critic: fsdp and trainer == "ppo" and critic == "separate",
     "FSDP does not split a second trained model. Use critic=head or adapter, or ZeRO-3 (--config_file zero3)."),
    (lambda fsdp, optim: fsdp and "8bit" in optim,
     "optimizers of 8 bits cannot step on weights that FSDP splits. Use adamw_torch_fused, or ZeRO-3 (--config_file "
     "zero3)."),
)
OF_A_JOB: tuple[Row, ...] = (
    *SHARED,
    (lambda trainer, critic, reward_model: trainer == "ppo" and critic != "adapter" and reward_model == "adapter",
     "a reward adapter needs an adapter critic. Set reward_model=copy, or critic=adapter."),
    (lambda trainer, method, critic, reward_model:
        trainer == "ppo" and method == "full" and "adapter" in (critic, reward_model),
     "adapters need LoRA. Allow lora, or set critic=separate and reward_model=copy."),
    (lambda num_reward_models, reward_model: num_reward_models > 1 and reward_model == "none",
     "there is none to count. Set reward_model=copy."),
    (lambda method, zero_stage, offload, fsdp:
        method == "qlora" and zero_stage == 3 and offload != "none" and not fsdp,
     "a 4-bit base has not been tried in host memory under ZeRO-3. Use offload=none, or fsdp with offload=all, which "
     "has."),
    (lambda fp16, method: fp16 and method == "qlora",
     "TRL keeps adapters on a 4-bit base in bf16, whose gradients fp16 cannot scale. Use lora."),
    (lambda fsdp, zero_stage, offload: fsdp and (zero_stage != 3 or offload == "optimizer"),
     "FSDP splits weights, gradients and optimizer, and takes all of them into host memory or none. Use zero_stage=3 "
     "with offload=none or all, or no fsdp."),
    (lambda zero_hpz_partition_size, zero_stage, fsdp: zero_hpz_partition_size > 1 and (zero_stage != 3 or fsdp),
     "a second copy of the weights is of DeepSpeed's ZeRO-3. Use zero_stage=3, or leave it out."),
    (lambda overlap_comm, zero_stage: overlap_comm and zero_stage not in (1, 2),
     "it is of ZeRO-1 and 2; ZeRO-3 and DDP overlap. Leave it out."),
    *OF_FSDP,
    (lambda offload, zero_stage: offload == "all" and zero_stage != 3,
     "weights in host memory are ZeRO-3's. Use offload=optimizer or zero_stage=3."),
    (lambda offload, zero_stage: offload == "optimizer" and zero_stage == 0,
     "an optimizer in host memory is DeepSpeed's. Use zero_stage=2 or 3."),
    (lambda offload, optim: offload != "none" and optim != "adamw_torch_fused",
     "it does not run in host memory. Use offload=none, or leave optim alone."),
    (lambda checkpoint_every: checkpoint_every < 0, "use 0 for no checkpointing, or 1 and more."),
    *(option.conflict for option in OPTIONS),
    (lambda mean_completion_length, max_completion_length: not 0 <= mean_completion_length <= max_completion_length,
     "give a mean that is no longer than the longest, or leave it out."),
    (lambda oversample, trainer: oversample != 1 and (trainer != "grpo" or not 1 < oversample < math.inf),
     "it is GRPO's, and at least 1. Leave it out, or raise it."),
    (lambda use_vllm, trainer: use_vllm and trainer == "reward",
     "a reward model generates nothing. Remove use_vllm."),
    (lambda vllm_mode, use_vllm: vllm_mode == "server" and not use_vllm, "set use_vllm, or remove vllm_mode."),
    (lambda vllm_servers, vllm_mode: vllm_servers < 0 or (vllm_servers and vllm_mode != "server"),
     "a number of servers needs vllm_mode=server. Set it, or leave vllm_servers out."),
    (lambda use_vllm, vllm_gpu_memory_utilization: use_vllm and not 0 < vllm_gpu_memory_utilization < 1,
     "it is a share between 0 and 1, such as 0.3."),
)
# fmt: on
