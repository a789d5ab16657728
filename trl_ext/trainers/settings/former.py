"""Settings of earlier TRL and transformers, which public scripts still have, and what took their place.

Imports nothing of TRL's: the command line reads it as well.
"""

import inspect
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from trl_ext.errors import ArgumentError

_RENAMED = """
evaluation_strategy eval_strategy  per_gpu_train_batch_size per_device_train_batch_size  no_cuda use_cpu
per_gpu_eval_batch_size per_device_eval_batch_size  torchdynamo torch_compile_backend  push_to_hub_token hub_token
include_tokens_per_second include_num_input_tokens_seen  push_to_hub_model_id hub_model_id  model_id model_name_or_path
dataset_id_or_path dataset_name  use_liger use_liger_kernel  use_liger_loss use_liger_kernel  init_kl_coef kl_coef
max_new_tokens max_completion_length  wandb_log_unique_prompts log_unique_prompts  ppo_epochs num_ppo_epochs
vllm_gpu_memory vllm_gpu_memory_utilization  vllm_max_model_len vllm_max_model_length
vllm_guided_decoding_regex vllm_structured_outputs_regex
""".split()
# What to do about a setting of old, by its name; settings of today stand in quotes.
REPLACED = {old: f"It is '{new}' now." for old, new in zip(_RENAMED[::2], _RENAMED[1::2], strict=True)} | {
    "warmup_ratio": "It is 'warmup_steps' now: below 1 it is a share of all steps.",
    "overwrite_output_dir": "It is 'overwrite' here: checkpoints of an earlier run are removed before step 1.",
    "logging_dir": "Leave it out: TensorBoard's folder is the environment variable TENSORBOARD_LOGGING_DIR.",
    "group_by_length": "Set 'train_sampling_strategy' to group_by_length; packed rows need no such order.",
    "save_safetensors": "Leave it out: models are saved as safetensors in any case.",
    "torch_dtype": "It is 'dtype' in a recipe, and model_init_kwargs={'dtype': ...} in a program.",
    "use_flash_attention_2": "Set 'attn_implementation' to flash_attention_2 (in a program in model_init_kwargs).",
    "max_seq_length": "It is 'max_length' of a reward model's pairs, 'max_completion_length' of completions.",
    "max_prompt_length": "Prompts are not cut: leave out rows whose prompt is too long (dataset.filter). The longest "
    "one that memory is planned for is 'memory_prompt_length'.",
    "vllm_device": "vLLM runs on the trainer's cards where 'vllm_mode' is colocate, on others by --vllm_servers N.",
    "vllm_dtype": "Leave it out: vLLM takes the type of the model that is trained.",
    "vllm_enable_prefix_caching": "It is a key of 'vllm_server_options', for servers that --vllm_servers N starts.",
    "mini_batch_size": "An update takes 'num_mini_batches' optimizer steps, each on an equal part of its episodes.",
}


def replacement(name: str) -> str:
    """Say what took the place of a setting of old, empty for another name."""
    return REPLACED.get(name.replace("-", "_"), "")


def check_names(config: type, given: Mapping[str, Any]) -> None:
    """Raise ArgumentError for a keyword that the constructor of a config does not take.

    Args:
        config: Its class; one whose constructor takes any keyword is left alone.
        given: The keywords.
    """
    parameters = inspect.signature(config.__init__).parameters  # type: ignore[misc]
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    for name in () if takes_any else given.keys() - parameters.keys():
        near = get_close_matches(name, parameters, n=1)
        advice = replacement(name) or (f"Did you mean '{near[0]}'?" if near else "")
        raise ArgumentError(f"{config.__name__} has no argument '{name}'. {advice}".rstrip())
