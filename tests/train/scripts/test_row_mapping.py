"""Columns of any data become prompts and answers, by the keys of a recipe; what cannot be mapped is a sentence."""

import json
import re
from itertools import product

import pytest
import yaml
from datasets import ClassLabel, Dataset, IterableDataset, Value

from tests.conftest import ROOT
from trl_ext.errors import DataError, TrlExtError
from trl_ext.rewards import RuleSet
from trl_ext.scripts.data.dataset import DatasetSource
from trl_ext.scripts.data.keys import DataArguments, PromptArguments
from trl_ext.trainers.checkpoints.fingerprint import data_of, differences
from trl_ext.trainers.rows.pairs import check_pairs

PATTERN = "#### (.+)"
GSM8K = [
    {"question": "How many?", "answer": "It is <<2*3=6>>6.\n#### 6"},
    {"question": "How much?", "answer": "A lot.\n#### 1,234"},
    {"question": "How long?", "answer": "Not long.\n#### -5 "},
]
COLUMNS = {"prompt": "question", "answer": "answer"}
ASKED = [{"role": "user", "content": "How many?"}]
SYSTEM = {"role": "system", "content": "Be brief."}


def mapped(rows=GSM8K, chat_template=False, streams=False, kind=PromptArguments, **keys):
    """The rows that the keys make of these."""
    dataset = Dataset.from_list(rows)
    dataset = dataset.to_iterable_dataset() if streams else dataset
    return kind(**keys).mapping().apply(dataset, "train_dataset", lambda: chat_template)


ASKS, SOLVED = "How many?", GSM8K[0]["answer"]
CHANGED = {"question": "answer", "answer": "question"}
LEFT_OUT = dict(columns={"answer": None})
# Keys, whether the tokenizer has a chat template, and the first row.
MAPPED = [
    (dict(columns=COLUMNS), False, dict(prompt=ASKS, answer=SOLVED)),
    (dict(columns=COLUMNS, answer_pattern=PATTERN), False, dict(prompt=ASKS, answer="6")),
    (dict(columns="{prompt: question}"), False, dict(prompt=ASKS)),  # words of the command line
    (dict(columns=COLUMNS), True, dict(prompt=ASKED)),
    (dict(columns=COLUMNS, prompt_format="text"), True, dict(prompt=ASKS)),
    (dict(prompt_template="Q: {question}\nA:"), False, dict(question=ASKS, prompt="Q: How many?\nA:")),
    (dict(prompt_template="{question}"), True, dict(prompt=ASKED)),
    (dict(prompt_template="{question}!", columns={"prompt": "question"}), False, dict(prompt="How many?!")),
    (dict(columns=COLUMNS, system_prompt="Be brief."), True, dict(prompt=[SYSTEM, *ASKED])),
    (dict(columns=CHANGED), False, dict(question=SOLVED, answer=ASKS)),
    (LEFT_OUT, False, dict(question=ASKS)),
]


def test_a_row_is_what_the_keys_say(subtests):
    for (keys, chat_template, expected), streams in product(MAPPED, (False, True)):
        with subtests.test(str(keys), streams=streams):
            row = next(iter(mapped(chat_template=chat_template, streams=streams, **keys)))
            assert {column: row[column] for column in expected} == expected
            assert set(row) <= {"prompt", "answer", "question"} and ("answer" in row) == (keys != LEFT_OUT)


def test_answers_are_stripped_and_otherwise_left_to_the_rules():
    assert mapped(columns=COLUMNS, answer_pattern=PATTERN)["answer"] == ["6", "1,234", "-5"]


def test_the_answer_rule_reads_golds_with_commas():
    rules = RuleSet.from_dict({"rules": [{"rule": "answer", "gold": "answer", "kind": "number"}]})
    gold = list(mapped(columns=COLUMNS, answer_pattern=PATTERN)["answer"])
    completions = ["It is 6.", "It is 1234.", "It is 5."]
    assert rules(prompts=["?"] * 3, completions=completions, answer=gold) == [1.0, 1.0, 0.0]


def test_every_gold_of_gsm8k_is_a_number(data_dir):
    train, _ = DatasetSource(str(data_dir / "gsm8k_train.jsonl")).load()
    rows = PromptArguments(columns={"prompt": "question"}, answer_pattern=PATTERN).mapping()
    golds = rows.apply(train, "train_dataset", lambda: False)["answer"]
    assert len(golds) == len(train) and all(re.fullmatch(r"-?[\d,]+(\.\d+)?", gold) for gold in golds)


def test_messages_get_the_system_message_in_front():
    rows = [{"prompt": ASKED}, {"prompt": [*ASKED, {"role": "assistant", "content": "6"}, *ASKED]}]
    found = mapped(rows, chat_template=True, system_prompt="Be brief.")["prompt"]
    assert found == [[SYSTEM, *row["prompt"]] for row in rows]


def test_a_prompt_of_the_data_stays_as_it_is_without_keys():
    dataset = Dataset.from_list([{"prompt": "How many?"}])
    assert PromptArguments().mapping().apply(dataset, "train_dataset", lambda: True) is dataset


def test_a_stream_is_mapped_as_it_comes():
    def rows():
        yield GSM8K[0]
        raise AssertionError("the second row was read")

    stream = IterableDataset.from_generator(rows)
    found = PromptArguments(columns=COLUMNS, answer_pattern=PATTERN).mapping().apply(stream, "train", lambda: False)
    assert next(iter(found)) == {"prompt": "How many?", "answer": "6"}


def test_pairs_keep_their_prompts_as_text():
    rows = [{"instruction": "w5", "good": "w6", "bad": "w7"}]
    columns = {"prompt": "instruction", "chosen": "good", "rejected": "bad"}
    found = mapped(rows, True, kind=DataArguments, columns=columns)[0]
    assert found == {"prompt": "w5", "chosen": "w6", "rejected": "w7"}


# A cell, the template's field, and its text.
WRITTEN = [
    ([44, 19], "{cell}", "[44, 19]"),
    (["red", "blue"], "{cell}", "A. red\nB. blue"),
    ({"text": ["red"], "label": ["A"]}, "{cell.text}", "A. red"),
    ({"in": {"it": "w5"}}, "{cell.in.it}!", "w5!"),
]


@pytest.mark.parametrize("streams", [False, True])
def test_values_within_columns_and_lists_are_written_out(streams):
    for cell, template, text in WRITTEN:
        rows = mapped([{"cell": cell, "answer": "6"}], streams=streams, prompt_template=template)
        assert next(iter(rows))["prompt"] == text


TURNS = [*ASKED, {"role": "assistant", "content": "6"}, *ASKED, {"role": "assistant", "content": "7"}]
SAID = [{"from": {"user": "human"}.get(turn["role"], "gpt"), "value": turn["content"]} for turn in TURNS]
# The name in the data, and what it is within these turns.
WITHIN = {
    "turns.:-1": TURNS[:-1],
    "turns.2:3": TURNS[2:3],
    "turns.-2:-1": TURNS[2:3],
    "said.:-1": TURNS[:-1],
    "json.:-1": None,  # of a text there are no parts
    "turns.0.content": ASKED,
    "turns.-1.content": [{"role": "user", "content": "7"}],
    "turns.4.content": None,
    "turns.-5.content": None,
    "turns.:": None,  # ends with the answer
    "turns.content": None,
}


@pytest.mark.parametrize("streams", [False, True])
def test_a_dotted_name_reads_items_and_parts_of_lists(streams, subtests):
    for name, prompt in WITHIN.items():
        with subtests.test(name):
            rows = [{"turns": TURNS, "said": SAID, "json": str(TURNS)}] * 2
            keys = dict(chat_template=True, streams=streams, columns={"prompt": name})
            if prompt is not None:
                assert next(iter(mapped(rows, **keys)))["prompt"] == prompt
                continue
            with pytest.raises(DataError, match=re.escape(name.partition(".")[0])):
                next(iter(mapped(rows, **keys)))


def test_messages_as_json_are_read_where_chats_are_made(subtests):
    named = [{**ASKED[0], "name": "Ann"}]
    rows = [{"input": json.dumps(chat)} for chat in (ASKED, named)] + [{"input": "How many?"}, {"input": "[1, 2]"}]
    whole = [{"role": "user", "content": "[1, 2]"}]
    for keys, chat_template, wanted in (
        ({}, True, [ASKED, ASKED, ASKED, whole]),
        ({}, False, [row["input"] for row in rows]),
        ({"prompt_format": "text"}, True, [row["input"] for row in rows]),
    ):
        with subtests.test(str(keys), chat_template=chat_template):
            found = mapped(rows, chat_template=chat_template, columns={"prompt": "input"}, **keys)
            assert list(found["prompt"]) == wanted


def test_a_value_within_a_column_may_take_its_place():
    rows = [{"prompt": TURNS, "answer": {"it": "7"}}]
    (row,) = mapped(rows, chat_template=True, columns={"prompt": "prompt.:-1", "answer": "answer.it"})
    assert row == {"prompt": TURNS[:-1], "answer": "7"}


@pytest.mark.parametrize("kind", [Value("int64"), Value("string"), ClassLabel(names=["A", "B", "C", "D"])])
@pytest.mark.parametrize("streams", [False, True])
def test_a_number_of_an_option_becomes_its_letter(kind, streams):
    rows = Dataset.from_list([{"prompt": "w5", "answer": 2}]).cast_column("answer", Value("int64"))
    rows = rows.cast_column("answer", kind)
    rows = rows.to_iterable_dataset() if streams else rows
    for first, letter in ((0, "C"), (1, "B"), (2, "A")):
        mapping = PromptArguments(first_option=first).mapping()
        assert next(iter(mapping.apply(rows, "train_dataset", lambda: False)))["answer"] == letter


# The page's table: the form, a row, and the keys.
PAGE = (ROOT / "docs/reference/data.md").read_text().partition("## Rows of other projects")[2].partition("\n## ")[0]
FORMS = re.findall(r"^\| ([^|]+) \| `([^`]+)` \| (`.+`) \|$", PAGE, flags=re.MULTILINE)


def test_the_page_shows_keys_for_rows_of_other_projects(subtests):
    assert len(FORMS) == PAGE.count("\n| ") - 1
    for form, row, keys in FORMS:
        keys = {name: value for one in re.findall("`([^`]+)`", keys) for name, value in yaml.safe_load(one).items()}
        rows, has_pairs = (
            [json.loads(row)] * 2,
            "rejected" in row or {"chosen", "chosen_ids"} & set(keys.get("columns", {})),
        )
        for streams in (False,) if "better" in keys.get("columns", {}) else (False, True):
            with subtests.test(form, streams=streams):
                kind = DataArguments if has_pairs else PromptArguments
                found = mapped(rows, chat_template=True, streams=streams, kind=kind, **keys)
                if has_pairs:
                    check_pairs(found, "train_dataset")
                    first = next(iter(found))
                    assert "Hello." in str(first["chosen"]) if "ids" not in form else first["chosen_ids"] == [5, 6]
                    continue
                first = next(iter(found))
                (message,) = first["prompt"]
                assert message["role"] == "user" and "2" in message["content"] and "5" in message["content"]
                assert first["answer"] in ("7", 7, "B")


@pytest.mark.parametrize("streams", [False, True])
def test_a_dotted_name_reads_what_lies_within_a_column_of_any_json(streams, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"p": "w5", "a": {"b": 1}}\n{"p": "w6", "a": {"b": "x"}}\n')
    rows, _ = DatasetSource(str(path), streaming=streams).load()
    mapping = PromptArguments(columns={"prompt": "p", "answer": "a.b"}).mapping()
    assert [row["answer"] for row in mapping.apply(rows, "train_dataset", lambda: False)] == [1, "x"]


@pytest.mark.parametrize("streams", [False, True])
def test_a_checkpoint_knows_the_prompts_of_its_run(streams):
    runs = [
        data_of(mapped(chat_template=True, streams=streams, columns=COLUMNS, system_prompt=prompt))
        for prompt in ("Be brief.", "Be brief.", "Be kind.")
    ]
    assert runs[0] == runs[1]
    (changed,) = differences(runs[0], runs[2])
    assert changed.startswith("first row was" if streams else "content was")


# Bad input --------------------------------------------------------------------------------------------------------

# What the sentence holds, and the keys.
TYPO, BRIEF, QUESTION = {"prompt": "quesion"}, "Be brief.", "{question}"
REFUSED = {
    "columns names 'quesion', and train_dataset has the columns": dict(columns=TYPO),
    "Did you mean 'question'?": dict(columns=TYPO),
    "columns names 'question.text', and train_dataset": dict(columns={"prompt": "question.text"}),
    "gives 'question' the names 'prompt' and 'task'": dict(columns={"prompt": "question", "task": "question"}),
    "has a column of this name already": dict(columns={"question": "answer"}),
    "columns must be a mapping, our name: the data's name, not 'question'": dict(columns="question"),
    "columns: {prompt:  is no mapping": dict(columns="{prompt: "),
    "'prompt: 3' does not give a column another name": dict(columns={"prompt": 3}),
    "prompt_template reads 'problem', and train_dataset has": dict(prompt_template="{problem}"),
    "prompt_template reads 'prompt', and": dict(columns=COLUMNS, prompt_template="{question} {prompt}"),
    "prompt_template reads 'question.__class__', and": dict(prompt_template="{question.__class__}"),
    "prompt_template reads 'question[0]', and": dict(prompt_template="{question[0]}"),
    "prompt_template makes the column 'prompt', and train_dataset has one already": dict(
        columns={"prompt": "answer"}, prompt_template=QUESTION
    ),
    "leaves out 'question', and prompt_template reads it": dict(columns={"question": None}, prompt_template=QUESTION),
    "system_prompt or prompt_format reads the column 'prompt': train_dataset has": dict(system_prompt=BRIEF),
    "of the prompts, and the model's tokenizer has no chat template": dict(columns=COLUMNS, system_prompt=BRIEF),
    "prompt_format: chat makes messages": dict(columns=COLUMNS, prompt_format="chat"),
    "system_prompt is blank. Write its text, or leave it out": dict(columns=COLUMNS, system_prompt=" \n"),
    "no place for a system_prompt": dict(system_prompt=BRIEF, prompt_format="text"),
    "answer_pattern or first_option reads the column 'answer': train_dataset has": dict(
        columns={"prompt": "question", "gold": "answer"}, answer_pattern=PATTERN
    ),
    "is no regular expression: missing )": dict(answer_pattern="#### (.+"),
    "has no groups": dict(answer_pattern="#### .+"),
    "has 2 groups": dict(answer_pattern="(####) (.+)"),
    "train_dataset: rows 0, 1, 2 have no match of answer_pattern '=> (.+)' in 'answer'. Drop or mend": dict(
        columns=COLUMNS, answer_pattern="=> (.+)"
    ),
    "row 2 has no match of answer_pattern '#### ([0-9,]+)' in 'answer'. Drop or mend": dict(
        columns=COLUMNS, answer_pattern="#### ([0-9,]+)"
    ),
}


def test_keys_that_do_not_fit_the_data_are_a_sentence(subtests):
    for sentence, keys in REFUSED.items():
        with subtests.test(sentence):
            with pytest.raises(TrlExtError) as caught:
                mapped(**keys)
            assert sentence in str(caught.value)


TEMPLATE = {"prompt_template": QUESTION}
NULLS = [
    ({"question": None}, {"columns": COLUMNS}, "row 3 has no 'question' (null)"),
    ({"question": None}, TEMPLATE, "row 3 has no 'question' (null)"),
    ({"answer": None}, TEMPLATE | {"answer_pattern": PATTERN}, "row 3 has no 'answer' (null)"),
]


def test_a_row_without_a_value_is_named():
    for changes, keys, sentence in NULLS:
        with pytest.raises(TrlExtError) as caught:
            mapped([*GSM8K, GSM8K[0] | changes, GSM8K[1]], **keys)
        assert sentence in str(caught.value)


AS_TEXT = {"columns": {"prompt": "question"}, "prompt_format": "text"}
BRIEFED = {"columns": COLUMNS, "system_prompt": BRIEF}
BAD_TYPES = [
    ({"question": [["w5"]]}, TEMPLATE, "a list as 'question', where"),
    ({"answer": 6}, {"answer_pattern": PATTERN}, "a value of type int as 'answer', where"),
    ({"question": ASKED}, AS_TEXT, "messages as 'question', where prompt_format is text"),
    (
        {"answer": 26},
        {"first_option": 0},
        "'26' as 'answer', no option by first_option=0",
    ),
    ({"answer": "no"}, {"first_option": 1}, "'no' as 'answer', no option by first_option=1"),
    ({"question": [*ASKED, {"role": "assistant", "content": "6"}]}, {"columns": COLUMNS}, "question.:-1} cuts off"),
    ({"question": 7}, {"columns": COLUMNS}, "a value of type int as 'question', which is neither"),
    ({"question": [SYSTEM, *ASKED]}, BRIEFED, "its own system message in addition to system_prompt"),
]


def test_values_that_cannot_be_used_are_a_sentence(subtests):
    for (cells, keys, sentence), streams in product(BAD_TYPES, (False, True)):
        with subtests.test(sentence, streams=streams):
            with pytest.raises(TrlExtError) as caught:
                list(mapped([GSM8K[0] | cells] * 2, chat_template=True, streams=streams, **keys))
            assert sentence in str(caught.value)


# Pairs whose better side is named by a column ------------------------------------------------------------------------

SIDES = {"columns": {"chosen": "a", "rejected": "b", "better": "winner"}}


def sides(*winners):
    return [{"prompt": "w5 ", "a": "w7", "b": "w8", "winner": winner} for winner in winners]


@pytest.mark.parametrize(
    "winners",
    [(0, 1), (False, True), (0.0, 1.0), (-3, 2), (-1, 1, 0), ("a", "b"), ("model_a", "model_b", "tie (bothbad)")],
)
def test_the_side_that_a_column_names_is_the_chosen_one(winners):
    pairs = mapped(sides(*winners), kind=DataArguments, **SIDES)
    assert (pairs["chosen"][:], pairs["rejected"][:]) == (["w7", "w8"], ["w8", "w7"])
    assert pairs.column_names == ["prompt", "chosen", "rejected"]


def test_ties_are_counted(caplog):
    mapped(sides(1, -1, 0), kind=DataArguments, **SIDES)
    assert "train_dataset: 1 of 3 pairs are ties by 'winner', and are dropped." in caplog.text


def test_a_value_that_names_no_side_is_refused_with_its_row():
    for winners in ((0, None), ("a", "neither"), (1, float("nan")), (1, 2, 1), (0, 4)):  # numbers from 1, ratings
        with pytest.raises(DataError, match=r"row 1 has .* as 'winner', which names neither side"):
            mapped(sides(*winners), kind=DataArguments, **SIDES)


def test_a_stream_has_no_better_side():
    with pytest.raises(TrlExtError, match="reads the whole column: set dataset_streaming to false"):
        mapped(sides(0, 1), streams=True, kind=DataArguments, **SIDES)


def test_a_column_that_may_name_the_better_side_is_pointed_out(caplog):
    mapped(sides(0, 1), kind=DataArguments, columns={"chosen": "a", "rejected": "b"})
    assert "columns: {..., better: winner} puts it first." in caplog.text


def test_text_after_messages_is_the_assistants_in_a_dataset_and_a_stream():
    row = {"prompt": ASKED, "chosen": "w7", "rejected": "w8"}
    for streams in (False, True):
        found = next(iter(mapped([row], streams=streams, kind=DataArguments)))
        assert found["chosen"] == [{"role": "assistant", "content": "w7"}] and found["prompt"] == ASKED
