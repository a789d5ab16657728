"""`trl_ext.scripts.reward` trains from a recipe, and refuses what cannot work before it loads a model."""

import json
import re
import resource

import pytest
import torch
from datasets import Dataset
from safetensors import safe_open

from tests import recipes, tiny
from trl_ext.errors import ConfigError, DataError
from trl_ext.monitor.log_keys import REWARD_MODEL
from trl_ext.monitor.record import read_log_history, read_record
from trl_ext.monitor.summary import summarize
from trl_ext.scripts import reward, training
from trl_ext.scripts.reward import filter_everywhere
from trl_ext.scripts.rewards import build_rules

RULES = [{"rule": "answer", "gold": "answer", "kind": "exact"}]
EVALUATED = dict(eval_strategy="steps", eval_steps=2, eval_on_start=True)
TEMPLATE = "{% for message in messages %}{{ message.content }} <eos> {% endfor %}"


def pair(i, chosen=None, rejected=None):
    """Plain text: the chosen side is the gold answer, the rejected one is not."""
    gold = tiny.words(i)
    return {
        "prompt": tiny.words(i, i + 1, i + 2) + " ",
        "chosen": gold if chosen is None else chosen,
        "rejected": tiny.words(i + 1, i + 2) if rejected is None else rejected,
        "answer": gold,
    }


def as_messages(row):
    turns = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
    return row | {name: [{"role": role, "content": row[name].strip()}] for name, role in turns.items()}


GOOD = [pair(i) for i in range(3, 19)]
# Identical; empty; contradicted by RULES.
BAD = [pair(3, "w9", "w9"), pair(4, "w4", " "), pair(5, "w6", "w5")]


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    """A tiny language model with its tokenizer, and folders with train.jsonl and test.jsonl."""
    folder = tmp_path_factory.mktemp("assets")
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = TEMPLATE
    recipes.save(folder / "model", "llama", tokenizer)
    recipes.write_rows(folder / "data", GOOD)
    recipes.write_rows(folder / "messages", [as_messages(row) for row in [*GOOD, *BAD]])
    return folder


@pytest.fixture
def run(assets, tmp_path):
    return recipes.starter(reward.main, tmp_path, assets, max_steps=2, gradient_checkpointing=False)


def test_a_recipe_trains_evaluates_saves_and_reports(run, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("TRL_EXT_REPORT", "1")
    run(**EVALUATED)
    captured = capfd.readouterr()
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"model.safetensors", "trainer_state.json", "report.html", "recipe.yaml", "versions.json"} <= files

    summary = summarize(read_log_history(tmp_path / "out"))
    assert summary.kind is REWARD_MODEL and summary.num_steps == 2
    held_out = {curve.name: change for curve, change in summary.held_out.items()}
    assert {curve.name for curve in summary.training} >= {"accuracy", "margin", "loss"}
    assert None not in (held_out["accuracy"].before, held_out["accuracy"].after)
    assert summary.forwarded_tokens < summary.padded_tokens
    assert "update" in summary.phase_s

    progress = captured.err
    assert "held-out after step 0  accuracy " in progress
    assert "step 1/2  accuracy " in progress and "margin " in progress and "left 0:00" in progress
    assert "{'loss'" not in captured.out + captured.err  # the metrics dictionary of transformers' own callback
    assert "2 steps in" in captured.out
    assert "Pairs" not in captured.out  # nothing was filtered


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        (dict(save_strategy="steps", save_steps=2), "--resume_from_checkpoint true: checkpoint-2 is complete."),
        ({}, "There is no complete checkpoint"),
    ],
)
def test_a_disk_that_is_full_after_the_last_step_is_a_sentence(run, changes, advice, tmp_path, capfd, monkeypatch):
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    with monkeypatch.context() as patch:
        fill = lambda *_, **__: resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))  # noqa: E731
        patch.setattr(training.FirstStep, "on_train_end", fill)
        try:
            with pytest.raises(SystemExit, match="2"):
                run(**changes)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    said = capfd.readouterr().err
    assert "error: All steps are done, but the model could not be written" in said and "Traceback" not in said
    assert "File too large" in said and advice in said
    if changes:
        run(resume_from_checkpoint="true", **changes)
        assert (tmp_path / "out" / "model.safetensors").is_file()


def test_rules_filter_evaluate_and_become_margins(run, tmp_path, capfd, monkeypatch):
    from trl_ext.trainers.reward.trainer import RewardTrainer

    datasets = {}

    def keep(self, *args, **kwargs):
        datasets.update(train=kwargs["train_dataset"], held_out=kwargs["eval_dataset"])
        original(self, *args, **kwargs)

    original = RewardTrainer.__init__
    monkeypatch.setattr(RewardTrainer, "__init__", keep)
    run(data="messages", rules=RULES, margin_from_rules=True, **EVALUATED)
    captured = capfd.readouterr()
    for role in ("Training", "Held-out"):
        assert f"{role} pairs:\n" in captured.out
    assert len(re.findall(r"^total +19$", captured.out, re.MULTILINE)) == 2
    assert datasets["train"]["answer"][:] == [row["answer"] for row in GOOD]
    assert datasets["train"]["margin"][:] == [1.0] * len(GOOD)
    # The pair that the rules contradict stays in the held-out set, which tells the two kinds apart.
    assert len(datasets["held_out"]) == len(GOOD) + 1
    assert "if rules agree" in captured.err and "if rules disagree" in captured.err
    record = read_record(tmp_path / "out")
    assert record.rules["rules"][0]["rule"] == "answer" and record.recipe["margin_from_rules"] is True


def test_a_run_is_repeated_from_its_folder(run, tmp_path):
    run("--max_steps", "1", data="messages", rules=RULES, margin_from_rules=True)
    reward.main(["--config", str(tmp_path / "out" / "recipe.yaml"), "--output_dir", str(tmp_path / "again")])
    losses = [read_log_history(tmp_path / name)[0]["loss"] for name in ("out", "again")]
    assert losses[0] == losses[1] != 0


def test_lora_trains_and_saves_the_score_head(run, tmp_path):
    heads = []
    for learning_rate in (0.0, 1e-2):
        run(*"--use_peft --lora_r 4 --lora_target_modules all-linear".split(), learning_rate=learning_rate)
        with safe_open(tmp_path / "out" / "adapter_model.safetensors", framework="pt") as weights:
            assert [name for name in weights.keys() if "score" in name] == ["base_model.model.score.weight"]
            heads.append(weights.get_tensor("base_model.model.score.weight"))
    assert not torch.equal(*heads)
    assert not (tmp_path / "out" / "model.safetensors").exists()
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["task_type"] == "SEQ_CLS"
    assert read_record(tmp_path / "out").recipe["lora_r"] == 4


SLIPS = {
    "--margin_from_rules": "margin_from_rules is true, but there are no rules.",
    "--filter_pairs --dataset_streaming": "filter_pairs reads all pairs before the first step",
    "--use_peft --lora_task_type CAUSAL_LM": "lora_task_type is CAUSAL_LM, which would leave",
    "--resume_from_checkpoint true": "There is no checkpoint in ",
}


def test_a_slip_is_one_sentence_before_anything_is_loaded(subtests, run, capsys, monkeypatch):
    monkeypatch.setattr("datasets.load_dataset", lambda *args, **kwargs: pytest.fail("read the dataset"))
    for words, sentence in SLIPS.items():
        with subtests.test(words):
            assert f"error: {sentence}" in recipes.stopped(capsys, run, *words.split())


def test_a_filter_that_leaves_nothing_is_a_sentence(run, tmp_path, capsys):
    bad = str(recipes.write_rows(tmp_path / "bad", BAD))
    said = recipes.stopped(capsys, run, "--dataset_name", bad, rules=RULES, filter_pairs=True)
    assert "error: The training pairs cannot be filtered. Not one of the 3 pairs is left" in said


# Filter -----------------------------------------------------------------------------------------------------------


def test_without_rules_contradicted_pairs_stay_and_no_column_is_added():
    rows = Dataset.from_list([*GOOD, *BAD])
    pairs = filter_everywhere(rows, None, False, "training pairs")
    assert len(pairs) == len(GOOD) + 1 and pairs.column_names == rows.column_names


def test_the_rules_gap_stays_with_its_row():
    rows = Dataset.from_list([*BAD, *GOOD, pair(20, "w20", "w20")])
    pairs = filter_everywhere(rows, build_rules(RULES), True, "training pairs")
    assert pairs["answer"][:] == [row["answer"] for row in GOOD]
    assert pairs["rule_gap"][:] == pairs["margin"][:] == [1.0] * len(GOOD)


def test_a_stream_and_a_missing_column_are_refused():
    stream = Dataset.from_list(GOOD).to_iterable_dataset()
    with pytest.raises(ConfigError, match="the training pairs whole"):
        filter_everywhere(stream, None, False, "training pairs")
    with pytest.raises(DataError, match="The held-out pairs cannot be filtered"):
        filter_everywhere(Dataset.from_dict({"text": ["a"]}), None, False, "held-out pairs")
    assert filter_everywhere(None, None, False, "held-out pairs") is None
