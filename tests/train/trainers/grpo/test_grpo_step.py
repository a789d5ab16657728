"""One optimizer step of trl_ext.GRPOTrainer is one of trl.GRPOTrainer on the same completions."""

import random

import pytest
import torch
import trl
from datasets import Dataset

import trl_ext
from tests import tiny
from tests.rollouts import rollout

torch.set_num_threads(1)

WEIGHT_TOLERANCE = 1e-6
LOSS_TYPES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo", "luspo"]


def reward(completion_ids, **_):
    """Any fixed function that differs within a group."""
    return [(sum(ids) % 17) / 17 for ids in completion_ids]


def prompts() -> Dataset:
    draw = random.Random(0)
    rows = [tiny.words(*(draw.randrange(3, tiny.VOCAB) for _ in range(length))) for length in (9, 1, 4, 7) * 4]
    return Dataset.from_dict({"prompt": rows})


def weights_after(library, tmp_path, steps: int = 1, family: str = "llama", **changes) -> torch.Tensor:
    settings = dict(
        output_dir=str(tmp_path),
        use_cpu=True,
        bf16=False,
        report_to="none",
        max_steps=steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_generations=4,
        max_completion_length=12,
        learning_rate=1e-3,
        # Adam divides by the root of the squared gradient: where that is rounding noise, so is the step. A larger
        # epsilon makes the step a smooth function of the gradient, so that 1e-6 tells something.
        adam_epsilon=1e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        beta=0.0,
    )
    if library is trl_ext:
        settings["packing"] = True
    model = tiny.model(family)
    before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    trainer = library.GRPOTrainer(
        model,
        reward,
        library.GRPOConfig(**{**settings, **changes}),
        prompts(),
        processing_class=tiny.tokenizer(),
        rollout_func=rollout,
    )
    trainer.train()
    after = torch.cat([p.detach().flatten() for p in trainer.model.parameters()]).cpu()
    assert (after - before).abs().max() > 1e-4, "nothing was learned, so nothing is compared"
    return after


def difference(tmp_path, **changes) -> float:
    ours, theirs = (weights_after(library, tmp_path, **changes) for library in (trl_ext, trl))
    return (ours - theirs).abs().max().item()


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_step_is_trls_for_every_loss_type(loss_type, tmp_path):
    assert difference(tmp_path, loss_type=loss_type) <= WEIGHT_TOLERANCE


@pytest.mark.parametrize(
    "changes",
    [
        dict(importance_sampling_level="sequence", loss_type="grpo"),
        dict(num_iterations=2, steps=2),
        dict(steps_per_generation=4, steps=3),
        dict(temperature=0.7),
        dict(entropy_coef=0.01),
        dict(top_entropy_quantile=0.5),
        dict(mask_truncated_completions=True),
        dict(delta=1.5, epsilon_high=0.28),
        dict(gradient_checkpointing=False),
        dict(scale_rewards="batch"),
        dict(max_grad_norm=0.01),
    ],
    ids=lambda changes: ",".join(f"{k}={v}" for k, v in changes.items()),
)
def test_a_step_is_trls_under_its_options(changes, tmp_path):
    assert difference(tmp_path, **changes) <= WEIGHT_TOLERANCE


@pytest.mark.parametrize(
    "changes",
    [
        dict(gradient_accumulation_steps=6, steps_per_generation=4),
        dict(gradient_accumulation_steps=3, steps_per_generation=2),
        dict(gradient_accumulation_steps=3, steps_per_generation=2, num_iterations=2, steps=3),
        dict(gradient_accumulation_steps=2, steps_per_generation=3),
        dict(gradient_accumulation_steps=4, steps_per_generation=2, num_iterations=2),
    ],
    ids=lambda changes: ",".join(f"{k}={v}" for k, v in changes.items()),
)
def test_steps_are_trls_when_generations_begin_within_a_step(changes, tmp_path):
    assert difference(tmp_path, **{"steps": 2, **changes}) <= WEIGHT_TOLERANCE


@pytest.mark.parametrize("coefficient", [0.0, 0.1])
def test_a_step_is_trls_for_a_mixture_of_experts_and_its_auxiliary_loss(coefficient, tmp_path):
    assert difference(tmp_path, family="qwen3_moe", router_aux_loss_coef=coefficient) <= WEIGHT_TOLERANCE


def test_a_step_is_trls_with_a_token_budget(tmp_path):
    theirs = weights_after(trl, tmp_path)
    ours = weights_after(trl_ext, tmp_path, max_tokens_per_forward=24)
    assert (ours - theirs).abs().max() <= WEIGHT_TOLERANCE


def test_a_step_is_trls_with_a_token_budget_for_a_mixture_without_its_auxiliary_loss(tmp_path):
    mixture = dict(family="qwen3_moe", router_aux_loss_coef=0.0)
    theirs = weights_after(trl, tmp_path, **mixture)
    ours = weights_after(trl_ext, tmp_path, **mixture, max_tokens_per_forward=24)
    assert (ours - theirs).abs().max() <= WEIGHT_TOLERANCE


def test_a_step_is_trls_with_a_reference_model(tmp_path):
    folder = tmp_path / "model"
    tiny.model("llama").save_pretrained(folder)

    def run(library):
        original = tiny.model
        try:
            tiny.model = lambda name: type(original(name)).from_pretrained(folder)
            return weights_after(library, tmp_path, beta=0.1, steps=2)
        finally:
            tiny.model = original

    assert (run(trl_ext) - run(trl)).abs().max() <= WEIGHT_TOLERANCE
