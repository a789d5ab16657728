"""Check that a plan can run on this machine: cards, their free memory, packages, compiler, host memory, disk."""

from collections.abc import Iterator
from pathlib import Path

from trl_ext.doctor.facts import Disk, Facts
from trl_ext.doctor.finding import Finding, note, ok, problem
from trl_ext.doctor.nvml import hardware_of
from trl_ext.memory.cards import BF16, CONTEXT_GIB
from trl_ext.memory.models.shapes import lm_params
from trl_ext.memory.planner.planner import Plan
from trl_ext.memory.units import gib

SUBJECT = "plan"


def check_plan(facts: Facts, plan: Plan) -> Iterator[Finding]:
    """Yield a finding for everything that the plan needs and the machine lacks, and one "ok" if none is a problem."""
    hardware = plan.estimate.hardware
    found = [*_cards(facts, plan), *_packages(facts, plan)]
    need = gib(plan.estimate.host_bytes)
    if facts.host_free_gib is not None and facts.host_free_gib < need:
        what = f"The plan needs {need:.0f} GiB of host memory (estimated), and {facts.host_free_gib:.0f} are free."
        advice = "Plan again with --host_memory_gib, or with ZeRO-3, which loads in shares."
        found.append(problem(SUBJECT, what, advice))
    found += _disks(facts, plan)
    if not any(finding.level == "problem" for finding in found):
        need = gib(plan.estimate.need_bytes)
        yield ok(SUBJECT, f"{plan.label} can run here: {need:.1f} GiB a card (estimated), made for {hardware}.")
    yield from found


def _cards(facts: Facts, plan: Plan) -> Iterator[Finding]:
    hardware, need = plan.estimate.hardware, gib(plan.estimate.need_bytes)
    if len(facts.gpus) < hardware.gpus_per_machine:
        advice = "Plan again with --gpus for the cards that are here."
        yield problem(SUBJECT, f"The plan is for {hardware}; cards found here: {len(facts.gpus)}.", advice)
        return
    for index, gpu in enumerate(facts.gpus[: hardware.gpus_per_machine]):
        if gpu.usable_gib < need:
            what = f"The plan needs {need:.1f} GiB a card (estimated); card {index} has {gpu.usable_gib:.1f} usable."
            yield problem(SUBJECT, what, "Plan again with --gpus for the cards that are here.")
        elif gpu.usable_now_gib < need:
            what = (
                f"The plan needs {need:.1f} GiB a card (estimated); card {index} has {gpu.usable_now_gib:.1f} usable "
                f"now, after memory of other processes and {CONTEXT_GIB} GiB for CUDA."
            )
            yield problem(SUBJECT, what, "End the processes that use the card; nvidia-smi lists them.")
        if gpu.capability < BF16 and not plan.job.fp16:
            what = f"The plan trains in bf16, which card {index} does not support."
            yield problem(SUBJECT, what, "Plan again with --fp16, or use a card from Ampere on.")
    link = hardware.card.link
    if len(facts.gpus) > 1 and plan.job.zero_stage == 3 and link.is_fast and facts.has_nvlink is False:
        here = hardware_of(facts.gpus, facts.has_nvlink, facts.has_peer_access).card.link
        engine = "FSDP2" if plan.job.fsdp else "ZeRO-3"
        what = f"The plan gathers weights by {engine} over {link.name}; here it is {here.name}, and steps take longer."
        yield note(SUBJECT, what, "Plan again for these cards: ZeRO-2 or offload may be faster.")


def _packages(facts: Facts, plan: Plan) -> Iterator[Finding]:
    job = plan.job
    needs = {
        "deepspeed": (job.zero_stage > 0 and not job.fsdp, f"ZeRO-{job.zero_stage}"),
        "peft": (job.uses_lora, "LoRA"),
        "bitsandbytes": (job.method == "qlora" or job.optim == "adamw_bnb_8bit", "4-bit bases and 8-bit Adam"),
        "vllm": (job.use_vllm, "use_vllm"),
    }
    for package, (is_needed, purpose) in needs.items():
        if is_needed and facts.versions.get(package) is None:
            yield problem(SUBJECT, f"The plan uses {purpose}; {package} is missing.", f"pip install {package}")
    if job.offload == "none" or job.fsdp:
        return
    if facts.compiler is None:
        what = "The plan keeps the optimizer in host memory; there is no C++ compiler for DeepSpeed's CPU Adam."
        yield problem(SUBJECT, what, "apt install g++, or set CXX.")
    if facts.ninja is None:
        what = "The plan keeps the optimizer in host memory; ninja, which builds DeepSpeed's CPU Adam, is missing."
        yield problem(SUBJECT, what, "pip install ninja, and have its folder on the PATH.")
    for lock in facts.build_locks:
        if lock.is_stale and Path(lock.path).parent.name == "cpu_adam":
            what = f"The plan keeps the optimizer in host memory. {lock.finding.what}"
            yield problem(SUBJECT, what, lock.finding.advice)
    if "OMP_NUM_THREADS" not in facts.environment:
        what = "OMP_NUM_THREADS is not set: launchers then give every process one thread, and CPU Adam crawls."
        yield note(SUBJECT, what, "Set it to the cores divided by the processes.")


def _disks(facts: Facts, plan: Plan) -> Iterator[Finding]:
    for disk in facts.disks:
        if disk.purpose == "output":
            yield from _output(disk, plan)
        elif disk.purpose == "model cache" and disk.free_gib < model_gib(plan):
            what = (
                f"The model's files take {model_gib(plan):.0f} GiB in bf16, and {disk.free_gib:.0f} are free at "
                f"{disk.path}."
            )
            yield note(SUBJECT, what, "Nothing to do if they are there already; else set HF_HOME to a larger disk.")


def _output(disk: Disk, plan: Plan) -> Iterator[Finding]:
    # 2 bytes a trained weight (adapters 4); a checkpoint adds 12 bytes for master weights and Adam.
    trained = sum(engine.trained for engine in plan.estimate.setup.engines)
    each = 4 if plan.job.uses_lora else 2
    final, checkpoint = gib(each * trained), gib((each + 12) * trained)
    if disk.free_gib < final:
        what = f"The trained weights take {final:.0f} GiB (estimated), and {disk.free_gib:.0f} are free."
        yield problem(SUBJECT, what, "Make room, or give another --output_dir.")
    elif disk.free_gib < final + 2 * checkpoint:
        what = (
            f"A checkpoint with its optimizer takes {checkpoint:.0f} GiB (estimated), and {disk.free_gib:.0f} are "
            "free; the previous checkpoint is kept until the next is complete."
        )
        yield note(SUBJECT, what, 'Set save_total_limit: 1, save_only_model: true or save_strategy: "no".')


def model_gib(plan: Plan) -> float:
    """Return the size of the model's files in bf16, in GiB."""
    return gib(2 * lm_params(plan.estimate.shape))
