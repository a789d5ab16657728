"""Data of any columns reach step 1; what cannot be trained on is one sentence, and exit code 2."""

import json
from itertools import product

import datasets
import pytest
from datasets import Dataset, load_dataset
from huggingface_hub import constants

from tests import recipes, tiny
from tests.nightly import nightly
from tests.preferences import reward_model
from tests.recipes import PROMPTS
from tests.reward_trainers import chat_tokenizer
from trl_ext.cli.score.rows import read_data
from trl_ext.errors import ConfigError, DataError
from trl_ext.scripts import grpo, ppo, reward
from trl_ext.scripts.data.dataset import DatasetSource, bad_line, leave_if_unreachable

GOOD = '{"prompt": "w5", "answer": "1"}\n'
# name: (what the file holds, what the sentence says)
FILES = {
    "nothing.jsonl": ("", "nothing.jsonl is empty. Check what wrote it."),
    "blank.jsonl": ("\n\n", "cannot be loaded: it has no rows"),
    "broken.jsonl": (GOOD * 5 + '{"prompt": "w5\n' + GOOD, "cannot be loaded: broken.jsonl, line 6: "),
    "cut.jsonl": (GOOD * 5 + '{"prompt": "w5", "ans', "cannot be loaded: cut.jsonl, line 6: "),
    "no_object.jsonl": (GOOD * 3 + '"w5"\n', "no_object.jsonl, line 4: a str, where each line must be an object"),
    "array.jsonl": ("[1]\n[2]\n", "array.jsonl, line 1: a list, where each line must be an object"),
    "twice.jsonl": (GOOD + '{"prompt": "w5", "prompt": "w6"}\n', "was specified twice in row 1"),
    "surrogate.jsonl": (GOOD * 3 + '{"prompt": "w5 \\ud800"}\n', "surrogate pair in string is invalid. in row 3"),
    "page.jsonl": ("<!DOCTYPE html>\n", "page.jsonl, line 1: "),
    "nothing.csv": ("", "nothing.csv is empty"),
    "header.csv": ("prompt,answer\n", "cannot be loaded: it has no rows"),
    "ragged.csv": ("prompt,answer\nw5,1\nw5,1,3\n", "Expected 2 fields in line 3, saw 3"),
    "latin.csv": ("prompt\né\n".encode("latin-1"), "'utf-8' codec can't decode"),
    "pointer.parquet": ("version https://git-lfs.github.com/spec/v1\n", "magic bytes not found"),
    "rows.txt": ("w5\n", "rows.txt is none of .jsonl, .json, .parquet, .csv. Convert it to one of them."),
    "number.json": ("7", "cannot be loaded: JSON parse error"),
    "no_list.json": ("[]", "cannot be loaded: it has no rows"),
}


def test_a_file_that_cannot_be_read_is_a_sentence(subtests, tmp_path):
    for name, (content, sentence) in FILES.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        with subtests.test(name):
            with pytest.raises(DataError) as caught:
                DatasetSource(str(tmp_path / name)).load()
            assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_datasets_reads_has_no_bad_line(tmp_path):
    for number, content in enumerate([GOOD * 3, GOOD + "\n\n" + GOOD, "\ufeff" + GOOD, GOOD.strip()]):
        file = tmp_path / f"rows{number}.jsonl"
        file.write_text(content)
        assert len(load_dataset("json", data_files=str(file), split="train")) > 0
        assert bad_line(file) == ""


def test_a_name_is_no_pattern(tmp_path):
    for name, answer in (("rows1.jsonl", "wrong"), ("rows[1].jsonl", "right"), ("r?ws*.jsonl", "right")):
        (tmp_path / name).write_text(json.dumps({"prompt": "w5", "answer": answer}) + "\n")
        for streaming in (False, True):
            rows = list(DatasetSource(str(tmp_path / name), streaming=streaming).load().train)
            assert [row["answer"] for row in rows] == [answer]
        assert read_data(str(tmp_path / name))["answer"][:] == [answer]
    folder = tmp_path / "rows [v1]"
    folder.mkdir()
    (folder / "part.parquet").write_bytes(b"")
    with pytest.raises(DataError, match="cannot be loaded"):
        DatasetSource(str(folder)).load()


# The scripts ------------------------------------------------------------------------------------------------------

PAIRS = [{"prompt": "w5 ", "chosen": tiny.words(i), "rejected": tiny.words(i + 1)} for i in range(3, 19)]
LENGTH = {"rules": [{"rule": "length", "high": 4, "slack": 4}]}
SCRIPTS = {
    "grpo": (grpo, PROMPTS, {"num_generations": 2, "max_completion_length": 6, **LENGTH}),
    "ppo": (ppo, PROMPTS, {"response_length": 6, **LENGTH}),
    "reward": (reward, PAIRS, {}),
}
DROPS = {"dataloader_drop_last": True}
# name: (changes of row 5, changes of the settings, what the sentence says)
REFUSED = {
    "null": ({"prompt": None}, {}, "row 5 has no prompt"),
    "number": ({"prompt": 7}, {}, "row 5 has a prompt of type int"),
    "messages among texts": ({"prompt": [{"role": "user", "content": "w5"}]}, {}, "row 5 has "),
    "no step": ({}, {"max_steps": 0}, "max_steps"),
    "few rows": ({}, {**DROPS, "per_device_train_batch_size": 64}, "has 16 rows; over 1 process one "),
    "evaluation": ({}, {}, "eval_dataset: row 1000 has "),
}
DAILY = {("grpo", "null"), ("grpo", "few rows"), ("ppo", "number"), ("ppo", "evaluation"), ("reward", "null")}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A policy and a reward model, with a chat template and without one, and a policy's folder without weights."""
    folder = tmp_path_factory.mktemp("models")
    for name, tokenizer in (("plain", tiny.tokenizer()), ("chat", chat_tokenizer())):
        for script in ("grpo", "ppo"):
            recipes.save(folder / name / script, "llama", tokenizer)
        recipes.save(folder / name / "reward", reward_model(folder / "reward", "llama"), tokenizer)
        recipes.save(folder / name / "none", tiny.model("llama").config, tokenizer)
    return folder


def argv_of(folder, files, model, **settings):
    """Write files, by their split, and a recipe; return the script's arguments."""
    for split, content in files.items():
        (folder / "data").mkdir(exist_ok=True)
        (folder / "data" / f"{split}.jsonl").write_text(content)
    settings = dict(max_steps=1, eval_strategy="steps" if "test" in files else "no", eval_steps=1) | settings
    own = dict(output_dir=str(folder / "runs" / "out"), model_name_or_path=str(model))
    own["dataset_name"] = str(folder / "data")
    return recipes.recipe(folder, **recipes.SMALL | own | settings)


def lines(rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize(
    ("script", "kind"),
    [one if one in DAILY else nightly(*one) for one in product(SCRIPTS, REFUSED)],
)
def test_bad_data_end_a_script_in_one_sentence(script, kind, models, tmp_path, capfd):
    module, rows, own = SCRIPTS[script]
    row, changes, sentence = REFUSED[kind]
    bad = [{name: None for name in rows[0]}] if kind == "evaluation" else []
    files = {"train": lines([*rows[:5], rows[5] | row, *rows[6:]]), "test": lines([rows[0]] * 1000 + bad)}
    argv = argv_of(tmp_path, files, models / "plain" / script, **own | changes)
    assert sentence in recipes.stopped(capfd, module.main, argv)


STREAMS = {
    "A row of the stream cannot be read: JSON parse error": GOOD + '{"prompt": "w5\n' + GOOD,
    "On rank 0 a row came with no prompt (null)": GOOD + '{"prompt": null, "answer": "1"}\n',
    "The stream of training rows ended before the first batch was full.": GOOD,
}


@pytest.mark.parametrize("sentence", STREAMS)
def test_a_bad_stream_ends_a_script_in_one_sentence(sentence, models, tmp_path, capfd):
    settings = SCRIPTS["grpo"][2] | dict(dataset_streaming=True, shuffle_dataset=False)
    argv = argv_of(tmp_path, {"train": STREAMS[sentence]}, models / "plain" / "grpo", **settings)
    assert sentence in recipes.stopped(capfd, grpo.main, argv)


# Other columns ----------------------------------------------------------------------------------------------------

GSM8K = [{"question": tiny.words(i, i + 1), "answer": f"w5\n#### {i},000"} for i in range(3, 11)]
# The columns of UltraFeedback, binarized, as its two publishers have them.
SIDES = [
    {
        name: [{"role": "user", "content": tiny.words(i)}, {"role": "assistant", "content": answer}]
        for name, answer in (("chosen", tiny.words(i + 1)), ("rejected", "w9"))
    }
    for i in range(10, 18)
]
ULTRAFEEDBACK = [
    {"prompt": tiny.words(i), "prompt_id": "7", **sides, "score_chosen": 8.0}
    for i, sides in zip(range(10, 18), SIDES, strict=True)
]
NAMED = [{"instruction": "w5 ", "good": tiny.words(i), "bad": tiny.words(i + 1)} for i in range(3, 11)]
PROMPT_KEYS = {"columns": {"prompt": "question"}, "answer_pattern": "#### (.+)", "system_prompt": "w7"}
RULES = [{"rule": "answer", "gold": "answer", "kind": "number"}]
RUNS = {
    "ppo": ("ppo", GSM8K, {**PROMPT_KEYS, "rules": RULES, "response_length": 4}),
    "pairs": ("reward", NAMED, {"columns": {"prompt": "instruction", "chosen": "good", "rejected": "bad"}}),
    "pairs of messages": ("reward", ULTRAFEEDBACK, {"columns": {"prompt": None}}),
}


STREAMED = [("ppo", True), ("pairs", True), nightly("pairs of messages", True)]


@pytest.mark.parametrize(("name", "streams"), [*product(RUNS, [False]), *STREAMED])
def test_data_of_other_columns_reach_step_1(name, streams, models, tmp_path):
    script, rows, keys = RUNS[name]
    settings = keys | dict(dataset_streaming=streams, per_device_train_batch_size=8)
    SCRIPTS[script][0].main(argv_of(tmp_path, {"train": lines(rows)}, models / "chat" / script, **settings))
    assert json.loads((tmp_path / "runs" / "out" / "trainer_state.json").read_text())["global_step"] == 1


# The others are test_row_mapping.py's.
UNFIT = [
    ("grpo", GSM8K, {"columns": {"prompt": "problem"}}, "columns names 'problem', and train_dataset has the columns"),
    ("ppo", GSM8K, {}, "has no column 'prompt', only 'question', 'answer'. Name the column that holds the prompts: "),
    ("ppo", GSM8K, {**PROMPT_KEYS, "dataset_streaming": True, "max_steps": -1}, "set max_steps"),
    ("reward", ULTRAFEEDBACK, {}, "text next to messages"),
]


def test_keys_that_do_not_fit_end_a_run_before_a_model_loads(subtests, models, tmp_path, capfd):
    for script, rows, keys, sentence in UNFIT:
        own = {} if script == "reward" else {"rules": RULES, "per_device_train_batch_size": 8}
        argv = argv_of(tmp_path, {"train": lines(rows)}, models / "chat" / "none", **own, **keys)
        with subtests.test(sentence):
            said = recipes.stopped(capfd, SCRIPTS[script][0].main, argv)
            assert sentence in said and (script != "reward" or "columns: {prompt: null}" in said)


# The hub's data, in their layout on a local disk ---------------------------------------------------------------------


CARD = "---\nconfigs:\n" + "".join(
    f"- config_name: {name}\n  data_files:\n"
    + "".join(f"  - split: {split}\n    path: {name}/{split}-*\n" for split in ("train", "test"))
    for name in ("main", "socratic")
)


@pytest.fixture(scope="module")
def gsm8k(tmp_path_factory):
    """A folder as `hf download openai/gsm8k` leaves it, with rows of two configurations."""
    folder = tmp_path_factory.mktemp("gsm8k")
    (folder / "README.md").write_text(CARD + "---\n")
    for config in ("main", "socratic"):
        rows = [{"question": f"w{i}", "answer": f"{config}\n#### {i}"} for i in range(3, 19)]
        for split in ("train", "test"):
            (folder / config).mkdir(exist_ok=True)
            Dataset.from_list(rows).to_parquet(folder / config / f"{split}-00000-of-00001.parquet")
    return str(folder)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_copy_of_the_hubs_folder_has_its_configurations(gsm8k, streaming):
    train, test = DatasetSource(gsm8k, test_split="test", config="socratic", streaming=streaming).load()
    assert next(iter(train)) == next(iter(test)) == {"question": "w3", "answer": "socratic\n#### 3"}


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (None, "Config name is missing. Please pick one among the available configs: ['main', 'socratic']"),
        ("mian", "BuilderConfig 'mian' not found. Available: ['main', 'socratic']."),
    ],
)
def test_a_configuration_that_is_not_there_is_a_sentence(gsm8k, config, sentence):
    with pytest.raises(DataError) as caught:
        DatasetSource(gsm8k, config=config).load()
    assert str(caught.value).startswith(f"The dataset '{gsm8k}' cannot be loaded: {sentence}")
    assert str(caught.value).endswith(" Choose a configuration by dataset_config.")


def test_a_copy_in_one_file_stands_for_any_configuration(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "w5"}\n')
    assert DatasetSource(str(tmp_path / "rows.jsonl"), config="main").load()[0][0] == {"prompt": "w5"}


def test_a_configuration_of_a_mixture_has_no_effect():
    with pytest.raises(ConfigError, match="dataset_config is 'main', which has no effect on a mixture"):
        DatasetSource(None, config="main", mixture=object())


@pytest.fixture
def no_hub(monkeypatch):
    """A hub at a port where nobody listens, and everything that would be changed put back."""
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)


def test_a_hub_that_does_not_answer_is_asked_once(no_hub, capfd):
    with pytest.raises(DataError) as caught:
        DatasetSource("openai/gsm8k", config="main").load()
    said = str(caught.value)
    assert "'openai/gsm8k' is not on this machine, and the hub (http://127.0.0.1:9) cannot be reached" in said
    assert "hf download openai/gsm8k --repo-type dataset --local-dir FOLDER" in said and "HF_ENDPOINT=URL" in said
    assert "\n" not in said and "Retrying" not in capfd.readouterr().err


def test_the_hub_is_left_where_it_cannot_be_reached_only(no_hub, monkeypatch):
    monkeypatch.setattr("trl_ext.memory.models.find.no_hub", lambda: "")
    leave_if_unreachable()
    assert not constants.HF_HUB_OFFLINE
