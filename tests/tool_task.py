"""A tiny chat model's sums with a calculator: tokenizer, template, tools, and scripted turns that call them.

One token a word. A call is written as
`<call> {"name":"add","arguments":{"a": 3 ,"b": 4 }} </call> <eos>`, which the tokenizer's `response_template` reads.
"""

import random
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests import grpo_trainers, tiny

NUMBERS = 60
_MARKS = ["<pad>", "<unk>", "<eos>", "user", "assistant", "tool", "<call>", "</call>", "+", "=", "error"]
_PARTS = ['{"name":"add","arguments":{"a":', '{"name":"fail","arguments":{"a":', '{"name":"lost","arguments":{"a":']
_PARTS += [',"b":', "}}"]
WORDS = {word: i for i, word in enumerate([*_MARKS, *_PARTS, *map(str, range(NUMBERS))])}
TEMPLATE = (
    "{% for m in messages %}"
    "{{ m['role'] + ' ' }}{% if m.get('tool_calls') %}{% for call in m['tool_calls'] %}"
    "<call> {{ call['function'] | tojson }} </call> {% endfor %}{% endif %}"
    "{{ m['content'] }}{{ ' <eos> ' if m['role'] == 'assistant' else ' ' }}"
    "{% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
)
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "assistant",
    "fields": {
        "tool_calls": {
            "open": "<call>",
            "close_pattern": r"</call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<eos>\s*", "content": "text"},
    },
}


def tokenizer() -> PreTrainedTokenizerFast:
    fast = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=fast, pad_token="<pad>", unk_token="<unk>", eos_token="<eos>", padding_side="left"
    )
    made.chat_template = TEMPLATE
    made.response_template = RESPONSE_TEMPLATE
    return made


def ids(text: str) -> list[int]:
    return [WORDS[word] for word in text.split()]


def call(name: str, a: int, b: int) -> str:
    return f'<call> {{"name":"{name}","arguments":{{"a": {a} ,"b": {b} }}}} </call>'


def sums(num_rows: int = 16) -> Dataset:
    """Conversations that ask for `a + b`, in prompts of two lengths, with the answer beside them."""
    draw = random.Random(0)
    pairs = [(draw.randrange(20), draw.randrange(20)) for _ in range(num_rows)]
    return Dataset.from_dict(
        {
            "prompt": [
                [{"role": "user", "content": f"{a} + {b} =" + " =" * 7 * (i % 2)}] for i, (a, b) in enumerate(pairs)
            ],
            "answer": [str(a + b) for a, b in pairs],
        }
    )


def add(a: int, b: int) -> int:
    """
    Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def fail(a: int, b: int) -> int:
    """
    Fail.

    Args:
        a: A number.
        b: Another number.
    """
    raise ValueError("error")


# What the script says in a first turn. The last one is no call that can be run.
FIRST = (
    call("add", 3, 4) + " <eos>",
    "9 <eos>",
    call("add", 11, 20) + " " + call("add", 1, 2) + " <eos>",
    call("fail", 1, 1) + " <eos>",
    call("lost", 1, 1) + " <eos>",
    '<call> {"name":"add","arguments":{"a": 3 3 <eos>',
)


class Script:
    """Stands in for sampling, as TRL's `_generate_single_turn`: what it says depends on the prompt and its place.

    TRL reads its calls, runs the tools and asks for the next turn.

    Args:
        first: Its first turns, one after the other.
        again: How often a later turn calls once more, from 0 to 1; else it is a few numbers.
        most: How many numbers at most.
    """

    def __init__(self, first: tuple[str, ...] = FIRST, again: float = 0.25, most: int = 5) -> None:
        self.first, self.again, self.most = first, again, most
        self.seen: dict[str, int] = {}

    def __call__(self, prompt_ids: list[list[int]], *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        return [ids(self._turn(prompt)) for prompt in prompt_ids], None

    def _turn(self, prompt: list[int]) -> str:
        key = str(prompt)
        place = self.seen[key] = self.seen.get(key, -1) + 1
        draw = random.Random(f"{key}/{place}")
        if WORDS["tool"] not in prompt:
            return self.first[(place + sum(prompt)) % len(self.first)]
        if draw.random() < self.again:
            return call("add", draw.randrange(20), draw.randrange(20)) + " <eos>"
        return " ".join(str(draw.randrange(NUMBERS)) for _ in range(min(self.most, draw.choice([1, 2, 5])))) + " <eos>"


class Adds:
    """An environment with a tool, which scores its completions itself."""

    reward = 0.0

    def reset(self, **_: Any) -> str:
        return "1 + 2 ="

    def add(self, a: int, b: int) -> int:
        """
        Add two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        return a + b

    def get_reward(self) -> float:
        return self.reward


def trainer(library, folder, rewards=None, options=None, rows=None, **changes) -> Any:
    """A GRPOTrainer of `trl` or `trl_ext` whose turns are scripted.

    Args:
        options: Of the trainer: tools, environment_factory.
        changes: Of the config; and `script`.
    """
    script = changes.pop("script", None) or Script()
    settings = dict(per_device_train_batch_size=8, gradient_accumulation_steps=2, num_generations=8)
    settings |= dict(max_completion_length=64, processing_class=tokenizer(), rollout_func=None)
    settings |= (options or dict(tools=[add, fail])) | changes
    model = tiny.model("llama", vocab_size=len(WORDS))
    made = grpo_trainers.trainer(folder, library, model, rewards, sums() if rows is None else rows, **settings)
    made._generate_single_turn = script  # TRL reads what it says, calls the tools, and asks again
    made.before = grpo_trainers.weights(made)
    return made


def trained(subject: Any) -> torch.Tensor:
    """Train; return all weights, which must have moved."""
    subject.train()
    return grpo_trainers.learned(subject)


def check_packed(subject: Any) -> None:
    """Fail unless every optimizer step went through the model on flat rows."""
    steps = [entry for entry in subject.state.log_history if "loss" in entry]
    assert subject._packs and len(steps) == subject.state.max_steps
    for step in steps:
        assert step["packing/forwarded_tokens"] < step["packing/padded_tokens"] / 1.5
        assert step["packing/forwarded_over_raw"] < 1, "no prompt was shared"
        assert step["tools/call_frequency"] > 0
