"""What does it cost to keep attention's output over checkpointing, in bytes, and what does it save, in seconds?

One packed row of a prompt and its completions through a Llama of 8 layers, forward and backward, with checkpointing,
without and with `keep_attention`. Bytes are those that the layers keep, against the planner's 2 bytes a value and 4 a
query head, for each token and layer; they do not change on a busy machine. Seconds need a quiet one: `--seconds`.

    python benchmarks/kept_attention.py
"""

import argparse
import gc
import time
import weakref
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from trl_ext.packing import recompute
from trl_ext.packing.attention import packed_forward, take_segments
from trl_ext.packing.layout import flatten
from trl_ext.packing.plan import plan_rows
from trl_ext.packing.ragged import Ragged
from trl_ext.packing.step_plan import RowSize
from trl_ext.trainers.forward.checkpointing import enable_checkpointing

LAYERS, HIDDEN, HEADS, KEY_HEADS, VOCAB = 8, 512, 8, 4, 1024
KINDS = {"checkpointing": {}, "attention kept": {"keep_attention": True}}


def model() -> Any:
    """A Llama in bfloat16 that attends within segments."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=HIDDEN, intermediate_size=4 * HIDDEN, num_hidden_layers=LAYERS, vocab_size=VOCAB)
    config = LlamaConfig(**sizes, num_attention_heads=HEADS, num_key_value_heads=KEY_HEADS)
    made = LlamaForCausalLM(config).to(torch.bfloat16).train()
    take_segments(made.config)
    return made


def inputs(prompt: int, completion: int, group: int) -> dict[str, Any]:
    """A flat row of a group, as a model takes it."""
    draw = torch.Generator().manual_seed(0)
    start = torch.randint(VOCAB, (prompt,), generator=draw)
    ends = torch.randint(VOCAB, (group, completion), generator=draw)
    (row,) = plan_rows([RowSize(0, prompt, completion)] * group)
    flat = flatten(row, Ragged.of([torch.cat([start, end]).tolist() for end in ends]))
    return dict(input_ids=flat.input_ids, position_ids=flat.position_ids, segments=flat.table)


def kept_bytes(kept: list[weakref.ref]) -> int:
    """Bytes of the storages that all checkpointed layers keep, each once."""
    tensors = [x for one in kept if one() for out in one()._outputs for x in out if isinstance(x, torch.Tensor)]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


def main() -> None:
    """Print a line for either kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("prompt", 2048), ("completion", 128), ("group", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--seconds", type=int, default=0, help="repetitions that are timed; 0 for none")
    options = parser.parse_args()
    row = inputs(options.prompt, options.completion, options.group)
    num_tokens = row["input_ids"].numel()
    made: list[weakref.ref] = []
    plain = recompute.KeptAttention.__init__

    def noted(self: Any) -> None:
        plain(self)
        made.append(weakref.ref(self))

    recompute.KeptAttention.__init__ = noted  # type: ignore[method-assign]
    times: dict[str, float] = {}
    for name, how in KINDS.items():
        subject = model()
        enable_checkpointing(subject, {"use_reentrant": False, **how})
        with torch.no_grad(), packed_forward():  # kernels are looked at once, which a checkpoint would see
            subject(**row, use_cache=False)
        made.clear()
        for turn in range(1 + options.seconds):
            start = time.perf_counter()
            with packed_forward():
                loss = subject(**row, use_cache=False).logits.float().logsumexp(-1).mean()
            if not turn:
                print(f"{name}: {kept_bytes(made) / num_tokens / LAYERS:,.0f} bytes a token and layer")
            loss.backward()
            times[name] = min(times.get(name, 1e9), time.perf_counter() - start) if turn else 1e9
            subject.zero_grad()
        gc.collect()
    print(f"planner: {2 * HIDDEN + 4 * HEADS:,} bytes a token and layer, {num_tokens:,} tokens")
    if options.seconds:
        first, second = times.values()
        print(f"seconds: {second / first:.2f} times the seconds of checkpointing (best of {options.seconds})")


if __name__ == "__main__":
    main()
