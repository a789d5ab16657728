"""Pairs in a flat row: what is shared, which token is scored, and that its score is the model's own."""

import random

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tests import tiny
from tests.preferences import reward_model
from trl_ext.errors import PackingError
from trl_ext.packing.attention import take_segments
from trl_ext.packing.ulysses import SequenceGroup
from trl_ext.trainers.forward.pairs import (
    SHARED,
    num_shared_tokens,
    num_tokens_of_pair,
    pair_row,
    sides,
)
from trl_ext.trainers.forward.pooled_head import add_pooled_head, pooled_scores, scored_token, tokens_here

torch.set_num_threads(1)

SCORE_TOLERANCE = 1e-5
PAD, EOS = 0, 2


def scores_of(model, row):
    return pooled_scores(model, row.flat, row.pool_index)


def pair(chosen, rejected, **columns):
    return {"chosen_ids": chosen, "rejected_ids": rejected, **columns}


def ragged(count: int, seed: int = 0):
    """Pairs that end in EOS; sides share 0 to 12 tokens and have 0 to 8 of their own before it."""
    draw = random.Random(seed)

    def tokens(most):
        return [draw.randrange(3, tiny.VOCAB) for _ in range(draw.randrange(most + 1))]

    prompts = [tokens(12) for _ in range(count)]
    return [pair([*prompt, *tokens(8), EOS], [*prompt, *tokens(8), EOS]) for prompt in prompts]


RAGGED = ragged(12)
# Where the rule for the scored token has to look closely, with the pad tokens to look at it with.
CORNERS = {
    "own tokens of one side are all EOS": pair([5, 6, EOS], [5, 6, 7, EOS]),
    "own tokens of both sides are all EOS": pair([5, 6, EOS], [5, 6, EOS, EOS]),
    "a side of EOS alone": pair([EOS], [5, EOS]),
    "nothing but EOS": pair([EOS, EOS], [EOS, EOS, EOS]),
    "several EOS at the end": pair([5, 6, 7, EOS, EOS], [5, 6, 8, EOS]),
    "EOS in the middle": pair([5, EOS, 7, EOS], [5, EOS, 8, 9]),
    "no EOS": pair([5, 6, 7], [5, 6, 8, 9]),
    "a side that is the other's beginning": pair([5, 6], [5, 6, 7]),
    "identical sides": pair([5, 6, 7, EOS], [5, 6, 7, EOS]),
    "nothing in common": pair([5, EOS], [6, 7, EOS]),
    "the pad token in the text": pair([5, PAD, 7, PAD], [5, PAD, PAD]),
}


def stock_rule(side, pad_token_id) -> int:
    """transformers' GenericForSequenceClassification.forward, for one sequence."""
    if pad_token_id is None:
        return len(side) - 1
    is_text = (torch.tensor(side) != pad_token_id).to(torch.int32)
    return int((torch.arange(len(side), dtype=torch.int32) * is_text).argmax())


def seen_from(row, index: int) -> list[int]:
    """The tokens that row index `index` attends to, itself included and last."""
    ids = row.flat.input_ids[0].tolist()
    (segment,) = (s for s in row.flat.table.segments if s.start <= index < s.end)
    assert row.flat.position_ids[0, index] == segment.offset + index - segment.start
    seen = ids[segment.start : index + 1]
    while segment.parent is not None:
        segment = row.flat.table.segments[segment.parent]
        seen = ids[segment.start : segment.end] + seen
    return seen


# Shared tokens ----------------------------------------------------------------------------------------------------


def shared_by_a_loop(chosen, rejected) -> int:
    count = 0
    for one, other in zip(chosen[:-1], rejected[:-1], strict=False):
        if one != other:
            break
        count += 1
    return count


@pytest.mark.parametrize("seed", range(20))
def test_shared_tokens_are_those_that_a_loop_counts(seed):
    draw = random.Random(seed)
    for _ in range(100):
        # Few token ids, so that sides often agree by chance after the first difference.
        common, one, other = ([draw.randrange(3) for _ in range(draw.randrange(12))] for _ in range(3))
        chosen, rejected = common + one, common + other
        for left, right in ((chosen, rejected), (chosen, list(chosen)), (common, chosen), (rejected, common)):
            assert num_shared_tokens(left, right) == shared_by_a_loop(left, right), (left, right)


@pytest.mark.parametrize(
    ("chosen", "rejected", "shared"),
    [
        ([1, 2, 3], [1, 2, 4], 2),
        ([1, 2, 3], [1, 2, 3], 2),  # identical: the last token stays each side's own
        ([1, 2], [1, 2, 3], 1),  # a beginning of the other one, too
        ([1, 2, 3], [1, 2], 1),
        ([1], [1], 0),
        ([1, 2, 3], [4, 2, 3], 0),
        ([], [1, 2], 0),
        ([], [], 0),
    ],
)
def test_every_side_keeps_a_token_of_its_own(chosen, rejected, shared):
    assert num_shared_tokens(chosen, rejected) == shared


def test_the_datasets_count_of_shared_tokens_is_believed():
    known = pair([5, 6, 7, 8], [5, 6, 7, 9], **{SHARED: 1})
    assert num_tokens_of_pair(known, share_prompt=True) == 7
    assert pair_row([known], True, PAD).flat.num_tokens == 7


# Rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share_prompt", [True, False])
@pytest.mark.parametrize("pad_token_id", [PAD, EOS, None])
@pytest.mark.parametrize("corner", CORNERS)
def test_the_scored_token_is_the_one_that_transformers_scores(corner, pad_token_id, share_prompt):
    # Not alone in its row: indices are those of the row, not of the pair.
    examples = [RAGGED[0], CORNERS[corner], RAGGED[1]]
    row = pair_row(examples, share_prompt, pad_token_id)
    assert len(row.pool_index) == 6
    for side, index in zip(sides(examples), row.pool_index.tolist(), strict=True):
        assert scored_token(side, pad_token_id) == stock_rule(side, pad_token_id)
        assert seen_from(row, index) == side[: stock_rule(side, pad_token_id) + 1]


@pytest.mark.parametrize("share_prompt", [True, False])
@pytest.mark.parametrize("pad_token_id", [PAD, EOS])
@pytest.mark.parametrize("seed", range(5))
def test_the_scored_tokens_of_ragged_pairs_see_their_side_and_nothing_else(seed, pad_token_id, share_prompt):
    examples = ragged(12, seed)
    row = pair_row(examples, share_prompt, pad_token_id)
    for side, index in zip(sides(examples), row.pool_index.tolist(), strict=True):
        assert seen_from(row, index) == side[: stock_rule(side, pad_token_id) + 1]


def test_a_shared_beginning_is_in_the_row_once():
    row = pair_row([pair([5, 6, 7, 8], [5, 6, 9])], True, PAD)
    assert row.flat.input_ids.tolist() == [[5, 6, 7, 8, 9]]
    assert row.flat.position_ids.tolist() == [[0, 1, 2, 3, 2]]
    assert row.pool_index.tolist() == [3, 4]


def test_without_sharing_every_side_is_in_the_row_whole():
    row = pair_row([pair([5, 6, 7, 8], [5, 6, 9])], False, PAD)
    assert row.flat.input_ids.tolist() == [[5, 6, 7, 8, 5, 6, 9]]
    assert row.flat.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    assert row.pool_index.tolist() == [3, 6]


def test_chosen_sides_are_scored_before_rejected_ones():
    row = pair_row([pair([5], [6]), pair([7], [8])], True, PAD)
    assert row.flat.input_ids[0, row.pool_index].tolist() == [5, 7, 6, 8]


@pytest.mark.parametrize("share_prompt", [True, False])
def test_a_pair_is_measured_as_the_row_lays_it(share_prompt):
    for example in [*RAGGED, *CORNERS.values()]:
        assert pair_row([example], share_prompt, PAD).flat.num_tokens == num_tokens_of_pair(example, share_prompt)


def test_token_counts_of_a_row():
    row = pair_row([pair([5, 6, 7, 8], [5, 6, 9]), pair([3], [4])], True, PAD)
    assert (row.num_pairs, row.flat.num_tokens) == (2, 7)
    assert row.num_raw_tokens == 4 + 3 + 1 + 1
    assert row.num_padded_tokens == 4 * 4


def test_margins_are_one_float_a_pair():
    row = pair_row([pair([5], [6], margin=1), pair([7], [8], margin=0.5)], True, PAD)
    assert torch.equal(row.margins, torch.tensor([1.0, 0.5]))
    assert pair_row([pair([5], [6])], True, PAD).margins is None


def test_a_row_without_pairs_is_one_token_that_nobody_scores():
    row = pair_row([], True, PAD)
    assert row.flat.num_tokens == 1
    assert row.pool_index.shape == (0,) and row.pool_index.dtype == torch.long
    assert (row.num_pairs, row.num_raw_tokens, row.num_padded_tokens) == (0, 0, 0)
    assert row.margins is None


def test_a_row_moves_to_a_device_whole():
    row = pair_row([pair([5, 6, 7], [5, 6, 8], margin=1.0), RAGGED[0] | {"margin": 0.0}], True, PAD)
    moved = row.to("meta")
    table = moved.flat.table
    tensors = (moved.flat.input_ids, moved.flat.position_ids, moved.pool_index, moved.margins)
    for tensor in (*tensors, table.copies.index, table.cu_seqlens, table.copies.cu_seqlens):
        assert tensor.device.type == "meta"
    assert moved.examples is row.examples and table.segments == row.flat.table.segments
    assert row.pool_index.device.type == "cpu"


# Scores -----------------------------------------------------------------------------------------------------------


def scores_alone(model, examples) -> torch.Tensor:
    """[2N, 1] transformers' own forward of every side by itself."""
    with torch.no_grad():
        return torch.cat([model(input_ids=torch.tensor([side]), use_cache=False).logits for side in sides(examples)])


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    """A tiny reward model of a family as transformers makes it; one a family."""
    made = {}

    def make(family):
        if family not in made:
            made[family] = reward_model(tmp_path_factory.mktemp(family), family).eval()
        made[family].config.get_text_config().pad_token_id = PAD
        return made[family]

    return make


@pytest.mark.parametrize("share_prompt", [True, False])
@pytest.mark.parametrize("pad_token_id", [PAD, EOS])
@pytest.mark.parametrize("family", tiny.PACKABLE)
def test_packed_scores_are_those_of_every_side_alone(family, pad_token_id, share_prompt, model_of):
    model = model_of(family)
    model.config.get_text_config().pad_token_id = pad_token_id
    examples = [*RAGGED, *CORNERS.values()]
    expected = scores_alone(model, examples)
    assert expected.std() > 1000 * SCORE_TOLERANCE, "all scores are alike, so nothing is compared"
    add_pooled_head(model)
    take_segments(model.config)
    with torch.no_grad():
        packed = scores_of(model, pair_row(examples, share_prompt, pad_token_id))
    assert packed.shape == expected.shape
    assert (packed - expected).abs().max() <= SCORE_TOLERANCE


@pytest.mark.parametrize("family", tiny.PACKABLE)
def test_a_row_without_pairs_has_no_score_and_reaches_every_layer_with_a_gradient_of_zero(family, model_of):
    """A surplus forward must take part in the collectives of ZeRO-3 and DDP, and change nothing."""
    model = model_of(family)
    add_pooled_head(model)
    take_segments(model.config)
    scores = scores_of(model, pair_row([], True, PAD))
    scores.sum().backward()
    assert scores.shape == (0, 1)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    assert all(gradient is not None and not gradient.any() for gradient in gradients.values())


# Head -------------------------------------------------------------------------------------------------------------


def test_without_pool_index_a_model_is_what_it_was(model_of):
    model = model_of("llama")
    padded = dict(input_ids=torch.tensor([[5, 6, 7], [8, 9, 0]]), attention_mask=torch.tensor([[1, 1, 1], [1, 1, 0]]))
    plain = AutoModelForSequenceClassification.from_config(model.config, dtype=torch.float32).eval()
    plain.load_state_dict(model.state_dict())
    add_pooled_head(model)
    labels = torch.tensor([[0.5], [1.0]])
    with torch.no_grad():
        before, after = (m(**padded, labels=labels) for m in (plain, model))
    assert torch.equal(before.logits, after.logits) and torch.equal(before.loss, after.loss)


def test_the_head_is_added_once(model_of):
    model = model_of("llama")
    add_pooled_head(model)
    forward = model.forward
    add_pooled_head(model)
    assert model.forward == forward


def test_a_model_without_score_layer_is_refused_by_name():
    with pytest.raises(PackingError, match="LlamaForCausalLM has no layer `score`"):
        add_pooled_head(tiny.model("llama"))


def test_each_score_is_made_by_one_process_of_a_group():
    row = pair_row(ragged(9), share_prompt=True, pad_token_id=PAD)
    groups = [SequenceGroup(4, rank) for rank in range(4)]
    made = [tokens_here(row.flat, row.pool_index, group) for group in groups]
    assert sorted(torch.cat(made).tolist()) == list(range(18))
    for group, here in zip(groups, made, strict=True):
        part = row.flat.part(group)
        places = row.pool_index[here] - group.rank * part.num_tokens
        assert torch.equal(part.input_ids[0, places], row.flat.input_ids[0, row.pool_index[here]])
