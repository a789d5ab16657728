"""`trl-ext plan --probe`: three real steps of the best plans on the cards at hand, measured beside the estimate.

Each plan is written and launched as printed. The rows are synthetic: prompts and answers as long as the plan's, and
completions that may not end before, scored by a rule. A run that dies is an answer, too.
"""

import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from trl_ext.errors import ConfigError
from trl_ext.memory.files.plan import write_plan
from trl_ext.memory.files.settings import launch_line
from trl_ext.memory.job import Job
from trl_ext.memory.models.find import weights_of
from trl_ext.memory.planner.planner import Plan, Plans
from trl_ext.scripts.exit import OUT_OF_MEMORY

NUM_PLANS = 3
NUM_STEPS = 3  # the first has no Adam's state before it, and is slower
CLOSE_FRAC = 0.1  # an estimate that is no further off is called right
QUIET = ["--max_steps", str(NUM_STEPS), "--logging_steps", "1", "--save_strategy", "no", "--report_to", "none"]


@dataclass(frozen=True, slots=True)
class Trial:
    """A plan's estimate, and what its three steps came to.

    Args:
        label: The plan.
        estimated_gib, estimated_s: Peak of a card, without the CUDA context; seconds of an optimizer step.
        gib: Measured peak of a card; None on a CPU, and of a run that ended early.
        s: Measured seconds of an optimizer step, the median of those after the first; None of a run that ended early.
        ended: "" for a run of three steps, else how it ended.
    """

    label: str
    estimated_gib: float
    estimated_s: float
    gib: float | None = None
    s: float | None = None
    ended: str = ""


def probed(plans: Plans, model: str) -> list[Trial]:
    """Run the best plans, one after the other.

    Args:
        plans: What the planner found.
        model: The model as the command line names it.

    Raises:
        ConfigError: A size instead of a model, more cards in the plan than here, or a vLLM server in every plan.
    """
    from trl_ext.doctor.look import this_machine

    if weights_of(model) is None:
        raise ConfigError(f"--probe trains the model, and {model} has no weights. Give a name on the hub or a folder.")
    here, planned = this_machine(), plans.search.hardware
    if here is not None and here.num_gpus < planned.num_gpus:
        raise ConfigError(
            f"--probe runs on the cards here, {here}, and the plan is for {planned}. Plan for those here."
        )
    # The reward model of a plan is not at hand, and left out of estimate and run alike.
    alone = [one for one in plans.plans if not one.job.vllm_servers]
    if not alone:
        raise ConfigError("--probe starts no vLLM server. Ask for a plan without --vllm_mode server.")
    found = [replace(one, estimate=one.what_if(reward_model="none")) for one in alone[:NUM_PLANS]]
    return [_probe(one, model, use_cpu=here is None) for one in found]


def _probe(plan: Plan, model: str, *, use_cpu: bool) -> Trial:
    estimate = plan.estimate
    expected = Trial(plan.label, round(estimate.peak_gib, 2), round(estimate.step_s, 2))
    with tempfile.TemporaryDirectory(prefix="probe") as name:
        folder = Path(name)
        write_plan(plan, folder, model)
        (folder / "rules.yaml").write_text("rules:\n  - {rule: length, high: 1, slack: 100000}\n", encoding="utf-8")
        rows = "".join(json.dumps(row) + "\n" for row in synthetic_rows(plan.job, model))
        (folder / "rows.jsonl").write_text(rows, encoding="utf-8")
        theirs = {"DATASET": folder / "rows.jsonl", "RULES.yaml": folder / "rules.yaml", "OUT": folder / "out"}
        words = [str(theirs.get(word, word)) for word in shlex.split(launch_line(plan.job, name))]
        words = [*words, *QUIET, *_full_length(plan.job), *(["--use_cpu", "true"] if use_cpu else [])]
        start = words.index("trl-ext")
        command = ["env", *words[:start], sys.executable, "-m", "trl_ext.cli.main", *words[start + 1 :]]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode == OUT_OF_MEMORY:
            return replace(expected, ended="out of memory")
        state = folder / "out" / "trainer_state.json"
        if done.returncode or not state.is_file():
            said = [line for line in done.stdout.splitlines() if line.startswith("error:") or "Error: " in line]
            return replace(expected, ended=said[-1].strip() if said else f"exit code {done.returncode}")
        peak_gib, step_s = measured(json.loads(state.read_text(encoding="utf-8"))["log_history"])
        return replace(expected, gib=peak_gib, s=step_s)


def synthetic_rows(job: Job, model: str) -> list[dict[str, str]]:
    """As many rows as an optimizer step takes, each as long as the plan says, up to a token or two."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    token = next(i for i in range(len(tokenizer) // 2, len(tokenizer)) if str(tokenizer.decode([i])).strip())
    length = job.max_prompt_length if job.generates else job.max_length // 2
    ids = tokenizer(str(tokenizer.decode([token] * length)), add_special_tokens=False)["input_ids"]
    text = str(tokenizer.decode(ids[:length]))
    answers = {} if job.generates else {"chosen": " " + text, "rejected": " " + text}
    return [{"prompt": text, **answers}] * job.global_batch


def _full_length(job: Job) -> list[str]:
    """Options by which completions do not end before their longest."""
    name = "min_tokens" if job.use_vllm else "min_new_tokens"
    least = json.dumps({name: job.max_completion_length})
    return ["--generation_kwargs", least] if job.generates else []


def measured(log_history: Sequence[dict[str, Any]]) -> tuple[float | None, float]:
    """GiB and seconds of a run's log, as in `Trial`."""
    steps = [entry for entry in log_history if any(key.startswith("phase/") for key in entry)]
    seconds = [sum(entry[key] for key in entry if key.startswith("phase/")) for entry in steps]
    peaks = [
        entry[key]
        for entry in steps
        for key in entry
        if key.startswith("memory/") and key.endswith("_gib") and "predicted" not in key and "reserved" not in key
    ]
    return round(max(peaks), 2) if peaks else None, round(median(seconds[1:] or seconds), 2)


def sentences(probes: Sequence[Trial]) -> list[str]:
    """The answer in words: a line for each plan, and which estimate was right."""
    lines = ["probed, three steps each (measured, beside the estimate)"]
    for one in probes:
        memory = "memory is not measured on a CPU" if one.gib is None else _beside(one.gib, one.estimated_gib, "GiB")
        got = one.ended or f"{memory}; {_beside(one.s or 0.0, one.estimated_s, 's a step')}"
        lines.append(f"  {one.label}: {got}")
    ran = [one for one in probes if one.s is not None]
    if not ran:
        return [*lines, "None of them ran."]
    fastest = min(ran, key=lambda one: one.s or 0.0)
    verdict = "as estimated" if fastest is probes[0] else f"and not {probes[0].label}, as estimated"
    return [*lines, f"Fastest: {fastest.label}, {verdict}."]


def _beside(found: float, estimated: float, unit: str) -> str:
    is_right = abs(found - estimated) <= CLOSE_FRAC * estimated
    return f"{found:.2f} {unit} ({estimated:.2f}: {'right' if is_right else f'{estimated / found - 1:+.0%}'})"


def as_json(probes: Sequence[Trial]) -> list[dict[str, Any]]:
    """The probes for JSON."""
    return [asdict(one) for one in probes]
