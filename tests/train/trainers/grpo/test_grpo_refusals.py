"""Models that cannot be packed, and input that cannot work: a sentence before the first step."""

import pytest
import torch
from datasets import Dataset, IterableDataset
from peft import PromptTuningConfig
from transformers import MambaConfig, MambaForCausalLM

from tests import tiny
from trl_ext import GRPOConfig, GRPOTrainer, RuleSet
from trl_ext.errors import ConfigError, DataError, PackingError
from trl_ext.rewards import Answer

torch.set_num_threads(1)

PROMPTS = Dataset.from_dict({"prompt": [tiny.words(5, 6, 7)] * 8})


def trainer(tmp_path, model="llama", dataset=PROMPTS, rewards=None, peft_config=None, **changes) -> GRPOTrainer:
    settings = dict(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", max_completion_length=8)
    return GRPOTrainer(
        tiny.model(model) if isinstance(model, str) else model,
        rewards or (lambda completions, **_: [0.0] * len(completions)),
        GRPOConfig(**{**settings, **changes}),
        dataset,
        processing_class=tiny.tokenizer(),
        peft_config=peft_config,
    )


@pytest.fixture
def warnings(monkeypatch) -> list[str]:
    """What the trainer warns of."""
    said: list[str] = []
    monkeypatch.setattr("trl_ext.trainers.packing.logger.warning", said.append)
    return said


@pytest.mark.parametrize("family", tiny.STATEFUL)
def test_a_model_with_state_along_the_row_is_trained_on_padded_batches_with_one_warning(family, tmp_path, warnings):
    subject = trainer(tmp_path, family)
    assert not subject._packs
    assert subject.model.config._attn_implementation == "sdpa"
    (warning,) = warnings
    assert "padded batches, without packing" in warning


@pytest.mark.parametrize(("family", "feature"), [("gemma2", "softcap"), ("gpt_oss", "s_aux")])
def test_soft_capping_and_attention_sinks_keep_their_own_attention_and_are_not_packed(family, feature, tmp_path):
    subject = trainer(tmp_path, family)
    assert not subject._packs
    assert subject.model.config._attn_implementation == "eager"
    with pytest.raises(PackingError, match=feature):
        trainer(tmp_path, family, packing=True)


def test_mamba_is_trained_on_padded_batches(tmp_path, warnings):
    config = MambaConfig(vocab_size=tiny.VOCAB, hidden_size=32, state_size=8, num_hidden_layers=2, pad_token_id=0)
    assert not trainer(tmp_path, MambaForCausalLM(config))._packs
    assert warnings[0].endswith("when a neighbour's tokens change, tolerance 1.0e-04.")  # no kernel would help


def test_prompt_tuning_is_trained_on_padded_batches(tmp_path, warnings):
    tuning = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    assert not trainer(tmp_path, peft_config=tuning)._packs
    assert "virtual tokens" in warnings[0]


@pytest.mark.parametrize("family", tiny.STATEFUL)
def test_packing_forced_on_such_a_model_is_refused(family, tmp_path):
    with pytest.raises(PackingError, match=r"packing=True, but .* cannot be packed"):
        trainer(tmp_path, family, packing=True)


def test_a_packable_model_passes_the_self_check_in_silence(tmp_path, warnings):
    assert trainer(tmp_path)._packs
    assert warnings == []


def test_the_refusal_says_what_stopped_the_check(tmp_path):
    with pytest.raises(PackingError, match="the packed forward stopped with ValueError"):
        trainer(tmp_path, "lfm2", packing=True)


def test_an_empty_dataset_is_refused(tmp_path):
    with pytest.raises(DataError, match="train_dataset is empty"):
        trainer(tmp_path, dataset=Dataset.from_dict({"prompt": []}))


def test_an_empty_stream_is_refused(tmp_path):
    with pytest.raises(DataError, match="stream ended"):
        trainer(tmp_path, dataset=IterableDataset.from_generator(lambda: iter(())))


def test_a_dataset_without_prompt_is_refused_with_the_columns_it_has(tmp_path):
    with pytest.raises(DataError, match="no column 'prompt', only 'question'"):
        trainer(tmp_path, dataset=Dataset.from_dict({"question": ["w5"]}))


def test_a_rule_that_asks_for_a_missing_column_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"no column 'gold'.*it has 'prompt'"):
        trainer(tmp_path, rewards=RuleSet([Answer(gold="gold")]))


def test_a_budget_smaller_than_the_longest_row_is_refused_with_the_number_to_set(tmp_path):
    with pytest.raises(ConfigError, match="Set it to at least 11"):
        trainer(tmp_path, max_tokens_per_forward=10)


def test_a_budget_smaller_than_a_completion_is_refused_when_the_config_is_parsed(tmp_path):
    with pytest.raises(ConfigError, match="cannot hold one completion"):
        trainer(tmp_path, max_tokens_per_forward=8)


@pytest.mark.parametrize("coefficient", [None, 0.1], ids=["the model's own", "given"])
def test_a_budget_is_refused_beside_an_auxiliary_loss_that_it_would_change(coefficient, tmp_path):
    with pytest.raises(ConfigError, match=r"max_tokens_per_forward=100 .* load-balancing loss"):
        trainer(tmp_path, "qwen3_moe", max_tokens_per_forward=100, router_aux_loss_coef=coefficient)


def test_a_budget_without_packing_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="Remove one of the two"):
        trainer(tmp_path, max_tokens_per_forward=100, packing=False)


def test_a_negative_evaluation_temperature_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="must be at least 0"):
        trainer(tmp_path, eval_temperature=-1.0)


@pytest.mark.parametrize("kind", ["GRPO", "Reward"])
def test_a_plain_trl_config_out_of_range_is_refused_before_a_model_loads(tmp_path, kind):
    import trl

    import trl_ext

    args = getattr(trl, f"{kind}Config")(str(tmp_path / "out"), use_cpu=True, bf16=False, weight_decay=-0.1)
    with pytest.raises(ConfigError, match=r"weight_decay=-0.1 must be at least 0"):
        getattr(trl_ext, f"{kind}Trainer")("no-model-is-loaded", args=args)
    assert not (tmp_path / "out").exists()


def test_a_plain_trl_config_packs(tmp_path):
    import trl

    args = trl.GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none")
    subject = GRPOTrainer(
        tiny.model("llama"),
        lambda completions, **_: [0.0] * len(completions),
        args,
        PROMPTS,
        processing_class=tiny.tokenizer(),
    )
    assert subject._packs
