"""Two processes say what one process says: steps, a table, one problem, and what comes next. So do scripts."""

import json

import pytest

from tests.multi.launching import PROGRAMS, succeeded
from tests.multi.warm import warm_python

RECIPE = dict(
    rules=[{"rule": "length", "high": 4, "slack": 4, "unit": "words"}],
    max_steps=2,
    logging_steps=1,
    use_cpu=True,
    bf16=False,
    report_to="none",
    save_strategy="no",
    eval_strategy="steps",
    eval_steps=2,
    eval_on_start=True,
    num_generations_eval=1,
    log_completions=True,
    num_completions_to_print=0,
    per_device_train_batch_size=4,
    per_device_eval_batch_size=2,
    num_generations=2,
    max_completion_length=4,
)
NOISE = (
    "Loading weights",
    "Generating",
    "Writing model",
    "FutureWarning",
    "OMP_NUM_THREADS",
    "built",
)


# Of three steps: a table of 4 completions, and a line about the others; DeepSpeed's word on the accelerator, a bar for
# the weights, a line on groups without variance, and one for each step.
MOST_LINES_OF_A_SCRIPT = {"stdout": 20, "stderr": 8}


@pytest.mark.parametrize(("option", "num_tables"), [("", 1), ("num_completions_to_print=1", 4)])
def test_a_script_is_as_quiet_as_the_command_line(option, num_tables, tiny_model, tmp_path):
    """A table is printed once, or each time where a script says how many completions it wants to see, TRL's
    last one at the end of training included."""
    command = [warm_python(), PROGRAMS / "plain_script.py", tiny_model, tmp_path / "out", *filter(None, [option])]
    done = succeeded(command, tmp_path)
    assert done.stdout.count("╰") == num_tables, done.stdout
    assert len(list((tmp_path / "out" / "completions").glob("*.parquet"))) == 3
    assert "FutureWarning: a user's own" in done.stderr and "deprecated" not in done.stderr
    if not option:
        for name, most in MOST_LINES_OF_A_SCRIPT.items():
            said = [line for line in getattr(done, name).splitlines() if line.strip() and "a user's own" not in line]
            assert len(said) <= most, "\n".join(said)


def test_a_console_is_quiet(tiny_model, tmp_path):
    for split in ("train", "test"):
        rows = [json.dumps({"prompt": f"w{i} w3"}) for i in range(8)]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(rows))
    (tmp_path / "recipe.yaml").write_text(json.dumps(RECIPE))
    command = [warm_python(), "-m", "trl_ext.cli.main", "grpo", "--num_processes", 2, "--config_file", "cpu"]
    command += ["--main_process_port", 0, "--config", "recipe.yaml", "--output_dir", "out"]
    command += ["--model_name_or_path", tiny_model, "--dataset_name", tmp_path]
    done = succeeded(["env", "--unset=OMP_NUM_THREADS", *command], tmp_path)
    text = done.stdout + done.stderr
    assert not [noise for noise in NOISE if noise in text]
    others = ("runpy", "accelerator to CPU")  # of the warm Python, of DeepSpeed
    said = [line for line in done.stderr.splitlines() if line.strip() and not any(one in line for one in others)]
    steps = [line.split("  ")[0] for line in said]
    # Both completions of a group may score alike here.
    steps = [step for step in steps if not step.startswith("No completion of this step has an advantage: ")]
    assert steps == ["held-out after step 0", "step 1/2", "step 2/2", "held-out after step 2"]
    ending = done.stdout[done.stdout.index("Model: ") :].splitlines()
    assert [line.split(" ")[0] for line in ending if line] == [
        "Model:",
        "One",
        "Before:",
        "After:",
        "Next:",
        *[""] * 3,
    ]
    assert ending[2].startswith("One problem: w") and ending[2].endswith(" w3")
