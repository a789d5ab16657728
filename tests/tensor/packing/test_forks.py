"""Rows that fork at random places share what they begin with, completions included, and score and learn as alone."""

import pytest
import torch

from tests import tiny
from tests.batches import RAGGED, Batch, forked, gradient, padded, ready_to_pack
from trl_ext.packing import attention
from trl_ext.packing.layout import lay_out
from trl_ext.packing.plan import MIN_SAVED
from trl_ext.packing.ulysses import SequenceGroup
from trl_ext.trainers.forward.value_head import add_value_head
from trl_ext.trainers.step.score import score
from trl_ext.trainers.step.unpadded import plan, unpad

torch.set_num_threads(1)
CPU = torch.device("cpu")
SEEDS = range(20)
LOGP_TOLERANCE, GRADIENT_TOLERANCE = 5e-6, 2e-6  # absolute and relative: those of the trainers' exactness tests


def merging_is_exact(num_tokens: int, num_keys: int, longest: int, window: int | None) -> bool:
    return window is None or longest <= window


def unique_tokens(given: Batch) -> int:
    """Tokens of the rows if each common beginning were forwarded once, whatever it saves."""
    return len({(prompt + own)[: end + 1] for prompt, own in given.rows for end in range(len(prompt + own))})


def model_of(family: str) -> torch.nn.Module:
    """A model with a value head that is not zero."""
    model = ready_to_pack(tiny.model(family).eval(), outputs=("log_probs", "entropy"), temperature=0.7)
    torch.nn.init.normal_(add_value_head(model).weight, std=0.1, generator=torch.Generator().manual_seed(1))
    return model


def scored(model, given, max_tokens):
    """Log-probabilities, entropies and values [3, B, C], and the gradient of their weighted sum."""
    flat = unpad(given.input_ids, given.attention_mask, given.width)
    result = score(model, flat, plan(flat, True, max_tokens), CPU, compute_entropy=True)
    found = torch.stack([result.logps, result.entropies, result.values])
    draw = torch.Generator().manual_seed(2)
    weights = torch.randn(found.shape, generator=draw)
    return found.detach(), gradient(model, (found * weights).sum())


def scored_alone(model, given):
    rows = [scored_one(model, prompt, own, given.width) for prompt, own in given.rows]
    found = torch.stack(rows, dim=1)
    draw = torch.Generator().manual_seed(2)
    weights = torch.randn(found.shape, generator=draw)
    return found.detach(), gradient(model, (found * weights).sum())


def scored_one(model, prompt, own, width):
    ids = torch.tensor([prompt + own])
    labels = ids.clone()
    labels[:, : len(prompt)] = -100
    out = model(input_ids=ids, labels=labels, fused_lm_head=True)
    values = out.token_values[0, len(prompt) - 1 : -1]
    found = [out.log_probs[0, -len(own) :], out.entropy[0, -len(own) :], values]
    return torch.nn.functional.pad(torch.stack(found), (0, width - len(own)))


@pytest.mark.parametrize("merges", [True, False], ids=["merged", "copied"])
@pytest.mark.parametrize("family", ["llama", "mistral_window"])
def test_forks_at_random_places_score_and_learn_as_each_row_alone(family, merges, monkeypatch):
    monkeypatch.setattr(attention, "merging_pays", lambda *sizes: merges and merging_is_exact(*sizes))
    model = model_of(family)
    shared = 0
    for seed in SEEDS:
        given = forked(seed)
        expected, expected_gradient = scored_alone(model, given)
        for max_tokens in (None, 90):
            found, ours = scored(model, given, max_tokens)
            assert (found - expected).abs().max() <= LOGP_TOLERANCE
            assert (ours - expected_gradient).norm() <= GRADIENT_TOLERANCE * expected_gradient.norm()
        whole = unpad(given.input_ids, given.attention_mask, given.width)
        (row,) = plan(whole, True)
        packed = lay_out(row, whole.sequences, whole.num_scored)
        shared += len(packed.source) - len(packed.before)
        assert unique_tokens(given) <= row.num_tokens
    assert shared > 10 * len(SEEDS), "scored tokens that several rows have in common"


def of_rows(packed) -> dict:
    """Label by sequence and place among its scored tokens."""
    labels = packed.labels[packed.source_index].tolist()
    places = zip(packed.scored_item.tolist(), packed.scored_offset.tolist(), strict=True)
    return dict(zip(places, labels, strict=True))


def test_every_scored_token_of_every_row_has_its_label_in_the_row_and_in_its_parts():
    for given in (*map(forked, SEEDS), RAGGED):
        flat = unpad(given.input_ids, given.attention_mask, given.width)
        expected = {(i, k): token for i, (_, own) in enumerate(given.rows) for k, token in enumerate(own)}
        for row in plan(flat, True, 90):
            packed = lay_out(row, flat.sequences, flat.num_scored)
            assert (packed.before[1:] > packed.before[:-1]).all()
            parts = [of_rows(packed.part(SequenceGroup(3, rank))) for rank in range(3)]
            assert of_rows(packed) == {place: label for part in parts for place, label in part.items()}
            assert len(of_rows(packed)) == sum(map(len, parts))
            for place, label in of_rows(packed).items():
                assert expected.pop(place) == label
        assert not expected


def test_what_a_common_beginning_is_worth():
    prompt, long = tuple(range(3, 12)), tuple(range(20, 20 + MIN_SAVED))
    # The last common token stays with each row, since it predicts what they part with.
    for own, num_tokens in (
        ((long, long), 9 + MIN_SAVED - 1 + 2),  # equal rows
        ((long, (*long, 5, 6)), 9 + MIN_SAVED - 1 + 1 + 3),  # one is the beginning of the other
        (((*long, 5), (*long, 6)), 9 + MIN_SAVED - 1 + 2 * 2),
        (((*long[:-8], 5), (*long[:-8], 6)), 9 + MIN_SAVED - 8 - 1 + 2 * 2),  # of one group: whatever it saves
        (((*long[:9], 5), (*long[:9], 6), (7, 8)), 8 + 2 * 11 + 3),  # one more level would save 9 tokens
    ):
        given = padded([(prompt, one) for one in own])
        flat = unpad(given.input_ids, given.attention_mask, given.width)
        assert [row.num_tokens for row in plan(flat, True)] == [num_tokens]
        assert plan(flat, False)[0].num_tokens == len(flat.sequences.tokens)
    # A turn whose prompt is another row with its completion.
    given = padded([(prompt, long), ((*prompt, *long, 5), (6, 7))])
    flat = unpad(given.input_ids, given.attention_mask, given.width)
    assert plan(flat, True)[0].num_tokens == 9 + MIN_SAVED - 1 + 1 + 4
