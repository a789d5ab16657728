"""A run's folder as trainers leave it, made without a trainer: log, record and tables of completions."""

import io
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from trl_ext.monitor.pages.report import summary_table
from trl_ext.monitor.record import write_record

HOSTILE = (
    "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">",
    "\x1b[31mred\x00 \u202egnp.exe\u202c \ud800 " + "A" * 100_000 + " the end",
)


PLAN = {"label": "plan of 40 GiB", "peak_gib": 38.21, "usable_gib": 45.0, "peak_phase": "update", "step_s": 12.34}


def entry(step: int, num_steps: int, rules: int = 2) -> dict[str, Any]:
    """What a GRPO run logs in a step; its rewards rise."""
    done = step / num_steps
    return {
        "step": step,
        "loss": 0.1 - done / 10,
        "grad_norm": 1.0 + step % 3,
        "learning_rate": 1e-5 * (1 - done),
        "reward": done,
        "rewards/rules/mean": done,
        **{f"rewards/rule_{number}/mean": done / (number + 1) for number in range(rules)},
        "kl": 0.1 * done,
        "entropy": 2.0 - done,
        "frac_reward_zero_std": 0.0,
        "completions/mean_length": 100.0 + step % 7,
        "completions/max_length": 200.0 + step % 5,
        "completions/min_length": 5.0,
        "completions/clipped_ratio": 0.3 * (1 - done),
        "packing/forwarded_tokens": 100.0,
        "packing/padded_tokens": 300.0 + step % 2,
        "phase/generate_s": 3.0,
        "phase/update_s": 1.0,
        "memory/update_gib": 40.0,
        **({"memory/predicted_update_gib": 42.0} if step == 1 else {}),
    }


def trace(value: float, adds: float) -> str:
    """The column `rule_trace` of a row with two rules, the second of which takes away."""
    return json.dumps({"answer": [value, "ok", value, "gold whole text: 7"], "style": [-1.0, "ok", adds, "<i>"]})


def completion_row(step: int, number: int, completion: Any, value: float, adds: float = 0.0) -> dict[str, Any]:
    """A row of TRL's table."""
    return {
        "step": step,
        "prompt": [{"role": "user", "content": f"3 + {number} <b>?</b>"}],
        "completion": [{"role": "assistant", "content": completion}],
        "rules": value + adds,
        "rule_trace": trace(value, adds),
        "rule_columns": json.dumps({"answer": "7"}),
        "advantage": value - 0.5,
    }


def write_table(folder: Path, step: int, rows: list[dict[str, Any]]) -> None:
    """Write a table of completions where TRL does."""
    import pyarrow
    import pyarrow.parquet as parquet

    (folder / "completions").mkdir(exist_ok=True)
    table = pyarrow.Table.from_pylist(rows)
    parquet.write_table(table, folder / "completions" / f"completions_{step:05d}.parquet")


def write_run(folder: Path, num_steps: int = 20, rules: int = 2, **recipe: Any) -> Path:
    """Write the folder of a finished run, with hostile completions and names."""
    folder.mkdir(parents=True, exist_ok=True)
    log = [{"step": 0, "eval_reward": 0.1}, *(entry(step, num_steps, rules) for step in range(1, num_steps + 1))]
    log += [{"step": num_steps, "eval_reward": 0.9}, {"step": num_steps, "train_runtime": 61.0}]
    state = {"log_history": log, "max_steps": num_steps, "global_step": num_steps}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    for step in (1, num_steps):
        rows = [completion_row(step, number, f"= {number} at {step}", number / 8) for number in range(8)]
        rows[3] = completion_row(step, 3, HOSTILE[0], 1.0, -0.5)
        rows[5] = completion_row(step, 5, HOSTILE[1].replace("\ud800", ""), 0.0, -2.0)
        write_table(folder, step, rows)
    packages = {"trl_ext": "0.1.0", "trl": "1.16.0"}
    versions = {"trainer": "grpo", "started": "2026-11-22T18:00:00+00:00", "num_processes": 2, "packages": packages}
    versions["launch"] = "trl-ext grpo --config quickstart"
    settings = {"model_name_or_path": "org/<model>", "dataset_name": "org/data", "learning_rate": 1e-5, **recipe}
    write_record(folder, settings, versions, {"rules": [{"rule": "answer", "gold": "answer"}]}, PLAN)
    return folder


def by_name(changes):
    """Curves of a summary, or their changes, by the name that a person reads."""
    return {curve.name: change for curve, change in changes.items()}


def text_of(summary):
    """The table of a summary as a terminal shows it."""
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(summary_table(summary))
    return console.export_text()
