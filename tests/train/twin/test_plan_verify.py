"""`trl-ext plan --verify`: the best plan's training, counted by the twin beside the formulas."""

import json
import shlex

import pytest

from tests.plans import config
from trl_ext.cli.plan.command import EXAMPLES, NOTHING_FITS, plan
from trl_ext.errors import ConfigError

TINY = config("llama", 4096, 1024, 2816, 2, 8, kv_heads=4, max_position_embeddings=4096)
QUESTION = "--trainer grpo --gpus 1xRTX4090".split()


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(TINY))
    return str(path.parent)


def test_the_example_of_the_help_says_both_numbers(model, capsys):
    [line] = [line for line in EXAMPLES.splitlines() if "--verify" in line]
    words = shlex.split(line)[2:]
    words[words.index("--model") + 1] = model  # made tiny
    assert plan(words) == 0
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last.startswith("verified: training peaks in the phase '") and "GiB by the twin" in last
    assert "GiB by the formulas" in last and "%" in last


def test_json_carries_both_numbers_and_their_difference(model, capsys):
    assert plan([*QUESTION, "--model", model, "--method", "lora", "--verify", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)["verify"]
    assert answer["refusal"] == "" and answer["phase"] in ("score", "update", "step")
    assert answer["twin_gib"] > 0
    assert answer["difference_frac"] == pytest.approx(answer["formula_gib"] / answer["twin_gib"] - 1, abs=0.002)
    assert abs(answer["difference_frac"]) < 0.05


def test_what_the_twin_cannot_follow_is_a_sentence_and_the_plan_stands(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_HOME", str(tmp_path))  # no model is in the hub's cache
    for words, code, reason in (
        ("--model 1B --zero_stage 2 --offload optimizer", 0, "not verified: Offloading: "),
        ("--model Qwen/Qwen3-30B-A3B --method lora --gpus 8xH100-80GB", 0, "is a mixture of experts"),
        ("--model 7B --zero_stage 0", NOTHING_FITS, "not verified: Nothing fits, so there is no plan to verify."),
    ):
        assert plan([*QUESTION, *words.split(), "--verify"]) == code
        assert reason in capsys.readouterr().out.strip().splitlines()[-1]


def test_a_list_of_presets_has_no_plan_to_verify():
    with pytest.raises(ConfigError, match="--presets lists the frozen plans and takes --json alone"):
        plan(["--presets", "--verify"])
