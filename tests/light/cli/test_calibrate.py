"""`trl-ext plan --calibrate RUN`: the clock of a card, corrected by a run that was measured on it."""

import json

import pytest

from trl_ext.cli.main import main
from trl_ext.memory.files.plan import write_plan
from trl_ext.memory.planner.planner import plan

QUESTION = ["--trainer", "grpo", "--model", "8B", "--gpus", "8xH100-80GB", "--use_vllm", "--beta", "0.01"]
PARTS = (("generation", "weight push"), ("scoring",), ("update", "communication", "offload"))


@pytest.fixture
def clock(tmp_path, monkeypatch):
    """The file in which quotients are kept."""
    monkeypatch.setenv("TRL_EXT_CLOCK", str(tmp_path / "kept" / "clock.json"))
    return tmp_path / "kept" / "clock.json"


def run_of(folder, times=(3.0, 2.0, 0.5), num_entries=4, mean=256):
    """A run's folder: its plan, and a log whose phases take so many times as long as the plan's, but the first."""
    best = plan("grpo", "8B", "8xH100-80GB", use_vllm=True, beta=0.01).best
    write_plan(best, folder)
    shorter = best.what_if(mean_completion_length=mean).seconds
    generation, scoring, update = (
        time * sum(shorter.get(part, 0.0) for part in parts) for time, parts in zip(times, PARTS, strict=True)
    )
    phases = {"generate": 0.9 * generation, "score": 0.1 * generation, "logps": scoring, "update": 0.75 * update}
    entry = {f"phase/{name}_s": seconds for name, seconds in phases.items()}
    entry |= {"phase/other_s": 0.25 * update, "phase/evaluate_s": 99.0, "completions/mean_length": mean, "loss": 0.1}
    history = [
        {**entry, "reward": 0.5, "step": step, "phase/update_s": 1e3 if step == 1 else phases["update"]}
        for step in range(1, num_entries + 1)
    ]
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": history, "max_steps": num_entries}))
    return folder


def seconds(capsys, *options):
    assert main(["plan", *QUESTION, *options, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["plans"][0]["step_parts_s"]


@pytest.mark.parametrize("mean", [256, 100])
def test_later_plans_for_the_card_take_what_the_run_took(tmp_path, clock, capsys, mean):
    before = seconds(capsys)
    assert main(["plan", "--calibrate", str(run_of(tmp_path / "run", mean=mean))]) == 0
    told = capsys.readouterr().out
    assert "H100-80GB: generation takes 3, scoring 2 and the update 0.5 times the formulas' seconds" in told
    after = seconds(capsys)
    for times, parts in zip((3.0, 2.0, 0.5), PARTS, strict=True):
        for part in before.keys() & set(parts):
            assert after[part] == pytest.approx(times * before[part], abs=0.02), part
    assert main(["plan", *QUESTION]) == 0
    assert "rough" not in capsys.readouterr().out
    assert main(["plan", *QUESTION[:4], "--gpus", "8xA100-80GB"]) == 0
    assert "s a step, rough" in capsys.readouterr().out, "another card is not confirmed"


def test_a_plan_read_back_keeps_its_clock(tmp_path, clock, capsys):
    main(["plan", "--calibrate", str(run_of(tmp_path / "run"))])
    main(["plan", *QUESTION, "--write", str(tmp_path / "plan")])
    kept = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert kept["pace"] == kept["hardware"]["pace"] == [3.0, 2.0, 0.5]
    # The seconds of a run with such a plan are held against the formulas, not against what was corrected before.
    (tmp_path / "run" / "plan.json").write_text(json.dumps(kept))
    capsys.readouterr()
    assert main(["plan", "--calibrate", str(tmp_path / "run")]) == 0
    assert "generation takes 3, scoring 2 and the update 0.5 times" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda run, clock: (run / "plan.json").unlink(), "has no plan.json"),
        (lambda run, clock: (run / "trainer_state.json").unlink(), "There is no log.jsonl or trainer_state.json"),
        (lambda run, clock: run_of(run, num_entries=2), "has logged its phases 2 times"),
        (lambda run, clock: (clock.parent.mkdir(), clock.write_text('{"A40-48GB": [1, 0, 1]}')), "is damaged"),
    ],
)
def test_a_run_that_says_nothing_is_refused_in_a_sentence(tmp_path, clock, capsys, break_it, words):
    run = run_of(tmp_path / "run")
    break_it(run, clock)
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "--calibrate", str(run)])
    assert words in capsys.readouterr().err


def test_a_mean_that_is_longer_than_the_longest_is_refused_and_a_shorter_one_takes_less(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["plan", *QUESTION, "--mean_completion_length", "300"])
    assert "mean_completion_length is 300, and max_completion_length 256" in capsys.readouterr().err
    before, after = seconds(capsys), seconds(capsys, "--mean_completion_length", "100")
    assert after["update"] < before["update"] and after["generation"] < before["generation"]
