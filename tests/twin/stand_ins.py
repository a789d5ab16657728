"""What a simulated trainer is given instead of weights, tokenizer and data: models from a config, one word, rollouts.

Every sequence has its worst-case length, and no two prompts are equal, so that nothing is shared.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

from tests.twin.simulation import Simulation

WORDS = {"<pad>": 0, "<bos>": 1, "<eos>": 2, "a": 3, "b": 4}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def make_config(values: Mapping[str, Any], num_labels: int | None = None) -> Any:
    """The config that a config.json describes, with the tokens of our tokenizer."""
    values = {key: value for key, value in values.items() if key not in ("architectures", "dtype", "torch_dtype")}
    labels = {} if num_labels is None else {"num_labels": num_labels}
    config = CONFIG_MAPPING[values["model_type"]](**{**values, **SPECIAL, **labels})
    config._attn_implementation = "sdpa"
    return config


def causal_model(simulation: Simulation) -> Any:
    """A language model, in the dtype that it is loaded in."""
    return _made(AutoModelForCausalLM, make_config(simulation.config), simulation.dtype)


def scorer(simulation: Simulation, dtype: str | None = None) -> Any:
    """A reward or value model: the same backbone with one output."""
    config = make_config(simulation.config, num_labels=1)
    return _made(AutoModelForSequenceClassification, config, dtype or simulation.dtype)


def _made(kind: Any, config: Any, dtype: str) -> Any:
    model = kind.from_config(config, dtype=getattr(torch, dtype))
    # As after `from_pretrained`; trainers switch to training themselves.
    return model.eval()


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word."""
    fast = Tokenizer(models.WordLevel(WORDS, unk_token="a"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=fast, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", padding_side="left"
    )


def preference_pairs(num: int, num_tokens: int) -> Dataset:
    """Tokenized pairs whose sides differ from the first token on."""
    chosen, rejected = [WORDS["a"]] * num_tokens, [WORDS["b"]] * num_tokens
    return Dataset.from_dict({"chosen_ids": [chosen] * num, "rejected_ids": [rejected] * num})


def prompts(num: int) -> Dataset:
    """Prompts; their tokens come with the rollouts."""
    return Dataset.from_dict({"prompt": ["a"] * num})


def rollouts(simulation: Simulation) -> Callable[..., dict[str, Any]]:
    """TRL's `rollout_func`: every prompt and every completion at its longest."""
    prompt, completion = [WORDS["a"]] * simulation.prompt_tokens, [WORDS["b"]] * simulation.completion_tokens

    def rollout(asked: Sequence[Any], *trainer: Any, **options: Any) -> dict[str, Any]:
        num = len(asked)
        return {"prompt_ids": [prompt] * num, "completion_ids": [completion] * num, "logprobs": None}

    return rollout


def fixed_reward(completions: Sequence[Any], **columns: Any) -> list[float]:
    """A reward function that costs nothing: 0 and 1 in turn, so that it differs within a group."""
    return [float(place % 2) for place in range(len(completions))]
