"""Runs whose processes cannot share rows: a sentence before anything starts."""

from types import SimpleNamespace

import pytest
from accelerate import ParallelismConfig
from datasets import Dataset

from tests import tiny
from trl_ext import GRPOConfig, GRPOTrainer, PPOConfig, RewardConfig
from trl_ext.errors import ConfigError, PackingError
from trl_ext.packing.ulysses import SequenceGroup
from trl_ext.trainers.forward.sequence_parallel import check_models, check_processes

CONFIGS = (GRPOConfig, RewardConfig, PPOConfig)


def config(kind=GRPOConfig, **changes):
    return kind(**{"output_dir": "out", **tiny.QUIET_ON_CPU, "sequence_parallel": 2, **changes})


def score(completions, **_):
    return [float(len(text)) for text in completions]


def trainer(tmp_path, model="llama", **changes) -> GRPOTrainer:
    args = config(output_dir=str(tmp_path), max_completion_length=8, **changes)
    prompts = Dataset.from_dict({"prompt": [tiny.words(5, 6, 7)] * 8})
    return GRPOTrainer(tiny.model(model), score, args, prompts, processing_class=tiny.tokenizer())


@pytest.fixture
def two_processes(monkeypatch):
    """As far as checks know: a forward would wait for the other one."""
    monkeypatch.setattr("trl_ext.trainers.checks.check_processes", lambda args: None)
    monkeypatch.setattr(SequenceGroup, "of_world", lambda size, timeout_s: SequenceGroup(2, 0))


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(sequence_parallel=0), "sequence_parallel=0 must be at least 1"),
        (dict(packing=False), "sequence_parallel=2 shares packed rows, and packing=False makes none"),
        (dict(parallelism_config=ParallelismConfig(cp_size=2)), "cp_size=2.* set sequence_parallel=2"),
    ],
)
def test_a_config_that_contradicts_itself(kind, changes, words):
    with pytest.raises(ConfigError, match=words):
        config(kind, **changes)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_launch_by_which_accelerate_would_share_rows(kind, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_SIZE", "4")
    with pytest.raises(ConfigError, match=r"sp_size=4.* set sequence_parallel=4"):
        config(kind, sequence_parallel=1)


@pytest.mark.parametrize(("count", "words"), [(1, "1 process cannot"), (3, "3 processes cannot"), (2, ""), (4, "")])
def test_processes_that_make_no_groups(count, words):
    args = SimpleNamespace(sequence_parallel=2, world_size=count, fsdp=[])
    if not words:
        return check_processes(args)
    with pytest.raises(ConfigError, match=f"{words} be cut into groups of sequence_parallel=2"):
        check_processes(args)


def test_fsdp():
    with pytest.raises(ConfigError, match="sequence_parallel=2 runs under DDP and DeepSpeed, not FSDP"):
        check_processes(SimpleNamespace(sequence_parallel=2, world_size=2, fsdp=["full_shard"]))


def test_a_trainer_in_one_process(tmp_path):
    with pytest.raises(ConfigError, match="1 process cannot be cut"):
        trainer(tmp_path)


def test_heads_that_cannot_be_dealt():
    check_models([tiny.model("llama")], 4)
    with pytest.raises(ConfigError, match="llama has 4 attention heads, which sequence_parallel=3 does not divide"):
        check_models([tiny.model("llama")], 3)


def test_positions_that_depend_on_the_length_of_the_row():
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(ConfigError, match=r"positions of type dynamic.* Leave sequence_parallel=2 out"):
        check_models([tiny.model("llama", rope_parameters=rope)], 2)


def test_layers_that_carry_state_along_the_row():
    with pytest.raises(ConfigError, match=r"lfm2 has layers that carry state .* Leave sequence_parallel=2 out"):
        check_models([tiny.model("lfm2")], 2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(entropy_coef=0.1), "the entropy bonus is a mean over all tokens"),
        (dict(top_entropy_quantile=0.5), "top_entropy_quantile=0.5 is a quantile"),
        (dict(loss_type="bnpo"), "loss_type='bnpo' is a mean over the tokens of each micro-batch"),
    ],
)
def test_losses_that_need_their_micro_batch(changes, words, tmp_path, two_processes):
    with pytest.raises(ConfigError, match=f"sequence_parallel=2 takes rows out .* change the loss: {words}"):
        trainer(tmp_path, **changes)


def test_a_mixture_with_auxiliary_loss(tmp_path, two_processes):
    with pytest.raises(ConfigError, match="the load-balancing loss counts all tokens"):
        trainer(tmp_path, "qwen3_moe", router_aux_loss_coef=0.01)


def test_a_model_that_cannot_be_packed(tmp_path, two_processes):
    with pytest.raises(PackingError, match=r"sequence_parallel=2 shares packed rows, but Gemma2.* Leave it out to"):
        trainer(tmp_path, "gemma2")
