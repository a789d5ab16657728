"""Every key of a written recipe is a field of the config on which it lands."""

import dataclasses
from importlib import import_module

import pytest
from trl import ModelConfig

from trl_ext.memory.files import settings
from trl_ext.memory.job import Job
from trl_ext.memory.planner.presets import PRESETS
from trl_ext.scripts.ppo import PPOScriptArguments
from trl_ext.scripts.recipe import LAUNCH_KEY

CONFIGS = {
    "reward": ("trl_ext.trainers.reward.config", "RewardConfig"),
    "grpo": ("trl_ext.trainers.grpo.config", "GRPOConfig"),
    "ppo": ("trl_ext.trainers.ppo.config", "PPOConfig"),
}
VLLM = {"use_vllm": True, "vllm_enable_sleep_mode": True}
JOBS = [
    *((name, preset.plan().job) for name, preset in PRESETS.items()),
    ("qlora", Job("grpo", method="qlora", optim="adamw_bnb_8bit")),
    (
        "zero3",
        Job("grpo", zero_stage=3, ds3_gather_for_generation=False, steps_per_generation=2, beta=0.1, oversample=1.5),
    ),
    ("vllm", Job("ppo", zero_stage=3, offload="all", max_tokens_per_forward=8192, **VLLM)),
    ("server", Job("grpo", use_vllm=True, vllm_mode="server", vllm_servers=1, vllm_tensor_parallel_size=2)),
    ("padded", Job("reward", packing=False, layer_kernels=False)),
    ("pairs", Job("reward", max_tokens_per_forward=8192, activation_offloading=True)),
]


def fields_of(trainer):
    """Of the trainer's config and of ModelConfig, what the script of PPO asks beside them, and the launch file."""
    module, name = CONFIGS[trainer]
    config = getattr(import_module(module), name)
    own = (
        {"value_model"} & {field.name for field in dataclasses.fields(PPOScriptArguments)}
        if trainer == "ppo"
        else set()
    )
    return (
        own
        | {LAUNCH_KEY}
        | {field.name for config_class in (config, ModelConfig) for field in dataclasses.fields(config_class)}
    )


@pytest.mark.parametrize(("name", "job"), JOBS)
def test_every_key_is_a_field(name, job):
    keys = settings.recipe(job, "model", num_gpus=1, in_folder=True).keys()
    assert keys <= fields_of(job.trainer)


def test_a_planned_recipe_makes_the_planned_config(tmp_path):
    from trl_ext.trainers.grpo.config import GRPOConfig

    job = Job("grpo", checkpoint_every=2, per_device_train_batch_size=4, global_batch=32)
    model_keys = {field.name for field in dataclasses.fields(ModelConfig)}
    keys = {name: value for name, value in settings.recipe(job, "m", 1).items() if name not in model_keys}
    config = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, **{**keys, "bf16": False})
    assert config.gradient_accumulation_steps == 8
    assert config.activation_checkpointing_kwargs["every_n_layers"] == 2
