"""Worked numbers of the formulas, each as its docstring tells it."""

from dataclasses import replace

import pytest

from trl_ext.memory.cards import Hardware, find_card, parse_gpus
from trl_ext.memory.formulas import activations as act
from trl_ext.memory.formulas import generation, states
from trl_ext.memory.formulas.engines import Engine, engines, frozen_copies, num_scoring_passes
from trl_ext.memory.formulas.estimate import estimate
from trl_ext.memory.formulas.peak import Setup, footprints
from trl_ext.memory.job import Job
from trl_ext.memory.models.families import FAMILIES
from trl_ext.memory.models.find import find_shape
from trl_ext.memory.models.shapes import backbone_params, largest_weight, lm_params, scorer_params
from trl_ext.memory.units import GIB, gib

LLAMA3 = find_shape("meta-llama/Llama-3.1-8B")
REWARD = Job("reward")
ZERO2 = replace(REWARD, zero_stage=2)
LORA64 = replace(REWARD, method="lora", lora_r=64)


def engine(job, num_params, num_gpus=8):
    return Engine(LLAMA3, job, num_gpus, "policy", num_params)


def test_a_layer_saves_200840_bytes_a_token_works_with_more_and_is_checkpointed_every_nth():
    fp32 = replace(REWARD, dtype="float32")
    assert act.saved_bytes(LLAMA3, ZERO2) == 200_840
    assert [act.work_bytes(LLAMA3, job) for job in (ZERO2, fp32, LORA64)] == [266_904, 300_184, 345_616]
    # A checkpoint doubles where the residual stream is fp32.
    assert [act.checkpoint_bytes(LLAMA3, job) for job in (ZERO2, fp32)] == [8192, 16384]
    for every, checkpointed in {1: 32, 2: 16, 3: 11, 0: 0}.items():
        job = replace(ZERO2, checkpoint_every=every)
        assert act.held_bytes(LLAMA3, job) == (checkpointed * 8192, (32 - checkpointed) * 200_840)


def test_a_prompt_is_kept_where_a_step_has_another_forward_for_its_group():
    job = Job("grpo", num_generations=8, per_device_train_batch_size=1, global_batch=8, max_prompt_length=512)
    for num_gpus, kept in ((8, 0.0), (4, 8.0 * 32 * 1024 * 512)):
        setup = Setup.of(LLAMA3, job, Hardware(num_gpus, find_card("H200")))
        updates = [one.terms.get("kept prompt", 0.0) for one in footprints(setup) if one.phase == "update"]
        assert max(updates) == kept


def test_norms_on_queries_and_keys_and_dropout_save_more():
    qwen3 = find_shape("Qwen/Qwen3-8B")
    assert act.saved_bytes(qwen3, ZERO2) - act.saved_bytes(replace(qwen3, qk_norm=""), ZERO2) == 6 * 5120 + 4 * 40
    dry = Job("grpo", method="lora", lora_r=64)
    wet = replace(dry, lora_dropout=0.05)
    inputs, shared = 6 * 4096 + 14336, 2 * 4096 + 14336
    assert act.saved_bytes(LLAMA3, wet) - act.saved_bytes(LLAMA3, dry) == 3 * inputs - 2 * shared
    for trainer in ("reward", "ppo"):  # which disable dropout
        dry = Job(trainer, method="lora")
        assert act.saved_bytes(LLAMA3, replace(dry, lora_dropout=0.05)) == act.saved_bytes(LLAMA3, dry)


def test_a_padded_batch_repeats_keys_and_values_and_its_mask_grows_with_the_square_of_its_rows():
    padded = replace(ZERO2, packing=False)
    mask = 2 * padded.sequence_tokens  # [B, 1, S, S] in bf16
    assert act.saved_bytes(LLAMA3, padded) - act.saved_bytes(LLAMA3, ZERO2) == 4 * (4096 - 1024) + mask
    # 32k tokens: a GiB of truth values, and two in bf16 for every layer that is not checkpointed.
    long = replace(ZERO2, max_length=32768, checkpoint_every=0)
    more = [act.held_bytes(LLAMA3, replace(long, packing=packing))[1] * 32768 for packing in (True, False)]
    repeated = 32 * 32768 * 4 * (4096 - 1024)
    assert more[1] - more[0] - repeated == 32 * 2 * 2**30
    assert act.mask_bytes(LLAMA3, replace(long, packing=False)) * 32768 == 2**30


def test_every_family_with_eager_attention_has_the_bytes_of_its_scores():
    assert {name for name, family in FAMILIES.items() if family.is_eager} == act.SCORES.keys()
    gemma = find_shape("google/gemma-2-9b")
    job = Job("grpo", packing=False, zero_stage=2, max_prompt_length=512, max_completion_length=3584)
    assert act.padding_bytes(gemma, job) - 4 * (gemma.q_width - gemma.kv_width) == 524_288


def test_the_fused_head_holds_one_tile_of_logits_and_sums_its_gradient_in_fp32():
    per_token = 2 * 4096 + 28
    assert act.head_forward_bytes(LLAMA3, ZERO2, 8192) == 2 * 4096 * 32768 + 8192 * per_token
    assert act.head_forward_bytes(LLAMA3, ZERO2, 8192) < 2 * 8192 * LLAMA3.vocab
    small = replace(LLAMA3, vocab=8192)  # the tile has TRL's width all the same
    assert act.head_forward_bytes(small, ZERO2, 512) == act.head_forward_bytes(LLAMA3, ZERO2, 512)
    frozen, trained = (act.head_backward_bytes(LLAMA3, job, 1024) for job in (replace(LORA64, zero_stage=2), ZERO2))
    assert trained - frozen == 6 * 128256 * 4096


def test_autocast_keeps_copies_of_trained_weights_alone():
    fp32 = replace(REWARD, dtype="float32")
    assert act.cast_cache_bytes(LLAMA3, fp32) / GIB == pytest.approx(13.0, abs=0.01)
    assert act.cast_cache_bytes(LLAMA3, replace(LORA64, dtype="float32")) == act.cast_cache_bytes(LLAMA3, ZERO2) == 0


def test_zero2_holds_2p_and_20p_over_n_at_the_optimizer_step_and_zero3_splits_sixteen_bytes():
    num_params, num_gpus = scorer_params(LLAMA3), 8
    terms = (states.weight_bytes, states.optimizer_bytes, states.gradient_bytes, states.step_bytes)
    total = sum(term(engine(ZERO2, num_params)) for term in terms)
    assert total == pytest.approx(2 * num_params + 20 * num_params / num_gpus)
    assert total / GIB == pytest.approx(31.45, abs=0.01)
    terms = (states.weight_bytes, states.optimizer_bytes, states.gradient_bytes)
    assert sum(term(engine(replace(REWARD, zero_stage=3), 1000)) for term in terms) == 16 * 1000 / 8


def test_a_share_of_the_gradients_keeps_the_table_that_it_cuts_whole():
    num_params = scorer_params(LLAMA3)
    assert states.share_gradient_bytes(engine(ZERO2, num_params, 8)) == 2 * num_params / 8
    assert states.share_gradient_bytes(engine(ZERO2, num_params, 64)) == 2 * LLAMA3.vocab * LLAMA3.hidden
    # One inside the table casts a single piece to fp64 for its norm.
    assert states.step_bytes(engine(ZERO2, num_params, 64)) == 8 * num_params / 64


def test_a_separate_critic_trains_all_weights_beside_lora():
    job = Job("ppo", method="lora", critic="separate", reward_model="copy")
    policy, critic = engines(LLAMA3, job, 8)
    assert policy.frozen == lm_params(LLAMA3)
    assert (critic.role, critic.trained, critic.frozen) == ("critic", scorer_params(LLAMA3), 0)
    assert critic.job.method == "full"


def test_every_reward_model_of_an_ensemble_is_counted():
    for kind, num_params in {"copy": scorer_params(LLAMA3), "adapter": 41_943_040}.items():
        job = Job("ppo", method="lora", critic="adapter", zero_stage=2, reward_model=kind)
        ensembles = [replace(job, num_reward_models=number) for number in (1, 3)]
        copies = [copy for one in ensembles for copy in frozen_copies(LLAMA3, one) if copy.role == "reward model"]
        assert [copy.bytes_per_gpu(job, 8) for copy in copies] == [2 * num_params, 6 * num_params]
        one, three = (num_scoring_passes(ensemble, 8) for ensemble in ensembles)
        assert three == one + 2


def test_ddp_holds_gradients_in_its_buckets_and_trls_twice():
    for is_view, num_bytes in ((True, 4000), (False, 8000)):
        job = replace(REWARD, dtype="float32", gradient_as_bucket_view=is_view)
        for num_gpus, held in ((1, 4000), (2, num_bytes)):
            one = engine(job, 1000, num_gpus)
            assert states.gradient_bytes(one) + states.bucket_bytes(one) == held


def test_adam_keeps_two_bytes_instead_of_eight_in_8_bits_and_18_in_host_memory():
    job = replace(REWARD, dtype="float32")
    assert states.optimizer_bytes(engine(job, 1000)) == 8000
    assert states.optimizer_bytes(engine(replace(job, optim="adamw_bnb_8bit"), 1000)) == 2000
    policy = engine(replace(ZERO2, offload="optimizer"), 1000, 4)
    assert states.optimizer_bytes(policy) == states.gradient_bytes(policy) == 0
    assert states.host_bytes(policy) == 18_000


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_zero_1_holds_all_gradients_wherever_its_optimizer_is(micro_batches):
    """It sends them after the last micro-batch of a step: only the optimizer and the share's gradients leave."""
    job = Job("reward", zero_stage=1, max_length=64, global_batch=8 * micro_batches)
    cards = parse_gpus("8xA100-80GB")
    here, away = (estimate(replace(job, offload=where), LLAMA3, cards) for where in ("none", "optimizer"))
    policy = away.setup.engines[0]
    assert states.optimizer_bytes(policy) == 0 and states.gradient_bytes(policy) == 2 * policy.trained
    left = here.worst["update"].num_bytes - away.worst["update"].num_bytes
    assert 12 * policy.trained / 8 <= left <= 14.1 * policy.trained / 8
    assert away.worst["update"].num_bytes > 4 * policy.trained


def test_a_4_bit_base_takes_five_and_a_half_gib_and_is_read_a_file_at_a_time():
    (policy,) = engines(LLAMA3, Job("grpo", method="qlora", lora_r=1), 1)
    assert states.weight_bytes(policy) / GIB == pytest.approx(5.3, abs=0.05)
    # Its bf16 weights never stand in host memory: 70B on 8 cards would be 1,036 GiB of it.
    job = Job("grpo", method="qlora", zero_stage=2)
    found = estimate(job, find_shape("meta-llama/Llama-3.1-70B"), parse_gpus("8xH100-80GB"))
    assert gib(found.host_bytes) == pytest.approx(8 * 4.66, abs=0.1)
    whole = estimate(replace(job, method="lora"), found.shape, found.hardware)
    assert gib(whole.host_bytes) > 1000


def test_completions_keep_four_gib_of_keys_and_values_and_vllm_takes_its_share_of_the_whole_card():
    job = Job("grpo", global_batch=16, max_prompt_length=1024, max_completion_length=1024)
    assert generation.cache_bytes(LLAMA3, job, 1) / GIB == pytest.approx(4.0 * 33 / 32)
    job = Job("grpo", use_vllm=True, vllm_gpu_memory_utilization=0.3)
    assert generation.vllm_bytes(find_card("A100-40GB"), job) / GIB == pytest.approx(0.3 * 39.5)
    assert generation.vllm_cache_tokens(find_shape("7B"), find_card("A100-40GB"), job) < 0


# What ZeRO-3 has gathered --------------------------------------------------------------------------------------------

ZERO3, GRPO = replace(REWARD, zero_stage=3), Job("grpo", zero_stage=3)
TABLE = LLAMA3.vocab * LLAMA3.hidden


def gathered(job, place, shape=LLAMA3):
    """In elements."""
    (policy,) = engines(shape, job, 8)
    return states.gathered_bytes(policy, place) / 2


def test_a_layer_in_backward_leaves_no_room_or_keeps_one_weight_without_a_checkpoint():
    layer = (backbone_params(LLAMA3) - TABLE) / 32
    assert layer > ZERO3.stage3_max_live_parameters
    assert gathered(ZERO3, "layer") == layer
    roomy = replace(ZERO3, stage3_max_live_parameters=10**9, reduce_bucket_size=1)
    assert gathered(roomy, "layer") == layer + 10**9 + 50_000_000 + TABLE
    assert gathered(replace(ZERO3, checkpoint_every=0), "layer") == largest_weight(LLAMA3) < gathered(ZERO3, "layer")


def test_the_table_comes_with_the_bottom_layers_twice_where_others_share_its_buffer():
    assert gathered(ZERO3, "bottom") == 100_000_000 + 2 * TABLE
    tight = replace(ZERO3, stage3_max_live_parameters=10**6)
    assert gathered(tight, "bottom") == 10**6 + TABLE


def test_the_fused_heads_weight_stays_through_the_whole_pass():
    for place in ("forward", "layer", "bottom", "embedding"):
        assert gathered(GRPO, place) >= TABLE
        assert gathered(ZERO2, place) == 0  # below ZeRO-3 nothing is gathered
    assert gathered(GRPO, "embedding") == 2 * TABLE
    small = find_shape("0.5B")  # a tied head is the table
    assert gathered(GRPO, "embedding", small) == small.vocab * small.hidden


def test_small_gradients_are_interleaved_in_a_copy_of_the_bucket():
    large, small = (gathered(replace(ZERO3, reduce_bucket_size=num), "layer") for num in (10**8, 10**6))
    assert large - small == 10**8
    lora = replace(ZERO3, method="lora")
    assert gathered(replace(lora, reduce_bucket_size=10**8), "layer") == gathered(lora, "layer")
