"""Runs of a tiny model, under accelerate and under Ray, whose weights are compared."""

import json
import re
import subprocess
import sys

import yaml

from tests.multi.launching import environment, launched, loaded

PATIENCE_S = 600


def write_recipe(trainer, model, folder) -> str:
    """Write a recipe that trains the tiny model for 8 steps on the CPU, with a checkpoint after each second one."""
    prompts = [{"prompt": f"w{i} w{i + 1}", "answer": f"w{i}"} for i in range(64)]
    pairs = [{"prompt": f"w{i} ", "chosen": f"w{10 + i} w3", "rejected": f"w{20 + i}"} for i in range(64)]
    rows = pairs if trainer == "reward" else prompts
    (folder / f"{trainer}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    # Half of the words: completions of a group differ.
    rule = {"rule": "pattern", "pattern": ".*w[0-9]*[02468]"}
    own = {} if trainer == "reward" else {"rules": [rule], "max_completion_length": 6}
    settings = {
        "model_name_or_path": str(model),
        "dataset_name": str(folder / f"{trainer}.jsonl"),
        "per_device_train_batch_size": 4,
        "max_steps": 8,
        "save_steps": 2,
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "eval_strategy": "no",
        "logging_steps": 1,
        "learning_rate": 1e-3,
        **own,
        **({"num_generations": 4} if trainer == "grpo" else {}),
        **({"critic": "head"} if trainer == "ppo" else {}),
    }
    (folder / f"{trainer}.yaml").write_text(yaml.safe_dump(settings))
    return str(folder / f"{trainer}.yaml")


def under_accelerate(trainer, launch_file, recipe, out) -> dict:
    """Train with two processes, and return the weights."""
    command = [*launched(launch_file, 2), "-m", f"trl_ext.scripts.{trainer}", "--config", recipe, "--output_dir", out]
    _run(list(map(str, command)), environment(), out)
    return loaded(out / "model.safetensors")


def under_ray(trainer, launch_file, recipe, out, step, rank, *options) -> dict:
    """Train with two workers of which one is killed before a step, and return the weights."""
    words = ["--num_workers", 2, "--max_failures", 1, "--config_file", launch_file, "--config", recipe]
    command = [sys.executable, "-m", "tests.multi.programs.ray_trial", trainer, *words, "--output_dir", out, *options]
    command += ["--storage_path", out.with_suffix(".ray")]
    dying = {"DYING_STEP": str(step), "DYING_RANK": str(rank)}
    _run(list(map(str, command)), environment() | dying, out)
    assert out.with_suffix(".died").read_text() == f"rank {rank} in step {step}"
    return loaded(out / "model.safetensors")


def _run(command, env, out):
    log = out.with_suffix(".log")
    with log.open("w") as file:
        code = subprocess.run(command, env=env, stdout=file, stderr=file, timeout=PATIENCE_S).returncode
    text = re.sub(r"\x1b\[[0-9;]*m", "", log.read_text())
    assert code == 0, text[-6000:]
    assert "Failed to query" not in text
