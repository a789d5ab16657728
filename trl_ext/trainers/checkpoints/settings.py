"""Settings that decide the numbers of a run, those that a checkpoint restores, and those that only run it.

TRL's own fields and ours count unless they stand among the operational ones; of the many that transformers has for
every kind of training, those count that are named here.
"""

from dataclasses import fields
from typing import Any

from transformers import TrainingArguments

# Of transformers': what is drawn into a step, and how it becomes an update.
_OF_TRANSFORMERS = frozenset(
    "optim optim_args optim_target_modules max_grad_norm bf16 fp16 label_smoothing_factor neftune_noise_alpha "
    "average_tokens_across_devices dataloader_drop_last train_sampling_strategy".split()
)
# Of TRL's and ours: where and how fast, not what. Packing and token budgets move rounding only.
_OPERATIONAL = frozenset(
    "model_init_kwargs trust_remote_code num_generations_eval ds3_gather_for_generation pad_to_multiple_of "
    "cache_implementation use_vllm vllm_mode vllm_model_impl vllm_enable_sleep_mode vllm_server_base_url "
    "vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization "
    "vllm_max_model_length vllm_tensor_parallel_size log_completions log_multimodal num_completions_to_print "
    "log_unique_prompts log_completions_hub_repo use_transformers_continuous_batching "
    "transformers_continuous_batching_config use_transformers_paged dataset_num_proc activation_offloading "
    "packing share_prompt max_tokens_per_forward sequence_parallel eval_temperature eval_greedy memory memory_allow "
    "memory_prompt_length memory_headroom global_batch memory_rehearsal memory_on_oom resume_despite save_on_signal "
    "remove_unused_columns local_rollout_forward_batch_size reward_tokens_per_forward num_sample_generations "
    "sft_model_path reward_model_path total_episodes reward_weights critic value_learning_rate value_weight_decay "
    "value_lr_scheduler_type critic_warmup_steps "
    # The same as other fields, under TRL 1.12's names.
    "response_length num_ppo_epochs cliprange kl_coef "
    # Made of others: of batch, processes and steps_per_generation.
    "generation_batch_size".split()
)
# Settings that a checkpoint brings along: optimizer and schedule restore them, and a new value has no effect.
RESTORED = tuple(
    "learning_rate value_learning_rate weight_decay value_weight_decay adam_beta1 adam_beta2 adam_epsilon".split()
)
# Settings of the schedule that is drawn anew, at its new values, and stands at the checkpoint's step.
REDRAWN = tuple(
    "lr_scheduler_type value_lr_scheduler_type lr_scheduler_kwargs warmup_steps critic_warmup_steps max_steps "
    "num_train_epochs".split()
)


def settings_of(args: Any) -> dict[str, Any]:
    """Return the settings that decide the numbers of a run, by name."""
    theirs = {field.name for field in fields(TrainingArguments)}
    names = [f.name for f in fields(args) if (f.name in _OF_TRANSFORMERS or f.name not in theirs)]
    found = {name: getattr(args, name) for name in names if name not in _OPERATIONAL}
    per_forward, forwards = args.per_device_train_batch_size, args.gradient_accumulation_steps
    if hasattr(args, "num_generations"):  # rollouts are counted in micro-batches
        return found | {"per_device_train_batch_size": per_forward, "gradient_accumulation_steps": forwards}
    # How the samples of an optimizer step are cut into forwards moves rounding only.
    return found | {"per_device_train_batch_size x gradient_accumulation_steps": per_forward * forwards}


def restored_settings(args: Any) -> dict[str, Any]:
    """Return the settings whose change is told and not refused, by name."""
    return {name: getattr(args, name) for name in (*RESTORED, *REDRAWN) if hasattr(args, name)}
