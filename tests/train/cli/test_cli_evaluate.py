"""`trl-ext evaluate`: on problems whose answers are known, the result is known; explain reads what it writes."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests import fake_vllm, recipes, tiny
from tests.recipes import stopped, write_rows
from trl_ext.cli.main import main
from trl_ext.monitor.record import write_record
from trl_ext.trainers.forward.reward_input import RECORD_FILE

LENGTH = {"rule": "length", "high": 2, "slack": 2, "weight": 0.5}
RULES = {"rules": [LENGTH, {"rule": "answer", "gold": "gold", "kind": "exact"}]}
RECIPE = {"columns": {"prompt": "question"}, "temperature": 0.7, "max_completion_length": 5}
# Prompt, and the number of samples of 4 that are right: the stand-in for vLLM answers the last word in so many.
PROBLEMS = [("w9 w90", 0), ("w9 w91", 1), ("w9 w92", 4), ("w9 w93", 2), ("w9 w94", 4)]
RIGHT = {int(prompt.split("w")[-1]): right for prompt, right in PROBLEMS}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    model = tiny.model("llama")
    model.lm_head.weight.data *= 10
    return recipes.save(tmp_path_factory.mktemp("base"), model)


@pytest.fixture
def run(base, tmp_path, monkeypatch):
    """A run with its record, and held-out problems as its recipe names columns."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder, data = tmp_path / "run", tmp_path / "problems"
    folder.mkdir()
    for file in base.iterdir():
        (folder / file.name).symlink_to(file)
    write_rows(data / "test.jsonl", [{"question": prompt, "gold": prompt.split()[-1]} for prompt, _ in PROBLEMS])
    write_rows(data / "train.jsonl", [{"question": "w5", "gold": "w6"}])
    recipe = {**RECIPE, "dataset_name": str(data)}
    write_record(folder, recipe, {"trainer": "grpo", "packages": {}}, RULES)
    return folder


def answer(ids, number):
    return [ids[-1] if number < RIGHT[ids[-1]] else 3, 2]


def result_of(run, name="problems-test-n4"):
    folder = run / "evaluations" / name
    lines = (folder / "completions.jsonl").read_text().splitlines()
    return json.loads((folder / "evaluation.json").read_text()), [json.loads(line) for line in lines]


def test_pass_at_k_of_known_answers_is_known_and_explain_reads_the_completions(run, monkeypatch, capsys):
    fake_vllm.install(monkeypatch, answer)
    assert main(["evaluate", str(run), "--num_generations", "4", "--backend", "vllm"]) == 0
    result, rows = result_of(run)
    assert result["pass_rule"] == "answer" and result["temperature"] == 0.7 and result["max_new_tokens"] == 5
    at_1 = (0 + 1 / 4 + 1 + 2 / 4 + 1) / 5
    at_2 = (0 + 1 / 2 + 1 + 5 / 6 + 1) / 5  # of 6 pairs, 3 and 5 have a right one
    assert result["pass@k"]["1"]["value"] == pytest.approx(at_1)
    assert result["pass@k"]["2"]["value"] == pytest.approx(at_2)
    assert result["pass@k"]["4"]["value"] == pytest.approx(4 / 5)
    assert result["rules_mean"] == pytest.approx({"answer": 11 / 20, "length": 1.0})
    assert result["reward_mean"] == pytest.approx(11 / 20 + 0.5)
    assert result["mean_length_tokens"] == 2 and result["truncated_frac"] == 0
    assert [row["passed"] for row in rows] == [number < right for _, right in PROBLEMS for number in range(4)]
    assert "pass@4" in capsys.readouterr().out
    file = run / "evaluations" / "problems-test-n4" / "completions.jsonl"
    for number in (4, 5):
        assert main(["score", "explain", str(run / "rules.yaml"), str(file), "--row", str(number)]) == 0
        assert f"total   {rows[number]['total']:.3f}" in capsys.readouterr().out


def test_greedy_answers_are_the_models(run, base, capsys, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(base).eval()
    ids = torch.tensor([tiny.tokenizer()("w9 w92").input_ids])
    greedy = model.generate(ids, max_new_tokens=5, do_sample=False)[0, 2:]
    said = tiny.tokenizer().decode(greedy, skip_special_tokens=True)
    data = run.parent / "own.jsonl"
    write_rows(data, [{"question": "w9 w92", "gold": said}, {"question": "w9 w91 w7 w8", "gold": "w198"}])
    for number in (1, 2):  # the second time beside the first
        assert main(["evaluate", str(run), "--dataset", str(data)]) == 0
        result, rows = result_of(run, "own-greedy" if number == 1 else "own-greedy-2")
        assert [row["passed"] for row in rows] == [True, False]
        assert result["pass@k"]["1"]["value"] == 0.5 and result["temperature"] == 0
        assert result["pass@k"]["1"]["method"].startswith("Wilson")


def test_the_table_says_how_the_chat_template_ends_a_prompt(run, monkeypatch, capsys):
    fake_vllm.install(monkeypatch)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %} <think>\n{% endif %}"
    (run / "chat_template.jinja").write_text(template)
    assert main(["evaluate", str(run), "--backend", "vllm", "--limit", "1", "--output", str(run / "here")]) == 0
    row = json.loads((run / "here" / "completions.jsonl").read_text())
    assert row["prompt_end"] == "? <think>\n"


def test_another_rule_may_decide(run, monkeypatch, capsys):
    fake_vllm.install(monkeypatch, answer)
    argv = ["evaluate", str(run), "--backend", "vllm", "--limit", "3", "--output", str(run / "here")]
    assert main([*argv, "--pass_rule", "length", "--threshold", "0.5"]) == 0
    result = json.loads((run / "here" / "evaluation.json").read_text())
    assert result["pass@k"]["1"]["value"] == 1 and result["num_problems"] == 3


REFUSED = {
    "--pass_rule style": "There is no rule 'style'",
    "--split validation": "has no split 'validation'",
    "--dataset /none.jsonl": "There is no file or folder /none.jsonl",
    "--rules /none.yaml": "/none.yaml cannot be read",
    "--limit 0": "--limit is 0",
    "--num_generation 4": "Did you mean --num_generations?",
}


def evaluate(*argv):
    return main(["evaluate", *map(str, argv)])


def test_what_cannot_be_evaluated_is_one_sentence(subtests, run, capsys):
    for words, sentence in REFUSED.items():
        with subtests.test(words):
            assert sentence in stopped(capsys, evaluate, run, *words.split())
            assert not (run / "evaluations").exists()


def test_a_reward_model_solves_no_problems(run, capsys):
    (run / RECORD_FILE).write_text("{}")
    sentence = f"{run} is a reward model, which solves no problems. Its accuracy on held-out pairs is in the log"
    assert sentence in stopped(capsys, evaluate, run)


def test_a_folder_without_record_needs_rules_and_data(base, run, tmp_path, capsys):
    assert "holds no rules.yaml with rules" in stopped(capsys, evaluate, base)
    write_record(tmp_path / "program", {"seed": 1}, {"trainer": "grpo"}, rules_notes="Scored by my_reward.")
    for file in base.iterdir():
        (tmp_path / "program" / file.name).symlink_to(file)
    assert "holds no rules.yaml with rules" in stopped(capsys, evaluate, tmp_path / "program")
    assert "There is no dataset" in stopped(capsys, evaluate, base, "--rules", run / "rules.yaml")
    write_rows(tmp_path / "bare.jsonl", [{"prompt": "w4", "solution": "w5"}])
    asked = ["--rules", run / "rules.yaml", "--dataset", tmp_path / "bare.jsonl"]
    assert "The rules read the column 'gold'" in stopped(capsys, evaluate, base, *asked)
    assert "columns names 'question'" in stopped(capsys, evaluate, run, "--dataset", tmp_path / "bare.jsonl")


def test_completions_stay_where_a_rule_cannot_score_and_a_folder_is_checked_before_the_model(run, monkeypatch, capsys):
    fake_vllm.install(monkeypatch, answer)
    command = ["evaluate", str(run), "--num_generations", "4", "--backend", "vllm"]
    error = stopped(capsys, main, [*command, "--output", str(run / "rules.yaml" / "results")])
    assert "cannot be a folder" in error and "Give another --output." in error

    monkeypatch.setattr("trl_ext.rewards.ruleset.RuleSet.explain_all", failing)
    with pytest.raises(RuntimeError, match="the judge is away"):
        main([*command, "--output", str(run / "kept")])
    lines = (run / "kept" / "completions.jsonl").read_text().splitlines()
    assert len(lines) == 20 and json.loads(lines[0])["gold"] == "w90"
    assert f"Completions: {run / 'kept' / 'completions.jsonl'}" in capsys.readouterr().out


def failing(*_, **__):
    raise RuntimeError("the judge is away")
