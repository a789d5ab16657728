"""Every field of PPOConfig changes what is trained, leaves the numbers alone by its nature, or is refused."""

from dataclasses import fields
from datetime import date
from functools import partial

import pytest
import torch

from tests import ppo_trainers, tiny
from tests.faults.starting import IS_THOROUGH
from trl_ext import PPOConfig
from trl_ext.errors import ConfigError
from trl_ext.trainers.ppo import config as config_module
from trl_ext.trainers.ppo import inputs
from trl_ext.trainers.ppo.refusals import REASONS

# Two epochs of an update and one of the next, so that ratios leave 1 and there is a KL.
BASE = dict(max_steps=3, num_ppo_epochs=2, num_generations=2, kl_coef=0.1, learning_rate=1e-2, packing=False)
SAMPLED = dict(rollout_func=None)
MODEL = dict(reward_model=partial(ppo_trainers.classifier, 9))
GROUPS = dict(advantage_estimator="rloo", critic="none")
ADAPTIVE = dict(use_adaptive_entropy=True, entropy_target=9.0)

# A value that changes the trained weights, and the settings that it is changed beside.
ACTS = {
    "adam_beta1": (0.1, {}),
    "adam_beta2": (0.5, {}),
    "adam_epsilon": (1.0, {}),
    "beta": (0.5, dict(kl_coef=None)),
    "cliprange": (1e-3, {}),
    "critic_init": ("reward", MODEL),
    "critic_warmup_steps": (1, {}),
    "cliprange_value": (1e-4, {}),
    "delta": (1.01, dict(cliprange=1e-3)),
    "entropy_coef": (0.1, {}),
    "entropy_coef_delta": (0.05, ADAPTIVE),
    "entropy_coef_max": (1e-3, ADAPTIVE),
    "entropy_target": (9.0, dict(use_adaptive_entropy=True)),
    "epsilon": (1e-3, {}),
    "epsilon_high": (1e-3, {}),
    "gamma": (0.5, {}),
    "gate_above": (0.5, dict(score_mode="gate", **MODEL)),
    "generation_kwargs": ({"suppress_tokens": list(range(3, 40))}, SAMPLED),
    "gradient_accumulation_steps": (1, {}),
    "importance_sampling_level": ("sequence", dict(GROUPS, loss_type="grpo")),
    "kl_coef": (0.5, {}),
    "kl_estimator": ("k3", {}),
    "kl_term": ("loss", dict(kl_estimator="k3")),
    "kl_horizon": (20, dict(kl_target=1.0, kl_horizon=1000)),
    "kl_target": (1e3, dict(kl_estimator="k3", kl_horizon=20, kl_target=1.0, num_ppo_epochs=1)),
    "lam": (0.5, {}),
    "learning_rate": (1e-3, {}),
    "loss_type": ("grpo", {}),
    "lr_scheduler_kwargs": ({"num_cycles": 2.0}, dict(lr_scheduler_type="cosine")),
    "lr_scheduler_type": ("linear", {}),
    "mask_truncated_completions": (True, {}),
    "max_completion_length": (2, dict(SAMPLED, response_length=None)),
    "max_grad_norm": (0.01, {}),
    "max_steps": (2, {}),
    "min_p": (0.9, SAMPLED),
    "missing_eos_penalty": (1.0, {}),
    "neftune_noise_alpha": (5.0, {}),
    "num_generations": (4, {}),
    "num_iterations": (1, dict(num_ppo_epochs=None)),
    "num_mini_batches": (2, {}),
    "num_ppo_epochs": (1, {}),
    "num_train_epochs": (1.0, dict(max_steps=-1)),
    "off_policy_mask_threshold": (1e-6, {}),
    "optim": ("sgd", {}),
    "per_device_train_batch_size": (2, {}),
    "repetition_penalty": (5.0, SAMPLED),
    "response_length": (2, SAMPLED),
    "reward_weights": ([0.5], {}),
    "sapo_temperature_neg": (0.5, dict(loss_type="sapo")),
    "sapo_temperature_pos": (0.5, dict(loss_type="sapo")),
    "score_clip": (0.01, MODEL),
    "score_mode": ("gate", MODEL),
    "score_normalisation": ("running", MODEL),
    "seed": (7, {}),
    "shuffle_dataset": (False, {}),
    "stop_token_id": (7, SAMPLED),
    "temperature": (0.5, {}),
    "top_entropy_quantile": (0.3, {}),
    "top_k": (1, SAMPLED),
    "top_p": (0.1, SAMPLED),
    "total_episodes": (8, dict(max_steps=-1)),
    "use_adaptive_entropy": (True, dict(entropy_coef=0.1)),
    "value_learning_rate": (0.5, {}),
    "vespo_k_neg": (1.0, dict(loss_type="vespo")),
    "vespo_k_pos": (1.0, dict(loss_type="vespo")),
    "vespo_lambda_neg": (1.0, dict(loss_type="vespo")),
    "vespo_lambda_pos": (1.0, dict(loss_type="vespo")),
    "value_lr_scheduler_type": ("linear", {}),
    "value_normalisation": (True, {}),
    "vf_coef": (0.01, {}),
    "warmup_steps": (2, dict(lr_scheduler_type="linear")),
    "weight_decay": (0.3, {}),
    "whiten_rewards": (True, {}),
}

# Settings of which this file trains nothing, by why.
OTHERS = {
    "where and when things are written, sent and shown": """
        output_dir logging_strategy logging_steps logging_first_step log_on_each_node logging_nan_inf_filter
        include_num_input_tokens_seen log_level log_level_replica disable_tqdm report_to run_name project
        trackio_space_id trackio_bucket_id trackio_static_space_id save_only_model save_strategy save_steps
        save_on_each_node save_on_signal save_total_limit enable_jit_checkpoint push_to_hub hub_token
        hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision skip_memory_metrics
        log_completions log_multimodal num_completions_to_print log_unique_prompts log_completions_hub_repo""",
    "what a resumed run takes up": """
        ignore_data_skip restore_callback_states_from_checkpoint resume_from_checkpoint load_best_model_at_end
        metric_for_best_model greater_is_better resume_despite overwrite""",
    "when and how an evaluation runs": """
        eval_strategy eval_steps eval_delay per_device_eval_batch_size prediction_loss_only eval_on_start
        eval_do_concat_batches eval_use_gather_object eval_accumulation_steps bf16_full_eval fp16_full_eval
        num_generations_eval eval_temperature""",
    "precision, memory and speed: the same numbers up to rounding": """
        bf16 fp16 tf32 activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing
        gradient_checkpointing_kwargs torch_compile torch_compile_backend torch_compile_mode use_liger_kernel
        liger_kernel_config use_cache torch_empty_cache_steps auto_find_batch_size full_determinism
        cast_lm_head_to_fp32 pad_to_multiple_of cache_implementation use_transformers_continuous_batching
        transformers_continuous_batching_config use_transformers_paged packing share_prompt max_tokens_per_forward
        local_rollout_forward_batch_size reward_tokens_per_forward ds3_gather_for_generation memory
        sequence_parallel memory_prompt_length global_batch memory_rehearsal memory_on_oom
        skip_zero_advantage layer_kernels""",
    "the processes and how rows reach them": """
        use_cpu accelerator_config parallelism_config dataloader_drop_last dataloader_num_workers
        dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor
        dataloader_multiprocessing_context dataloader_in_order ddp_find_unused_parameters ddp_bucket_cap_mb
        ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout fsdp fsdp_config deepspeed debug local_rank""",
    "read by scripts": "do_train do_eval do_predict sft_model_path reward_model_path dataset_num_proc",
    "needs another model, optimizer, dataset or critic than this file's": """
        optim_args optim_target_modules model_init_kwargs trust_remote_code router_aux_loss_coef disable_dropout
        chat_template_kwargs remove_unused_columns max_tool_calling_iterations stop_token critic advantage_estimator
        ref_adapter_name model_adapter_name reward_model_eos""",
    "the other name of num_mini_batches x gradient_accumulation_steps": "generation_batch_size steps_per_generation",
    "a bound that the coefficient meets only after it has fallen": "entropy_coef_min",
    "vLLM": """
        generation_ahead use_vllm vllm_mode vllm_model_impl vllm_enable_sleep_mode vllm_server_base_url
        vllm_server_options vllm_structured_outputs_regex
        vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization
        vllm_max_model_length vllm_tensor_parallel_size vllm_importance_sampling_correction
        vllm_importance_sampling_mode vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min
        vllm_importance_sampling_cap""",
}
# Values of the settings that are refused; beside the default, which is always fine.
REFUSED = {
    "average_tokens_across_devices": False,
    "batch_eval_metrics": True,
    "include_for_metrics": ["inputs"],
    "label_names": ["x"],
    "label_smoothing_factor": 0.3,
    "length_column_name": "size",
    "curriculum": {"target": 0.5},
    "data_seed": 7,
    "multi_objective_aggregation": "normalize_then_sum",
    "num_sample_generations": 5,
    "oversample": 1.5,
    "ref_model_mixup_alpha": 0.1,
    "ref_model_sync_steps": 1,
    "scale_rewards": "none",
    "sync_ref_model": True,
    "train_sampling_strategy": "group_by_length",
    "use_bias_correction_kl": False,
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train on fixed rollouts with these settings; the weights. Equal settings are trained once."""
    known = {}

    def train(settings: dict) -> dict[str, torch.Tensor]:
        key = repr(sorted(settings.items(), key=str))
        if key not in known:
            options = {**BASE, **settings}
            if "reward_model" in options:
                models = options["reward_model"] = options["reward_model"]()
                tokenizers = [tiny.tokenizer()] * 2 if isinstance(models, list) else tiny.tokenizer()
                options |= dict(reward_processing_classes=tokenizers, reward_funcs=ppo_trainers.reward)
            critic, folder = options.pop("critic", "head"), tmp_path_factory.mktemp("out")
            trainer = ppo_trainers.trainer(critic, folder, model=ppo_trainers.decided_actor(), **options)
            trainer.train()
            known[key] = ppo_trainers.trained_weights(trainer)
        return known[key]

    return train


def test_every_field_has_its_place():
    others = [name for names in OTHERS.values() for name in names.split()]
    placed, there = [*ACTS, *REFUSED, *others], {field.name for field in fields(PPOConfig)}
    assert there - set(placed) == set(), "new fields: add them to ACTS or, if they train nothing else, to OTHERS"
    assert set(placed) - there == set(), "fields that are gone"
    assert len(placed) == len(there), "a field stands in two places"
    assert set(REFUSED) == set(REASONS)


def of_today(names):
    """A quarter of the settings, another one each day; all of them with TRL_EXT_THOROUGH=1."""
    return sorted(names)[0 if IS_THOROUGH else date.today().toordinal() % 4 :: 1 if IS_THOROUGH else 4]


@pytest.mark.parametrize("name", of_today(ACTS))
def test_the_setting_changes_what_is_trained(name, trained):
    value, beside = ACTS[name]
    assert ppo_trainers.distance(trained(beside), trained({**beside, name: value})) > 1e-5


# Settings of the optimizers, each of which must reach the groups of every critic beside the defaults alone.
OF_GROUPS = dict(learning_rate=1e-2, adam_epsilon=1.0, weight_decay=0.3, value_learning_rate=0.5)


def groups(trainer):
    """What the optimizers' groups say, their parameters by shape; of the actor and of the critic."""
    of_critic = {id(p) for p in trainer._critic.parameters()}
    own = [] if trainer._critic.is_trained_with_actor else [trainer._critic.optimizer]
    found = {True: [], False: []}
    for optimizer in (trainer.create_optimizer(), *own):
        for group in optimizer.param_groups:
            facts = {key: value for key, value in group.items() if key not in ("params", "initial_lr", "of_critic")}
            for p in group["params"]:
                found[id(p) in of_critic].append((tuple(p.shape), str(facts)))
    return sorted(found[False]), sorted(found[True])


@pytest.mark.parametrize("critic", ppo_trainers.CRITICS)
def test_a_setting_of_the_optimizer_reaches_the_groups_of_actor_and_critic(critic, tmp_path):
    made = {}
    for name, value in {None: None, **OF_GROUPS}.items():
        trainer = ppo_trainers.trainer(critic, tmp_path, **({} if name is None else {name: value}))
        trainer.create_optimizer_and_scheduler(3)
        if critic == "separate":
            trainer._critic.prepare()
        made[name] = groups(trainer)
    for name in OF_GROUPS:
        changed = [one != other for one, other in zip(made[None], made[name], strict=True)]
        assert changed == [not name.startswith("value_"), True], name
    decayed = [facts for shape, facts in made["weight_decay"][1] if len(shape) > 1]
    assert decayed and all("'weight_decay': 0.3" in facts for facts in decayed)
    assert not any("'weight_decay': 0.3" in facts for shape, facts in made["weight_decay"][1] if len(shape) < 2)


def test_a_setting_without_effect_is_refused_with_its_reason(subtests):
    for name, value in REFUSED.items():
        with subtests.test(name), pytest.raises(ConfigError, match=rf"^{name}=.* has no effect in PPO: .*{name}"):
            PPOConfig("out", use_cpu=True, bf16=False, **{name: value})


# TRL itself refuses to synchronise a reference with weight 0 in the loss.
@pytest.mark.parametrize("name", of_today(set(REFUSED) - {"sync_ref_model"}))
def test_what_is_refused_has_no_effect_indeed(name, trained, monkeypatch):
    monkeypatch.setattr(config_module, "check_effects", lambda config, table: None)
    assert ppo_trainers.distance(trained({}), trained({name: REFUSED[name]})) == 0


def test_values_that_say_what_happens_anyway_are_fine():
    for changes in ({}, dict(num_sample_generations=0), dict(scale_rewards=True)):
        PPOConfig("out", use_cpu=True, bf16=False, **changes)


def test_k3_in_the_reward_is_warned_about(monkeypatch, tmp_path):
    said = []
    monkeypatch.setattr(inputs.logger, "warning_once", said.append)
    for estimator, times in (("k1", 0), ("k3", 1)):
        ppo_trainers.trainer("head", tmp_path, kl_estimator=estimator)
        assert len([text for text in said if "kl_estimator='k3'" in text]) == times
