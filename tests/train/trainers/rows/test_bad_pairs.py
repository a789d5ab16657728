"""Forty kinds of bad data for the RewardTrainer: one sentence with row numbers before the first step."""

import math
import random

import pytest
import torch
from datasets import Dataset, Features, IterableDataset, Json, List, Value

from tests import tiny
from tests.preferences import reward_model
from tests.reward_trainers import chat_tokenizer, trainer
from trl_ext.errors import ConfigError, DataError
from trl_ext.trainers.rows.pairs import _flags, _read, check_columns, check_pairs, problems
from trl_ext.trainers.rows.screen import rows_where
from trl_ext.trainers.rows.text import TextCheck

torch.set_num_threads(1)


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


BAD = {
    "null chosen": (pairs(text(chosen=None)), "row 4 has an empty side"),
    "null rejected": (pairs(text(rejected=None)), "row 4 has an empty side"),
    "empty": (pairs(text(chosen="")), "row 4 has an empty side"),
    "blank": (pairs(text(rejected=" \n")), "row 4 has an empty side"),
    "many": (pairs(*[text(chosen="")] * 5), "rows 4, 5, 6 and 2 more have an empty side"),
    "equal": (pairs(text(chosen="w7")), "row 4 has a chosen side that equals"),
    "equal messages": (pairs(chat("w7"), good=chat), "row 4 has a chosen side that equals"),
    "equal tokens": (pairs(tokens((5, 7, 2)), good=tokens), "row 4 has a chosen side that equals"),
    "null prompt": (pairs(text(prompt=None)), "row 4 has no prompt"),
    "all prompts null": (pairs(text(prompt=None), num=0), "row 0 has no prompt"),
    "prompts that are numbers": (pairs(text(prompt=7), num=0), "row 0 has a prompt of type int"),
    "a prompt that is a number": (any_json(text(), text(prompt=7)), "row 1 has a prompt of type int"),
    "sides that are numbers": (pairs({"chosen": 1, "rejected": 2}, num=0), "row 0 has a chosen side of type int"),
    "sides that are bytes": (
        pairs({"chosen": b"a", "rejected": b"b"}, num=0),
        "row 0 has a chosen side of type bytes",
    ),
    "sides that are lists": (pairs({"chosen": ["a"], "rejected": ["b"]}, num=0), "is a list of str, not of messages"),
    "a mapping": (pairs({"chosen": {"a": 1}, "rejected": {"a": 2}}, num=0), "row 0 has a chosen side of type dict"),
    "messages beside text": (any_json(text(), text(chosen=user("w6"))), "row 1 has text next to messages"),
    "a prompt of messages beside text": (pairs(text(prompt=user("w5")), num=0), "row 0 has text next to messages"),
    "a chat among texts": (
        any_json(text(prompt="w5"), text(user("w5"), user("w6"), user("w7"))),
        "row 1 has messages, where the first row has text",
    ),
    "NUL": (pairs(text(chosen="w5\0")), "row 4 has a NUL character in its chosen side"),
    "NUL in a prompt": (pairs(text(prompt="w5\0")), "row 4 has a NUL character in its prompt"),
    "special tokens only": (pairs(text(chosen="<eos>")), "row 4 has a chosen side of special tokens only"),
    "no messages": (pairs(chat() | {"rejected": []}, good=chat), "row 4 has an empty side"),
    "null content": (pairs(chat(None), good=chat), "row 4 has an empty side"),
    "null content before": (
        pairs({"chosen": turns(None, "w6"), "rejected": turns("w5", "w7")}, good=chat),
        "row 4 has a message without content in its chosen side",
    ),
    "special tokens only as answer": (
        pairs(chat("<eos>"), good=chat),
        "row 4 has a chosen side whose last message is empty",
    ),
    "no role": (pairs({"chosen": [{"content": "w5"}], "rejected": [{"content": "w6"}]}, num=0), "without role"),
    "null role": (
        pairs({"chosen": user("w5", None), "rejected": user("w6")}, good=chat),
        "row 4 has a message without role",
    ),
    "content is a number": (pairs({"chosen": user(5), "rejected": user(6)}, num=0), "whose content is of type int"),
    "margin NaN": (pairs(text(margin=math.nan), good=lambda: text(margin=1.0)), "row 4 has a margin that is no"),
    "margin infinite": (pairs(text(margin=math.inf), good=lambda: text(margin=1.0)), "row 4 has a margin"),
    "margin null": (pairs(text(margin=None), good=lambda: text(margin=1.0)), "row 4 has a margin"),
    "margin as text": (pairs(text(margin="1.0"), num=0), "row 0 has a margin that is no finite number"),
    "margin negative": (
        pairs(text(margin=-5.0), good=lambda: text(margin=1.0)),
        "row 4 has a margin that is not from",
    ),
    "margin huge": (pairs(text(margin=1e308), good=lambda: text(margin=1.0)), "row 4 has a margin that is not from 0"),
    "invisible": (pairs(text(chosen="\u200b\ufeff\u00ad")), "row 4 has an empty side"),
    "invisible answer": (pairs(chat("\u2060"), good=chat), "row 4 has an empty side"),
    "an unknown role": (
        pairs({"chosen": user("w5", "wizard"), "rejected": user("w6", "wizard")}, good=chat),
        "row 4 has a message in its chosen side with the role 'wizard'",
    ),
    "the user last": (
        pairs(chat() | {"rejected": turns("w5", "w6", "w7")}, good=chat),
        "row 4 has a rejected side that ends with the user",
    ),
    "other user turns": (
        pairs(chat() | {"rejected": turns("w8", "w7")}, good=chat),
        "row 4 has sides with different user turns. Drop such pairs: pairs, report = trl_ext.filter_pairs",
    ),
    "a null among tokens": (pairs(tokens((5, None, 6)), good=tokens), "row 4 has chosen_ids outside the 199"),
    "the same tokens": (pairs(text(chosen="unknown", rejected="words"), num=0), "1 of 1 pairs have the same tokens"),
    "splits": ({"train": pairs()}, "train_dataset holds the splits 'train'. Give one"),
    "no tokens": (pairs(tokens(()), good=tokens), "row 4 has an empty side"),
    "a negative token": (pairs(tokens((5, -100, 2)), good=tokens), "row 4 has chosen_ids outside the 199 tokens"),
    "a foreign token": (pairs(tokens((5, 199)), good=tokens), "row 4 has chosen_ids outside the 199 tokens"),
    "a foreign rejected token": (pairs(tokens((5,), (6, 5000)), good=tokens), "row 4 has rejected_ids outside"),
    "no column": (pairs().remove_columns("rejected"), "which make no preference pairs"),
    "no rows": (pairs().select([]), "is empty"),
    "too long": (pairs(text(chosen="w5 " * 600)).select([4]), "1 of 1 pairs have a side longer than max_length"),
    "longer than the model": (
        pairs(tokens(range(3, 199)), tokens([5] * 600), good=tokens),
        "row 5 has more chosen_ids than the 512",
    ),
}
SETTINGS = {"longer than the model": {"max_length": None}, "too long": {"max_length": 512}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return reward_model(tmp_path_factory.mktemp("model"), "llama")


def test_there_are_forty_kinds():
    assert len(BAD) >= 40


@pytest.mark.parametrize("kind", BAD)
def test_bad_pairs_are_named_before_the_first_step(kind, model, tmp_path):
    dataset, sentence = BAD[kind]
    with pytest.raises((DataError, ConfigError), match=sentence) as caught:
        trainer(tmp_path, dataset, model=model, **SETTINGS.get(kind, {}))
    assert "\n" not in str(caught.value)


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
    with pytest.raises(
        DataError, match=r"train_dataset: row 4 has messages that the chat template refuses: no system"
    ):
        trainer(tmp_path, pairs(system, good=chat), model=model, processing_class=tokenizer)


def test_pairs_of_the_same_tokens_are_left_out(model, tmp_path, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr("trl_ext.trainers.reward.data.logger.warning", said.append)
    subject = trainer(tmp_path, pairs(text(chosen="unknown", rejected="words"), text()), model=model)
    assert list(subject.train_dataset["row"]) == [0, 1, 2, 3, 5]
    assert said == ["train_dataset: 1 of 6 pairs have the same tokens on both sides, and are left out."]


def test_what_the_code_of_a_stream_raises_is_a_sentence(model, tmp_path):
    def rows():
        yield from [text()] * 3
        raise RuntimeError("the disk is gone")

    with pytest.raises(DataError, match=r"a row that came along cannot be read: the disk is gone \(RuntimeError\)"):
        trainer(tmp_path, IterableDataset.from_generator(rows), model=model, max_steps=1).train()


def test_a_list_is_no_dataset():
    with pytest.raises(DataError, match=r"train_dataset is a list. Make a dataset of it: datasets.Dataset.from_list"):
        check_columns([text()], "train_dataset")


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
    "content in parts": pairs(
        {name: user([{"type": "text", "text": word}]) for name, word in (("chosen", "w6"), ("rejected", "w7"))}, num=0
    ),
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


@pytest.mark.parametrize("kind", GOOD)
def test_what_trl_takes_is_not_refused(kind):
    check_pairs(GOOD[kind], "train_dataset", chat_tokenizer())


# The screen -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["text", "messages", "tokens"])
def test_the_screen_lets_no_bad_pair_through(form):
    draw = random.Random(0)

    def some_text():
        return draw.choices(["w5", "w6", "w5 w6", "", " ", "<eos>", "w5\0", None], [9, 9, 9, 1, 1, 1, 1, 1])[0]

    def some_side():
        if form == "text":
            return some_text()
        if form == "tokens":
            return draw.choices([[5, 6], [5, 7], [5], [], None], [9, 9, 9, 1, 1])[0]
        return draw.choices([turns(*[some_text() for _ in range(draw.randrange(1, 4))]), [], None], [20, 1, 1])[0]

    names = ("chosen_ids", "rejected_ids") if form == "tokens" else ("prompt", "chosen", "rejected")
    rows = [{name: some_side() for name in names} | {"margin": draw.choice([1.0, 2.0])} for _ in range(2000)]
    check = TextCheck(("<eos>",), is_answer=True)
    dataset = Dataset.from_list(rows)
    bad = {row for row, pair in enumerate(rows) if list(problems(pair, check))}
    flagged = dict(rows_where(dataset, _read(dataset), lambda columns: _flags(columns, check)))
    assert 200 < len(bad) and bad <= set(flagged)
    assert len(flagged) < 2000 if form == "tokens" else len(flagged) < 1.5 * len(bad)
