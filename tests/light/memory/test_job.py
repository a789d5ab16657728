"""Every contradiction between the settings of a job."""

import pytest

from trl_ext.errors import ConfigError
from trl_ext.memory.contradictions import OF_A_JOB, names_of
from trl_ext.memory.job import Job, changed

PPO = dict(trainer="ppo", method="lora")
# For each row of the table, in its order, settings of which it is the first that holds.
EXAMPLES = [
    dict(sequence_parallel=2, packing=False),
    dict(max_tokens_per_forward=4096, packing=False),
    dict(generation_ahead=2, use_vllm=True, vllm_mode="server"),
    dict(generation_ahead=1),
    dict(PPO, critic="head", reward_model="adapter"),
    dict(trainer="ppo", critic="adapter"),
    dict(num_reward_models=2),
    dict(method="qlora", zero_stage=3, offload="all"),
    dict(method="qlora", fp16=True),
    dict(fsdp=True, zero_stage=3, offload="optimizer"),
    dict(zero_hpz_partition_size=8, zero_stage=2),
    dict(overlap_comm=True, zero_stage=3),
    dict(fsdp=True, zero_stage=3, sequence_parallel=2),
    dict(fsdp=True, zero_stage=3, trainer="ppo", critic="separate"),
    dict(fsdp=True, zero_stage=3, optim="adamw_bnb_8bit"),
    dict(offload="all", zero_stage=2),
    dict(offload="optimizer"),
    dict(offload="optimizer", zero_stage=2, optim="adamw_bnb_8bit"),
    dict(checkpoint_every=-1),
    dict(keep_attention=True, checkpoint_every=0),
    dict(activation_offloading=True),
    dict(mean_completion_length=512),
    dict(trainer="ppo", oversample=1.5),
    dict(trainer="reward", use_vllm=True),
    dict(vllm_mode="server"),
    dict(use_vllm=True, vllm_servers=1),
    dict(use_vllm=True, vllm_gpu_memory_utilization=30.0),
]


def test_a_contradiction_is_a_sentence_with_its_values_and_what_to_do(subtests):
    for row, settings in zip(OF_A_JOB, EXAMPLES, strict=True):
        for make in (lambda one: Job(**one), lambda one: changed(Job(one["trainer"]), one)):
            with subtests.test(settings):
                with pytest.raises(ConfigError) as raised:
                    make({"trainer": "grpo", **settings})
                assert str(raised.value).endswith(row[1])
                assert all(f"{name}=" in str(raised.value) for name in names_of(row))
