"""Settings of GRPO drawn at random: our weights are TRL's after a few steps on the same completions.

GPT-2 is left out: with positions that are learned, TRL's left-padded rows are off each row alone, and ours are not. So
are positions that depend on a row's length (`tests/tiny.py`, STRETCHED), where TRL's rows depend on their neighbours.
"""

import random
from functools import partial

import pytest
import torch
import trl
from datasets import Dataset
from peft import LoraConfig

import trl_ext
from tests import tiny
from tests.half_precision import PRECISIONS, Gradients, cast, moved_weights, wide_model
from tests.lanes.fuzz.draws import (
    CLOSE,
    check_draw,
    check_mean_in_half,
    doubled,
    seeds,
    show,
    summary,
    weights,
)
from tests.rollouts import forked_rollout, rollout
from trl_ext.packing import step_plan

torch.set_num_threads(1)
FAMILIES = ["llama", "qwen2", "qwen3", "mistral_window", "gemma3", "qwen3_moe", "deepseek_v3"]
LOSSES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo", "luspo"]
NUM_GENERATIONS = 4
SCORES = ["ragged", "dead groups", "tied", "NaN"]


@pytest.fixture(scope="module", autouse=True)
def tell(request):
    yield
    show(request, summary("grpo"))


@pytest.fixture(autouse=True)
def cheap_calls(monkeypatch):
    """Prompts are kept wherever a group is cut: what a call costs is of models that are larger than these."""
    monkeypatch.setattr(step_plan, "CALL_COST", 0)


def drawn(seed: int) -> dict:
    """Settings of one draw; `family`, `lora`, `scores`, `env_mask`, `forked`, `max_tokens` are not TRL's."""
    draw = random.Random(seed)

    def maybe(chance: float, **settings) -> dict:
        return settings if draw.random() < chance else {}

    size, accumulation = draw.choice([(4, 1), (4, 2), (2, 2), (2, 4), (8, 1), (1, 4)])
    family, lora = draw.choice(FAMILIES), draw.random() < 0.2
    settings = dict(
        family=family,
        lora=lora,
        scores=draw.choice(SCORES),
        env_mask=draw.random() < 0.2,
        loss_type=draw.choice(LOSSES),
        num_iterations=draw.choice([1, 1, 2, 3]),
        per_device_train_batch_size=size,
        gradient_accumulation_steps=accumulation,
        learning_rate=draw.choice([1e-3, 1e-2]),
        max_grad_norm=draw.choice([0.0, 0.05, 1.0]),
        temperature=draw.choice([1.0, 0.7]),
        scale_rewards=draw.choice(["group", "batch", "none"]),
        gradient_checkpointing=draw.random() < 0.5,
        gradient_checkpointing_kwargs={"use_reentrant": draw.random() < 0.5},
        mask_truncated_completions=draw.random() < 0.2,
        **maybe(0.3, beta=0.1, use_bias_correction_kl=draw.random() < 0.5),
        **maybe(0.2, importance_sampling_level="sequence"),
        **maybe(0.2, delta=1.5),
        **maybe(0.2, epsilon_high=0.28),
        **maybe(0.15, top_entropy_quantile=0.5),
        **maybe(0.15, off_policy_mask_threshold=0.01),
        **maybe(0.3, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=4),
        **maybe(0.1, router_aux_loss_coef=0.0),
    )
    if "beta" in settings and not lora:
        settings |= maybe(0.4, sync_ref_model=True, ref_model_sync_steps=1)
    if draw.random() < 0.3 and "top_entropy_quantile" not in settings and family != "qwen3_moe":
        settings["max_tokens"] = draw.choice([56, 90, 200])
    return settings | dict(forked=draw.random() < 0.4)


def drawn_in_half(seed: int) -> dict:
    """Settings of one draw in half precision: the gradients are compared, so nothing clips them."""
    settings, draw = drawn(seed), random.Random(f"half {seed}")
    for name in ("eval_strategy", "eval_steps", "per_device_eval_batch_size"):
        settings.pop(name, None)
    if settings["loss_type"] == "luspo":
        settings["importance_sampling_level"] = "sequence"
    size, accumulation = settings["per_device_train_batch_size"], settings["gradient_accumulation_steps"]
    micro_batches = [
        n for n in (1, 2, 4, 8) if n * size % NUM_GENERATIONS == 0 and (n % accumulation == 0 or accumulation % n == 0)
    ]
    return settings | dict(
        max_grad_norm=0.0, learning_rate=draw.choice([1e-4, 1e-3]), steps_per_generation=draw.choice(micro_batches)
    )


def score_as(kind: str):
    def score(prompts, completion_ids, **_):
        values = [sum(ids) % 17 / 17 for ids in completion_ids]
        if kind == "dead groups":
            return [1.0 if len(p.split()) < 6 else v for p, v in zip(prompts, values, strict=True)]
        if kind == "tied":
            return [float(value > 0.5) for value in values]
        if kind == "NaN":
            return [None if sum(ids) % 5 == 0 else v for ids, v in zip(completion_ids, values, strict=True)]
        return values

    return score


def with_mask(rollout):
    def spoken(prompts, trainer):
        made = rollout(prompts, trainer)
        return {**made, "env_mask": [[int(i % 3 != 1) for i in range(len(ids))] for ids in made["completion_ids"]]}

    return spoken


def trained(folder, settings: dict, seed: int, ours: bool, layout: dict | None = None, precision: str | None = None):
    """Train; return the weights before and after, or of a `precision` the trainer and the gradients of its steps."""
    settings = {**settings, **(layout or {})}
    family, lora, scores, env_mask = (settings.pop(name) for name in ("family", "lora", "scores", "env_mask"))
    completions = forked_rollout if settings.pop("forked") else rollout
    if budget := settings.pop("max_tokens", None):
        settings |= {"max_tokens_per_forward": budget} if ours else {}
    library = trl_ext if ours else trl
    if in_float64 := settings.pop("in_float64", False):
        settings["model_init_kwargs"] = {"experts_implementation": "eager"}  # of the reference
    dtype, autocast = PRECISIONS.get(precision, (torch.float32, False))
    model = wide_model(family, seed) if precision else tiny.model(family, seed=seed)
    model = doubled(model) if in_float64 else model
    # TRL loads the reference by the model's name; near the policy a KL would have no gradient to compare.
    (moved_weights(model) if precision else model).save_pretrained(folder / "model")
    model = cast(model, dtype) if precision else model
    model.config._name_or_path = str(folder / "model")
    draw = random.Random(seed)
    words = [
        tiny.words(*(draw.randrange(3, tiny.VOCAB) for _ in range(draw.choice([1, 4, 9, 40])))) for _ in range(24)
    ]
    torch.manual_seed(seed)
    trainer = library.GRPOTrainer(
        model,
        score_as(scores),
        library.GRPOConfig(
            str(folder / "out"), use_cpu=True, bf16=autocast, report_to="none", disable_tqdm=True, save_strategy="no",
            max_steps=3, num_generations=NUM_GENERATIONS, max_completion_length=12,
            adam_epsilon=1e-3, logging_steps=1, seed=seed, **settings,
        ),
        Dataset.from_dict({"prompt": words}),
        eval_dataset=Dataset.from_dict({"prompt": words[:2]}),
        processing_class=tiny.tokenizer(),
        rollout_func=with_mask(completions) if env_mask else completions,
        peft_config=LoraConfig(r=4, target_modules="all-linear", exclude_modules=["lm_head"]) if lora else None,
        callbacks=[gradients := Gradients()],
    )  # fmt: skip
    before = weights(trainer.model)
    trainer.train()
    if precision:
        return trainer, gradients.steps
    return before, weights(trainer.model)


@pytest.mark.parametrize("seed", seeds(200))
def test_a_drawn_run_is_trls(seed, tmp_path):
    check_draw("grpo", seed, drawn, drawn_in_half, partial(trained, tmp_path))


def test_a_mixture_with_a_reference_model_runs_in_float64(tmp_path):
    plain = {"family": "qwen3_moe", "lora": False, "scores": "ragged", "env_mask": False, "forked": True, "beta": 0.1}
    runs = [trained(tmp_path, plain, 0, ours, {"in_float64": True}) for ours in (False, True)]
    (start, theirs), (_, ours) = runs
    assert (ours - theirs).abs().max() <= CLOSE * (theirs - start).abs().max()


def test_the_draws_in_half_precision_are_as_near_to_float32_as_trls():
    check_mean_in_half("grpo")
