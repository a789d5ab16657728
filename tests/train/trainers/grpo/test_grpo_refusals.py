"""Models that cannot be packed, and input that cannot work: a sentence before the first step."""

from types import SimpleNamespace

import pytest
import torch
import trl
from accelerate import ParallelismConfig
from datasets import IterableDataset
from peft import PromptTuningConfig
from transformers import MambaConfig, MambaForCausalLM

import trl_ext
from tests import grpo_trainers, tiny
from trl_ext import GRPOConfig, GRPOTrainer, PPOConfig, RewardConfig
from trl_ext.compat.accelerate import fsdp_dtype
from trl_ext.errors import ConfigError, DataError, PackingError
from trl_ext.packing.ulysses import SequenceGroup
from trl_ext.trainers.settings.checks import check_packed_bits
from trl_ext.trainers.step.sequence_parallel import check_models, check_processes


def trainer(folder, model="llama", data="w5 w6 w7", **changes) -> GRPOTrainer:
    return grpo_trainers.trainer(folder, model=model, data=data, **dict(max_completion_length=8) | changes)


MIXTURE = dict(model="qwen3_moe", max_tokens_per_forward=100)


@pytest.fixture
def warnings(monkeypatch) -> list[str]:
    """What the trainer warns of."""
    said: list[str] = []
    monkeypatch.setattr("trl_ext.trainers.base.packing.logger.warning", said.append)
    return said


@pytest.mark.parametrize("family", tiny.OTHER_STATE)
def test_a_model_with_state_of_another_kind_is_padded_with_one_warning_and_not_packed(family, tmp_path, warnings):
    subject = trainer(tmp_path, family)
    assert not subject._packs and subject.model.config._attn_implementation == "sdpa"
    (warning,) = warnings
    assert "Packing is off" in warning and "packing=False leaves this warning out" in warning
    with pytest.raises(PackingError, match=r"packing=True, but .* cannot be packed"):
        trainer(tmp_path, family, packing=True)


@pytest.mark.parametrize(("family", "feature"), [("gemma2", "softcap"), ("gpt_oss", "s_aux")])
def test_soft_capping_and_attention_sinks_keep_their_own_attention_and_are_not_packed(family, feature, tmp_path):
    subject = trainer(tmp_path, family)
    assert not subject._packs
    assert subject.model.config._attn_implementation == "eager"
    with pytest.raises(PackingError, match=feature):
        trainer(tmp_path, family, packing=True)


@pytest.mark.own_self_check
def test_a_model_that_looks_ahead_is_not_packed(tmp_path):
    model = tiny.model("llama")
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    with pytest.raises(PackingError, match=r"LlamaAttention is not causal\. Packing is for causal models"):
        trainer(tmp_path, model, packing=True)


def test_mamba_is_trained_on_padded_batches(tmp_path, warnings):
    config = MambaConfig(vocab_size=tiny.VOCAB, hidden_size=32, state_size=8, num_hidden_layers=2, pad_token_id=0)
    assert not trainer(tmp_path, MambaForCausalLM(config))._packs
    # No kernel would help, and none is named.
    assert "when a neighbour's tokens change, tolerance 1.0e-04. The results are the same" in warnings[0]


def test_prompt_tuning_is_trained_on_padded_batches(tmp_path, warnings):
    tuning = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    assert not trainer(tmp_path, peft_config=tuning)._packs
    assert "virtual tokens" in warnings[0]


REFUSED = [
    (dict(data=IterableDataset.from_generator(lambda: iter(()))), DataError, "stream ended"),
    # The number to set, with a loss that a budget would change.
    (dict(max_tokens_per_forward=10), ConfigError, "Set it to at least 11"),
    (MIXTURE, ConfigError, r"max_tokens_per_forward=100 .* load-balancing loss"),
    (MIXTURE | dict(router_aux_loss_coef=0.1), ConfigError, r"max_tokens_per_forward=100 .* load-balancing loss"),
    (dict(max_tokens_per_forward=64, entropy_coef=0.1), ConfigError, "cut a micro-batch: the entropy bonus"),
    (dict(max_tokens_per_forward=64, top_entropy_quantile=0.5), ConfigError, "is a quantile over all tokens"),
    (
        dict(max_tokens_per_forward=64, model="gemma2"),
        PackingError,
        "^max_tokens_per_forward=64 .* cannot .* Leave it out",
    ),
    (dict(skip_zero_advantage=True, beta=0.1), ConfigError, "beta=0.1 adds a KL penalty to every row"),
    (dict(skip_zero_advantage=True, entropy_coef=0.1), ConfigError, "the entropy bonus is a mean"),
]


def test_what_cannot_work_is_refused_before_the_first_step(subtests, tmp_path):
    for changes, error, sentence in REFUSED:
        with subtests.test(sentence), pytest.raises(error, match=sentence):
            trainer(tmp_path, **changes)


def test_a_plain_trl_config_out_of_range_is_refused_before_a_model_loads(tmp_path):
    for kind in ("GRPO", "Reward"):
        args = getattr(trl, f"{kind}Config")(str(tmp_path / "out"), use_cpu=True, bf16=False, weight_decay=-0.1)
        with pytest.raises(ConfigError, match=r"weight_decay=-0.1 must be at least 0"):
            getattr(trl_ext, f"{kind}Trainer")("no-model-is-loaded", args=args)
    assert not (tmp_path / "out").exists()


def test_a_plain_trl_config_packs(tmp_path):
    args = trl.GRPOConfig(str(tmp_path), **tiny.QUIET_ON_CPU)
    data, tokenizer = grpo_trainers.prompts(), tiny.tokenizer()
    assert GRPOTrainer(tiny.model("llama"), grpo_trainers.reward, args, data, processing_class=tokenizer)._packs


# Processes that cannot share rows ------------------------------------------------------------------------------------


CONFIGS = (GRPOConfig, RewardConfig, PPOConfig)


def config(kind=GRPOConfig, **changes):
    return kind(**{"output_dir": "out", **tiny.QUIET_ON_CPU, "sequence_parallel": 2, **changes})


def sharing(folder, model="llama", **changes) -> GRPOTrainer:
    return grpo_trainers.trainer(folder, model=model, data="w5 w6 w7", sequence_parallel=2, **changes)


@pytest.fixture
def two_processes(monkeypatch):
    """As far as checks know: a forward would wait for the other one."""
    monkeypatch.setattr("trl_ext.trainers.settings.checks.check_processes", lambda args: None)
    monkeypatch.setattr(SequenceGroup, "of_world", lambda size, timeout_s: SequenceGroup(2, 0))


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_config_or_a_launch_that_contradicts_it(kind, monkeypatch):
    with pytest.raises(ConfigError, match=r"cp_size=2.* set sequence_parallel=2"):
        config(kind, parallelism_config=ParallelismConfig(cp_size=2))
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_SIZE", "4")
    with pytest.raises(ConfigError, match=r"sp_size=4.* set sequence_parallel=4"):
        config(kind, sequence_parallel=1)


def test_processes_that_make_no_groups(tmp_path):
    args = SimpleNamespace(sequence_parallel=2, fsdp=[])
    for args.world_size in (2, 4):
        check_processes(args)
    for args.world_size, words in ((1, "1 process cannot"), (3, "3 processes cannot")):
        with pytest.raises(ConfigError, match=f"{words} be cut into groups of sequence_parallel=2"):
            check_processes(args)
    with pytest.raises(ConfigError, match="1 process cannot be cut"):
        sharing(tmp_path)


@pytest.mark.parametrize(
    ("variables", "settings", "words"),
    [
        ({"FSDP_ACTIVATION_CHECKPOINTING": "true"}, {}, "recomputed by the trainer's gradient_checkpointing"),
        ({"FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}, {}, "end without a model that can be loaded"),
        ({}, {"optim": "adamw_bnb_8bit"}, "optim='adamw_bnb_8bit': optimizers of 8 bits"),
        ({}, {"sequence_parallel": 2}, "sequence_parallel=2: rows are shared under DDP and DeepSpeed"),
    ],
)
def test_a_launch_of_fsdp_with_which_a_run_would_fail_or_lose_its_model(
    variables, settings, words, tmp_path, monkeypatch, two_processes
):
    launched = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}
    for name, value in (launched | variables).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=words):
        trainer(tmp_path, **settings)


class Params4bit(torch.nn.Parameter):
    """By its name a weight of bitsandbytes, which may be stored as any dtype."""


@pytest.mark.parametrize(("stored", "is_bf16"), [("uint8", True), ("float32", True), ("bfloat16", False)])
def test_4_bit_weights_that_fsdp_would_leave_whole_or_cast(stored, is_bf16):
    weights = Params4bit(torch.zeros(4, dtype=getattr(torch, stored)), requires_grad=False)
    model = SimpleNamespace(parameters=lambda: [weights])
    args = SimpleNamespace(fsdp=True, bf16=is_bf16, fp16=False)
    with pytest.raises(ConfigError, match=f"weights are of {stored}.*bnb_4bit_quant_storage={fsdp_dtype(args)}"):
        check_packed_bits(model, args)
    weights.data = weights.data.to(getattr(torch, fsdp_dtype(args)))
    check_packed_bits(model, args)
    check_packed_bits(model, SimpleNamespace(fsdp=False))


ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}


def test_models_whose_rows_cannot_be_shared():
    for size in (3, 4, 8):  # of 4 heads
        check_models([tiny.model("llama")], size)
    for model, words in (
        (tiny.model("llama", rope_parameters=ROPE), r"positions of type dynamic.* Leave sequence_parallel=2 out"),
        (tiny.model("lfm2"), r"lfm2 has layers that carry state .* Leave sequence_parallel=2 out"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_models([model], 2)


def test_losses_that_need_their_micro_batch_and_a_model_that_cannot_be_packed(tmp_path, two_processes):
    for changes, words in (
        (dict(entropy_coef=0.1), "the entropy bonus is a mean over all tokens"),
        (dict(top_entropy_quantile=0.5), "top_entropy_quantile=0.5 is a quantile"),
        (dict(loss_type="bnpo"), "loss_type='bnpo' is a mean over the tokens of each micro-batch"),
        (dict(model="qwen3_moe", router_aux_loss_coef=0.01), "the load-balancing loss counts all tokens"),
    ):
        with pytest.raises(ConfigError, match=f"sequence_parallel=2 takes rows out .* change the loss: {words}"):
            sharing(tmp_path, **changes)
    with pytest.raises(PackingError, match=r"sequence_parallel=2 shares packed rows, but Gemma2.* Leave it out to"):
        sharing(tmp_path, "gemma2")
