"""`trl-ext` answers at once, and a slip on its command line is one sentence."""

import json
import subprocess
import sys

import pytest

from trl_ext import __version__
from trl_ext.cli.main import SCRIPTS, main, shipped_recipes
from trl_ext.monitor.record import write_record

HEAVY = ("torch", "trl", "transformers", "accelerate", "matplotlib", "rich")


def test_help_imports_nothing_heavy():
    asked = [["--help"], ["--version"], *([name, "--help"] for name in SCRIPTS)]
    code = "import sys; from trl_ext.cli.main import main\n"
    code += f"for argv in {asked}: main(argv)\nprint([m for m in {HEAVY} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.splitlines()[-1] == "[]"


def test_no_command_and_help_print_the_same_and_version_its_number(capsys):
    assert main([]) == 0
    text = capsys.readouterr().out
    assert main(["--help"]) == 0
    assert capsys.readouterr().out == text
    assert "grpo" in text and "reward" in text and "report" in text
    main(["--version"])
    assert capsys.readouterr().out == f"trl-ext {__version__}\n"


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_commands_help_names_its_script_and_recipes_that_there_are(name, capsys):
    assert main([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: trl-ext {name} ") and f"python -m trl_ext.scripts.{name} --help" in text
    names = [recipe.name for recipe in shipped_recipes() if recipe.trainer == name]
    assert f"shipped recipe: {', '.join(names)}\n" in text and names


SLIPS = {
    "grop": "There is no command 'grop'. Did you mean 'grpo'?",
    "--unknown": "There is no command '--unknown'. There are: grpo, ppo, reward, plan, ",
    "rewrad": "There is no command 'rewrad'. Did you mean 'reward'?",
    "report nowhere": "There is no log.jsonl or trainer_state.json in nowhere",
    "report": "Give one run for its report, or two or more after --compare",
    "report a --compare b c": "Give one run for its report, or two or more after --compare",
    "report --compare a": "There is nothing to compare in: a.",
    "report --compare nowhere none": "There is no log.jsonl or trainer_state.json in nowhere",
    "plan --alow lora": "Unknown flag --alow. Did you mean --allow?",
    "plan --what_if zero=2": "Unknown flag --what_if. Did you mean --what-if?",
    "plan --trainer grop": "--trainer cannot be 'grop'. Did you mean 'grpo'?",
    "plan --trainer sft": "--trainer cannot be 'sft'. There are: reward, grpo, ppo.",
    "plan --max_length long": "--max_length must be a whole number, not 'long'.",
    "plan --what-if": "--what-if: expected one argument.",
    "plan 8B": "Unexpected '8B' on the command line.",
    "plan --presets --gpus 2x4090": "--presets lists the presets and takes --json alone. Ask for one by --preset",
    "doctor --pln plan": "Unknown flag --pln. Did you mean --plan?",
    "score explian": "trl-ext score has no command 'explian'. Did you mean 'explain'?",
    "score explain a b --rwo 3": "Unknown flag --rwo. Did you mean --row?",
    "score audit": "trl-ext score audit needs RULES, DATA. See trl-ext score audit --help.",
}


def test_a_slip_is_one_sentence_and_exit_code_2(capsys, subtests):
    for words, sentence in SLIPS.items():
        with subtests.test(words):
            with pytest.raises(SystemExit) as stop:
                main(words.split())
            assert stop.value.code == 2
            error = capsys.readouterr().err
            assert error.strip().startswith(f"error: {sentence}") and "Traceback" not in error


def test_report_renders_a_run_again_and_recognises_a_reward_model(tmp_path, capsys):
    log = [{"step": 1, "reward": 0.5, "rewards/answer/mean": 0.25}]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": log}))
    write_record(tmp_path, {"model_name_or_path": "SmolLM2"}, {"trainer": "grpo"})
    assert main(["report", str(tmp_path)]) == 0
    assert "answer" in capsys.readouterr().out
    assert "SmolLM2" in (tmp_path / "report.html").read_text()
    log = [{"step": 10, "loss": 0.5, "accuracy": 0.75, "margin": 1.5, "mean_reward": 0.1, "max_reward": 2.0}]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": log}))
    assert main(["report", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "accuracy" in text and "margin" in text and "0.75" in text
    assert "<h2>Reward model</h2>" in (tmp_path / "report.html").read_text()
