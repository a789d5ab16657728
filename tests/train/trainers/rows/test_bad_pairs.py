"""Forty kinds of bad data for the RewardTrainer: one sentence with row numbers before the first step."""

import math
from functools import partial

import pytest
from datasets import Dataset, Features, IterableDataset, Json, List, Value

from tests import tiny
from tests.preferences import reward_model
from tests.reward_trainers import chat_tokenizer, trainer
from trl_ext.errors import ConfigError, DataError
from trl_ext.trainers.rows.pairs import check_pairs


def text(prompt="w5 ", chosen="w6", rejected="w7", **more):
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, **more}


def turns(*contents):
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def chat(chosen="w6", rejected="w7", **more):
    return {"chosen": turns("w5", chosen), "rejected": turns("w5", rejected), **more}


def tokens(chosen=(5, 6, 2), rejected=(5, 7, 2), **more):
    return {"chosen_ids": list(chosen), "rejected_ids": list(rejected), **more}


def pairs(*bad, good=text, num=4):
    return Dataset.from_list([good() for _ in range(num)] + list(bad))


def any_json(*rows):
    return Dataset.from_list(list(rows), features=Features(dict.fromkeys(rows[0], Json())))


def user(content, role="assistant"):
    return [{"role": role, "content": content}]


def both(content, other, role="assistant"):
    return {"chosen": user(content, role), "rejected": user(other, role)}


# What the fifth row is, by what the sentence says of it. Where a row may have a margin, the others have one.
TEXTS = {
    "an empty side": [
        *(dict(chosen=nothing) for nothing in (None, "", "\u200b\ufeff\u00ad")),
        *(dict(rejected=nothing) for nothing in (None, " \n")),
    ],
    "a chosen side that equals": [dict(chosen="w7")],
    "no prompt": [dict(prompt=None)],
    "a NUL character in its chosen side": [dict(chosen="w5\0")],
    "a NUL character in its prompt": [dict(prompt="w5\0")],
    "a margin that is no finite number": [dict(margin=nothing) for nothing in (math.nan, math.inf, None)],
    "a margin that is not from 0": [dict(margin=-5.0), dict(margin=1e308)],
}
CHATS = {
    "an empty side": [chat() | {"rejected": []}, chat(None), chat("  "), chat("\u2060")],
    "a chosen side that equals": [chat("w7")],
    "a message without content in its chosen side": [{"chosen": turns(None, "w6"), "rejected": turns("w5", "w7")}],
    "a message without role": [{"chosen": user("w5", None), "rejected": user("w6")}],
    "sides with different user turns. Drop such pairs: pairs, report = trl_ext.filter_pairs": [
        {"chosen": turns("w5", "w6"), "rejected": turns("w8", "w7")},
        {"chosen": turns("w5", "w6", "w9", "w6"), "rejected": turns("w5", "w6", "w8", "w7")},
    ],
    "a message in its chosen side with the role 'wizard'": [both("w5", "w6", "wizard")],
}
TOKENS = {
    "an empty side": [tokens(())],
    "a chosen side that equals": [tokens((5, 7, 2))],
    "chosen_ids outside the 199 tokens": [tokens(ids) for ids in ((5, None, 6), (5, -100, 2), (5, 199))],
    "rejected_ids outside": [tokens((5,), (6, 5000))],
}
# All rows are of this kind.
KINDS = {
    "row 0 has no prompt": text(prompt=None),
    "row 0 has a prompt of type int": text(prompt=7),
    "row 0 has a chosen side of type int": {"chosen": 1, "rejected": 2},
    "row 0 has a chosen side of type bytes": {"chosen": b"a", "rejected": b"b"},
    "is a list of str, not of messages": {"chosen": ["a"], "rejected": ["b"]},
    "row 0 has a chosen side of type dict": {"chosen": {"a": 1}, "rejected": {"a": 2}},
    "row 0 has text next to messages": {"prompt": "w5", **both("w6", "w7")},
    "without role": {"chosen": [{"content": "w5"}], "rejected": [{"content": "w6"}]},
    "whose content is of type int": both(5, 6),
    "row 0 has a margin that is no finite number": text(margin="1.0"),
    "1 of 1 pairs have a side longer than max_length": text(chosen="w5 " * 600),
    "all pairs have the same tokens on both sides": text(chosen="unknown", rejected="words"),
}
SOMETIMES = text(user("w5"), user("w6"), user("w7"))
WHOLE = {
    r"rows 4, 5, 6 and 2 more have an empty side; row 9 has a chosen side that": pairs(
        *[text(chosen=" ")] * 5, text(rejected="w6")
    ),
    "row 1 has a prompt of type int": any_json(text(), text(prompt=7)),
    "row 1 has text next to messages": any_json(text(), text(chosen=user("w6"))),
    "row 1 has messages, where the first row has text": any_json(text(prompt="w5"), SOMETIMES),
    "train_dataset holds the splits 'train'. Give a split": {"train": pairs()},
    "a chosen side that ends with the user, and so without an answer": Dataset.from_list(
        [{side: [{"role": "user", "content": side}] for side in ("chosen", "rejected")}]
    ),
    "which make no preference pairs": pairs().remove_columns("rejected"),
    "the column 'images', and reward models are trained on text": pairs().map(lambda row: {"images": ["a.png"]}),
    "is empty": pairs().select([]),
    "stream ended before its first row": IterableDataset.from_generator(lambda: iter(())),
    "train_dataset: row 0 has an empty side": Dataset.from_list([text(chosen=""), text()]).to_iterable_dataset(),
    "row 5 has more chosen_ids than the 512": pairs(tokens(range(3, 199)), tokens([5] * 600), good=tokens),
}
# Tokens under their old names, which are looked at in the same way.
OLD_NAMES = {f"{side}_ids": f"{side}_input_ids" for side in ("chosen", "rejected")}


def bad():
    """Datasets with bad pairs, and what the sentence says of each."""
    for says, rows in TEXTS.items():
        for row in rows:
            margin = dict(margin=1.0) if "margin" in row else {}
            yield f"row 4 has {says}", pairs(text(**row), good=partial(text, **margin))
    for says, rows in CHATS.items():
        for row in rows:
            yield f"row 4 has {says}", pairs(row, good=chat)
    for says, rows in TOKENS.items():
        for row in rows:
            yield f"row 4 has {says}", pairs(row, good=tokens)
        if says in ("an empty side", "a chosen side that equals"):
            yield f"row 4 has {says}", pairs(row, good=tokens).rename_columns(OLD_NAMES)
    for says, row in KINDS.items():
        yield says, pairs(row, num=0)
    yield from WHOLE.items()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return reward_model(tmp_path_factory.mktemp("model"), "llama")


def test_bad_pairs_are_named_before_the_first_step(subtests, model, tmp_path):
    every = list(bad())
    assert len(every) >= 40
    for sentence, dataset in every:
        settings = dict(max_length=None if "512" in sentence else 512)
        settings |= dict(max_steps=1) if isinstance(dataset, IterableDataset) else {}
        with subtests.test(sentence):
            with pytest.raises((DataError, ConfigError), match=sentence) as caught:
                trainer(tmp_path, dataset, model=model, **settings)
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize("columns", [("question", "good", "bad"), ("prompt", "completion", "label"), ("chosen",)])
def test_columns_that_make_no_pair_are_refused_with_those_that_do(columns, tmp_path):
    accepted = r"'prompt' and 'chosen' and 'rejected'; 'chosen' and 'rejected'; 'chosen_ids' and 'rejected_ids'"
    with pytest.raises(DataError, match=rf"train_dataset has the columns '\w+'.*{accepted}.*rename_column"):
        trainer(tmp_path, [dict.fromkeys(columns, "w5")])


def test_bad_pairs_for_an_evaluation_are_named_before_training_as_well(model, tmp_path):
    def beside_good(bad):
        return {"chat": pairs(num=1), "math": Dataset.from_list([bad])}

    empty = Dataset.from_list([text(chosen="")])
    for evaluated, sentence in (
        (empty, "eval_dataset: row 0 has an empty side"),
        (pairs().select([]), r"eval_dataset.* is empty"),
        (beside_good(text(rejected="w6")), r"math.*: row 0 has a chosen side that equals"),
        (beside_good({"text": "w5"}), r"eval_dataset\['math'\] has the columns 'text'"),
    ):
        with pytest.raises(DataError, match=sentence):
            trainer(tmp_path, model=model, eval_dataset=evaluated)
    with pytest.raises(DataError, match="eval_dataset: row 0 has an empty side"):
        trainer(tmp_path, model=model).evaluate(empty)


def test_messages_without_a_chat_template_are_refused(model, tmp_path):
    with pytest.raises(DataError, match="train_dataset holds messages, and the tokenizer has no chat template"):
        trainer(tmp_path, pairs(good=chat), model=model, processing_class=tiny.tokenizer())


def test_messages_that_the_chat_template_refuses_are_named(model, tmp_path):
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        + tokenizer.chat_template
    )
    system = {name: user("w3", "system") + chat()[name] for name in ("chosen", "rejected")}
    sentence = r"train_dataset: row 4 has messages that the chat template refuses: no system"
    with pytest.raises(DataError, match=sentence):
        trainer(tmp_path, pairs(system, good=chat), model=model, processing_class=tokenizer)


def test_a_rows_number_is_that_of_the_users_dataset(model, tmp_path):
    rows = [tokens(range(5, 40)), tokens(), tokens((5, 199))]
    with pytest.raises(DataError, match="row 2 has chosen_ids outside"):
        trainer(tmp_path, Dataset.from_list(rows), model=model, max_length=20)


def test_fewer_pairs_than_a_batch_are_refused_where_they_are_dropped(model, tmp_path):
    with pytest.raises(DataError, match="has 4 rows; over 1 process one batch takes 8 pairs"):
        trainer(tmp_path, pairs(), model=model, per_device_train_batch_size=8, dataloader_drop_last=True).train()
    trainer(tmp_path, pairs(), model=model, per_device_train_batch_size=8, max_steps=1).train()


@pytest.mark.parametrize("bad", [text(prompt=None), text(chosen="w5 \ud800"), text(prompt=7), text(chosen=user("w5"))])
def test_bad_pairs_of_a_stream_are_left_out(bad, model, tmp_path, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr("trl_ext.trainers.rows.pairs.logger.warning_once", said.append)
    stream = IterableDataset.from_generator(lambda: iter([text(), bad, text()]))
    subject = trainer(tmp_path, stream, model=model, max_steps=1)
    assert len(list(subject.train_dataset)) == 2
    assert "such pairs are left out of the stream" in said[0]


# What TRL takes ---------------------------------------------------------------------------------------------------

CALLS = List({"role": Value("string"), "content": Value("string"), "tool_calls": List({"name": Value("string")})})
GOOD = {
    "an empty prompt": pairs(text(prompt="")),
    "a blank prompt": pairs(text(prompt="\n")),
    "a prompt of a BOS token": pairs(text(prompt="<bos>")),
    "an empty prompt of messages": pairs({"prompt": [], "chosen": user("w6"), "rejected": user("w7")}, num=0),
    "duplicates": pairs(),
    "tokens beside text": pairs(text() | tokens(), num=0),
    "tokens of one side beside text": pairs(text() | {"chosen_ids": [5]}, num=0),
    "whole margins": pairs(text(margin=1), num=0),
    "content in parts": pairs(both(*([{"type": "text", "text": word}] for word in ("w6", "w7"))), num=0),
    "a tool call as answer": Dataset.from_list(
        [
            {
                "chosen": [{"role": "assistant", "content": None, "tool_calls": [{"name": "w6"}]}],
                "rejected": [{"role": "assistant", "content": "w6", "tool_calls": None}],
            }
        ],
        features=Features({"chosen": CALLS, "rejected": CALLS}),
    ),
}


def test_what_trl_takes_is_not_refused(subtests):
    for kind, dataset in GOOD.items():
        with subtests.test(kind):
            check_pairs(dataset, "train_dataset", chat_tokenizer())
