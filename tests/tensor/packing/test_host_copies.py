"""A packed forward and its backward never wait for the card, and copy few tensors to it.

There is no card here: the device "meta" stands in for it. What has to be known on the host raises there, a copy from
the host is seen by a dispatch mode, and a copy that is not asynchronous would wait for all work before it.
"""

from collections import Counter
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import masking_utils

from tests import tiny
from tests.batches import batch, ready_to_pack
from trl_ext.packing import attention, kernels
from trl_ext.packing.merge import merged_attention
from trl_ext.trainers.step.score import score
from trl_ext.trainers.step.unpadded import plan, unpad

CARD = torch.device("meta")
LAYERS = 3  # of the tiny models
# Seven for the layout (tokens, positions, places), others for attention: boundaries, and an index where runs are not
# adjacent; copied keys need all three, merging as many and two a level.
MOST_COPIES = {"copies": 10, "merged": 10}


class Traffic(TorchDispatchMode):
    """Counts copies from the host to the card by whether the host waits, and calls that need a value on the host."""

    WAITS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal", "aten::masked_select")

    def __init__(self):
        super().__init__()
        self.copies, self.waits, self.shapes = Counter(), Counter(), set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._schema.name
        if name == "aten::_to_copy" and args[0].device != out.device:
            self.copies["asynchronous" if kwargs.get("non_blocking") else "waited for"] += 1
        if name in self.WAITS or (
            name == "aten::index" and any(x is not None and x.dtype == torch.bool for x in args[1])
        ):
            self.waits[name] += 1
        if isinstance(out, torch.Tensor):
            self.shapes.add(tuple(out.shape))
        return out


class OnCard:
    """A merging kernel on the stand-in for a card."""

    def __init__(self):
        self.calls = Counter()

    def forward(self, qkv, part, scale):
        q, *_ = qkv
        self.calls["forward"] += 1
        assert {part.cu_queries.device, part.cu_keys.device} == {CARD}
        return torch.empty_like(q), q.new_empty(q.shape[1], len(q), dtype=torch.float32)

    def backward(self, grad, qkv, out, lse, part, scale):
        self.calls["backward"] += 1
        return tuple(map(torch.empty_like, qkv))


def varlen(q, k, v, cu_q, cu_k, max_q, max_k, **how):
    assert isinstance(max_q, int) and isinstance(max_k, int)
    return q + 0 * (k.sum() + v.sum() + cu_q.sum() + cu_k.sum())


def traffic(kernel, family="llama", checkpointing=False):
    """What a forward of a row with two groups of two levels, and its backward, copy and wait for."""
    model = ready_to_pack(tiny.model(family), outputs=("log_probs", "entropy"))
    model.to(CARD).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    given = batch((30, (6, 9, 4)), (17, (5, 5)))
    flat = unpad(given.input_ids, given.attention_mask, given.width)
    rows = plan(flat, True)
    assert len(rows) == 1
    with pytest.MonkeyPatch.context() as patch, Traffic() as seen:
        patch.setattr(torch, "is_autocast_enabled", lambda *_: False)  # which does not know the stand-in
        patch.setattr(attention, "choose_kernel", lambda *_, **__: kernel)
        patch.setattr(kernels, "call_varlen_attn", varlen)
        score(model, flat, rows, CARD).logps.sum().backward()
    return seen


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "mistral_window"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_forward_by_copies_never_waits_for_the_card(checkpointing, family):
    seen = traffic(kernels.varlen_attention, family, checkpointing)
    assert not seen.waits and not seen.copies["waited for"]
    assert seen.copies["asynchronous"] <= MOST_COPIES["copies"], "recomputing a layer copies nothing"


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_merged_forward_never_waits_for_the_card_and_calls_attention_once_a_level(checkpointing):
    kernel = OnCard()
    seen = traffic(partial(merged_attention, kernel=kernel), checkpointing=checkpointing)
    assert not seen.waits and not seen.copies["waited for"]
    assert seen.copies["asynchronous"] <= MOST_COPIES["merged"]
    # Each segment on itself, and the prompts of all groups in one call.
    assert kernel.calls == {"forward": 2 * LAYERS * (1 + checkpointing), "backward": 2 * LAYERS}


def test_only_packed_forwards_leave_out_the_search_of_positions():
    attention.dispatch_on_segments("sdpa")
    find, positions = masking_utils.find_packed_sequence_indices, torch.tensor([[0, 1, 2, 0, 1]])
    assert find(positions).tolist() == [[0, 0, 0, 1, 1]]
    with attention.packed_forward():
        assert find(positions) is None
    assert masking_utils.find_packed_sequence_indices is find, "it is replaced once"


def test_the_head_makes_no_logits_of_all_tokens_and_words_and_keeps_none():
    vocab = 6000
    model = ready_to_pack(tiny.model("llama", vocab_size=vocab), outputs=("log_probs", "entropy")).train()
    given = batch((30, (6, 9, 4)), (17, (5, 5)))
    flat = unpad(given.input_ids, given.attention_mask, given.width)
    kept = []
    with Traffic() as seen, torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape) or x, lambda x: x):
        score(model, flat, plan(flat, True), torch.device("cpu")).logps.sum().backward()
    assert any(shape[-1:] == (2048,) for shape in seen.shapes), "a tile of the vocabulary"
    assert {shape for shape in seen.shapes if vocab in shape} <= {(vocab, 64), (64, vocab)}
    assert [shape for shape in kept if vocab in shape] == [(vocab, 64)], "the weights alone"
