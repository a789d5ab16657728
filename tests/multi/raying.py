"""Runs of a tiny model, under accelerate and under Ray, whose weights are compared."""

import re
import subprocess
import sys

from tests.multi.launching import environment, launched, loaded, succeeded

PATIENCE_S = 600


def under_accelerate(trainer, launch_file, recipe, out) -> dict:
    """Train with two processes, and return the weights."""
    succeeded([*launched(launch_file, 2), "-m", f"trl_ext.scripts.{trainer}", "--config", recipe, "--output_dir", out])
    return loaded(out / "model.safetensors")


def under_ray(trainer, launch_file, recipe, out, step, rank, *options) -> dict:
    """Train with two workers of which one is killed before a step, and return the weights."""
    words = ["--num_workers", 2, "--max_failures", 1, "--config_file", launch_file, "--config", recipe]
    command = [sys.executable, "-m", "tests.multi.programs.ray_trial", trainer, *words, "--output_dir", out, *options]
    command = [str(word) for word in [*command, "--storage_path", out.with_suffix(".ray")]]
    env = environment() | {"DYING_STEP": str(step), "DYING_RANK": str(rank)}
    log = out.with_suffix(".log")
    with log.open("w") as file:
        code = subprocess.run(command, env=env, stdout=file, stderr=file, timeout=PATIENCE_S).returncode
    text = re.sub(r"\x1b\[[0-9;]*m", "", log.read_text())
    assert code == 0, text[-6000:]
    assert "Failed to query" not in text
    assert out.with_suffix(".died").read_text() == f"rank {rank} in step {step}"
    return loaded(out / "model.safetensors")
