"""Files that cannot be trained on: one sentence with the line or the row, exit code 2, nothing left on the disk."""

import json

import pytest
import torch
import yaml
from datasets import load_dataset

from tests import tiny
from tests.preferences import reward_model
from trl_ext.errors import DataError
from trl_ext.scripts import grpo, ppo, reward
from trl_ext.scripts.data.dataset import DatasetSource

torch.set_num_threads(1)

GOOD = '{"prompt": "w5", "answer": "1"}\n'
# name: (what the file holds, what the sentence says)
FILES = {
    "nothing.jsonl": ("", "nothing.jsonl is empty. Check what wrote it."),
    "blank.jsonl": ("\n\n", "cannot be loaded: it has no rows"),
    "broken.jsonl": (GOOD * 5 + '{"prompt": "w5\n' + GOOD, "cannot be loaded: broken.jsonl, line 6: "),
    "cut.jsonl": (GOOD * 5 + '{"prompt": "w5", "ans', "cannot be loaded: cut.jsonl, line 6: "),
    "no_object.jsonl": (GOOD * 3 + '"w5"\n', "no_object.jsonl, line 4: a str, where each line must be an object"),
    "array.jsonl": ("[1]\n[2]\n", "array.jsonl, line 1: a list, where each line must be an object"),
    "twice.jsonl": (GOOD + '{"prompt": "w5", "prompt": "w6"}\n', "line 2: the key 'prompt' comes twice"),
    "surrogate.jsonl": (GOOD * 3 + '{"prompt": "w5 \\ud800"}\n', "surrogate.jsonl, line 4: half a character"),
    "page.jsonl": ("<!DOCTYPE html>\n", "page.jsonl, line 1: "),
    "nothing.csv": ("", "nothing.csv is empty"),
    "header.csv": ("prompt,answer\n", "cannot be loaded: it has no rows"),
    "ragged.csv": ("prompt,answer\nw5,1\nw5,1,3\n", "Expected 2 fields in line 3, saw 3"),
    "latin.csv": ("prompt\né\n".encode("latin-1"), "'utf-8' codec can't decode"),
    "pointer.parquet": ("version https://git-lfs.github.com/spec/v1\n", "magic bytes not found"),
    "number.json": ("7", "cannot be loaded: JSON parse error"),
    "no_list.json": ("[]", "cannot be loaded: it has no rows"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_cannot_be_read_is_a_sentence(name, tmp_path):
    content, sentence = FILES[name]
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError) as caught:
        DatasetSource(str(tmp_path / name)).load()
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [GOOD * 3, GOOD + "\n\n" + GOOD, "\ufeff" + GOOD, GOOD.strip()])
def test_a_file_that_datasets_reads_has_no_bad_line(content, tmp_path):
    from trl_ext.scripts.data.dataset import bad_line

    file = tmp_path / "rows.jsonl"
    file.write_text(content)
    assert len(load_dataset("json", data_files=str(file), split="train")) > 0
    assert bad_line(file) == ""


# The scripts ------------------------------------------------------------------------------------------------------

PROMPTS = [{"prompt": tiny.words(i, i + 1), "answer": tiny.words(i)} for i in range(3, 19)]
PAIRS = [{"prompt": "w5 ", "chosen": tiny.words(i), "rejected": tiny.words(i + 1)} for i in range(3, 19)]
SCRIPTS = {
    "grpo": (grpo, PROMPTS, {"num_generations": 2, "max_completion_length": 6}),
    "ppo": (ppo, PROMPTS, {"response_length": 6}),
    "reward": (reward, PAIRS, {}),
}
# name: (changes of row 5, changes of the settings, what the sentence says)
REFUSED = {
    "null": ({"prompt": None}, {}, "row 5 has no prompt"),
    "number": ({"prompt": 7}, {}, "row 5 has a prompt of type int"),
    "messages among texts": ({"prompt": [{"role": "user", "content": "w5"}]}, {}, "row 5 has "),
    "no step": ({}, {"max_steps": 0}, "max_steps"),
    "few rows": (
        {},
        {"per_device_train_batch_size": 64, "dataloader_drop_last": True},
        "has 16 rows; over 1 process one ",
    ),
    "evaluation": ({}, {"bad_evaluation": True}, "eval_dataset: row 1000 has "),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny.model("llama").save_pretrained(folder / "policy")
    reward_model(folder / "reward", "llama").save_pretrained(folder / "reward")
    for name in ("policy", "reward"):
        tiny.tokenizer().save_pretrained(folder / name)
    return folder


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("script", SCRIPTS)
def test_bad_data_end_a_script_in_one_sentence_and_leave_nothing(script, kind, model, tmp_path, capfd):
    module, rows, own = SCRIPTS[script]
    row, changes, sentence = REFUSED[kind]
    rows = [*rows[:5], rows[5] | row, *rows[6:]]
    held_out = [rows[0]] * 1000
    changes = dict(changes)
    if changes.pop("bad_evaluation", False):
        held_out.append({name: None for name in rows[0]})
    splits = {"train": rows, "test": held_out}
    files = {split: "".join(json.dumps(row) + "\n" for row in part) for split, part in splits.items()}
    assert sentence in ended(module, files, tmp_path, capfd, model, **own, **changes)
    assert not (tmp_path / "runs").exists()


def ended(module, files, folder, capfd, model, **changes) -> str:
    """Run a script on files, by their split, and return the one sentence that it ends with."""
    (folder / "data").mkdir()
    for split, content in files.items():
        (folder / "data" / f"{split}.jsonl").write_text(content)
    settings = dict(
        output_dir=str(folder / "runs" / "out"),
        model_name_or_path=str(model / ("reward" if module is reward else "policy")),
        dataset_name=str(folder / "data"),
        max_steps=1,
        per_device_train_batch_size=4,
        use_cpu=True,
        bf16=False,
        eval_strategy="steps" if "test" in files else "no",
        eval_steps=1,
        report_to="none",
        save_strategy="no",
    )
    if module is not reward:
        settings["rules"] = [{"rule": "length", "high": 4, "slack": 4}]
    (folder / "recipe.yaml").write_text(yaml.safe_dump(settings | changes))
    with pytest.raises(SystemExit) as caught:
        module.main(["--config", str(folder / "recipe.yaml")])
    assert caught.value.code == 2
    error = capfd.readouterr().err
    assert "Traceback" not in error
    (line,) = [line for line in error.splitlines() if line.startswith("error: ")]
    return line


STREAMS = {
    "a row that cannot be read": (
        GOOD + '{"prompt": "w5\n' + GOOD,
        "A row that came along cannot be read: JSON parse error",
    ),
    "a null prompt": (GOOD + '{"prompt": null, "answer": "1"}\n', "On rank 0 a row came with no prompt (null)"),
    "too few rows": (GOOD, "The stream of training rows ended before the first batch was full."),
}


@pytest.mark.parametrize("kind", STREAMS)
def test_a_bad_stream_ends_a_script_in_one_sentence(kind, model, tmp_path, capfd):
    content, sentence = STREAMS[kind]
    settings = dict(SCRIPTS["grpo"][2], dataset_streaming=True, shuffle_dataset=False)
    assert sentence in ended(grpo, {"train": content}, tmp_path, capfd, model, **settings)
