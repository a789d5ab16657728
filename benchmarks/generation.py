"""How many processor seconds of generation does trl_ext save? `generate` as TRL calls it, and as our trainers do.

SmolLM2-135M in float32 on one core, 32 rows, sampled with TRL's default settings. Lengths are set: a logits processor
gives each row its last token at its length, in either way alike. Tokens are compared, and so is the generator's state.
Rounds alternate between the ways, and processor seconds are compared, so that a busy machine hits both.

    python benchmarks/generation.py --output benchmarks/results/generation_cpu.json
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from machine import save
from quickstart.assets import prepare
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, GenerationConfig, SuppressTokensLogitsProcessor

from trl_ext.compat.generate import known_rows_skipped

ROWS = 32
# What ends a row, what fills it up after that, and tokens that tell rows apart.
END, PAD, FIRST = 2, 0, 1000


@dataclass(frozen=True)
class Case:
    """A shape of prompts and completions, and how many times fewer processor seconds are asked for."""

    name: str
    prompt_tokens: int
    group: int
    lengths: tuple[int, ...]
    asked: float


def long_tail(rows: int = ROWS, longest: int = 256, median: int = 24) -> tuple[int, ...]:
    """Quantiles of a log-normal distribution, of which the last is `longest`, in a fixed random order."""
    normal = statistics.NormalDist()
    places = [normal.inv_cdf((i + 0.5) / rows) for i in range(rows)]
    found = [round(median * (longest / median) ** (place / places[-1])) for place in places]
    return tuple(found[i] for i in torch.randperm(rows, generator=torch.Generator().manual_seed(0)))


CASES = (
    Case("long tail", 60, 8, long_tail(), 2.2),
    Case("equal lengths", 60, 8, (24,) * ROWS, 0.97),
    Case("equal lengths, no prompt twice", 60, 1, (24,) * ROWS, 0.97),
    Case("long prompts", 256, 8, (24,) * ROWS, 2.0),
)
# A part for another engine adds its way here.
WAYS: dict[str, Callable[[Any], AbstractContextManager[None]]] = {
    "trl": lambda model: nullcontext(),
    "trl_ext": known_rows_skipped,
}


class Lengths(SuppressTokensLogitsProcessor):
    """Ends each row at its length. The first token is the row's number, as rows that have ended may be missing.

    It reads each row alone, as its base does, so that ours need not give it the whole batch.
    """

    def __init__(self, prompt_tokens: int, lengths: Sequence[int]) -> None:
        super().__init__([])
        self._prompt_tokens, self._lengths = prompt_tokens, torch.tensor(lengths)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        written = input_ids.shape[1] - self._prompt_tokens
        if written == 0:
            wanted = torch.arange(len(scores)) + FIRST
            return torch.full_like(scores, -torch.inf).scatter(1, wanted[:, None], 0.0)
        ends = self._lengths[input_ids[:, self._prompt_tokens] - FIRST] == written + 1
        scores[ends] = -torch.inf
        scores[:, END] = torch.where(ends, 0.0, -torch.inf)
        return scores


def generated(model: Any, case: Case, way: str, seed: int) -> tuple[float, torch.Tensor, torch.Tensor]:
    """Return processor seconds, the tokens and the state of the generator after them."""
    draw = torch.Generator().manual_seed(seed)
    prompts = torch.randint(FIRST, 40_000, (ROWS // case.group, case.prompt_tokens), generator=draw)
    ids = prompts.repeat_interleave(case.group, 0)
    config = GenerationConfig(
        max_new_tokens=max(case.lengths), do_sample=True, temperature=1.0, top_p=1.0, top_k=0,
        eos_token_id=END, pad_token_id=PAD, disable_compile=True,
    )  # fmt: skip
    torch.manual_seed(seed)
    model.lengths = case.lengths
    with torch.no_grad(), WAYS[way](model):
        start = time.process_time()
        found = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)
        seconds = time.process_time() - start
    return seconds, found, torch.get_rng_state()


def policy(layers: int | None) -> Any:
    """SmolLM2-135M, or its first layers, whose completions have `lengths`."""
    changes = {} if layers is None else {"num_hidden_layers": layers}
    model = AutoModelForCausalLM.from_pretrained(prepare() / "model", dtype=torch.float32, **changes).eval()
    set_lengths(model, ())
    return model


def set_lengths(model: Any, lengths: Sequence[int]) -> None:
    """Let the model's `generate` end row i at `lengths[i]`, which is an attribute of the model from then on."""
    model.lengths, prepared = lengths, model._get_logits_processor

    def with_lengths(*args: Any, **kwargs: Any) -> Any:  # as an argument of `generate`, ours would leave it alone
        found = prepared(*args, **kwargs)
        return type(found)([*found, Lengths(kwargs["input_ids_seq_length"], model.lengths)])

    model._get_logits_processor = with_lengths


def show(results: dict[str, dict[str, Any]]) -> None:
    table = Table(title="Processor seconds of generate; trl / trl_ext")
    for column in ("", *WAYS, "ratio", "asked"):
        table.add_column(column, justify="right" if column else "left")
    for case in CASES:
        if found := results.get(case.name):
            table.add_row(case.name, *(f"{found[way]:.1f}" for way in WAYS), str(found["ratio"]), str(case.asked))
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2, help="times to alternate between the ways")
    parser.add_argument("--layers", type=int, help="only so many of the model's 30, to see that everything runs")
    parser.add_argument("--output", type=Path, help="JSON file for the figures, with machine and versions")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = policy(options.layers)
    results: dict[str, dict[str, Any]] = {}
    for case in CASES:
        seconds = dict.fromkeys(WAYS, 0.0)
        for round_ in range(options.rounds):
            outcomes = []
            for way in WAYS:
                spent, *outcome = generated(model, case, way, seed=round_)
                seconds[way] += spent
                outcomes.append(outcome)
            (tokens, state), *others = outcomes
            assert all(torch.equal(tokens, found) and torch.equal(state, after) for found, after in others)
        ratio = round(seconds["trl"] / seconds["trl_ext"], 2)
        results[case.name] = {way: round(spent, 2) for way, spent in seconds.items()}
        results[case.name] |= {"ratio": ratio, "asked": case.asked, "rounds": options.rounds}
        show(results)
        save(options.output, "generation", model="SmolLM2-135M-Instruct", rows=ROWS, results=results)


if __name__ == "__main__":
    main()
