"""LoRA on a reward model: a config that trains the score head is left alone, any other is made to."""

import pytest
import torch
import trl
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForSequenceClassification

import trl_ext
from tests import tiny
from tests.preferences import pairs, reward_model

torch.set_num_threads(1)

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
    monkeypatch.setattr("trl_ext.trainers.reward.peft.logger.warning", said.append)
    return said


def trainer(library, folder, lora: dict | None, model=None, **changes):
    torch.manual_seed(0)
    settings = dict(use_cpu=True, bf16=False, report_to="none", max_steps=3, save_strategy="no", disable_tqdm=True)
    settings |= dict(learning_rate=1e-3, adam_epsilon=1e-3, per_device_train_batch_size=4)
    return library.RewardTrainer(
        reward_model(folder) if model is None else model,
        library.RewardConfig(str(folder), **settings | changes),
        train_dataset=pairs(count=24),
        processing_class=tiny.tokenizer(),
        peft_config=None if lora is None else LoraConfig(r=4, **lora),
    )


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


@pytest.mark.parametrize("lora", NAMING.values(), ids=NAMING)
def test_nothing_is_said_of_such_a_config_on_a_reward_models_checkpoint(lora, tmp_path, warnings):
    reward_model(tmp_path).save_pretrained(tmp_path)
    trainer(trl_ext, tmp_path, lora, AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=1))
    assert warnings == []


@pytest.mark.parametrize("as_path", [True, False])
def test_without_a_task_type_a_trained_head_may_stay_frozen_as_in_trl(as_path, tmp_path, warnings):
    reward_model(tmp_path).save_pretrained(tmp_path)
    found = []
    for library in (trl_ext, trl):
        model = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=1)
        subject = trainer(library, tmp_path, {}, str(tmp_path) if as_path else model)
        subject.train()
        found.append(trained(subject))
    ours, theirs = found
    assert ours.keys() == theirs.keys()
    assert max((ours[name] - theirs[name]).abs().max() for name in theirs) <= 1e-6
    assert warnings == []


def test_an_adapter_on_a_new_head_is_warned_of_since_the_head_is_not_saved(tmp_path, warnings):
    trainer(trl_ext, tmp_path, NAMING["target_modules"])
    (warning,) = warnings
    assert "new score head" in warning
    warnings.clear()
    trainer(trl_ext, tmp_path, NAMING["modules_to_save"])
    assert warnings == []


@pytest.mark.parametrize(
    ("lora", "expected"),
    [
        ({}, WHOLE_HEAD),
        (dict(target_modules=["q_proj"]), WHOLE_HEAD),
        (dict(target_modules="all-linear", task_type="CAUSAL_LM"), WHOLE_HEAD),
        (dict(target_modules="all-linear", exclude_modules=["score"]), WHOLE_HEAD),
    ],
    ids=["empty", "target_modules", "CAUSAL_LM", "excluded"],
)
def test_a_config_that_leaves_a_new_head_frozen_is_made_to_train_it_and_said_so(lora, expected, tmp_path, warnings):
    assert head(trainer(trl_ext, tmp_path, lora)) == expected
    (warning,) = warnings
    assert "task_type='SEQ_CLS'" in warning


@pytest.mark.parametrize(
    ("lora", "expected"),
    [(NAMING["target_modules"], LORA_ON_HEAD), (NAMING["modules_to_save"], WHOLE_HEAD)],
    ids=["target_modules", "modules_to_save"],
)
def test_a_task_type_that_no_reward_model_has_is_dropped(lora, expected, tmp_path, warnings):
    assert head(trainer(trl_ext, tmp_path, lora | {"task_type": "CAUSAL_LM"})) == expected
    assert "It is dropped" in warnings[0]


def test_a_given_adapter_over_a_frozen_new_head_is_warned_of(tmp_path, warnings):
    trainer(trl_ext, tmp_path, None, get_peft_model(reward_model(tmp_path), LoraConfig(r=4)))
    assert "frozen" in warnings[0]


def test_a_given_adapter_over_a_trained_head_may_leave_it_frozen(tmp_path, warnings):
    reward_model(tmp_path).save_pretrained(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=1)
    trainer(trl_ext, tmp_path, None, get_peft_model(model, LoraConfig(r=4)))
    assert warnings == []
