"""A run of any family goes on from the weights of its checkpoint, to the bit; where one is not there, it ends."""

import json

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback

from tests import grpo_trainers, ppo_trainers, reward_trainers, tiny, tiny_images
from tests.nightly import daily
from tests.ppo_trainers import distance, trained_weights
from tests.preferences import pairs
from trl_ext.errors import ConfigError

SAVES = dict(save_strategy="steps", save_steps=1, max_steps=1)
IMAGES = dict(data=tiny_images.rows([[tiny_images.image(i)] for i in range(8)]), per_device_train_batch_size=8)


# With expert layers, which tests.tiny's have not.
_MIXED = {"deepseek_v2": dict(first_k_dense_replace=1, **tiny.MIXTURE["qwen3_moe"][1])}
_MIXED["deepseek_v3"] = _MIXED["deepseek_v2"]


def grpo(family, folder, **changes):
    if family in tiny_images.FAMILIES and family != "qwen3_5":
        made, own = tiny_images.model(family), IMAGES
        own = own | dict(processing_class=tiny_images.processor(), rollout_func=tiny_images.completions)
    else:
        # Of a mixture's auxiliary loss PhiMoE and Granite 4 lack what TRL reads.
        made, own = tiny.model(family, **_MIXED.get(family, {})), dict(router_aux_loss_coef=0.0)
    return grpo_trainers.trainer(folder, model=made, **SAVES | own | changes)


def reward(family, folder, **changes):
    return reward_trainers.trainer(
        folder, model=reward_trainers.reward_model(folder / "start", family), **SAVES | changes
    )


def ppo(critic):
    def make(family, folder, **changes):
        value = dict(value_model=ppo_trainers.classifier(family=family)) if critic == "separate" else {}
        made = ppo_trainers.trainer(critic, folder, model=tiny.model(family), **SAVES | value | changes)
        return ppo_trainers.stir(made)

    return make


KINDS = {"reward": reward, "ppo_head": ppo("head"), "ppo_separate": ppo("separate")}


def check_resumed(make, family, folder, **changes):
    """Train a step, and go on from it in a trainer that was made from the start's weights."""
    first = make(family, folder, **changes)
    start = trained_weights(first)
    first.train()
    trained = trained_weights(first)
    moved = [name for name in start if not torch.equal(start[name], trained[name])]
    assert len(moved) > len(start) / 2
    again = make(family, folder, **changes)
    assert distance(trained_weights(again), start) == 0
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 1
    wrong = [name for name, values in trained_weights(again).items() if not torch.equal(values, trained[name])]
    assert wrong == []


FAMILIES = [*tiny.PACKABLE, *tiny.MIXTURE, *tiny.MASKED, *tiny.LATENT, *tiny.EAGER_ONLY, *tiny.STATEFUL, "jamba"]
FAMILIES += ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]
DAILY = ("llama", "qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next", "qwen2_5_vl")


@pytest.mark.parametrize("family", daily(FAMILIES, *DAILY))
def test_a_run_of_grpo_goes_on_from_its_weights(family, tmp_path):
    check_resumed(grpo, family, tmp_path)


@pytest.mark.parametrize("kind", daily(KINDS, "reward", "ppo_separate"))
def test_a_run_of_a_mixture_goes_on_from_its_weights(kind, tmp_path):
    check_resumed(KINDS[kind], "qwen3_moe", tmp_path)


def test_a_critic_of_two_dtypes_goes_on_from_its_weights(tmp_path):
    """The head of a critic in bfloat16 is in float32."""

    def make(family, folder, **changes):
        value_model = ppo_trainers.classifier(family=family).bfloat16()
        return ppo("separate")(family, folder, **changes | dict(value_model=value_model))

    check_resumed(make, "llama", tmp_path)


class Best(TrainerCallback):
    """Makes the evaluation of step 1 the best, and keeps the weights of that moment."""

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        metrics["eval_loss"] = float(state.global_step)
        if state.global_step == 1:
            self.weights = trained_weights(self.trainer)


BEST = {
    "grpo llama": (grpo, "llama"),
    "grpo qwen3_moe": (grpo, "qwen3_moe"),
    "grpo qwen2_5_vl": (grpo, "qwen2_5_vl"),
    "ppo_adapter llama": (ppo("adapter"), "llama"),
    **{f"{kind} qwen3_moe": (make, "qwen3_moe") for kind, make in KINDS.items()},
}


@pytest.mark.parametrize("name", daily(BEST, "grpo qwen3_moe", "ppo_adapter llama", "ppo_head qwen3_moe"))
def test_the_best_model_is_that_of_the_best_step(name, tmp_path):
    (make, family), best = BEST[name], Best()
    rows = IMAGES["data"] if family == "qwen2_5_vl" else grpo_trainers.prompts().select(range(4))
    evaluates = dict(load_best_model_at_end=True, metric_for_best_model="eval_loss", eval_strategy="steps")
    evaluates |= dict(eval_steps=1, eval_dataset=pairs(4) if make is reward else rows, per_device_eval_batch_size=4)
    best.trainer = make(family, tmp_path, callbacks=[best], **evaluates | dict(max_steps=3))
    best.trainer.train()
    assert best.trainer.state.best_global_step == 1
    ended = trained_weights(best.trainer)
    assert [name for name, values in ended.items() if not torch.equal(values, best.weights[name])] == []


# Files that are not as they were written ----------------------------------------------------------------------------


def resumed_from(make, family, folder, change, **changes):
    """Train a step, change the folder of its checkpoint, and resume from it; both trainers."""
    first = make(family, folder, **changes)
    first.train()
    (folder / "checkpoint-1" / "manifest.json").unlink()
    change(folder / "checkpoint-1", first)
    again = make(family, folder, resume_despite=["manifest"], **changes)
    again.train(resume_from_checkpoint=str(folder / "checkpoint-1"))
    return first, again


def test_a_mixture_in_several_files_goes_on_from_its_weights(tmp_path):
    def divided(folder, trainer):
        (folder / "model.safetensors").unlink()
        trainer.model.save_pretrained(folder, max_shard_size="60KB")
        files = set(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].values())
        assert len(files) > 5

    first, again = resumed_from(grpo, "qwen3_moe", tmp_path, divided)
    assert distance(trained_weights(first), trained_weights(again)) == 0


def without(file, *parts):
    """Take weights out of a file whose names have these parts."""

    def change(folder, _trainer):
        found = load_file(folder / file)
        kept = {name: value for name, value in found.items() if not all(part in name for part in parts)}
        assert len(kept) < len(found)
        save_file(kept, folder / file, metadata={"format": "pt"})

    return change


LORA = LoraConfig(r=4, target_modules="all-linear", modules_to_save=["lm_head"])
LACKING = {
    "a weight": (
        grpo,
        "llama",
        {},
        ("model.safetensors", "layers.1", "q_proj"),
        r"1 of \d+ .*layers.1.self_attn.q_proj",
    ),
    "a part": (grpo, "qwen3_moe", {}, ("model.safetensors", "layers.1.mlp.experts"), r"2 of \d+ .*1.mlp.experts.gate"),
    "an adapter": (
        grpo,
        "llama",
        dict(peft_config=LORA),
        ("adapter_model.safetensors", "layers.1", "q_proj.lora_A"),
        r"1 of \d+ .*layers.1.self_attn.q_proj.lora_A.default.weight",
    ),
    "a module beside an adapter": (
        grpo,
        "llama",
        dict(peft_config=LORA),
        ("adapter_model.safetensors", "lm_head"),
        r"lm_head",
    ),
    "a critic's": (ppo("separate"), "llama", {}, ("critic/model.safetensors", "score"), r"1 of \d+ .*score.weight"),
}


@pytest.mark.parametrize("name", LACKING)
def test_a_checkpoint_that_lacks_a_trained_weight_is_refused_by_its_name(name, tmp_path):
    make, family, changes, lost, words = LACKING[name]
    with pytest.raises(
        ConfigError, match=rf"checkpoint-1\S* lacks .*{words}.* Resume from a checkpoint that holds them"
    ):
        resumed_from(make, family, tmp_path, without(*lost), **changes)
