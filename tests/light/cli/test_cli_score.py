"""`trl-ext score`: files in, a table and an exit code out; slips are one sentence."""

import json
import subprocess
import sys

import pytest

from trl_ext.cli.main import main

pytestmark = pytest.mark.slow

RULES = """\
rules:
  - {rule: answer}
  - {rule: length, low: 1, high: 200, unit: words, weight: 0.1, gate: answer}
"""
COMPARING = """\
from dataclasses import dataclass
from trl_ext.rewards import Rule, Verdict

@dataclass(frozen=True, kw_only=True)
class Longer(Rule):
    tier = "inline"
    reads_group = True

    def score(self, row):
        shorter = sum(len(one.text) < len(row.text) for one in row.group)
        return Verdict(1.0, "ok", f"longer than {shorter} of {len(row.group)} at step {row.step}")
"""
HEAVY = ("torch", "trl", "transformers", "datasets", "rich", "yaml")
ASKED = [{"role": "user", "content": "What is 6 * 7?"}]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "rules.yaml").write_text(RULES)
    write("data.jsonl", [{"prompt": ASKED, "answer": "42"}, {"prompt": "What is 1 + 1?", "answer": "2"}])
    return tmp_path


def write(name, rows):
    with open(name, "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def stopped(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error.strip()


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from trl_ext.cli.main import main\n"
        "for argv in (['score'], ['score', '--help'], ['score', 'redteam', '--help']):\n"
        f"    try: main(argv)\n    except SystemExit: pass\nprint([m for m in {HEAVY} if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", ["audit", "explain", "redteam"])
def test_help_says_what_it_is_for_and_shows_an_example(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["score", command, "--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0 and f"  trl-ext score {command} rules.yaml" in text


def test_audit_is_quiet_about_data_that_fits_and_exits_with_1_naming_the_row_that_does_not(folder, capsys):
    write("data.jsonl", [{"answer": "#### 42"}, {"answer": "18"}])
    assert main(["score", "audit", "rules.yaml", "data.jsonl"]) == 0
    out = capsys.readouterr().out
    assert "ok: every gold is read" in out and out.count("2 paid, 0 not") == 5
    write("data.jsonl", [{"answer": "42"}, {"answer": "forty"}])
    assert main(["score", "audit", "rules.yaml", "data.jsonl"]) == 1
    assert "answer, row 1: its gold cannot be read" in capsys.readouterr().out
    assert main(["score", "audit", "rules.yaml", "data.jsonl", "--limit", "1"]) == 0


@pytest.mark.parametrize("command", [["audit", "rules.yaml", "data.jsonl"], ["redteam", "rules.yaml", "data.jsonl"]])
def test_json_is_nothing_but_json(folder, capsys, command):
    code = main(["score", *command, "--json"])
    assert json.loads(capsys.readouterr().out)["ok"] is (code == 0)


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
def test_audit_reads_the_formats_that_training_reads(folder, capsys, suffix):
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list([{"answer": "42"}, {"answer": "18"}])
    getattr(data, f"to_{suffix[:4] if suffix != 'parquet' else suffix}")(f"data.{suffix}")
    assert main(["score", "audit", "rules.yaml", f"data.{suffix}"]) == 0


def test_audit_reads_a_saved_dataset_and_its_splits(folder, capsys):
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list([{"answer": "42"}])
    data.save_to_disk("one")
    datasets.DatasetDict({"validation": data}).save_to_disk("several")
    capsys.readouterr()
    assert main(["score", "audit", "rules.yaml", "one"]) == 0
    assert main(["score", "audit", "rules.yaml", "several", "--split", "validation"]) == 0
    error = stopped(["score", "audit", "rules.yaml", "several"], capsys)
    assert error == "error: several has no split 'train', only validation. Choose with --split."


def test_redteam_prints_every_cheat_and_exits_with_1_when_one_pays_and_0_when_none_does(folder, capsys):
    write("data.jsonl", [{"prompt": "6 * 7?", "answer": "42"}])
    (folder / "rules.yaml").write_text("rules: [{rule: answer, where: all}]")
    assert main(["score", "redteam", "rules.yaml", "data.jsonl"]) == 1
    text = capsys.readouterr().out
    assert "\nprompt copied " in text and "'answer only in the thoughts', row 0: " in text
    (folder / "rules.yaml").write_text("rules: [{rule: length, low: 1, high: 90, unit: words}]")
    assert main(["score", "redteam", "rules.yaml", "data.jsonl"]) == 0


def test_redteam_cheats_on_the_users_rows(folder, capsys):
    write("data.jsonl", [{"prompt": "6 * 7?", "answer": "42"}, {"prompt": "?", "answer": "18"}])
    main(["score", "redteam", "rules.yaml", "data.jsonl", "--limit", "1"])
    text = capsys.readouterr().out
    assert " cheats on 1 row, " in text


def test_explain_prints_rules_columns_and_text(folder, capsys):
    write(
        "table.jsonl", [{"prompt": "?", "completion": "A: 1", "answer": "2"}, {"completion": "A: 42", "answer": "42"}]
    )
    assert main(["score", "explain", "rules.yaml", "table.jsonl", "--row", "1"]) == 0
    text = capsys.readouterr().out
    assert "completion: A: 42" in text and "total   1.100" in text
    assert "answer='42'" in text and "where 'answer' is at least 1" in text


def test_explain_reads_how_the_chat_template_ends_the_prompt(folder, capsys):
    (folder / "tags.yaml").write_text("rules: [{rule: tags, tags: [think]}]")
    row = {"prompt": ASKED, "completion": [{"role": "assistant", "content": "6 * 7</think> 42"}]}
    rows = [{**row, "prompt_end": "?<assistant><think>\n"}, {**row, "prompt_end": "?<assistant>"}]
    for number, (one, total) in enumerate(zip(rows, ("1.000", "0.000"), strict=True)):
        write(f"table_{number}.jsonl", [one])
        assert main(["score", "explain", "tags.yaml", f"table_{number}.jsonl", "--row", "0"]) == 0
        assert f"total  {total}" in capsys.readouterr().out


def test_explain_reads_trls_table_and_joins_the_dataset(folder, capsys):
    datasets = pytest.importorskip("datasets")
    row = {
        "step": 10,
        "prompt": [{**ASKED[0], "name": None}],  # as parquet gives messages back when others have a name
        "completion": [{"role": "assistant", "content": "It is 42."}],
        "rules": 1.1,
        "answer": 0.5,  # a reward, under the name of a rule and of a column
        "advantage": 0.7,
    }
    datasets.Dataset.from_list([row, {**row, "rules": 0.0}]).to_parquet("completions.parquet")
    command = ["score", "explain", "rules.yaml", "completions.parquet", "--data", "data.jsonl"]
    write("data.jsonl", [{"prompt": ASKED, "answer": "42"}, {"prompt": [{**ASKED[0], "content": "?"}], "answer": "2"}])
    assert main([*command, "--row", "0"]) == 0
    text = capsys.readouterr().out
    assert "step 10" in text and "answer='42'" in text and "total   1.100" in text
    assert text.endswith("total in the log: 1.100, advantage in the log: 0.700\n")
    main([*command, "--row", "1"])
    assert "total in the log: 0.000" in (text := capsys.readouterr().out) and "The log differs" in text


def test_explain_shows_a_rule_the_group_of_the_table(folder, capsys, monkeypatch):
    monkeypatch.syspath_prepend(folder)
    (folder / "comparing.py").write_text(COMPARING)
    (folder / "rules.yaml").write_text("rules: [{rule: comparing.Longer}]")
    said = [("p", 1, "aaa"), ("p", 2, "a"), ("p", 2, "aa"), ("p", 2, "aaa"), ("q", 2, "aaaa")]
    write("table.jsonl", [{"prompt": p, "step": step, "completion": text} for p, step, text in said])
    assert main(["score", "explain", "rules.yaml", "table.jsonl", "--row", "2"]) == 0
    assert "longer than 1 of 2 at step 2" in capsys.readouterr().out


def test_token_ids_come_from_the_table_or_an_option_is_named(folder, capsys):
    (folder / "rules.yaml").write_text("rules: [{rule: length, high: 2}]")
    write("table.jsonl", [{"completion": "A: 42", "completion_ids": [5, 6, 7]}])
    main(["score", "explain", "rules.yaml", "table.jsonl", "--row", "0"])
    assert "3 tokens" in capsys.readouterr().out
    (folder / "rules.yaml").write_text("rules: [{rule: length}]")
    write("table.jsonl", TABLE)
    error = stopped(["score", "explain", "rules.yaml", "table.jsonl", "--row", "0"], capsys)
    assert error.endswith("On the command line: --tokenizer MODEL.")


TABLE = [{"prompt": "What is 1 + 1?", "completion": "A: 2", "step": 1, "answer": 1.0, "advantage": 0.5}]


ROW_0 = "explain rules.yaml table.jsonl --row 0"
SLIPS = {
    "redteam rules.yaml data.jsonl --lmit 3": "Unknown flag --lmit. Did you mean --limit?",
    "audit rules.yaml nowhere.jsonl": "There is no file or folder nowhere.jsonl.",
    "audit nowhere.yaml data.jsonl": "nowhere.yaml cannot be read",
    "audit rules.yaml rules.yaml": "rules.yaml is none of .jsonl, .json, .parquet, .csv.",
    "audit rules.yaml data.jsonl --limit 0": "--limit is 0. Give at least 1.",
    "audit rules.yaml data.jsonl --others -1": "others is -1.",
    "audit rules.yaml empty.jsonl": "empty.jsonl cannot be read",
    "audit rules.yaml broken.jsonl": "broken.jsonl cannot be read",
    "audit rules.yaml other.jsonl": "Rule 'answer' reads the column 'answer', which the dataset lacks",
    "redteam rules.yaml data.jsonl --shape A:": "shape is 'A:'. Write [answer]",
    "explain rules.yaml table.jsonl --row 1": "table.jsonl has 1 rows, counted from 0",
    "explain rules.yaml table.jsonl --row -1": "table.jsonl has 1 rows, counted from 0",
    ROW_0: "The rules read the column 'answer', which this table",
    "explain rules.yaml other.jsonl --row 0": "other.jsonl has no column 'completion'",
    f"{ROW_0} --data other.jsonl": "other.jsonl or the table has no column 'prompt' to match rows by.",
    f"{ROW_0} --data unlike.jsonl": "No row of unlike.jsonl has this row's prompt: What is 1 + 1?.",
    f"{ROW_0} --data twice.jsonl": "Rows 0, 1 of twice.jsonl have this prompt and differ.",
    "explain tokens.yaml table.jsonl --row 0": "Rule 'length' raised RuleError",
    "serve rules.yaml --max_mib 0 --token_env NO_SUCH_TOKEN": "--max_mib is 0. Give at least 1.",
}


def test_a_slip_is_one_sentence(folder, capsys, subtests):
    write("table.jsonl", TABLE)
    write("empty.jsonl", [])
    (folder / "broken.jsonl").write_text('{"answer": \n')
    write("other.jsonl", [{"solution": "18"}])
    write("unlike.jsonl", [{"prompt": "?", "answer": "2"}])
    write("twice.jsonl", [{"prompt": "What is 1 + 1?", "answer": answer} for answer in ("2", "3")])
    (folder / "tokens.yaml").write_text("rules: [{rule: length}]")
    for words, sentence in SLIPS.items():
        with subtests.test(words):
            assert stopped(["score", *words.split()], capsys).startswith(f"error: {sentence}")


RULES_OF_TOKENS = """\
rules:
  - {rule: answer, gold: answer, kind: number}
  - {rule: tags, tags: [think, answer], weight: 0.2, gate: answer}
  - {rule: length, high: 512, slack: 128, weight: 0.1}
"""


def saved_tokenizer(path):
    pytest.importorskip("torch")
    from tests import tiny

    tiny.tokenizer().save_pretrained(path)


def of_a_run(folder, text="<think>a b</think> <answer>4</answer>"):
    datasets = pytest.importorskip("datasets")
    prompt = "What is 2 + 2?"
    (folder / "out/completions").mkdir(parents=True)
    table = datasets.Dataset.from_list([{"step": 10, "prompt": prompt, "completion": text, "advantage": 0.5}] * 18)
    table.to_parquet("out/completions/completions_00010.parquet")
    write("train.jsonl", [{"prompt": prompt, "answer": "4"}])
    (folder / "rules.yaml").write_text(RULES_OF_TOKENS)


LINE = "explain rules.yaml out/completions/completions_00010.parquet --row 17 --data train.jsonl"


@pytest.mark.parametrize("where", ["out", "out/checkpoint-10", "model"])
def test_tokens_are_counted_with_the_runs_own_tokenizer(where, folder, capsys):
    of_a_run(folder)
    saved_tokenizer(where)
    (folder / "out/recipe.yaml").write_text("model_name_or_path: model")
    (folder / "out/versions.json").write_text('{"trainer": "grpo"}')
    assert main(["score", *LINE.split()]) == 0
    assert "length" in capsys.readouterr().out


def test_without_a_tokenizer_in_the_run_the_option_is_named(folder, capsys):
    of_a_run(folder)
    assert stopped(["score", *LINE.split()], capsys).endswith("On the command line: --tokenizer MODEL.")
    (folder / "out/recipe.yaml").write_text("model_name_or_path: ./gone")
    (folder / "out/versions.json").write_text('{"trainer": "grpo"}')
    error = stopped(["score", *LINE.split()], capsys)
    assert error.startswith("error: The tokenizer './gone' cannot be loaded: ") and "--tokenizer" in error


def test_a_column_that_is_missing_is_answered_with_those_that_are_there(folder, capsys):
    write("data.jsonl", [{"question": "6 * 7?", "solution": "42"}])
    for command in (["audit", "rules.yaml", "data.jsonl"], ["redteam", "rules.yaml", "data.jsonl"]):
        error = stopped(["score", *command], capsys)
        assert "'answer', which the dataset lacks; its columns are: question, solution." in error
