"""Pairs and settings that a reward model cannot be trained with: a sentence before the first step."""

import math

import pytest
import torch
import trl
from datasets import Dataset, IterableDataset
from transformers import AutoModelForSequenceClassification

from tests import tiny
from tests.preferences import pairs, reward_model
from tests.reward_trainers import PAIRS, trainer
from trl_ext.errors import ConfigError, DataError, PackingError

torch.set_num_threads(1)


def plain(chosen="w6", rejected="w7", **columns):
    return {"prompt": "w5 ", "chosen": chosen, "rejected": rejected, **columns}


def turns(*contents):
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def chat(chosen="w6", rejected="w7", **columns):
    return {"chosen": turns("w5", chosen), "rejected": turns("w5", rejected), **columns}


def tokens(chosen=(5, 6, 2), rejected=(5, 7, 2), **columns):
    return {"chosen_ids": list(chosen), "rejected_ids": list(rejected), **columns}


def legacy(chosen=(5, 6, 2), rejected=(5, 7, 2), **columns):
    return {"chosen_input_ids": list(chosen), "rejected_input_ids": list(rejected), **columns}


EMPTY_SIDES = {
    "text": (plain, ""),
    "blank text": (plain, " \n"),
    "missing text": (plain, None),
    "message": (chat, ""),
    "blank message": (chat, "  "),
    "tokens": (tokens, ()),
    "tokens under their old name": (legacy, ()),
}


# Pairs ------------------------------------------------------------------------------------------------------------


def test_an_empty_side_is_refused_with_the_number_of_its_row(subtests, tmp_path):
    sentence = r"train_dataset: row 2 has an empty side\. Drop such pairs: .*filter_pairs"
    for form, (make, nothing) in EMPTY_SIDES.items():
        for side in ("chosen", "rejected"):
            with subtests.test(form, side=side), pytest.raises(DataError, match=sentence):
                trainer(tmp_path, [make(), make(), make(**{side: nothing}), make()])
    with pytest.raises(DataError, match=sentence):
        trainer(tmp_path, [chat(), chat(), chat() | {"rejected": []}])
    with pytest.raises(DataError, match="train_dataset: row 0 has an empty side"):
        trainer(tmp_path, Dataset.from_list([plain(chosen=""), plain()]).to_iterable_dataset(), max_steps=1)


def test_identical_sides_and_margins_that_are_no_numbers_are_refused(subtests, tmp_path):
    for make in (plain, chat, tokens, legacy):
        same = (5, 8, 2) if make in (tokens, legacy) else "w8"
        with subtests.test(make.__name__):
            with pytest.raises(DataError, match="row 1 has a chosen side that equals the rejected one"):
                trainer(tmp_path, [make(), make(chosen=same, rejected=same)])
            for margin in (math.nan, math.inf, None):
                with pytest.raises(DataError, match="row 1 has a margin that is no finite number"):
                    trainer(tmp_path, [make(margin=1.0), make(margin=margin), make(margin=0.0)])


def test_many_bad_rows_are_counted_and_the_first_three_named(tmp_path):
    rows = [plain()] + [plain(chosen=" ")] * 5 + [plain(rejected="w6")]
    with pytest.raises(DataError, match=r"rows 1, 2, 3 and 2 more have an empty side; row 6 has a chosen side that"):
        trainer(tmp_path, rows)


@pytest.mark.parametrize("columns", [("question", "good", "bad"), ("prompt", "completion", "label"), ("chosen",)])
def test_columns_that_make_no_pair_are_refused_with_those_that_do(columns, tmp_path):
    accepted = r"'prompt' and 'chosen' and 'rejected'; 'chosen' and 'rejected'; 'chosen_ids' and 'rejected_ids'"
    with pytest.raises(DataError, match=rf"train_dataset has the columns '\w+'.*{accepted}.*rename_column"):
        trainer(tmp_path, [dict.fromkeys(columns, "w5")])


def test_no_pair_at_all_is_refused(tmp_path):
    with pytest.raises(DataError, match="train_dataset is empty"):
        trainer(tmp_path, Dataset.from_dict({"chosen": [], "rejected": []}))
    with pytest.raises(DataError, match="stream ended before its first row"):
        trainer(tmp_path, IterableDataset.from_generator(lambda: iter(())), max_steps=1)


def test_bad_evaluation_pairs_are_refused_before_training_as_well(tmp_path):
    with pytest.raises(DataError, match="eval_dataset: row 0 has an empty side"):
        trainer(tmp_path, eval_dataset=Dataset.from_list([plain(chosen="")]))
    with pytest.raises(DataError, match=r"eval_dataset.* is empty"):
        trainer(tmp_path, eval_dataset=Dataset.from_dict({"chosen": [], "rejected": []}))


def test_a_bad_one_of_several_evaluation_datasets_is_named(tmp_path):
    good, bad = Dataset.from_list([plain()]), Dataset.from_list([plain(rejected="w6")])
    with pytest.raises(DataError, match=r"math.*: row 0 has a chosen side that equals"):
        trainer(tmp_path, eval_dataset={"chat": good, "math": bad})
    with pytest.raises(DataError, match=r"eval_dataset\['math'\] has the columns 'text'"):
        trainer(tmp_path, eval_dataset={"chat": good, "math": Dataset.from_list([{"text": "w5"}])})


def test_pairs_given_to_evaluate_are_looked_at_as_well(tmp_path):
    subject = trainer(tmp_path)
    with pytest.raises(DataError, match="eval_dataset: row 0 has an empty side"):
        subject.evaluate(Dataset.from_list([plain(chosen="")]))


def test_no_pair_within_max_length_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"8 of 8 pairs have a side longer than max_length=2 tokens, so none is left"):
        trainer(tmp_path, max_length=2)


# Model ------------------------------------------------------------------------------------------------------------


def test_a_model_with_three_labels_is_refused(tmp_path):
    tiny.model("llama").save_pretrained(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    with pytest.raises(ValueError, match=r"`num_labels=3`.*require `num_labels=1`"):
        trainer(tmp_path, model=model)


# Settings ---------------------------------------------------------------------------------------------------------


def test_a_pair_over_the_budget_is_refused_with_its_row_and_the_number_to_set(tmp_path):
    rows = [tokens(), tokens(range(5, 25)), tokens(range(5, 15)), tokens((5, 6, 7, 8))]
    with pytest.raises(DataError, match=r"max_tokens_per_forward=10 is smaller than 2 of 4 pairs of train_dataset; "):
        trainer(tmp_path, rows, max_tokens_per_forward=10)
    # 20 + 3 - 1 shared, 10 + 3 - 1 shared.
    with pytest.raises(DataError, match=r"row 1 with 22 tokens, the longest has 22\. Set it to at least 22"):
        trainer(tmp_path, rows, max_tokens_per_forward=10)


def test_a_budget_of_exactly_the_longest_pair_is_enough(tmp_path):
    trainer(tmp_path, [tokens(), tokens(range(5, 15))], max_tokens_per_forward=12)
    # A pair that needs its prompt twice needs more.
    with pytest.raises(DataError, match="row 1 with 13 tokens"):
        trainer(tmp_path, [tokens(), tokens(range(5, 15))], max_tokens_per_forward=12, share_prompt=False)


def test_a_pair_over_the_budget_is_named_as_the_user_numbers_it(tmp_path):
    """Rows 0 and 2 are dropped for their length, so that the pair's number in what is left is 1."""
    rows = [tokens(range(5, 40)), tokens(), tokens(range(5, 40)), tokens(range(5, 15))]
    with pytest.raises(DataError, match=r"1 of 2 pairs of train_dataset; the first is row 3 with 12 tokens"):
        trainer(tmp_path, rows, max_tokens_per_forward=11, max_length=20)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (dict(max_tokens_per_forward=64, packing=False), "Remove one of the two"),
        (dict(max_tokens_per_forward=1), "cannot hold a pair"),
        (dict(max_length_policy="cut"), "is unknown. Use one of: drop, truncate_prompt"),
        (dict(max_tokens_per_forward=128, train_sampling_strategy="batch_rebalance"), "balances lengths itself"),
    ],
    ids=str,
)
def test_settings_that_contradict_each_other_are_refused(changes, sentence, tmp_path):
    with pytest.raises(ConfigError, match=sentence):
        trainer(tmp_path, **changes)


def test_a_budget_cannot_take_a_data_collator(tmp_path):
    collator = trl.trainer.reward_trainer.DataCollatorForPreference(pad_token_id=0)
    with pytest.raises(ConfigError, match=r"max_tokens_per_forward .*cannot take a data_collator"):
        trainer(tmp_path, data_collator=collator, max_tokens_per_forward=128)


def test_packing_that_is_asked_for_cannot_take_a_data_collator(tmp_path):
    collator = trl.trainer.reward_trainer.DataCollatorForPreference(pad_token_id=0)
    with pytest.raises(PackingError, match=r"packing=True, but .* cannot be packed: a data_collator is given"):
        trainer(tmp_path, data_collator=collator, packing=True)


@pytest.mark.parametrize("changes", [{}, dict(max_tokens_per_forward=130), dict(packing=False)], ids=str)
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
        trainer(tmp_path, [plain(chosen="")], model=model)
    assert model.config._attn_implementation == "sdpa"
