"""How much faster and smaller is a PPO update? Ours against TRL 1.12.0's PPOTrainer, same rollouts, one run.

An update is all that follows generation: log-probabilities of policy and reference, values, rewards of a reward
model, advantages, and the epochs over the episodes, with one optimizer step of policy and critic each. Completions are
fixed, one a prompt, so that both trainers see the same tokens. TRL takes the policy's log-probabilities from the
scores of its generation, which cost it nothing here (see ppo_peer.py); ours come from a forward inside the update.

Policy, reference, reward model and critic have one shape and random weights. Ours with critic "separate" trains what
TRL 1.12 trains: a full policy and a full critic, or adapters on the policy and a full critic. "head" and "adapter" put
the critic on the policy's backbone. Nobody checkpoints activations: TRL 1.12 cannot.

TRL 1.12.0 lives in an environment of its own. Without --peer_python one is made in the cache folder; it takes all but
TRL from the environment that runs this file. Every trainer runs in a process of its own, with an update that warms up
and whose peak memory counts; rounds alternate between the trainers, so that a busy machine hits all of them.

    python benchmarks/ppo.py --output benchmarks/results/ppo_cpu.json
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import venv
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import torch
from datasets import Dataset
from machine import machine
from machine import write as write_record
from ppo_task import (
    QUICK,
    Job,
    Meter,
    Task,
    causal_model,
    policy_adapter,
    scoring_model,
    text,
    tokenizer,
    with_rollouts,
)
from quickstart.assets import cache_folder
from rich.console import Console
from rich.table import Table
from transformers import PrinterCallback, TrainerCallback

import trl_ext

PEER = "trl==1.12.0"
HERE = Path(__file__).parent
SHAPE_OPTIONS = ("layers", "episodes", "rows", "updates", "bf16")


@dataclass(frozen=True, slots=True)
class Variant:
    """What is trained by whom, and the variant whose seconds and peak it is divided into."""

    name: str
    is_peer: bool
    critic: str
    lora: bool
    base: str


VARIANTS = (
    Variant("trl 1.12", True, "separate", False, "trl 1.12"),
    Variant("separate", False, "separate", False, "trl 1.12"),
    Variant("head", False, "head", False, "trl 1.12"),
    Variant("trl 1.12, lora", True, "separate", True, "trl 1.12, lora"),
    Variant("separate, lora", False, "separate", True, "trl 1.12, lora"),
    Variant("head, lora", False, "head", True, "trl 1.12, lora"),
    Variant("adapter, lora", False, "adapter", True, "trl 1.12, lora"),
)


@dataclass
class Result:
    """Figures of one variant.

    Args:
        seconds: Of each measured update.
        median_s, samples_per_s: Of them.
        peak_gib: Highest memory: of the card, or the bytes of all tensors alive.
        resident_gib: Growth of the process's resident memory at its highest, since before the models were made.
        faster, smaller: TRL 1.12's seconds, and its peak, over this variant's.
    """

    variant: str
    base: str
    seconds: list[float] = field(default_factory=list)
    median_s: float = 0.0
    samples_per_s: float = 0.0
    peak_gib: float = 0.0
    resident_gib: float = 0.0
    faster: float | None = None
    smaller: float | None = None


class UpdateEnd(TrainerCallback):
    """An update of our trainer is as many optimizer steps as epochs."""

    def __init__(self, meter: Meter, epochs: int):
        self._meter, self._epochs = meter, epochs

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % self._epochs == 0:
            self._meter.end()


def fixed_rollout(task: Task, meter: Meter):
    ids = {
        text(prompt): (prompt, completion) for prompt, completion in zip(task.prompts, task.completions, strict=True)
    }

    def rollout(prompts, trainer):
        meter.begin()
        found = [ids[prompt] for prompt in prompts]
        return {
            "prompt_ids": [prompt for prompt, _ in found],
            "completion_ids": [completion for _, completion in found],
            "logprobs": None,
        }

    return rollout


def config(job: Job, folder: str) -> trl_ext.PPOConfig:
    task = job.task
    return trl_ext.PPOConfig(
        output_dir=folder,
        critic=job.critic,
        per_device_train_batch_size=task.rows,
        gradient_accumulation_steps=task.episodes // task.rows,
        num_ppo_epochs=task.epochs,
        total_episodes=task.episodes * (task.updates + 1),
        response_length=task.longest,
        stop_token="eos",
        temperature=1.0,
        use_cpu=not torch.cuda.is_available(),
        bf16=task.bf16,
        gradient_checkpointing=False,
        logging_steps=task.epochs,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def train(job: Job, meter: Meter, folder: str) -> None:
    task = job.task
    trainer = trl_ext.PPOTrainer(
        args=config(job, folder),
        processing_class=tokenizer(task),
        model=causal_model(task),
        # With adapters the reference is the policy without them.
        ref_model=None if job.lora else causal_model(task),
        reward_model=scoring_model(task, seed=1),
        train_dataset=Dataset.from_dict({"prompt": [text(prompt) for prompt in task.prompts]}),
        value_model=scoring_model(task, seed=2) if job.critic == "separate" else None,
        callbacks=[UpdateEnd(meter, task.epochs)],
        peft_config=policy_adapter(job),
        rollout_func=fixed_rollout(task, meter),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()


def work(path: Path) -> None:
    """Run one job of ours, and print its figures."""
    job = Job.load(path)
    with tempfile.TemporaryDirectory() as folder, Meter() as meter:
        train(job, meter, folder)
    meter.report("torch", "transformers", "trl", "accelerate", "peft")


def peer_python(console: Console) -> str:
    """Interpreter of an environment whose TRL is 1.12.0 and whose other packages are those of this one."""
    folder = cache_folder().parent / PEER.replace("==", "-")
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        console.print(f"Making an environment with {PEER} in {folder}.")
        venv.create(folder, clear=True, with_pip=True)
        site = sysconfig.get_path("purelib", "venv", {"base": str(folder)})
        # A .pth file puts ours behind its own, so that its TRL is found first.
        (Path(site) / "peer.pth").write_text(sysconfig.get_path("purelib") + "\n")
        pip = [str(python), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, "--no-deps", "--ignore-installed", PEER], check=True)
        subprocess.run([*pip, "pandas", "rich"], check=True)
        (folder / "ready").touch()
    return str(python)


def run(variant: Variant, task: Task, python: str) -> dict:
    """Figures of one process."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.json"
        Job(task, variant.critic, variant.lora).save(path)
        peer = [python, str(HERE / "ppo_peer.py"), str(path)]
        ours = [sys.executable, __file__, "--worker", str(path)]
        done = subprocess.run(peer if variant.is_peer else ours, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{variant.name} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def add(result: Result, figures: dict, task: Task) -> None:
    result.seconds += [round(s, 3) for s in figures["seconds"]]
    result.median_s = round(statistics.median(result.seconds), 3)
    result.samples_per_s = round(task.episodes / result.median_s, 3)
    result.peak_gib = round(max(result.peak_gib, figures["peak_bytes"] / 2**30), 4)
    result.resident_gib = round(max(result.resident_gib, figures["resident_bytes"] / 2**30), 4)


def compare(results: list[Result]) -> None:
    """Fill in the ratios, where TRL 1.12 was measured."""
    found = {r.variant: r for r in results if r.seconds}
    for result in found.values():
        if base := found.get(result.base):
            result.faster = round(base.median_s / result.median_s, 2)
            result.smaller = round(base.peak_gib / result.peak_gib, 2)


def show(results: list[Result], task: Task, console: Console) -> None:
    table = Table(title=f"PPO update, {task.tokens} tokens ({task.padded_tokens} padded), trl 1.12 / trl_ext")
    for column in ("variant", "s", "samples/s", "faster", "peak GiB", "smaller", "RSS GiB"):
        table.add_column(column, justify="left" if column == "variant" else "right", no_wrap=True)
    for r in results:
        if r.seconds:
            values = (r.median_s, r.samples_per_s, r.faster, r.peak_gib, r.smaller, r.resident_gib)
            table.add_row(r.variant, *("" if value is None else str(value) for value in values))
    console.print(table)


def write(results: list[Result], task: Task, peer_versions: dict, path: Path) -> None:
    record = {
        "benchmark": "ppo",
        "task": {k: v for k, v in asdict(task).items() if k not in ("prompts", "completions")},
        "tokens": task.tokens,
        "padded_tokens": task.padded_tokens,
        "peak_of": "the card" if torch.cuda.is_available() else "tensors alive",
        "machine": machine(),
        "peer": peer_versions,
        "results": [asdict(r) for r in results if r.seconds],
    }
    write_record(path, record)


def measure(options, task: Task) -> None:
    console = Console()
    variants = [v for v in VARIANTS if v.name in options.variants]
    python = options.peer_python or (peer_python(console) if any(v.is_peer for v in variants) else "")
    results = [Result(v.name, v.base) for v in variants]
    peer_versions: dict[str, str] = {}
    for _ in range(options.rounds):
        for variant, result in zip(variants, results, strict=True):
            figures = run(variant, task, python)
            if variant.is_peer:
                peer_versions = figures["versions"]
            add(result, figures, task)
            compare(results)
            show(results, task, console)
            if options.output:
                write(results, task, peer_versions, options.output)


def main() -> None:
    names = [v.name for v in VARIANTS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", default=names, choices=names, help="which to run")
    parser.add_argument("--peer_python", help="interpreter of an environment with trl==1.12.0; unset: one is made")
    parser.add_argument("--layers", type=int, help="of every model")
    parser.add_argument("--episodes", type=int, help="in an update")
    parser.add_argument("--rows", type=int, help="episodes in a micro-batch")
    parser.add_argument("--updates", type=int, help="measured in a process, after one that warms up")
    parser.add_argument("--rounds", type=int, default=1, help="times to alternate between the variants")
    parser.add_argument("--bf16", action="store_true", default=None, help="autocast instead of float32")
    parser.add_argument("--quick", action="store_true", help="a tiny model, to see that everything runs")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help="JSON file for the figures, with machine and versions")
    options = parser.parse_args()
    if options.worker:
        work(options.worker)
        return
    given = {name: getattr(options, name) for name in SHAPE_OPTIONS if getattr(options, name) is not None}
    task = replace(QUICK if options.quick else Task(), **given)
    if task.episodes % task.rows:
        parser.error(f"--episodes {task.episodes} is no multiple of --rows {task.rows}.")
    measure(options, with_rollouts(task))


if __name__ == "__main__":
    main()
