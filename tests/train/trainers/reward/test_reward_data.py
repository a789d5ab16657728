"""Preference pairs on their way to a reward model: TRL's tokens, sides that are too long, streams."""

import random
from functools import cache

import pytest
import torch
import trl
from datasets import Dataset

import trl_ext
from tests import tiny
from tests.nightly import daily, nightly
from tests.preferences import pairs, reward_model
from tests.reward_trainers import PAIRS, trainer, warnings_of, weights
from trl_ext.errors import ConfigError, DataError, PackingError
from trl_ext.trainers.forward.pairs import SHARED, num_shared_tokens

WEIGHT_TOLERANCE = 1e-6
BOS, EOS = 1, 2


def ids_of(dataset) -> list[tuple[list[int], list[int]]]:
    return [(row["chosen_ids"], row["rejected_ids"]) for row in dataset]


def turn(role, text):
    return [{"role": role, "content": text.strip()}]


def with_implicit(row):
    return {name: row["prompt"] + row[name] for name in ("chosen", "rejected")}


def conversational(row):
    sides = {name: turn("assistant", row[name]) for name in ("chosen", "rejected")}
    return {"prompt": turn("user", row["prompt"]), **sides}


def implicit_conversational(row):
    return {name: turn("user", row["prompt"]) + turn("assistant", row[name]) for name in ("chosen", "rejected")}


FORMS = {
    "explicit prompt": dict,
    "implicit prompt": with_implicit,
    "messages, explicit prompt": conversational,
    "messages, implicit prompt": implicit_conversational,
}


@cache
def in_form(form: str, count: int = 8) -> Dataset:
    return Dataset.from_list([FORMS[form](row) for row in pairs(count)])


def pretokenised(count: int = 8, seed: int = 0) -> Dataset:
    """Pairs that begin with BOS and a shared prompt, and end with EOS; lengths from 4 to 60 tokens."""
    draw = random.Random(seed)

    def tokens(most):
        return [draw.randrange(3, tiny.VOCAB) for _ in range(draw.randrange(1, most))]

    rows = []
    for _ in range(count):
        prompt = [BOS, *tokens(40)]
        # The answers differ in their first token, so that the prompt is all that the sides share.
        rows.append({"chosen_ids": [*prompt, 3, *tokens(18), EOS], "rejected_ids": [*prompt, 4, *tokens(18), EOS]})
    return Dataset.from_list(rows)


# Tokens -----------------------------------------------------------------------------------------------------------


def test_the_tokens_are_trls_and_those_that_the_sides_share_are_counted(subtests, tmp_path):
    found = {}
    for form in FORMS:
        with subtests.test(form):
            dataset = in_form(form)
            theirs, ours = trainer(tmp_path, dataset, trl).train_dataset, trainer(tmp_path, dataset).train_dataset
            found[form] = ids_of(ours)
            assert found[form] == ids_of(theirs)
            stream = trainer(tmp_path, dataset.to_iterable_dataset(), max_steps=1).train_dataset
            assert ids_of(stream) == found[form]
            assert list(ours[SHARED]) == [num_shared_tokens(*sides) for sides in found[form]]
            assert max(ours[SHARED]) > 1
    for start in ("", "messages, "):
        assert found[f"{start}explicit prompt"] == found[f"{start}implicit prompt"]


def test_pretokenised_pairs_stay_as_they_are_and_may_carry_their_old_names(tmp_path):
    dataset = pretokenised()
    assert ids_of(trainer(tmp_path, dataset).train_dataset) == ids_of(dataset)
    renamed = dataset.rename_columns({f"{side}_ids": f"{side}_input_ids" for side in ("chosen", "rejected")})
    assert ids_of(trainer(tmp_path, renamed).train_dataset) == ids_of(dataset)


@pytest.mark.parametrize(("form", "changes"), [("torch", dict(max_tokens_per_forward=120)), ("numpy", {})])
def test_pairs_may_be_formatted_as_tensors_as_in_trl(form, changes, tmp_path):
    dataset = pretokenised().add_column("margin", [0.5] * 8).with_format(form)
    theirs = trainer(tmp_path, dataset, trl, max_steps=2).train()
    ours = trainer(tmp_path, dataset, max_steps=2, **changes).train()
    assert ours.training_loss == pytest.approx(theirs.training_loss, abs=1e-6)


# Length -----------------------------------------------------------------------------------------------------------


def test_pairs_over_max_length_are_dropped_as_in_trl_and_so_are_prepared_ones(tmp_path):
    dataset = pretokenised(32)
    prepared = trainer(tmp_path, dataset).train_dataset
    assert ids_of(trainer(tmp_path, prepared).train_dataset) == ids_of(prepared)
    for given in (dataset, prepared):
        theirs, ours = trainer(tmp_path, given, trl, max_length=30), trainer(tmp_path, given, max_length=30)
        assert 0 < len(theirs.train_dataset) < 32
        assert ids_of(ours.train_dataset) == ids_of(theirs.train_dataset)


def test_dropped_pairs_are_counted_in_one_warning_for_each_dataset(tmp_path, caplog):
    dataset = pretokenised(32)
    subject = trainer(tmp_path, dataset, max_length=30, eval_dataset=dataset.select(range(16)))
    dropped = (32 - len(subject.train_dataset), 16 - len(subject.eval_dataset))
    of_train, of_eval = warnings_of(caplog)
    assert f"train_dataset: {dropped[0]} of 32 pairs have a side longer than max_length=30 tokens" in of_train
    assert f"eval_dataset: {dropped[1]} of 16 pairs have a side longer than max_length=30 tokens" in of_eval


# Streams ----------------------------------------------------------------------------------------------------------


def trained(tmp_path, dataset, library=trl_ext, **changes) -> torch.Tensor:
    """Weights after four steps."""
    subject = trainer(tmp_path, dataset, library, max_steps=4, **changes)
    before = weights(subject)
    subject.train()
    after = weights(subject)
    assert (after - before).abs().max() > 1e-4, "nothing was learned, so nothing is compared"
    return after


WAYS = [{}, dict(max_tokens_per_forward=120), dict(packing=False)]


# A pair over the budget gets a forward of its own.
STREAMED = [nightly({}, 2), (WAYS[1], 2), nightly(WAYS[2], 1), (dict(max_tokens_per_forward=20), 1)]


@pytest.mark.parametrize(("changes", "accumulation"), STREAMED, ids=str)
def test_steps_on_a_stream_are_trls(changes, accumulation, tmp_path):
    stream = pairs(32, margin=True).to_iterable_dataset()
    settings = dict(gradient_accumulation_steps=accumulation)
    ours, theirs = trained(tmp_path, stream, **settings, **changes), trained(tmp_path, stream, trl, **settings)
    assert (ours - theirs).abs().max() <= WEIGHT_TOLERANCE


def test_a_stream_is_fitted_to_length_as_a_dataset_is(tmp_path):
    dataset = pretokenised(32)
    found = [
        ids_of(trainer(tmp_path, d, max_length=30, max_steps=1).train_dataset)
        for d in (dataset, dataset.to_iterable_dataset())
    ]
    assert found[0] == found[1]


# Loading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", daily(WAYS[:2], WAYS[1]), ids=str)
def test_worker_processes_load_the_same_rows_and_columns_that_are_not_removed_are_harmless(changes, tmp_path):
    dataset = pairs(16).add_column("source", ["web"] * 16)
    ways = ({}, dict(dataloader_num_workers=1), dict(remove_unused_columns=False))
    alone, loaded, kept = (trained(tmp_path, dataset, **way, **changes) for way in ways)
    assert torch.equal(alone, loaded) and torch.equal(alone, kept)


# What is refused before the first step -------------------------------------------------------------------------------


def tokens(chosen=(5, 6, 2), rejected=(5, 7, 2)):
    return {"chosen_ids": list(chosen), "rejected_ids": list(rejected)}


def test_a_pair_over_the_budget_is_refused_with_its_row_and_the_number_to_set(tmp_path):
    rows = [tokens(), tokens(range(5, 25)), tokens(range(5, 15)), tokens((5, 6, 7, 8))]
    words = r"max_tokens_per_forward=10 is smaller than 2 of 4 pairs of train_dataset; "
    # 20 + 3 - 1 shared, 10 + 3 - 1 shared.
    words += r".*row 1 with 22 tokens, the longest has 22\. Set it to at least 22"
    with pytest.raises(DataError, match=words):
        trainer(tmp_path, rows, max_tokens_per_forward=10)


def test_a_budget_of_exactly_the_longest_pair_is_enough(tmp_path):
    trainer(tmp_path, [tokens(), tokens(range(5, 15))], max_tokens_per_forward=12)
    # A pair that needs its prompt twice needs more.
    with pytest.raises(DataError, match="row 1 with 13 tokens"):
        trainer(tmp_path, [tokens(), tokens(range(5, 15))], max_tokens_per_forward=12, share_prompt=False)


BALANCED = dict(max_tokens_per_forward=128, train_sampling_strategy="batch_rebalance")


def test_settings_that_contradict_each_other_are_refused(subtests, tmp_path):
    collates = dict(data_collator=trl.trainer.reward_trainer.DataCollatorForPreference(pad_token_id=0))
    for changes, error, sentence in (
        (dict(max_tokens_per_forward=1), ConfigError, "max_tokens_per_forward=1: a forward cannot hold a row"),
        (BALANCED, ConfigError, "balances lengths itself"),
        (
            collates | dict(max_tokens_per_forward=128),
            ConfigError,
            "max_tokens_per_forward plans the batches: remove it or the data_coll",
        ),
        (
            collates | dict(packing=True),
            PackingError,
            "packing=True, but .* cannot be packed: a data_collator is",
        ),
        (dict(accelerator_config={"dispatch_batches": True}), ConfigError, "dispatch_batches=True cuts padded"),
    ):
        with subtests.test(sentence), pytest.raises(error, match=sentence):
            trainer(tmp_path, **changes)


@pytest.mark.parametrize("changes", daily(WAYS, WAYS[1]), ids=str)
def test_grouping_by_length_is_trls(changes, tmp_path):
    dataset = pairs(24).add_column("length", [7 * i % 24 for i in range(24)])
    settings = dict(train_sampling_strategy="group_by_length", remove_unused_columns=False, max_steps=3)
    theirs = trainer(tmp_path, dataset, trl, **settings).train()
    ours = trainer(tmp_path, dataset, **settings, **changes).train()
    assert ours.training_loss == pytest.approx(theirs.training_loss, abs=1e-6)


def test_nothing_is_written_into_the_users_dataset(tmp_path):
    before = PAIRS.column_names
    trainer(tmp_path)
    assert PAIRS.column_names == before


def test_what_is_refused_is_refused_before_the_model_is_switched(tmp_path):
    model = reward_model(tmp_path)
    with pytest.raises(DataError):
        trainer(tmp_path, [tokens(())], model=model)
    assert model.config._attn_implementation == "sdpa"
