"""Columns of any data become prompts and answers, by the keys of a recipe; what cannot be mapped is a sentence."""

import re

import pytest
from datasets import Dataset, IterableDataset

from trl_ext.errors import ConfigError, DataError, TrlExtError
from trl_ext.scripts.data.keys import DataArguments, PromptArguments

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


# (keys, whether the tokenizer has a chat template, the first row)
MAPPED = {
    "columns": ({"columns": COLUMNS}, False, {"prompt": "How many?", "answer": GSM8K[0]["answer"]}),
    "pattern": ({"columns": COLUMNS, "answer_pattern": PATTERN}, False, {"prompt": "How many?", "answer": "6"}),
    "words of the command line": ({"columns": "{prompt: question}"}, False, {"prompt": "How many?"}),
    "chat template": ({"columns": COLUMNS}, True, {"prompt": ASKED}),
    "text": ({"columns": COLUMNS, "prompt_format": "text"}, True, {"prompt": "How many?"}),
    "template": (
        {"prompt_template": "Q: {question}\nA:"},
        False,
        {"question": "How many?", "prompt": "Q: How many?\nA:"},
    ),
    "template of a chat": ({"prompt_template": "{question}"}, True, {"prompt": ASKED}),
    "template and columns": (
        {"prompt_template": "{question}!", "columns": {"prompt": "question"}},
        False,
        {"prompt": "How many?!"},
    ),
    "system prompt": ({"columns": COLUMNS, "system_prompt": "Be brief."}, True, {"prompt": [SYSTEM, *ASKED]}),
    "places changed": (
        {"columns": {"question": "answer", "answer": "question"}},
        False,
        {"question": GSM8K[0]["answer"], "answer": "How many?"},
    ),
    "left out": ({"columns": {"answer": None}}, False, {"question": "How many?"}),
}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("name", MAPPED)
def test_a_row_is_what_the_keys_say(name, streams):
    keys, chat_template, expected = MAPPED[name]
    row = next(iter(mapped(chat_template=chat_template, streams=streams, **keys)))
    assert {column: row[column] for column in expected} == expected
    assert set(row) <= {"prompt", "answer", "question"} and ("answer" in row) == (name != "left out")


def test_answers_are_stripped_and_otherwise_left_to_the_rules():
    assert mapped(columns=COLUMNS, answer_pattern=PATTERN)["answer"] == ["6", "1,234", "-5"]


def test_the_answer_rule_reads_golds_with_commas():
    from trl_ext.rewards import RuleSet

    rules = RuleSet.from_dict({"rules": [{"rule": "answer", "gold": "answer", "kind": "number"}]})
    gold = list(mapped(columns=COLUMNS, answer_pattern=PATTERN)["answer"])
    completions = ["It is 6.", "It is 1234.", "It is 5."]
    assert rules(prompts=["?"] * 3, completions=completions, answer=gold) == [1.0, 1.0, 0.0]


def test_every_gold_of_gsm8k_is_a_number(data_dir):
    from trl_ext.scripts.data.dataset import DatasetSource

    train, _ = DatasetSource(str(data_dir / "gsm8k_train.jsonl")).load()
    rows = PromptArguments(columns={"prompt": "question"}, answer_pattern=PATTERN).mapping()
    golds = rows.apply(train, "train_dataset", lambda: False)["answer"]
    assert len(golds) == len(train) and all(re.fullmatch(r"-?[\d,]+(\.\d+)?", gold) for gold in golds)


def test_messages_get_the_system_message_in_front():
    rows = [{"prompt": ASKED}, {"prompt": [*ASKED, {"role": "assistant", "content": "6"}]}]
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
    assert mapped(rows, True, kind=DataArguments, columns=columns)[0] == {
        "prompt": "w5",
        "chosen": "w6",
        "rejected": "w7",
    }


@pytest.mark.parametrize("streams", [False, True])
def test_a_checkpoint_knows_the_prompts_of_its_run(streams):
    from trl_ext.trainers.checkpoints.fingerprint import data_of, differences

    runs = [
        data_of(mapped(chat_template=True, streams=streams, columns=COLUMNS, system_prompt=prompt))
        for prompt in ("Be brief.", "Be brief.", "Be kind.")
    ]
    assert runs[0] == runs[1]
    (changed,) = differences(runs[0], runs[2])
    assert changed.startswith("first row was" if streams else "content was")


def test_what_the_row_checks_say_names_the_columns_of_the_data():
    mapping = PromptArguments(columns={"prompt": "question", "answer": "solution"}).mapping()
    with pytest.raises(DataError) as caught, mapping.names_of_the_data():
        raise DataError("train_dataset: row 5 has a blank prompt. Drop it.")
    assert str(caught.value) == "train_dataset: row 5 has a blank prompt. Drop it. Here prompt is made of 'question'."


# Bad input --------------------------------------------------------------------------------------------------------

REFUSED = {
    "unknown column": (
        {"columns": {"prompt": "quesion"}},
        "columns names 'quesion', and train_dataset has the columns",
    ),
    "near name": ({"columns": {"prompt": "quesion"}}, "Did you mean 'question'?"),
    "one column twice": (
        {"columns": {"prompt": "question", "task": "question"}},
        "columns gives 'question' the names 'prompt' and 'task'",
    ),
    "name that is taken": ({"columns": {"question": "answer"}}, "has a column of this name already"),
    "no mapping": ({"columns": "question"}, "columns must be a mapping, our name: the data's name, not 'question'"),
    "broken mapping": ({"columns": "{prompt: "}, "columns: {prompt:  is no mapping"),
    "number as name": ({"columns": {"prompt": 3}}, "'prompt: 3' does not give a column another name"),
    "unknown field": ({"prompt_template": "{problem}"}, "prompt_template reads 'problem', and train_dataset has"),
    "our name as field": (
        {"columns": COLUMNS, "prompt_template": "{question} {prompt}"},
        "prompt_template reads 'prompt', and",
    ),
    "attribute": ({"prompt_template": "{question.__class__}"}, "prompt_template reads 'question.__class__', and"),
    "item": ({"prompt_template": "{question[0]}"}, "prompt_template reads 'question[0]', and"),
    "prompt without effect": (
        {"columns": {"prompt": "answer"}, "prompt_template": "{question}"},
        "columns names 'answer' as prompt, and prompt_template, which makes the prompt, does not read it",
    ),
    "field that is left out": (
        {"columns": {"question": None}, "prompt_template": "{question}"},
        "columns leaves out 'question', and prompt_template reads it",
    ),
    "system prompt without prompt": ({"system_prompt": "Be brief."}, "system_prompt needs prompts: train_dataset has"),
    "system prompt without chat template": (
        {"columns": COLUMNS, "system_prompt": "Be brief."},
        "system_prompt makes messages of the prompts, and the model's tokenizer has no chat template",
    ),
    "chat without chat template": (
        {"columns": COLUMNS, "prompt_format": "chat"},
        "prompt_format: chat makes messages",
    ),
    "system prompt in text": ({"system_prompt": "Be brief.", "prompt_format": "text"}, "no place for a system_prompt"),
    "blank system prompt": ({"system_prompt": " "}, "system_prompt is blank"),
    "pattern without answer": (
        {"columns": {"prompt": "question", "gold": "answer"}, "answer_pattern": PATTERN},
        "answer_pattern has nothing to read",
    ),
    "pattern that is none": ({"answer_pattern": "#### (.+"}, "is no regular expression: missing )"),
    "pattern without group": ({"answer_pattern": "#### .+"}, "has no groups"),
    "pattern of two groups": ({"answer_pattern": "(####) (.+)"}, "has 2 groups"),
    "pattern of no row": (
        {"columns": COLUMNS, "answer_pattern": "=> (.+)"},
        "train_dataset: all 3 rows have no match of answer_pattern '=> (.+)' in 'answer'. Row 0 has 'It is",
    ),
    "pattern of some rows": (
        {"columns": COLUMNS, "answer_pattern": "#### ([0-9,]+)"},
        "train_dataset: row 2 has no match of answer_pattern '#### ([0-9,]+)' in 'answer'. Row 2 has 'Not long.",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_keys_that_do_not_fit_the_data_are_a_sentence(name):
    keys, sentence = REFUSED[name]
    with pytest.raises(TrlExtError) as caught:
        mapped(**keys)
    assert sentence in str(caught.value)


@pytest.mark.parametrize("key", ["system_prompt", "prompt_template", "prompt_format"])
def test_keys_of_prompts_are_not_for_pairs(key, tmp_path):
    from trl_ext.scripts import reward

    (tmp_path / "recipe.yaml").write_text(f"{key}: text\n")
    with pytest.raises(ConfigError, match=f"unknown key '{key}'. It belongs to grpo and ppo"):
        reward.make_parser().parse(["--config", str(tmp_path / "recipe.yaml")])


BAD_ROWS = {
    "null of a column": ({"question": None}, {"columns": COLUMNS}, "row 3 has no 'question' (null)"),
    "null of a field": ({"question": None}, {"prompt_template": "{question}"}, "row 3 has no 'question' (null)"),
    "null answer": (
        {"answer": None},
        {"prompt_template": "{question}", "answer_pattern": PATTERN},
        "row 3 has no 'answer' (null)",
    ),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_row_without_a_value_is_named(name):
    changes, keys, sentence = BAD_ROWS[name]
    with pytest.raises(TrlExtError) as caught:
        mapped([*GSM8K, GSM8K[0] | changes, GSM8K[1]], **keys)
    assert sentence in str(caught.value)


BAD_TYPES = {
    "list in a template": ({"question": ["w5"]}, {"prompt_template": "{question}"}, "a list as 'question', where"),
    "number and pattern": ({"answer": 6}, {"answer_pattern": PATTERN}, "a value of type int as 'answer', where"),
    "messages and text": (
        {"question": ASKED},
        {"columns": {"prompt": "question"}, "prompt_format": "text"},
        "messages as 'question', where prompt_format is text",
    ),
    "number as prompt": ({"question": 7}, {"columns": COLUMNS}, "a value of type int as 'question', which is neither"),
    "second system message": (
        {"question": [SYSTEM, *ASKED]},
        {"columns": COLUMNS, "system_prompt": "Be brief."},
        "all 2 rows have its own system message in addition to system_prompt",
    ),
}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("name", BAD_TYPES)
def test_values_that_cannot_be_used_are_a_sentence(name, streams):
    cells, keys, sentence = BAD_TYPES[name]
    with pytest.raises(TrlExtError) as caught:
        list(mapped([GSM8K[0] | cells] * 2, chat_template=True, streams=streams, **keys))
    assert (sentence.removeprefix("all 2 rows have ") if streams else sentence) in str(caught.value)
