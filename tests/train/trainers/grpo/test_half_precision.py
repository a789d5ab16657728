"""Half precision: the ratio of an unmoved policy is 1 to the bit, and gradients are as near to float32 as TRL's."""

import math
import random

import pytest
import torch
import trl
from datasets import Dataset
from peft import LoraConfig

import trl_ext
from tests import grpo_trainers, ppo_trainers, tiny, trained
from tests.half_precision import PRECISIONS, Gradients, cast, error, geometric_mean, wide_model
from tests.nightly import nightly
from trl_ext.packing import step_plan

# As TRL's documentation prints GSPO; and a range so narrow that any ratio but 1 is clipped where its advantage asks.
GSPO = dict(importance_sampling_level="sequence", epsilon=3e-4, epsilon_high=4e-4)
BY_TOKEN = dict(epsilon=1e-9, epsilon_high=1e-9)
LORA = LoraConfig(r=4, target_modules="all-linear", exclude_modules=["lm_head"])
# By name: what is set, and how many optimizer steps use each row.
WAYS = {
    "plain": (dict(), 1),
    "twice": (dict(num_iterations=2), 2),
    "KL": (dict(beta=0.1), 1),
    "KL twice": (dict(beta=0.1, num_iterations=2), 2),
    "several forwards": (dict(max_tokens_per_forward=150), 1),
    "several forwards, KL": (dict(max_tokens_per_forward=150, beta=0.1, num_iterations=2), 2),
    "LoRA": (dict(peft_config=LORA, beta=0.1), 1),
    "padded": (dict(packing=False, beta=0.1), 1),
    "checkpointing": (dict(gradient_checkpointing=True, beta=0.1), 1),
    "steps that do not divide": (dict(num_iterations=2, steps_per_generation=3, gradient_accumulation_steps=2), 1),
}
DAILY = [("bf16 weights under autocast", GSPO, "KL twice"), ("autocast", BY_TOKEN, "several forwards, KL")]
DAILY += [("bf16 weights", BY_TOKEN, "LoRA"), ("autocast", GSPO, "padded")]
DAILY += [("bf16 weights", BY_TOKEN, "steps that do not divide")]


@pytest.fixture(autouse=True)
def cheap_calls(monkeypatch):
    """Prompts are kept wherever a group is cut: what a call costs is of models that are larger than these."""
    monkeypatch.setattr(step_plan, "CALL_COST", 0)


def words(draw: random.Random, lengths: tuple[int, ...]) -> str:
    return tiny.words(*(draw.randrange(3, tiny.VOCAB) for _ in range(draw.choice(lengths))))


def prompts() -> Dataset:
    draw = random.Random(0)
    return Dataset.from_dict({"prompt": [words(draw, (5, 12, 40)) for _ in range(8)]})


def wide_trainer(folder, precision, **changes):
    """A trainer of ours whose policy does not move: four optimizer steps on each generation of 16 rows."""
    dtype, autocast = PRECISIONS[precision]
    model = cast(wide_model("qwen3"), dtype)
    model.config._name_or_path = str(folder / "model")  # the reference, which is the policy
    model.save_pretrained(folder / "model")
    settings = dict(
        bf16=autocast, learning_rate=0.0, steps_per_generation=4, gradient_accumulation_steps=1, loss_type="grpo"
    )
    return grpo_trainers.trainer(folder / "out", model=model, data=prompts(), **settings | changes)


@pytest.mark.parametrize(
    "precision, clipping, way",
    [
        case if case in DAILY else nightly(*case)
        for case in ((p, c, w) for p in list(PRECISIONS)[1:] for c in (GSPO, BY_TOKEN) for w in WAYS)
    ],
)
def test_nothing_is_clipped_and_the_kl_is_zero_before_anything_moved(precision, clipping, way, tmp_path):
    changes, uses = WAYS[way]
    trainer = wide_trainer(tmp_path, precision, max_steps=4 * uses, **clipping, **changes)
    trainer.train()
    assert trainer._packs == (way != "padded")
    steps = grpo_trainers.steps_of(trainer)
    assert len(steps) == 4 * uses and any(step["grad_norm"] > 0 for step in steps)
    assert [step["clip_ratio/region_mean"] for step in steps] == [0.0] * len(steps)
    if "beta" in changes:
        assert [step["kl"] for step in steps] == [0.0] * len(steps)


# Outputs in bf16 -----------------------------------------------------------------------------------------------------


def narrow_outputs(model):
    """Let every forward return bf16, as under FSDP2's mixed precision; bf16 weights and autocast return float32."""

    def narrow(module, given, output):
        for name, value in output.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                output[name] = value.bfloat16()
        return output

    model.register_forward_hook(narrow)
    return model


@pytest.mark.parametrize("packing", [True, False])
def test_passes_before_an_update_take_log_probabilities_in_bf16(packing, tmp_path):
    changes = dict(beta=0.1, num_iterations=2, max_steps=4, packing=packing)
    trainer = wide_trainer(tmp_path, "autocast", **BY_TOKEN, **changes)
    for model in (trainer.model, trainer.ref_model):
        narrow_outputs(model)
    trainer.train()
    steps = grpo_trainers.steps_of(trainer)
    assert [step["kl"] for step in steps] == [0.0] * 4 and steps[0]["grad_norm"] > 0
    assert [step["clip_ratio/region_mean"] for step in steps] == [0.0] * 4


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("critic", ppo_trainers.CRITICS)
def test_ppos_targets_take_log_probabilities_values_and_scores_in_bf16(critic, packing, tmp_path):
    own = dict(value_model=narrow_outputs(ppo_trainers.classifier())) if critic == "separate" else {}
    scorer = ppo_trainers.scorer() | dict(ref_model=None if critic == "adapter" else ppo_trainers.actor())
    trainer = ppo_trainers.trainer(
        critic, tmp_path, packing=packing, bf16=True, learning_rate=0.0, num_ppo_epochs=2, max_steps=2, **scorer, **own
    )
    models = [trainer.model, *([] if trainer.ref_model is None else [trainer.ref_model])]
    for model in (*models, *(one.model for one in trainer._ppo_models.rewards)):
        narrow_outputs(model)
    trainer.train()
    steps = grpo_trainers.steps_of(trainer)
    assert all(step["grad_norm"] > 0 and math.isfinite(step["loss/value_avg"]) for step in steps)


# The trained model ---------------------------------------------------------------------------------------------------

LOSSES = {name: dict(loss_type=name) for name in grpo_trainers.LOSS_TYPES} | {"gspo": dict(loss_type="grpo", **GSPO)}
LOSSES["luspo"] |= dict(importance_sampling_level="sequence")
UPDATES = {
    "four updates": dict(steps_per_generation=4, gradient_accumulation_steps=1, max_steps=4),
    "two, twice": dict(num_iterations=2, steps_per_generation=2, gradient_accumulation_steps=1, max_steps=4),
    "two of two": dict(steps_per_generation=4, gradient_accumulation_steps=2, max_steps=2),
    "one of two": dict(steps_per_generation=2, gradient_accumulation_steps=2, max_steps=1),
    "one of two, KL": dict(steps_per_generation=2, gradient_accumulation_steps=2, max_steps=1, beta=0.1),
}
# Of one case both errors are rounding, so it has room.
MOST_OF_MEAN, MOST_OF_ONE = 1.1, 1.3


def gradients(folder, library, precision, changes):
    """The gradients of all updates of one generation, on the first layers of the trained model.

    Nothing moves: a step would carry the rounding of one gradient, many times larger, into the next.
    """
    dtype, autocast = PRECISIONS[precision]
    tokenizer = trained.tokenizer()
    tokenizer.padding_side = "left"
    draw = random.Random(0)
    own = (__doc__ + pytest.__doc__ + random.__doc__).split()
    texts = [" ".join(draw.choice(own) for _ in range(draw.choice([3, 10, 25]))) for _ in range(4)]
    seen: dict[str, int] = {}

    def completions(prompts, trainer):
        made = []
        for prompt in prompts:
            seen[prompt] = seen.get(prompt, 0) + 1
            dice = random.Random(f"{prompt} {seen[prompt]}")
            text = " ".join(dice.choice(own) for _ in range(dice.choice([3, 8, 16, 24])))
            made.append(tokenizer(text)["input_ids"][:32])
        ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
        return {"prompt_ids": ids, "completion_ids": made, "logprobs": None}

    model = trained.model(dtype, NUM_LAYERS)
    if "beta" in changes:
        model.config._name_or_path = str(folder / "model")
        model.save_pretrained(folder / "model")
    trainer = grpo_trainers.trainer(
        folder / "out", library, model=model, data=Dataset.from_dict({"prompt": texts}), processing_class=tokenizer,
        rollout_func=completions, callbacks=[found := Gradients()], bf16=autocast, learning_rate=0.0,
        max_grad_norm=0.0, **changes,
    )  # fmt: skip
    trainer.train()
    assert getattr(trainer, "_packs", True)
    return found.steps


NUM_LAYERS = 4
EVERY = [
    (loss, way, precision)
    for loss in LOSSES
    for way in UPDATES
    for precision in ("autocast", "bf16 weights under autocast")
]


def check_errors(folder, cases) -> None:
    """Of ours over TRL's: the geometric mean of all cases, and each."""
    ratios = {}
    for case in cases:
        loss, way, precision = case
        changes = LOSSES[loss] | UPDATES[way]
        truth = gradients(folder, trl, "float32", changes)
        theirs = error(gradients(folder, trl, precision, changes), truth)
        ours = error(gradients(folder, trl_ext, precision, changes), truth)
        ratios[case] = ours / theirs
        print(f"{case}: error {ours:.4f}, TRL's {theirs:.4f}, ratio {ratios[case]:.3f}", flush=True)
    mean = geometric_mean(list(ratios.values()))
    print(f"{len(ratios)} cases: mean {mean:.3f}, largest {max(ratios.values()):.3f}")
    assert mean <= MOST_OF_MEAN and max(ratios.values()) <= MOST_OF_ONE, ratios


def test_gradients_of_the_trained_model_are_as_near_to_float32_as_trls(tmp_path):
    # Of one case the ratio is luck: 0.76 and 1.12 on a processor with bf16 instructions, 0.87 the mean of all ten.
    check_errors(tmp_path, [("grpo", "one of two, KL", of) for of in ("autocast", "bf16 weights under autocast")])


@pytest.mark.nightly
@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_of_each_loss_are_as_near_to_float32_as_trls(loss, tmp_path):
    check_errors(tmp_path, [case for case in EVERY if case[0] == loss])
