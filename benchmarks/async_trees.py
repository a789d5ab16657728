"""What does one attention layer of AsyncGRPOTrainer's rows cost: keys gathered for each segment, or shared keys once?

TRL gathers the keys and values on the path of each segment of its tree, and calls a kernel on the copies. Here the
same rows of TRL's `TreeRow` go through that (gathered, then `scaled_dot_product_attention` segment by segment) and
through `trl_ext.packing.tree`, forward and backward. Rounds alternate, and the least processor seconds of each count.
Key bytes count the keys and values that a layer holds for its backward.

    python benchmarks/async_trees.py --output benchmarks/results/async_trees_cpu.json
"""

import argparse
import os
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import torch
from machine import save
from rich.console import Console
from rich.table import Table
from torch.nn.functional import scaled_dot_product_attention
from trl.experimental.async_grpo.packing import TreeRow

from trl_ext.packing.tree import tree_attention

HEADS, KEY_HEADS, HEAD_SIZE = 8, 2, 64


@dataclass(frozen=True, slots=True)
class Shape:
    """Tokens of the prompts and completions of a row; `words` is the number of words that completions are made of."""

    name: str
    prompt: int
    completion: int
    generations: int
    groups: int = 1
    words: int = 10_000


SHAPES = (
    Shape("short prompt", 64, 128, 8, groups=2),
    Shape("long prompt", 1024, 128, 16),
    Shape("two long prompts", 1024, 128, 8, groups=2),
    Shape("completions that fork late", 256, 64, 16, words=2),
)


@dataclass(frozen=True, slots=True)
class Result:
    """Processor seconds of a layer, forward and backward; bytes of its keys and values; relative difference."""

    shape: Shape
    dtype: str
    tokens: int
    segments: int
    gathered_keys: int
    gathered_s: float
    shared_s: float
    gathered_bytes: int
    shared_bytes: int
    difference: float

    @property
    def times_faster(self) -> float:
        return self.gathered_s / self.shared_s


def row_of(shape: Shape) -> dict[str, torch.Tensor]:
    """TRL's row of random tokens in this shape."""
    draw, row = random.Random(0), TreeRow()
    for group in range(shape.groups):
        prompt = [draw.randrange(10_000) for _ in range(shape.prompt)]
        for _ in range(shape.generations):
            ids = torch.tensor([*prompt, *(draw.randrange(shape.words) for _ in range(shape.completion))])
            mask = (torch.arange(len(ids)) >= shape.prompt).long()
            given = dict(input_ids=ids, completion_mask=mask, old_log_probs=torch.zeros(len(ids)))
            row.add(dict(**given, advantage=1.0, group_id=group))
    return row.pack()


def gathered(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, row: dict[str, torch.Tensor]) -> torch.Tensor:
    """Attention as TRL's, with a plain kernel instead of FlashAttention 3; [1, H, T, D] to [1, T, H, D]."""
    k, v = (x.index_select(2, row["tree_kv_index"]) for x in (k, v))
    queries, keys = (row[f"tree_cu_seqlens_{name}"].diff().tolist() for name in "qk")
    outputs = []
    for one_q, one_k, one_v in zip(q.split(queries, 2), k.split(keys, 2), v.split(keys, 2), strict=True):
        n, m = one_q.shape[2], one_k.shape[2]
        mask = None if n == m else torch.ones(n, m, dtype=torch.bool).tril(m - n)
        outputs.append(
            scaled_dot_product_attention(one_q, one_k, one_v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
        )
    return torch.cat(outputs, dim=2).transpose(1, 2)


def shared(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, row: dict[str, torch.Tensor]) -> torch.Tensor:
    """The same by trl_ext."""
    parts = {name: row[name] for name in ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")}
    return tree_attention(SimpleNamespace(is_causal=True), q, k, v, None, base="sdpa", **parts)[0]


def measure(shape: Shape, dtype: torch.dtype, rounds: int) -> Result:
    row, draw = row_of(shape), torch.Generator().manual_seed(0)
    num = len(row["input_ids"])
    qkv = [torch.randn(1, heads, num, HEAD_SIZE, generator=draw) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    qkv = [x.to(dtype).requires_grad_() for x in qkv]
    grad = torch.randn(1, num, HEADS, HEAD_SIZE, generator=draw).to(dtype)
    seconds: dict[str, float] = {}
    found = {}
    for _ in range(rounds):
        for function in (gathered, shared):
            for x in qkv:
                x.grad = None
            begun = time.process_time()
            out = function(*qkv, row)
            out.backward(grad)
            took, name = time.process_time() - begun, function.__name__
            seconds[name] = min(took, seconds.get(name, took))
            found[name] = torch.cat([x.detach().float().flatten() for x in (out, *(x.grad for x in qkv))])
    keys, of_key = len(row["tree_kv_index"]), 2 * KEY_HEADS * HEAD_SIZE * dtype.itemsize
    return Result(
        shape,
        str(dtype).removeprefix("torch."),
        num,
        len(row["tree_cu_seqlens_q"]) - 1,
        keys,
        seconds["gathered"],
        seconds["shared"],
        keys * of_key,
        num * of_key,
        ((found["gathered"] - found["shared"]).norm() / found["gathered"].norm()).item(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = [measure(shape, dtype, given.rounds) for shape in SHAPES for dtype in (torch.float32, torch.bfloat16)]
    columns = ("row", "type", "tokens", "segments", "gathered keys", "gathered s", "shared s", "times", "difference")
    table = Table(*columns)
    for one in found:
        seconds = f"{one.gathered_s:.3f}", f"{one.shared_s:.3f}", f"{one.times_faster:.2f}"
        sizes = f"{one.tokens:,}", f"{one.segments:,}", f"{one.gathered_keys:,}"
        table.add_row(one.shape.name, one.dtype, *sizes, *seconds, f"{one.difference:.1e}")
    Console(width=140).print(table)
    note = "Processor seconds of one thread, on a machine that other programs kept busy."
    results = [asdict(one) | {"times_faster": one.times_faster} for one in found]
    save(given.output, "async_trees", note=note, rounds=given.rounds, results=results)


if __name__ == "__main__":
    main()
