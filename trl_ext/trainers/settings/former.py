"""Settings of earlier TRL and transformers, which public scripts still have, and their replacements."""

import inspect
from collections.abc import Mapping
from typing import Any

from trl_ext.errors import ArgumentError, did_you_mean

_RENAMED = """
evaluation_strategy eval_strategy  per_gpu_train_batch_size per_device_train_batch_size  no_cuda use_cpu
per_device_batch_size per_device_train_batch_size  batch_size per_device_train_batch_size
dataset_id_or_path dataset_name  use_liger use_liger_kernel  use_liger_loss use_liger_kernel  init_kl_coef kl_coef
max_new_tokens max_completion_length  wandb_log_unique_prompts log_unique_prompts  ppo_epochs num_ppo_epochs
vllm_gpu_memory vllm_gpu_memory_utilization  vllm_max_model_len vllm_max_model_length  push_to_hub_token hub_token
vllm_guided_decoding_regex vllm_structured_outputs_regex  model_id model_name_or_path
""".split()
# Advice by former name; present names are in quotes.
REPLACED = {old: f"It is '{new}' now." for old, new in zip(_RENAMED[::2], _RENAMED[1::2], strict=True)} | {
    "warmup_ratio": "It is 'warmup_steps' now: below 1 it is a share of all steps.",
    "overwrite_output_dir": "It is 'overwrite' here: checkpoints of an earlier run are removed before step 1.",
    "logging_dir": "Leave it out: TensorBoard's folder is the environment variable TENSORBOARD_LOGGING_DIR.",
    "group_by_length": "Set 'train_sampling_strategy' to group_by_length; packed rows need no such order.",
    "torch_dtype": "It is 'dtype' in a recipe, and model_init_kwargs={'dtype': ...} in a program.",
    "use_flash_attention_2": "Set 'attn_implementation' to flash_attention_2 (in a program in model_init_kwargs).",
    "max_seq_length": "It is 'max_length' of a reward model's pairs, 'max_completion_length' of completions.",
    "max_prompt_length": "Prompts are not cut: leave out rows whose prompt is too long (dataset.filter). Memory is "
    "planned for prompts of 'memory_prompt_length'.",
    "vllm_device": "vLLM runs on the trainer's cards where 'vllm_mode' is colocate, on others by --vllm_servers N.",
    "vllm_enable_prefix_caching": "It is a key of 'vllm_server_options', for servers that --vllm_servers N starts.",
}


def replacement(name: str) -> str:
    """Return the advice for a former setting; empty for any other name."""
    return REPLACED.get(name.replace("-", "_"), "")


def check_names(config: type, given: Mapping[str, Any]) -> None:
    """Raise ArgumentError for a keyword that a config's constructor does not take."""
    parameters = inspect.signature(config.__init__).parameters  # type: ignore[misc]
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    for name in () if takes_any else given.keys() - parameters.keys():
        advice = replacement(name) or did_you_mean(name, parameters)
        raise ArgumentError(f"{config.__name__} has no argument '{name}'. {advice}".rstrip())
