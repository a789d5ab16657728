"""How much faster is a whole step of GRPO, generation included? Ours against trl.GRPOTrainer, by phase.

SmolLM2-135M on the quickstart's task and prompts: one-digit sums, 8 completions a prompt, 64 in a step, bf16, one
process. "answers" are the quickstart's, of at most 16 tokens; in "tail" lengths are set, median 24, longest 256. Both
trainers generate for themselves, from one seed, with the settings that each has by default. TRL's methods are timed
around, in either library alike. Rounds alternate between the trainers, so that a busy machine hits both; the first
step of each warms up.

    python benchmarks/whole_step.py --output benchmarks/results/whole_step_cpu.json
"""

import argparse
import os
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import datasets
import torch
import transformers
import trl
from generation import long_tail, set_lengths
from grpo_task import PHASES, PhasesOfSteps, reward
from machine import save
from quickstart.assets import prepare
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

import trl_ext

ROWS = 64
# By name: lengths of the completions, the model's own without any; the longest; and the ratio that is asked.
SHAPES: dict[str, tuple[tuple[int, ...], int, float]] = {"answers": ((), 16, 4.8), "tail": (long_tail(ROWS), 256, 5.0)}
# Name of a variant: library and settings.
VARIANTS: dict[str, tuple[Any, dict[str, Any]]] = {"trl": (trl, {}), "trl_ext": (trl_ext, {})}


@dataclass
class Result:
    """Sums over the measured steps of one variant.

    Args:
        seconds: Of whole steps.
        phases: Of them, by phase; `update` is loss forward, backward and optimizer, `other` what is left.
        generated: Tokens of the completions.
    """

    variant: str
    steps: int = 0
    seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    generated: int = 0


def trainer(
    variant: str, shape: str, options: argparse.Namespace, seed: int, folder: str
) -> tuple[PhasesOfSteps, Any]:
    library, own = VARIANTS[variant]
    assets = prepare()
    lengths, longest, _ = SHAPES[shape]
    model = policy(assets / "model", options.layers)
    if lengths:
        set_lengths(model, lengths)
    args = library.GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=32,
        gradient_accumulation_steps=2,
        num_generations=8,
        max_completion_length=longest,
        max_steps=options.steps + 1,
        use_cpu=not torch.cuda.is_available(),
        bf16=True,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=seed,
        **own,
    )
    clock = PhasesOfSteps()
    subject = library.GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=args,
        train_dataset=datasets.load_dataset(str(assets / "data"), split="train"),
        processing_class=AutoTokenizer.from_pretrained(assets / "model"),
        callbacks=[clock],
    )
    subject.remove_callback(transformers.PrinterCallback)
    clock.watch(subject)
    return clock, subject


def policy(folder: Path, layers: int | None) -> Any:
    """SmolLM2-135M, or its first layers."""
    changes = {} if layers is None else {"num_hidden_layers": layers}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **changes)


def add(result: Result, shape: str, options: argparse.Namespace, seed: int) -> None:
    """Train one of the trainers, and add what it took without its first step."""
    with tempfile.TemporaryDirectory() as folder:
        clock, subject = trainer(result.variant, shape, options, seed, folder)
        subject.train()
    result.steps += options.steps
    result.seconds += sum(clock.seconds[1:])
    for found in clock.phases[1:]:
        for phase in PHASES:
            result.phases[phase] += found[phase]
    lengths = [entry["completions/mean_length"] for entry in subject.state.log_history if "loss" in entry]
    result.generated += round(ROWS * sum(lengths[1:]))


def show(shape: str, results: list[Result], ratios: dict[str, float]) -> None:
    table = Table(title=f"A whole step of GRPO, {shape}, seconds; trl / trl_ext")
    for column in ("", "step", *PHASES, "tokens generated"):
        table.add_column(column, justify="right" if column else "left")
    for r in results:
        values = [r.seconds, *(r.phases[phase] for phase in PHASES)]
        table.add_row(r.variant, *(f"{value / max(r.steps, 1):.2f}" for value in values), str(r.generated))
    table.add_row("ratio", *(str(ratios.get(name, "")) for name in ("step", *PHASES)), f"asked {SHAPES[shape][2]}")
    Console().print(table)


def ratios_of(base: Result, ours: Result) -> dict[str, float]:
    """TRL's seconds over ours, of the whole step and of each phase that both have."""
    pairs = {"step": (base.seconds, ours.seconds)}
    pairs |= {phase: (base.phases[phase], ours.phases[phase]) for phase in PHASES}
    return {name: round(theirs / own, 2) for name, (theirs, own) in pairs.items() if theirs and own}


def rounded(result: Result) -> dict[str, Any]:
    phases = {phase: round(seconds, 2) for phase, seconds in result.phases.items()}
    return asdict(result) | {"seconds": round(result.seconds, 2), "phases": phases}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps measured per trainer and round")
    parser.add_argument("--rounds", type=int, default=2, help="times to alternate between the trainers")
    parser.add_argument("--layers", type=int, help="only so many of the model's 30, to see that everything runs")
    parser.add_argument("--output", type=Path, help="JSON file for the figures, with machine and versions")
    options = parser.parse_args()
    datasets.disable_progress_bars()
    found: dict[str, Any] = {}
    for shape, (_, _, asked) in SHAPES.items():
        results = {variant: Result(variant) for variant in VARIANTS}
        for round_ in range(options.rounds):
            for result in results.values():
                add(result, shape, options, seed=round_)
                print(f"{shape}, round {round_ + 1} of {options.rounds}: {result.variant}", flush=True)
            ratios = ratios_of(results["trl"], results["trl_ext"])
            show(shape, list(results.values()), ratios)
            found[shape] = {"ratios": ratios, "asked": asked, "results": [rounded(r) for r in results.values()]}
            save(options.output, "whole_step", model="SmolLM2-135M-Instruct", **found)


if __name__ == "__main__":
    main()
