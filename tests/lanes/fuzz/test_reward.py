"""Settings of reward models drawn at random: our weights are TRL's after a few steps on the same pairs."""

import random
from functools import partial

import pytest
import torch
import trl
from datasets import Dataset
from peft import LoraConfig

import trl_ext
from tests import tiny
from tests.half_precision import PRECISIONS, Gradients, cast, wide_classifier
from tests.lanes.fuzz.draws import (
    check_draw,
    check_mean_in_half,
    doubled,
    seeds,
    show,
    summary,
    weights,
)
from tests.preferences import reward_model, words
from tests.reward_trainers import chat_tokenizer

torch.set_num_threads(1)
FAMILIES = ["llama", "qwen2", "qwen3", "mistral_window", "gemma3"]
FORMATS = ["explicit", "implicit", "chat", "ids", "long prompts", "continued"]


@pytest.fixture(scope="module", autouse=True)
def tell(request):
    yield
    show(request, summary("reward"))


def drawn(seed: int) -> dict:
    """Settings of one draw; `family`, `lora`, `format`, `margin`, `pad_is_eos` and `max_tokens` are not TRL's."""
    draw = random.Random(seed)
    settings = dict(
        family=draw.choice(FAMILIES),
        lora=draw.random() < 0.25,
        format=draw.choice(FORMATS),
        margin=draw.random() < 0.3,
        pad_is_eos=draw.random() < 0.2,
        num_pairs=draw.choice([24, 29, 33]),
        per_device_train_batch_size=draw.choice([1, 2, 4]),
        gradient_accumulation_steps=draw.choice([1, 2, 4]),
        learning_rate=draw.choice([1e-3, 1e-4]),
        max_grad_norm=draw.choice([0.0, 0.05, 1.0]),
        gradient_checkpointing=draw.random() < 0.5,
        center_rewards_coefficient=draw.choice([None, None, 0.1]),
    )
    if draw.random() < 0.4:
        settings["max_tokens"] = draw.choice([260, 400, 4096])
    return settings


def drawn_in_half(seed: int) -> dict:
    """Settings of one draw in half precision: the gradients are compared, so nothing clips them."""
    return drawn(seed) | dict(max_grad_norm=0.0, max_steps=4)


def pairs_of(seed: int, kind: str, margin: bool, num_pairs: int) -> Dataset:
    draw = random.Random(seed)

    def turn(role: str, text: str) -> list[dict]:
        return [{"role": role, "content": text}]

    def row() -> dict:
        prompt = words(draw, 90, 60) if kind == "long prompts" else words(draw, 30)
        chosen, rejected = words(draw, 20), words(draw, 20)
        if kind == "continued":
            rejected = f"{chosen} {rejected}"
        if kind == "implicit":
            return {"chosen": f"{prompt} {chosen}", "rejected": f"{prompt} {rejected}"}
        if kind == "ids":
            ids = tiny.tokenizer().convert_tokens_to_ids
            return {f"{name}_ids": ids(f"{prompt} {text}".split()) for name, text in
                    (("chosen", chosen), ("rejected", rejected))}  # fmt: skip
        if kind == "chat":
            return {"prompt": turn("user", prompt), "chosen": turn("assistant", chosen),
                    "rejected": turn("assistant", rejected)}  # fmt: skip
        return {"prompt": f"{prompt} ", "chosen": chosen, "rejected": rejected}

    return Dataset.from_list([row() | ({"margin": draw.random()} if margin else {}) for _ in range(num_pairs)])


def trained(folder, settings: dict, seed: int, ours: bool, layout: dict | None = None, precision: str | None = None):
    """Train; return the weights before and after, or of a `precision` the trainer and the gradients of its steps."""
    settings = {**settings, **(layout or {})}
    own = ("family", "lora", "format", "margin", "pad_is_eos", "num_pairs")
    family, lora, kind, margin, pad_is_eos, num_pairs = (settings.pop(name) for name in own)
    if budget := settings.pop("max_tokens", None):
        settings |= {"max_tokens_per_forward": budget} if ours else {}
    library = trl_ext if ours else trl
    in_float64 = settings.pop("in_float64", False)
    tokenizer = chat_tokenizer()
    dtype, autocast = PRECISIONS.get(precision, (torch.float32, False))
    model = (
        cast(wide_classifier(folder / "model", family, seed), dtype)
        if precision
        else reward_model(folder / "model", family)
    )
    model = doubled(model) if in_float64 else model
    if pad_is_eos:
        tokenizer.pad_token = tokenizer.eos_token
        model.config.pad_token_id = tokenizer.eos_token_id
    torch.manual_seed(seed)
    trainer = library.RewardTrainer(
        model,
        library.RewardConfig(
            str(folder / "out"), use_cpu=True, bf16=autocast, report_to="none", disable_tqdm=True, save_strategy="no",
            num_train_epochs=1, adam_epsilon=1e-3, logging_steps=1, seed=seed, **settings,
        ),
        train_dataset=pairs_of(seed, kind, margin, num_pairs),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=4, task_type="SEQ_CLS", target_modules="all-linear") if lora else None,
        callbacks=[gradients := Gradients()],
    )  # fmt: skip
    before = weights(trainer.model)
    trainer.train()
    if precision:
        return trainer, gradients.steps
    return before, weights(trainer.model)


@pytest.mark.parametrize("seed", seeds(60))
def test_a_drawn_run_is_trls(seed, tmp_path):
    check_draw("reward", seed, drawn, drawn_in_half, partial(trained, tmp_path))


def test_the_draws_in_half_precision_are_as_near_to_float32_as_trls():
    check_mean_in_half("reward")
