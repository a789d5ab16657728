"""Preference pairs, tiny reward models, and a record of what an optimizer step was made of."""

import random

import torch
from datasets import Dataset
from transformers import AutoModelForSequenceClassification, TrainerCallback

from tests import tiny


def words(draw: random.Random, most: int, least: int = 1) -> str:
    return tiny.words(*(draw.randrange(3, tiny.VOCAB) for _ in range(draw.randrange(least, most))))


def pairs(count: int = 48, seed: int = 0, margin: bool = False) -> Dataset:
    """Ragged pairs with an explicit prompt; lengths from 2 to 50 tokens."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        row = {"prompt": words(draw, 30) + " ", "chosen": words(draw, 20), "rejected": words(draw, 20)}
        rows.append(row | ({"margin": draw.random()} if margin else {}))
    return Dataset.from_list(rows)


def reward_model(folder, family: str = "llama", head_std: float = 0.05, **changes) -> torch.nn.Module:
    """A random sequence classification model in float32; `folder` holds its causal model for a moment."""
    tiny.model(family, **changes).save_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    torch.manual_seed(3)
    torch.nn.init.normal_(model.score.weight, std=head_std)
    return model


class Gradients(TrainerCallback):
    """The gradient of every optimizer step, one tensor per parameter."""

    def __init__(self):
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.steps.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
