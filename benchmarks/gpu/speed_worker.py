"""One row of the speed benchmark, in a process of its own: a step that warms up, and those that are measured.

    python -m benchmarks.gpu.speed_worker TASK.json

The last line printed is the answer: seconds, phases, MFU, peak. TRL, trl_ext and Unsloth differ in where the trainer
comes from and in nothing else, but that ours may fill a forward with as many tokens as theirs has with its padding.
"""

import itertools
import json
import math
import os
import sys
import tempfile
import warnings
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset, disable_progress_bars
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PrinterCallback,
    TrainerCallback,
)

from benchmarks.gpu.card import peak_tflops
from benchmarks.gpu.flops import mfu, verl_update_flops
from benchmarks.gpu.memory_worker import UNASSISTED, drop_other_meters, is_out_of_memory
from benchmarks.gpu.runner import answer
from benchmarks.gpu.speed_rows import LONGEST_PAIR, Row, counted, groups, needed_flops
from benchmarks.grpo_task import PHASES, PhasesOfSteps, Shape, fixed_rollout, reward, tokenizer
from benchmarks.reward_task import pairs
from trl_ext.compat.versions import installed_versions
from trl_ext.monitor.log_keys import KERNELS


def train(row: Row, device: str) -> dict[str, Any]:
    """Train for a step that warms up and those that are measured; what one took."""
    clock = PhasesOfSteps()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(row, device, folder, clock)
        trainer.remove_callback(PrinterCallback)
        drop_other_meters(trainer)
        clock.watch(trainer)
        trainer.add_callback(PeaksOfMeasuredSteps())
        trainer.train()
    return {**figures(row, clock), **memory(device), **facts(row, trainer)}


class PeaksOfMeasuredSteps(TrainerCallback):
    """Forgets the allocator's peaks up to the first measured step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1 and not args.use_cpu:
            torch.cuda.reset_peak_memory_stats()


def make_trainer(row: Row, device: str, folder: str, clock: PhasesOfSteps) -> Any:
    if row.library == "unsloth":
        import_module("unsloth")  # before TRL, which it patches
    library = import_module("trl_ext" if row.library == "trl_ext" else "trl")
    shape, generates = row.shape, row.generates or row.uses_vllm
    common: dict[str, Any] = {
        "output_dir": folder,
        "per_device_train_batch_size": row.micro_batch,
        "max_steps": row.num_steps,
        "use_cpu": device == "cpu",
        "bf16": True,
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": dict(row.checkpointing) or None,
        "optim": "adamw_torch_fused" if device == "cuda" else "adamw_torch",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **({"max_tokens_per_forward": row.budget, **UNASSISTED} if row.library == "trl_ext" else {}),
    }
    if row.trainer == "reward":
        common |= {"gradient_accumulation_steps": shape.groups // row.micro_batch, "max_length": LONGEST_PAIR}
        return library.RewardTrainer(
            policy(row, device, folder),
            library.RewardConfig(**common),
            train_dataset=pairs(shape, row.config["vocab_size"]),
            processing_class=tokenizer(row.config["vocab_size"]),
            callbacks=[clock],
        )
    vllm = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": shape.prompt + shape.longest}
    vllm["vllm_gpu_memory_utilization"] = row.job.vllm_gpu_memory_utilization
    args = library.GRPOConfig(
        gradient_accumulation_steps=shape.rows // row.micro_batch,
        num_generations=shape.generations,
        max_completion_length=shape.longest,
        learning_rate=1e-6,
        beta=0.0,
        **common,
        **(vllm if row.uses_vllm else row.engine_keys),
    )
    vocab = row.config["vocab_size"]
    return library.GRPOTrainer(
        model=policy(row, device, folder),
        reward_funcs=reward,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": prompts(shape)}),
        processing_class=tokenizer(vocab),
        rollout_func=None if generates else fixed_rollout(shape, itertools.count(), warm_up(shape), vocab),
        callbacks=[clock],
        peft_config=adapter(row),
    )


def adapter(row: Row) -> Any:
    """PEFT's config, of the planner's defaults; None to train all weights."""
    if row.method == "full":
        return None
    from peft import LoraConfig

    return LoraConfig(r=row.job.lora_r, lora_alpha=row.job.lora_r, target_modules="all-linear", task_type="CAUSAL_LM")


def warm_up(shape: Shape) -> Shape:
    """A first batch of few tokens: kernels are loaded, and the optimizer's state is there."""
    return replace(shape, prompt=min(shape.prompt, 64), mean=min(shape.mean, 64), longest=min(shape.longest, 64))


def prompts(shape: Shape) -> list[str]:
    """Of `shape.prompt` words; no two of one step are equal."""
    return [" ".join(f"w{3 + (i + j) % 97}" for j in range(shape.prompt)) for i in range(max(shape.groups, 2))]


def policy(row: Row, device: str, folder: str) -> Any:
    """Random weights in bf16, made where they are trained."""
    values = dict(row.config)
    config = CONFIG_MAPPING[values.pop("model_type")](**values, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(0)
    kind = AutoModelForCausalLM
    if row.trainer == "reward":
        kind, config.num_labels = AutoModelForSequenceClassification, 1
    with torch.device(device):
        model = kind.from_config(config, dtype=torch.bfloat16, attn_implementation=row.attention or None)
    if row.generates and row.shape.sigma:
        end_by_chance(model, row.shape.mean)
    if row.library != "unsloth" and not row.uses_vllm:
        return model
    place = Path(folder) / "model"
    model.save_pretrained(place)
    tokenizer(row.config["vocab_size"]).save_pretrained(place)
    del model
    if row.uses_vllm:  # which loads by name
        return str(place)
    # Unsloth patches what it loads itself. This has not run on a card yet: a failed row says why.
    loaded, _ = import_module("unsloth").FastLanguageModel.from_pretrained(
        str(place),
        max_seq_length=row.shape.prompt + row.shape.longest,
        dtype=torch.bfloat16,
        load_in_4bit=False,
        full_finetuning=True,
    )
    return loaded


def end_by_chance(model: Any, mean: int) -> None:
    """Let a text end at each token with odds of 1 to its mean length: all logits of random weights are about equal."""
    bias, end = math.log(model.config.vocab_size / mean), model.config.eos_token_id

    def raise_end(_head: Any, _inputs: Any, logits: torch.Tensor) -> torch.Tensor:
        logits[..., end] += bias
        return logits

    model.get_output_embeddings().register_forward_hook(raise_end)


def figures(row: Row, clock: PhasesOfSteps) -> dict[str, Any]:
    """Seconds by step and phase; tokens/s and MFU of the update, of what it really needs and as verl counts it."""
    measured = sorted(zip(clock.seconds[1:], clock.phases[1:], strict=True), key=lambda step: step[0])
    step_s, phases = measured[len(measured) // 2]
    flops = needed_flops(row, row.completions)
    found = groups(row, row.completions)
    of_verl = sum(verl_update_flops(counted(row), *group) for group in found)
    tokens = sum(prompt + sum(own) for prompt, own in found)
    copied = sum(len(own) * prompt + sum(own) for prompt, own in found)
    peak = peak_tflops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    return {
        "step_s": round(step_s, 3),
        "phases": {phase: round(phases[phase], 3) for phase in PHASES},
        "update_tflop": round(flops / 1e12, 3),
        "tokens_per_s": round(tokens / phases["update"]),
        "tokens_per_s_verl": round(copied / phases["update"]),
        "mfu": mfu(flops, phases["update"], peak),
        "mfu_verl": mfu(of_verl, phases["update"], peak),
    }


def memory(device: str) -> dict[str, int | None]:
    """The allocator's highest marks, bytes; a processor keeps none."""
    if device == "cpu":
        return {"allocated": None, "reserved": None}
    return {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}


def facts(row: Row, trainer: Any) -> dict[str, Any]:
    """What ran."""
    packages = ("torch", "transformers", "trl") + (("unsloth",) if row.library == "unsloth" else ())
    logged = [entry for entry in trainer.state.log_history if "packing/forwarded_tokens" in entry]
    return {
        "attention": trainer.model.config._attn_implementation,
        "kernels": logged[-1].get(KERNELS, "") if logged else "",
        "packed": bool(getattr(trainer, "_packs", False)),
        "forwarded_tokens": round(logged[-1]["packing/forwarded_tokens"]) if logged else None,
        "completion_tokens": completion_tokens(trainer),
        "versions": installed_versions(*packages),
    }


def completion_tokens(trainer: Any) -> list[float]:
    """Mean and longest of the last step's completions, which libraries draw differently; none of a reward model."""
    entries = [entry for entry in trainer.state.log_history if "completions/mean_length" in entry]
    return [entries[-1][f"completions/{name}_length"] for name in ("mean", "max")] if entries else []


def work(row: Row, device: str) -> dict[str, Any]:
    """Measure a row, or say that it ran out of memory. Any other error ends the process."""
    try:
        return {"status": "measured", **train(row, device)}
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return {"status": "oom", "reason": str(error).strip().splitlines()[0]}


def load(path: str) -> tuple[Row, str]:
    """The row and the device of a task's file."""
    task = json.loads(Path(path).read_text())
    return Row(**task["row"] | {"shape": Shape(**task["row"]["shape"])}), task["device"]


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    disable_progress_bars()
    answer(work(*load(sys.argv[1])))
