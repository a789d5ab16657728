"""LoRA on a reward model: a config that trains the score head is left alone, any other is made to."""

import pytest
import torch
import trl
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForSequenceClassification

import trl_ext
from tests import reward_trainers
from tests.preferences import pairs, reward_model

NAMING = {
    "target_modules": dict(target_modules=["q_proj", "score"]),
    "a pattern": dict(target_modules=r".*q_proj|score"),
    "all-linear": dict(target_modules="all-linear"),
    "modules_to_save": dict(target_modules=["q_proj"], modules_to_save=["score"]),
}
LORA_ON_HEAD = ["score.lora_A.default.weight", "score.lora_B.default.weight"]
WHOLE_HEAD = ["score.modules_to_save.default.weight"]


@pytest.fixture
def warnings(monkeypatch) -> list[str]:
    """What is said of LoRA."""
    said: list[str] = []
    monkeypatch.setattr("trl_ext.trainers.reward.config.logger.warning", said.append)
    return said


def trainer(library, folder, lora: dict | None, model="llama", **changes):
    torch.manual_seed(0)
    changes |= {} if lora is None else dict(peft_config=LoraConfig(r=4, **lora))
    return reward_trainers.trainer(folder, pairs(count=24), library, model, max_steps=3, **changes)


def loaded(folder):
    """A reward model's checkpoint."""
    if not (folder / "config.json").exists():
        reward_model(folder).save_pretrained(folder)
    return AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)


def trained(subject) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix("base_model.model."): weight.detach()
        for name, weight in subject.model.named_parameters()
        if weight.requires_grad
    }


def head(subject) -> list[str]:
    return [name for name in trained(subject) if "score" in name]


@pytest.mark.parametrize("lora", NAMING.values(), ids=NAMING)
def test_a_config_that_trains_the_head_trains_trls_weights(lora, tmp_path):
    ours = trainer(trl_ext, tmp_path, lora, packing=True)
    theirs = trainer(trl, tmp_path, lora)
    for subject in (ours, theirs):
        subject.train()
    assert head(ours) == head(theirs) == (WHOLE_HEAD if "modules_to_save" in lora else LORA_ON_HEAD)
    expected = trained(theirs)
    assert trained(ours).keys() == expected.keys()
    assert max((weight - expected[name]).abs().max() for name, weight in trained(ours).items()) <= 1e-6


@pytest.mark.parametrize("as_path", [True, False])
def test_without_a_task_type_a_trained_head_may_stay_frozen_as_in_trl(as_path, tmp_path, warnings):
    found = []
    for library in (trl_ext, trl):
        model = loaded(tmp_path)
        subject = trainer(library, tmp_path, {}, str(tmp_path) if as_path else model)
        subject.train()
        found.append(trained(subject))
    ours, theirs = found
    assert ours.keys() == theirs.keys()
    assert max((ours[name] - theirs[name]).abs().max() for name in theirs) <= 1e-6
    assert warnings == []


def test_an_adapter_on_a_new_head_is_warned_of_since_the_head_is_not_saved(tmp_path, warnings):
    trainer(trl_ext, tmp_path / "new", NAMING["target_modules"])
    (warning,) = warnings
    assert "new score head" in warning
    warnings.clear()
    trainer(trl_ext, tmp_path / "new", NAMING["modules_to_save"])
    for lora in NAMING.values():  # on a reward model's checkpoint
        trainer(trl_ext, tmp_path / "out", lora, loaded(tmp_path))
    assert warnings == []


@pytest.mark.parametrize(
    ("lora", "expected", "words"),
    [
        ({}, WHOLE_HEAD, "task_type='SEQ_CLS'"),
        (dict(target_modules=["q_proj"]), WHOLE_HEAD, "task_type='SEQ_CLS'"),
        (dict(target_modules="all-linear", task_type="CAUSAL_LM"), WHOLE_HEAD, "task_type='SEQ_CLS'"),
        (dict(target_modules="all-linear", exclude_modules=["score"]), WHOLE_HEAD, "task_type='SEQ_CLS'"),
        # A task type that no reward model has.
        (NAMING["target_modules"] | {"task_type": "CAUSAL_LM"}, LORA_ON_HEAD, "It is dropped"),
        (NAMING["modules_to_save"] | {"task_type": "CAUSAL_LM"}, WHOLE_HEAD, "It is dropped"),
    ],
    ids=["empty", "target_modules", "CAUSAL_LM", "excluded", "named CAUSAL_LM", "saved CAUSAL_LM"],
)
def test_a_config_that_leaves_a_new_head_frozen_is_made_to_train_it_and_said_so(
    lora, expected, words, tmp_path, warnings
):
    assert head(trainer(trl_ext, tmp_path, lora)) == expected
    assert words in warnings[0] and (len(warnings) == 1 or "SEQ_CLS" not in words)


def test_a_given_adapter_over_a_frozen_head_is_warned_of_where_the_head_is_new(tmp_path, warnings):
    trainer(trl_ext, tmp_path, None, get_peft_model(loaded(tmp_path), LoraConfig(r=4)))
    assert warnings == []
    trainer(trl_ext, tmp_path / "new", None, get_peft_model(reward_model(tmp_path / "new"), LoraConfig(r=4)))
    assert "frozen" in warnings[0]
