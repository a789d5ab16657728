"""Gradients in half precision, for tests: how far TRL's and ours are off TRL's in float32."""

import copy
import math
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, TrainerCallback

from tests import tiny

# A model whose rounding is not hidden below float32's own: of trained models' size in everything but the vocabulary.
WIDE = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=4)
OF_FAMILY = {"deepseek_v3": {"first_k_dense_replace": 4}}  # whose heads have sizes of their own
# (dtype of the weights, the trainer's `bf16`)
PRECISIONS = {
    "float32": (torch.float32, False),
    "bf16 weights": (torch.bfloat16, False),
    "bf16 weights under autocast": (torch.bfloat16, True),
    "autocast": (torch.float32, True),
}


class Gradients(TrainerCallback):
    """The gradients of all optimizer steps: of each everything that is trained, flattened, in float32."""

    def __init__(self) -> None:
        self.steps: list[torch.Tensor] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        self.steps.append(torch.cat([grad.detach().float().flatten() for grad in grads]))


def wide_model(family: str, seed: int = 0) -> Any:
    """A random causal model in float32 whose weights are numbers of bf16, twice as large as usual."""
    made = tiny.model(family, seed, **{**WIDE, **OF_FAMILY.get(family, {"head_dim": 64})})
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_((parameter * 2 if parameter.ndim == 2 else parameter).bfloat16())
    return made


def cast(model: Any, dtype: torch.dtype) -> Any:
    """The model with its weights in a dtype. `model.to` would round the frequencies of its positions, too."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def error(found: list[torch.Tensor], truth: list[torch.Tensor]) -> float:
    """How far gradients are off the true ones, as a fraction of these: over all steps and all weights."""
    off = sum((one - true).square().sum() for one, true in zip(found, truth, strict=True))
    return float((off / sum(true.square().sum() for true in truth)).sqrt())


def moved_weights(model: Any) -> Any:
    """A copy of a model whose weights are a twentieth off, and numbers of bf16."""
    made = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_((parameter * (1 + 0.05 * torch.randn_like(parameter))).bfloat16())
    return made


def wide_classifier(folder: Any, family: str, seed: int = 0) -> Any:
    """A random model of one score with the body of `wide_model`; `folder` holds that for a moment."""
    wide_model(family, seed).save_pretrained(folder)
    made = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    torch.manual_seed(seed)
    torch.nn.init.normal_(made.score.weight, std=0.05)
    with torch.no_grad():
        made.score.weight.copy_(made.score.weight.bfloat16())
    return made


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))
