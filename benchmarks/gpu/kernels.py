"""Packed attention by kernel, and one layer with the prompt once or a copy for each completion; forward and backward.

Rows "attention/..." give TFLOP/s of the pairs of tokens that are looked at, and the largest relative error of output
and gradients against float32, of one key head. Rows "layer/..." are DualKV's of one H100 (arXiv 2605.15422, Table 2):
a layer of Qwen3-8B with an MLP of 14,336, fp16, no checkpointing. FlashAttention 3 and 4 run where they are installed,
with copied keys and merged.

    python -m benchmarks.gpu.kernels
    python -m benchmarks.gpu.kernels --device cpu --scale tiny --output out.json
"""

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
from transformers import AutoModel, Qwen3Config

from benchmarks.gpu import part
from benchmarks.gpu.speed_rows import FLASH, has_attention
from benchmarks.grpo_task import wait
from trl_ext.packing import attention
from trl_ext.packing.kernels import flash_attention, sdpa_attention, varlen_attention
from trl_ext.packing.merge import CpuKernel, FlashKernel, VarlenKernel, merged_attention
from trl_ext.packing.plan import PlannedRow, plan_rows
from trl_ext.packing.step_plan import RowSize
from trl_ext.packing.table import SegmentTable

# Tokens of the prompt, and of each completion behind it.
SHAPES = {"8192+16x2048": (8192, [2048] * 16), "8192+4x2048": (8192, [2048] * 4), "1024+8x512": (1024, [512] * 8)}
SHAPES["256+16x64..2048"] = (256, [64, 128, 256, 512, 1024, 2048] * 2 + [96, 160, 333, 777])
KERNELS = ("copies", "merged", *FLASH, *(f"{name}-merged" for name in FLASH))
# Prompt and sequences of DualKV's layers, and how their lengths are drawn: experiments/reproduce_table2.py of
# amazon-science/dualkv-flash-attn-for-rl. Their figures stand in the paper alone.
LAYERS = {"5059x32": (5059, 32), "8192x16": (8192, 16), "16384x8": (16_384, 8), "32768x4": (32_768, 4)}
SHORTEST, LONGEST, SEED = 131, 2048, 42
LAYOUTS = ("once", "copies")
NAMES = [f"attention/{shape}/{kernel}" for shape, kernel in product(SHAPES, KERNELS)]
NAMES += [f"layer/{shape}/{layout}" for shape, layout in product(LAYERS, LAYOUTS)]
TINY = (32, [8] * 4)
HEADS, KEY_HEADS, SIZE = 32, 8, 128
TIMES = 6  # the first warms up


def milliseconds(call: Callable[[], torch.Tensor]) -> dict[str, float]:
    """Medians of a forward and of its backward."""
    took = []
    for _ in range(TIMES):
        wait()
        begun_s = time.perf_counter()
        out = call()
        wait()
        between_s = time.perf_counter()
        out.backward(torch.ones_like(out))
        wait()
        took.append((between_s - begun_s, time.perf_counter() - between_s))
    forward, backward = (1e3 * statistics.median(each) for each in zip(*took[1:], strict=True))
    return {"forward_ms": forward, "backward_ms": backward}


def kernel_of(name: str, device: str) -> Callable[..., torch.Tensor]:
    if name in FLASH:
        return partial(flash_attention, base=name)
    if name.startswith("flash"):
        return partial(merged_attention, kernel=FlashKernel(name.removesuffix("-merged")))
    if name == "merged":
        return partial(merged_attention, kernel=VarlenKernel() if device == "cuda" else CpuKernel())
    return varlen_attention if device == "cuda" else sdpa_attention


def of_attention(kernel: Callable[..., torch.Tensor], prompt: int, owns: list[int], device: str) -> dict[str, float]:
    """A kernel's milliseconds, TFLOP/s and error on one flat row."""
    (row,) = plan_rows([RowSize(0, prompt, own) for own in owns])
    table, draw = SegmentTable(row.segments, torch.device(device)), torch.Generator(device).manual_seed(0)
    sizes = [(1, heads, row.num_tokens, SIZE) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    q, k, v = (torch.randn(size, device=device, generator=draw).bfloat16().requires_grad_() for size in sizes)
    # Queries that share one key head, on their own: of all heads the scores in float32 would fill a card.
    few = q[:, : HEADS // KEY_HEADS], k[:, :1], v[:, :1]
    truth = outputs(sdpa_attention, table, *(x.detach().float().requires_grad_() for x in few))
    pairs = zip(outputs(kernel, table, *few), truth, strict=True)
    error = max(((ours.float() - exact).norm() / exact.norm()).item() for ours, exact in pairs)
    found = milliseconds(partial(kernel, q, k, v, table, scale=SIZE**-0.5, window=None))
    looks = prompt * (prompt + 1) / 2 + sum(own * prompt + own * (own + 1) / 2 for own in owns)
    # A backward needs two and a half times a forward: it computes the scores again.
    for half, gflop in (("forward", 4e-9 * HEADS * SIZE * looks), ("backward", 1e-8 * HEADS * SIZE * looks)):
        found[f"{half}_tflops"] = gflop / found[f"{half}_ms"]
    return {**found, "error": error}


def outputs(kernel: Callable[..., torch.Tensor], table: SegmentTable, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """The output, and the gradients of queries, keys and values."""
    out = kernel(*inputs, table, scale=SIZE**-0.5, window=None)
    return [out, *torch.autograd.grad(out.square().sum(), inputs)]


def of_layer(row: PlannedRow, device: str, width: int) -> dict[str, float]:
    """One layer's milliseconds on a flat row."""
    sizes = {"hidden_size": width, "intermediate_size": width * 7 // 2, "num_hidden_layers": 1, "vocab_size": 512}
    heads = {"num_attention_heads": width // SIZE, "num_key_value_heads": max(width // SIZE // 4, 1), "head_dim": SIZE}
    with torch.device(device):
        model = AutoModel.from_config(Qwen3Config(**sizes, **heads), dtype=torch.float16, attn_implementation="sdpa")
    attention.take_segments(model.config)
    places = torch.cat([torch.arange(one.offset, one.offset + one.length) for one in row.segments])[None].to(device)
    given = {"input_ids": places % 512, "position_ids": places, "use_cache": False}
    given["segments"] = SegmentTable(row.segments, torch.device(device))

    def call() -> torch.Tensor:
        with attention.packed_forward():
            return model(**given).last_hidden_state

    return {**milliseconds(call), "tokens": row.num_tokens}


def work(name: str, device: str, scale: str) -> dict[str, Any]:
    kind, shape, how = name.split("/")
    if how.startswith("flash") and not has_attention(name := how.removesuffix("-merged")):
        return {"status": "skipped", "reason": f"{FLASH[name]} is not installed."}
    prompt, owns = TINY if scale == "tiny" else SHAPES[shape] if kind == "attention" else drawn(*LAYERS[shape])
    if kind == "attention":
        found = of_attention(kernel_of(how, device), prompt, owns, device)
        says = "{forward_tflops:.0f} and {backward_tflops:.0f} TFLOP/s, error {error:.1e}".format(**found)
    else:
        alone = [RowSize(number, 0, prompt + own) for number, own in enumerate(owns)]
        (row,) = plan_rows([RowSize(0, prompt, own) for own in owns] if how == "once" else alone)
        found = of_layer(row, device, 256 if scale == "tiny" else 4096)
        says = f"{found['tokens']:,} tokens"
    return {**found, "says": f"forward {found['forward_ms']:.2f} ms, backward {found['backward_ms']:.2f} ms, {says}"}


def drawn(prompt: int, number: int) -> tuple[int, list[int]]:
    draw = torch.Generator().manual_seed(SEED)
    return prompt, torch.randint(SHORTEST, LONGEST + 1, (number,), generator=draw).tolist()


if __name__ == "__main__":
    sys.exit(part.main("kernels", __doc__, NAMES, work))
