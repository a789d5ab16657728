"""A LoRA reward model as one more adapter of the policy."""

import json
import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests import tiny
from tests.batches import RAGGED, difference
from tests.reward_trainers import trainer, warnings_of
from trl_ext.errors import ConfigError
from trl_ext.trainers.forward.pooled_head import scored_token
from trl_ext.trainers.ppo.scores.reward_adapter import load_reward_adapter

TOLERANCE = 5e-6
SEQUENCES = [prompt + completion for prompt, completion in RAGGED.rows]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Folder of a causal model, which is the base of policy and reward model."""
    folder = tmp_path_factory.mktemp("models") / "base"
    tiny.model("llama").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def reward_model(base):
    """A random LoRA reward model; `saved` holds it."""
    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, dtype=torch.float32)
    return get_peft_model(model, lora(task_type="SEQ_CLS")).eval()


@pytest.fixture(scope="module")
def saved(base, reward_model):
    reward_model.save_pretrained(base.parent / "reward")
    return base.parent / "reward"


@pytest.fixture
def copied(saved, tmp_path):
    """A copy of `saved` that a test may spoil."""
    return shutil.copytree(saved, tmp_path / "copied")


def lora(r: int = 4, **changes) -> LoraConfig:
    """With random weights where PEFT would start from zero."""
    return LoraConfig(**dict(r=r, target_modules="all-linear", init_lora_weights=False) | changes)


def actor(base, **changes):
    torch.manual_seed(2)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    # Another rank than the reward model's.
    return get_peft_model(model, lora(r=8, task_type="CAUSAL_LM", **changes)).eval()


@torch.no_grad()
def scores_by_adapter(policy, head, name="reward") -> torch.Tensor:
    backbone = policy.get_base_model().model
    before = policy.active_adapter
    policy.set_adapter(name)
    hidden = [backbone(input_ids=torch.tensor([s])).last_hidden_state[0, scored_token(s, 0)] for s in SEQUENCES]
    policy.set_adapter(before)
    return head(torch.stack(hidden))[:, 0]


@torch.no_grad()
def scores_by_transformers(model) -> torch.Tensor:
    return torch.cat([model(input_ids=torch.tensor([s])).logits[:, 0] for s in SEQUENCES])


@torch.no_grad()
def logits(policy) -> torch.Tensor:
    return torch.cat([policy(input_ids=torch.tensor([s])).logits[0] for s in SEQUENCES])


def states(policy) -> dict[str, bool]:
    return {name: p.requires_grad for name, p in policy.named_parameters()}


def spoil(folder, **changes) -> None:
    """Change keys of the adapter's config."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def check_scores(policy, folder, reward_model):
    """Fail unless the adapter of this folder scores as the reward model does."""
    head, expected = load_reward_adapter(policy, folder), scores_by_transformers(reward_model)
    assert difference(scores_by_adapter(policy, head), expected) < TOLERANCE
    # The adapter matters: the actor's own gives other scores.
    assert difference(scores_by_adapter(policy, head, "default"), expected) > 1e-3


def test_what_our_reward_trainer_saves_can_be_loaded(base, tmp_path):
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, dtype=torch.float32)
    peft_config = LoraConfig(r=4, task_type="SEQ_CLS", modules_to_save=["score"], target_modules="all-linear")
    subject = trainer(tmp_path, model=model, peft_config=peft_config, max_steps=2, learning_rate=0.05)
    subject.train()
    subject.save_model(str(tmp_path / "saved"))
    check_scores(actor(base), tmp_path / "saved", subject.model.eval())


def test_the_actor_computes_what_it_did_and_over_a_bfloat16_base_adapter_and_head_are_float32(base, saved):
    policy = actor(base)
    before = logits(policy)
    load_reward_adapter(policy, saved)
    assert torch.equal(logits(policy), before)
    policy = actor(base).to(torch.bfloat16)
    head = load_reward_adapter(policy, saved)
    assert {head.weight.dtype} | {p.dtype for n, p in policy.named_parameters() if ".reward." in n} == {torch.float32}


@pytest.mark.parametrize("active", ["default", "ref"])
def test_the_other_adapters_stay_as_they_were(base, saved, active):
    policy = actor(base)
    policy.add_adapter("ref", lora(r=2))
    policy.set_adapter(active)
    before = states(policy)
    assert any(before.values()) and not all(before.values())
    load_reward_adapter(policy, saved)
    after = states(policy)
    assert {name: after[name] for name in before} == before
    assert (policy.active_adapter, policy.base_model.active_adapters) == (active, [active])


def test_adapter_and_head_are_frozen_and_named_as_asked(base, saved):
    policy = actor(base)
    head = load_reward_adapter(policy, saved, name="judge")
    added = [p for name, p in policy.named_parameters() if ".judge." in name]
    assert len(added) == 2 * 7 * 3
    config = policy.peft_config["judge"]
    assert (config.task_type, config.modules_to_save, config.inference_mode) == ("CAUSAL_LM", None, True)
    assert not any(p.requires_grad for p in [*added, *head.parameters()])


def test_scores_are_the_reward_models_and_dropout_is_off_while_the_policy_trains(base, saved, copied, reward_model):
    check_scores(actor(base), saved, reward_model)
    spoil(copied, lora_dropout=0.5)
    check_scores(actor(base).train(), copied, reward_model)


def without(file):
    return lambda folder: (folder / file).unlink()


def with_two_labels(folder):
    weights = load_file(folder / "adapter_model.safetensors")
    weights["base_model.model.score.weight"] = torch.zeros(2, 64)
    save_file(weights, folder / "adapter_model.safetensors")


def with_no_head(folder):
    weights = load_file(folder / "adapter_model.safetensors")
    del weights["base_model.model.score.weight"]
    save_file(weights, folder / "adapter_model.safetensors")


UNFIT = {
    "lacks adapter_config.json. Give the folder that RewardTrainer saved": without("adapter_config.json"),
    "lacks adapter_model.safetensors. Give the folder that RewardTrainer saved": without("adapter_model.safetensors"),
    r"A reward model has one label; the adapter in .* has 2": with_two_labels,
    "has no trained score head": with_no_head,
    "is of the type IA3, not LoRA": dict(peft_type="IA3"),
    "in addition to the score head: embed_tokens": dict(modules_to_save=["score", "embed_tokens"]),
    "trains biases of the base model": dict(bias="all"),
    "has init_lora_weights='pissa', which changes the base weights": dict(init_lora_weights="pissa"),
}


def test_an_adapter_that_cannot_be_carried_is_refused(subtests, base, saved, tmp_path):
    policy = actor(base)
    for number, (sentence, change) in enumerate(UNFIT.items()):
        folder = shutil.copytree(saved, tmp_path / str(number))
        if isinstance(change, dict):
            spoil(folder, **change)
        else:
            change(folder)
        with subtests.test(sentence), pytest.raises(ConfigError, match=sentence):
            load_reward_adapter(policy, folder)
    with pytest.raises(ConfigError, match="has an adapter 'default' already"):
        load_reward_adapter(policy, saved, name="default")


def test_a_policy_of_another_shape_is_refused_and_left_as_it_was(subtests, saved, tmp_path):
    for changes, sentence in [
        (dict(hidden_size=32), "has hidden size 64, the policy 32"),
        (dict(num_hidden_layers=2), "does not fit the policy"),
        (dict(intermediate_size=80), "does not fit the policy"),
        (dict(num_hidden_layers=4), "does not fit the policy"),
    ]:
        tiny.model("llama", **changes).save_pretrained(tmp_path / "base")
        policy = actor(tmp_path / "base")
        before, output = states(policy), logits(policy)
        with subtests.test(changes=changes):
            with pytest.raises(ConfigError, match=sentence):
                load_reward_adapter(policy, saved)
            assert states(policy) == before and list(policy.peft_config) == ["default"]
            assert torch.equal(logits(policy), output)


def test_another_base_model_is_warned_of(base, copied, caplog):
    load_reward_adapter(actor(base), copied)
    assert warnings_of(caplog) == []
    spoil(copied, base_model_name_or_path="org/another")
    load_reward_adapter(actor(base), copied)
    assert "was trained on org/another, but the policy's base model is" in warnings_of(caplog)[0]
