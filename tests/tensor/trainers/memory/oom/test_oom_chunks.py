"""Halves of a micro-batch hold its rows once each, and their shares make its loss."""

from types import SimpleNamespace

import pytest
import torch

from trl_ext.trainers.forward.pairs import pair_row
from trl_ext.trainers.memory.oom.chunks import CompletionChunks, PairChunks, cut
from trl_ext.trainers.memory.oom.errors import asked_gib, is_out_of_memory

MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1], [0, 0, 0]])


def completions(loss_type: str = "dapo") -> CompletionChunks:
    args = SimpleNamespace(loss_type=loss_type, per_device_train_batch_size=5, gradient_accumulation_steps=3)
    return CompletionChunks(args)


def batch() -> dict:
    return {
        "prompt_mask": torch.ones(5, 2),
        "completion_ids": torch.arange(15).view(5, 3),
        "completion_mask": MASK,
        "advantages": torch.arange(5.0),
        "num_items_in_batch": torch.tensor(9),
        "tools": list("abcde"),
        "old_per_token_logps": None,
    }


@pytest.mark.parametrize("halvings", range(5))
def test_every_row_lands_in_exactly_one_chunk(halvings):
    parts = cut(completions(), batch(), halvings)
    assert len(parts) == min(2**halvings, 5)
    assert [row for part in parts for row in part["tools"]] == list("abcde")
    assert torch.cat([part["advantages"] for part in parts]).tolist() == [0, 1, 2, 3, 4]
    assert all(part["num_items_in_batch"] == 9 and part["old_per_token_logps"] is None for part in parts)


def loss(loss_type: str, chunk: dict) -> torch.Tensor:
    """TRL's three normalisations."""
    mask = chunk["completion_mask"]
    per_token = chunk["completion_ids"] * mask
    if loss_type == "dapo":
        return per_token.sum() / chunk["num_items_in_batch"]
    if loss_type == "bnpo":
        return per_token.sum() / mask.sum().clamp(min=1.0)
    return (per_token.sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()


@pytest.mark.parametrize("halvings", [1, 2, 3])
@pytest.mark.parametrize("loss_type", ["dapo", "bnpo", "grpo"])
def test_shares_make_the_loss_of_the_whole(loss_type, halvings):
    chunks, whole = completions(loss_type), batch()
    total = sum(chunks.share(p, whole) * loss(loss_type, p) for p in cut(chunks, whole, halvings))
    torch.testing.assert_close(total, loss(loss_type, whole))


def test_tokens_of_tools_count_in_no_mean():
    chunks, whole = completions("bnpo"), batch() | {"tool_mask": torch.zeros(5, 3)}
    whole["tool_mask"][0] = 1
    shares = [float(chunks.share(p, whole)) for p in chunks.halves(whole)]
    assert shares == pytest.approx([1.0, 1 / 3])  # of nothing, which TRL divides by 1


def test_the_advice_keeps_the_rows_of_an_optimizer_step():
    args = SimpleNamespace(loss_type="dapo", per_device_train_batch_size=8, gradient_accumulation_steps=3)
    wanted = "per_device_train_batch_size=2 and gradient_accumulation_steps=12"
    assert CompletionChunks(args).advice(4) == wanted


def test_a_mean_over_the_tokens_of_a_micro_batch_gets_no_advice():
    assert completions("bnpo").advice(2) == ""


def row(*examples) -> dict:
    return {"rows": [make(examples)]}


def make(examples):
    return pair_row(examples, share_prompt=True, pad_token_id=0)


PAIRS = [{"chosen_ids": [5, 6, 7 + i], "rejected_ids": [5, 8, 9, 3 + i]} for i in range(3)]


def pair_chunks(fills: bool, is_mean: bool = True) -> PairChunks:
    args = SimpleNamespace(max_tokens_per_forward=64)
    return PairChunks(args, make, fills, is_mean)


def test_a_rows_pairs_are_split():
    parts = pair_chunks(fills=False).halves(row(*PAIRS))
    assert [[e["chosen_ids"][-1] for e in p["rows"][0].examples] for p in parts] == [[7, 8], [9]]


def test_where_ranks_hold_different_numbers_there_are_always_two_halves():
    parts = pair_chunks(fills=True).halves(row(PAIRS[0]))
    assert [p["rows"][0].num_pairs for p in parts] == [1, 0]
    assert [p["rows"][0].num_pairs for p in pair_chunks(fills=True).halves(row())] == [0, 0]


def test_a_mean_over_pairs_is_shared_by_pairs_and_a_sum_is_not():
    whole = row(*PAIRS)
    for is_mean, expected in ((True, [2 / 3, 1 / 3]), (False, [1.0, 1.0])):
        chunks = pair_chunks(fills=False, is_mean=is_mean)
        assert [chunks.share(part, whole) for part in chunks.halves(whole)] == expected


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("anything"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)"), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("CUDA out of memory."), False),
    ],
)
def test_allocators_errors_are_told_from_others(error, expected):
    assert is_out_of_memory(error) is expected


def test_what_was_asked_for_is_read_in_gib():
    assert asked_gib("CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0") == 0.5
    assert asked_gib("MPS backend out of memory") is None
