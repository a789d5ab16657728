"""What benchmarks of GRPO train on, and how both libraries' steps are timed.

Shapes with drawn lengths, a tokenizer of words, rollouts that cost nothing.
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, TrainerCallback

from trl_ext.monitor.phases import PhaseClock

VOCAB = 8192
FIRST_WORD = 3
PHASES = ("generate", "score", "logps", "update", "other")


@dataclass(frozen=True, slots=True)
class Shape:
    """Lengths in tokens, and the groups of a generation batch.

    Completions are log-normal with this mean and sigma, cut at `longest`; sigma 0: all equal.
    """

    name: str
    prompt: int
    mean: int
    longest: int
    sigma: float
    groups: int
    generations: int = 8

    @property
    def rows(self) -> int:
        return self.groups * self.generations


def lengths(shape: Shape, seed: int) -> list[int]:
    """Completion lengths of one generation batch, scaled to the mean before they are cut at the longest."""
    draw = random.Random(seed)
    drawn = [math.exp(draw.gauss(0, shape.sigma)) for _ in range(shape.rows)]
    scale = shape.mean / statistics.mean(drawn)
    return [max(1, min(shape.longest, round(x * scale))) for x in drawn]


def fixed_rollout(shape: Shape, seeds: Iterator[int], warm_up: Shape | None = None, vocab: int = VOCAB) -> Callable:
    """A `rollout_func` that draws a generation batch of random tokens for every seed, the first as `warm_up` says."""
    shapes = iter([warm_up] if warm_up else [])

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        now, seed = next(shapes, shape), next(seeds)
        draw = random.Random(seed)
        ids = {p: [draw.randrange(FIRST_WORD, vocab) for _ in range(now.prompt)] for p in dict.fromkeys(prompts)}
        completions = [[draw.randrange(FIRST_WORD, vocab) for _ in range(n)] for n in lengths(now, seed)]
        return {"prompt_ids": [ids[p] for p in prompts], "completion_ids": completions, "logprobs": None}

    return rollout


def tokenizer(vocab: int = VOCAB) -> PreTrainedTokenizerFast:
    """One token per word: `<pad>`, `<bos>`, `<eos>`, `w3`, `w4`, ... No special token stands inside a word: text is
    searched for those before it is cut into words."""
    words = {f"w{i}": i for i in range(vocab)}
    for i, special in enumerate(("<pad>", "<bos>", "<eos>")):
        words[special] = words.pop(f"w{i}")
    fast = Tokenizer(models.WordLevel(words, unk_token="w3"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=fast, pad_token="<pad>", eos_token="<eos>", padding_side="left")


def model(layers: int, width: int, family: str = "llama") -> PreTrainedModel:
    """A model of random weights, the same in every call.

    Args:
        layers, width: Their number, and the hidden size.
        family: A key of FAMILIES.
    """
    torch.manual_seed(0)
    name, own = FAMILIES[family]
    config = AutoConfig.for_model(
        name,
        vocab_size=VOCAB,
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 192,
        max_position_embeddings=8192,
        **{field: value(layers, width) for field, value in own.items()},
    )
    return AutoModelForCausalLM.from_config(config)


def _every_fourth(other: str) -> Callable[[int, int], list[str]]:
    return lambda layers, _: ["full_attention" if i % 4 == 3 else other for i in range(layers)]


# Of each the name in transformers, and fields of its config as functions of the number of layers and the width. Layers
# of all but the first carry state; one in four attends.
FAMILIES: dict[str, tuple[str, dict[str, Callable[[int, int], Any]]]] = {
    "llama": ("llama", {}),
    "qwen3_5": (
        "qwen3_5_text",
        {
            "layer_types": _every_fourth("linear_attention"),
            "head_dim": lambda *_: 64,
            "linear_num_key_heads": lambda _, width: width // 128,
            "linear_num_value_heads": lambda _, width: width // 64,
            "linear_key_head_dim": lambda *_: 64,
            "linear_value_head_dim": lambda *_: 64,
        },
    ),
    "bamba": (
        "bamba",
        {
            "attn_layer_indices": lambda layers, _: [*range(3, layers, 4)],
            "mamba_n_heads": lambda _, width: width // 32,
            "mamba_d_head": lambda *_: 64,
            "mamba_d_state": lambda *_: 128,
        },
    ),
    "lfm2": ("lfm2", {"layer_types": _every_fourth("conv")}),
}


def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """A number that differs within a group."""
    return [sum(ids) % 17 / 17 for ids in completion_ids]


# Clocks -------------------------------------------------------------------------------------------------------------


def wait() -> None:
    """Until the card, if there is one, has done what it was told."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class StepClock(TrainerCallback):
    """Seconds of each optimizer step, its generation included; of all between steps nothing."""

    def __init__(self):
        self.seconds: list[float] = []

    def on_step_begin(self, *args, **kwargs):
        wait()
        self._start = time.perf_counter()

    def on_step_end(self, *args, **kwargs):
        wait()
        self.seconds.append(time.perf_counter() - self._start)


class PhasesOfSteps(StepClock):
    """The same, and how each optimizer step is spent: on either library's trainer by timing TRL's methods around.

    Attributes:
        phases: Of each optimizer step, seconds of PHASES; they add up to the step.
    """

    def __init__(self):
        super().__init__()
        self.phases: list[dict[str, float]] = []
        self._clock = PhaseClock(sync=wait, outside="other")

    def watch(self, trainer: Any) -> None:
        """Time the trainer's methods; without gradients, log-probabilities are the old policy's or the reference's."""
        trainer.training_step = self._timed("update", trainer.training_step)
        if not hasattr(trainer, "_generate"):  # a reward model's
            return
        for phase, name in (("generate", "_generate"), ("score", "_calculate_rewards")):
            setattr(trainer, name, self._timed(phase, getattr(trainer, name)))
        logps = trainer._get_per_token_logps_and_entropies
        timed = self._timed("logps", logps)
        trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: (
            logps(*args, **kwargs) if torch.is_grad_enabled() else timed(*args, **kwargs)
        )

    def _timed(self, phase: str, method: Callable) -> Callable:
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self._clock.phase(phase):
                return method(*args, **kwargs)

        return timed

    def on_step_begin(self, *args, **kwargs):
        self._clock.mark()
        self._clock.take()
        super().on_step_begin()

    def on_step_end(self, *args, **kwargs):
        super().on_step_end()
        found = self._clock.take()
        self.phases.append({phase: found.get(phase, 0.0) for phase in PHASES})
