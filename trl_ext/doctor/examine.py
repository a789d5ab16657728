"""Turn facts into findings: ok, worth knowing, or preventing training."""

import re
from collections import Counter
from collections.abc import Iterator

from trl_ext.compat.versions import RESOLVED_WITH_VLLM
from trl_ext.doctor.facts import BY_SPEED, Disk, Facts
from trl_ext.doctor.finding import Finding, note, ok, problem
from trl_ext.doctor.installed import holds, optional_windows, required_windows
from trl_ext.memory.cards import BF16, CONTEXT_GIB, FASTER_ATTENTION
from trl_ext.memory.files.settings import ALLOCATOR
from trl_ext.memory.planner.planner import Plan
from trl_ext.memory.units import gib

FULL_DISK_GIB = 1.0
LITTLE_DISK_GIB = 20.0  # a checkpoint of a 1B model with its optimizer
LITTLE_SHARED_GIB = 1.0  # Docker gives 0.06
LITTLE_HOST_GIB = 16.0  # an 8B model in bf16 on its way to a card
OTHERS_GIB = 1.0
NEEDED_FOR = {
    "deepspeed": "ZeRO",
    "vllm": "fast generation",
    "bitsandbytes": "4-bit bases and 8-bit Adam",
    "liger-kernel": "fused layer kernels on a card",
}
_ON = r"1|true|yes|y|on"
# Variables that slow training down or break it: a pattern of their harmful values, in any case, and the effect.
HARMS = {
    "NCCL_P2P_DISABLE": (_ON, "Cards talk through host memory; it is for cards without access to each other."),
    "NCCL_SHM_DISABLE": (_ON, "Processes of one machine then talk over the network stack."),
    "NCCL_SOCKET_IFNAME": (r"=?lo", "It binds NCCL to the loopback, so several machines never meet."),
    "NCCL_DEBUG": (r"info|trace", "Every rank prints every ring."),
    "TORCH_NCCL_BLOCKING_WAIT": (_ON, "The CPU then waits for every collective."),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": (r"0|false|no|n|off", "When a rank dies, the others then wait for ever."),
    "TORCH_DISTRIBUTED_DEBUG": (r"detail", "Every collective is checked by a second collective."),
    "CUDA_LAUNCH_BLOCKING": (_ON, "The CPU then waits for every kernel; it is for debugging."),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (_ON, "Every tensor then asks the driver for memory."),
}
OLD_NAME, NEW_NAME = next(iter(ALLOCATOR)), "PYTORCH_ALLOC_CONF"
WATCHED = (*HARMS, OLD_NAME, NEW_NAME, "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")


def examine(facts: Facts, plan: Plan | None = None) -> list[Finding]:
    """Judge all facts, in reading order; with a plan also whether it can run here.

    Args:
        facts: From `look`.
        plan: A plan to compare with the machine; None for none.
    """
    checks = [check_cards, check_links, check_driver, check_versions, check_attention, check_compiler, check_host]
    checks.append(check_sandbox)
    findings = [finding for check in checks for finding in check(facts)]
    findings += [_check_disk(disk) for disk in facts.disks if disk.purpose != "shared memory"]
    findings += [*check_variables(facts), *check_allocator(facts)]
    return findings + (list(check_plan(facts, plan)) if plan else [])


def check_cards(facts: Facts) -> Iterator[Finding]:
    """Judge the cards: present, equal, undivided and free."""
    if not facts.gpus:
        advice = "Only tiny models train on a CPU. `trl-ext plan --gpus 4xA40-48GB` plans for another machine."
        yield note("cards", f"No card was found: {facts.no_gpus}.", advice)
        return
    kinds = Counter((gpu.name, round(gpu.total_gib)) for gpu in facts.gpus)
    if len(kinds) > 1:
        named = ", ".join(f"{count} x {name} with {gib} GiB" for (name, gib), count in kinds.items())
        advice = "The smallest card bounds memory and the slowest bounds speed: choose with CUDA_VISIBLE_DEVICES."
        yield note("cards", f"The cards differ: {named}.", advice)
    else:
        first = facts.gpus[0]
        yield ok("cards", f"{len(facts.gpus)} x {first.name}, {first.usable_gib:.1f} GiB usable each.")
    if facts.counts_by_speed:
        yield note("cards", *BY_SPEED)
    for index, gpu in enumerate(facts.gpus):
        held = gpu.total_gib - gpu.free_gib
        if held > OTHERS_GIB:
            advice = "See whose they are with nvidia-smi; a run needs the whole card."
            yield note("cards", f"Card {index} is in use: {held:.1f} of {gpu.total_gib:.1f} GiB are taken.", advice)
        if gpu.is_split:
            advice = "Processes on parts of a card cannot talk over NCCL: train on one part, or switch MIG off."
            yield note("cards", f"Card {index} is split by MIG.", advice)
        if gpu.capability < BF16:
            advice = "Use fp16, or a card from Ampere (A10, A40, A100, RTX 30) on."
            capability = ".".join(map(str, gpu.capability))
            yield note("cards", f"Card {index}, compute capability {capability}, has no bf16 units.", advice)


def check_links(facts: Facts) -> Iterator[Finding]:
    """Judge how the cards talk to each other."""
    if len(facts.gpus) < 2:
        return
    if facts.has_nvlink:
        yield ok("links", "NVLink between all cards.")
    elif facts.has_nvlink is None:
        yield note("links", "The driver does not report how the cards are linked.", "See `nvidia-smi topo -m`.")
    elif facts.has_peer_access:
        advice = "Prefer ZeRO-2 or LoRA to ZeRO-3, which gathers all weights in every micro-batch."
        yield note("links", "No NVLink between all cards; they talk over PCIe.", advice)
    else:
        advice = "Avoid ZeRO-3; NCCL goes through shared memory, which must not be switched off."
        yield note("links", "The cards do not reach each other's memory: no NVLink, no peer access.", advice)


def check_driver(facts: Facts) -> Iterator[Finding]:
    """Judge whether the driver supports PyTorch's CUDA."""
    if not facts.gpus:
        return
    kernels, says = facts.kernels, f"Driver {facts.driver}, up to CUDA {facts.driver_cuda}"
    if kernels is None:
        yield note("driver", f"{says}; PyTorch was not asked.", "")
    elif kernels.cuda is None:
        advice = "Install a CUDA build: pip install torch --force-reinstall, from the index that pytorch.org names."
        yield problem("driver", f"{says}, but PyTorch {facts.versions.get('torch')} is built without CUDA.", advice)
    elif kernels.num_gpus == 0:
        advice = "Update the driver, or install a PyTorch built for an older CUDA."
        yield problem("driver", f"{says}; PyTorch is built for CUDA {kernels.cuda} and sees no card.", advice)
    elif kernels.num_gpus != len(facts.gpus):
        advice = "Look at CUDA_VISIBLE_DEVICES and at `nvidia-smi` for a card that has fallen off the bus."
        what = f"{says}; the driver shows {len(facts.gpus)} cards and PyTorch sees {kernels.num_gpus}."
        yield problem("driver", what, advice)
    else:
        yield ok("driver", f"{says}; PyTorch is built for CUDA {kernels.cuda}, NCCL {kernels.nccl or 'missing'}.")


def check_versions(facts: Facts) -> Iterator[Finding]:
    """Judge whether every package is in its window."""
    fine = []
    for package, window in required_windows().items():
        version = facts.versions.get(package)
        if version is not None and holds(window, version):
            fine.append(f"{package} {version}")
        else:
            yield problem("versions", _outside(package, window, version), f"pip install '{package}{window}'")
    if fine:
        yield ok("versions", f"{', '.join(fine)}.")
    yield from facts.untested
    for package, window in optional_windows(facts.vllm_window).items():
        version = facts.versions.get(package)
        if version is None:
            if package in NEEDED_FOR:
                yield ok("versions", f"{package} is not installed; it is for {NEEDED_FOR[package]}.")
        elif holds(window, version):
            yield ok("versions", f"{package} {version}.")
        else:
            yield note("versions", _outside(package, window, version), f"pip install '{package}{window}'")
    yield from _check_vllms_transformers(facts)


def _check_vllms_transformers(facts: Facts) -> Iterator[Finding]:
    """Name the transformers that belongs to vLLM: vLLM bounds it, so that pip changes the installed version."""
    vllm, transformers = facts.versions.get("vllm"), facts.versions.get("transformers")
    if vllm is None:
        named = [f"{package} {version}" for package, version in RESOLVED_WITH_VLLM.items()]
        yield ok("versions", f"The extra `vllm` resolves to {', '.join(named)}.")
    elif transformers is not None and (window := facts.vllms_transformers):
        what = f"vllm {vllm} takes transformers {window}; {transformers} is installed."
        if holds(window, transformers):
            yield ok("versions", what)
        else:
            yield note("versions", what, f"pip install 'transformers{window}'")


def _outside(package: str, window: str, version: str | None) -> str:
    is_what = "is not installed" if version is None else f"{version} is outside the window {window}"
    return f"{package} {is_what}."


def check_attention(facts: Facts) -> Iterator[Finding]:
    """Report which attention backends ran."""
    if facts.kernels is None:
        if facts.no_kernels:
            advice = "Run `python -c 'import torch'` to see all of it, and install torch again."
            yield problem("attention", f"PyTorch does not start: {facts.no_kernels}.", advice)
        return
    for major in sorted({gpu.capability[0] for gpu in facts.gpus} & FASTER_ATTENTION.keys()):
        faster, packages, way = FASTER_ATTENTION[major]
        if not any(map(facts.versions.get, packages)):
            what = f"A card of compute capability {major}, and {faster} is not installed."
            yield note("attention", what, f"Faster on long rows: {way}.")
    works = facts.kernels.works
    if not works:
        yield note("attention", "No card, no kernels to try: rows are packed with sdpa, segment by segment.")
        return
    ran = [name for name, why in works.items() if not why]
    failed = [f"{name} does not ({why})" for name, why in works.items() if why]
    what = f"{', '.join(ran) or 'Nothing'} ran on the first card" + "".join(f"; {text}" for text in failed)
    if works.get("varlen") == "" or works.get("flash-attn") == "":
        yield ok("attention", f"{what}.")
    elif ran:
        yield note("attention", f"{what}.", "Packed rows then take sdpa segment by segment, which is slower.")
    else:
        yield problem("attention", f"{what}.", "Install a PyTorch that is built for this card.")


def check_compiler(facts: Facts) -> Iterator[Finding]:
    """Judge the tools that compile DeepSpeed's CPU Adam at its first use, and locks that would block it."""
    missing = [name for name, path in (("a C++ compiler", facts.compiler), ("ninja", facts.ninja)) if path is None]
    if missing:
        advice = "Install them for runs that offload the optimizer: apt install g++, pip install ninja."
        yield note("compiler", f"Not on the PATH: {' and '.join(missing)}, for DeepSpeed's CPU Adam.", advice)
    else:
        yield ok("compiler", f"{facts.compiler} and ninja, for DeepSpeed's CPU Adam.")
    yield from (lock.finding for lock in facts.build_locks)


def check_host(facts: Facts) -> Iterator[Finding]:
    """Judge host memory, and the shared memory that NCCL and data loaders use."""
    if facts.host_total_gib is None or facts.host_free_gib is None:
        yield note("host memory", "This system does not report its memory.")
    else:
        what = f"{facts.host_free_gib:.0f} of {facts.host_total_gib:.0f} GiB are free."
        is_little = facts.host_free_gib < LITTLE_HOST_GIB
        advice = "Every process loads the whole model here first, unless ZeRO-3 splits it."
        yield note("host memory", what, advice) if is_little else ok("host memory", what)
    for disk in facts.disks:
        if disk.purpose == "shared memory" and disk.free_gib < LITTLE_SHARED_GIB and len(facts.gpus) > 1:
            advice = "Start the container with --shm-size=16g or --ipc=host: NCCL talks through it."
            yield note("shared memory", f"{disk.path} has {disk.free_gib:.2f} GiB.", advice)


def check_sandbox(facts: Facts) -> Iterator[Finding]:
    """Judge how far this machine confines the programs that the rule `code` runs."""
    if facts.sandbox is None:
        return
    level, trouble = facts.sandbox
    if level == 2:
        yield ok("sandbox", "The rule `code` runs programs at L2, its highest level.")
    elif level == 1:
        advice = "L1 is what the rule requires by default; `require: L2` is refused here."
        yield note("sandbox", f"The rule `code` runs programs at L1, not at L2 ({trouble}).", advice)
    else:
        advice = "L1 needs Linux 5.13 with seccomp and Landlock; `require: L0` gives up their protection."
        yield note("sandbox", f"The rule `code` is refused here ({trouble}).", advice)


def _check_disk(disk: Disk) -> Finding:
    subject, what = f"disk, {disk.purpose}", f"{disk.free_gib:.3g} GiB free at {disk.path}."
    if not disk.is_writable:
        advice = "Set HF_HOME to a folder of yours." if disk.purpose == "model cache" else "Give another --output_dir."
        return problem(subject, f"{disk.path} is not writable.", advice)
    if disk.free_gib < FULL_DISK_GIB:
        return problem(subject, what, "Make room: a run cannot save there.")
    if disk.free_gib < LITTLE_DISK_GIB:
        return note(subject, what, "A checkpoint with its optimizer takes 14 bytes a trained parameter.")
    return ok(subject, what)


def check_variables(facts: Facts) -> Iterator[Finding]:
    """Yield a finding for each variable that hurts here; one "ok" if none does."""
    found = []
    for name, (values, what) in HARMS.items():
        if name == "NCCL_P2P_DISABLE" and facts.has_peer_access is False:
            continue  # it is right there
        value = facts.environment.get(name)
        if value is not None and re.fullmatch(values, value.strip(), re.IGNORECASE):
            found.append(note("environment", f"{name}={value}. {what}", "Unset it."))
    yield from found or [ok("environment", "No variable that is known to hurt NCCL or CUDA is set.")]


def check_allocator(facts: Facts) -> Iterator[Finding]:
    """Judge whether PyTorch's allocator may grow its segments, under the variable that vLLM also reads."""
    if not facts.gpus:
        return
    setting = f"{OLD_NAME}={ALLOCATOR[OLD_NAME]}"
    if _expands(facts, OLD_NAME):
        yield ok("allocator", f"{OLD_NAME} has expandable_segments:True.")
    elif _expands(facts, NEW_NAME):
        what = f"expandable_segments is on under {NEW_NAME} alone, which vLLM's sleep mode does not read."
        yield note("allocator", what, f"Set {setting} instead.")
    else:
        what = "expandable_segments is off; fragmentation then costs up to a tenth of a card (estimated)."
        yield note("allocator", what, f"export {setting}; the launch line of a plan sets it.")


def _expands(facts: Facts, name: str) -> bool:
    return "expandable_segments:true" in facts.environment.get(name, "").replace(" ", "").lower()


# A plan ------------------------------------------------------------------------------------------------------------


def check_plan(facts: Facts, plan: Plan) -> Iterator[Finding]:
    """Yield a finding for everything that the plan needs and the machine lacks, and one "ok" if none is a problem."""
    hardware = plan.estimate.hardware
    found = [*_planned_cards(facts, plan), *_planned_packages(facts, plan)]
    need = gib(plan.estimate.host_bytes)
    if facts.host_free_gib is not None and facts.host_free_gib < need:
        what = f"The plan needs {need:.0f} GiB of host memory (estimated), and {facts.host_free_gib:.0f} are free."
        advice = "Plan again with --host_memory_gib, or with ZeRO-3, which loads in shares."
        found.append(problem("plan", what, advice))
    found += [one for disk in facts.disks if disk.purpose == "output" for one in _planned_output(disk, plan)]
    if not any(finding.level == "problem" for finding in found):
        need = gib(plan.estimate.need_bytes)
        yield ok("plan", f"{plan.label} can run here: {need:.1f} GiB a card (estimated), made for {hardware}.")
    yield from found


def _planned_cards(facts: Facts, plan: Plan) -> Iterator[Finding]:
    hardware, need = plan.estimate.hardware, gib(plan.estimate.need_bytes)
    if len(facts.gpus) < hardware.gpus_per_machine:
        advice = "Plan again with --gpus for the cards that are here."
        yield problem("plan", f"The plan is for {hardware}; cards found here: {len(facts.gpus)}.", advice)
        return
    for index, gpu in enumerate(facts.gpus[: hardware.gpus_per_machine]):
        if gpu.usable_gib < need:
            what = f"The plan needs {need:.1f} GiB a card (estimated); card {index} has {gpu.usable_gib:.1f} usable."
            yield problem("plan", what, "Plan again with --gpus for the cards that are here.")
        elif (now := gpu.free_gib - CONTEXT_GIB) < need:
            what = (
                f"The plan needs {need:.1f} GiB a card (estimated); card {index} has {now:.1f} usable now, after "
                f"memory of other processes and {CONTEXT_GIB} GiB for CUDA."
            )
            yield problem("plan", what, "End the processes that use the card; nvidia-smi lists them.")
        if gpu.capability < BF16 and not plan.job.fp16:
            what = f"The plan trains in bf16, which card {index} does not support."
            yield problem("plan", what, "Plan again with --fp16, or use a card from Ampere on.")


def _planned_packages(facts: Facts, plan: Plan) -> Iterator[Finding]:
    job = plan.job
    needs = {
        "deepspeed": (job.zero_stage > 0 and not job.fsdp, f"ZeRO-{job.zero_stage}"),
        "peft": (job.uses_lora, "LoRA"),
        "bitsandbytes": (job.method == "qlora" or job.optim == "adamw_bnb_8bit", "4-bit bases and 8-bit Adam"),
        "vllm": (job.use_vllm, "use_vllm"),
    }
    for package, (is_needed, purpose) in needs.items():
        if is_needed and facts.versions.get(package) is None:
            yield problem("plan", f"The plan uses {purpose}; {package} is missing.", f"pip install {package}")
    if job.offload == "none" or job.fsdp:
        return
    if facts.compiler is None:
        what = "The plan keeps the optimizer in host memory; there is no C++ compiler for DeepSpeed's CPU Adam."
        yield problem("plan", what, "apt install g++, or set CXX.")
    if facts.ninja is None:
        what = "The plan keeps the optimizer in host memory; ninja, which builds DeepSpeed's CPU Adam, is missing."
        yield problem("plan", what, "pip install ninja, and have its folder on the PATH.")
    if "OMP_NUM_THREADS" not in facts.environment:
        what = "OMP_NUM_THREADS is not set: launchers then give every process one thread, and CPU Adam crawls."
        yield note("plan", what, "Set it to the cores divided by the processes.")


def _planned_output(disk: Disk, plan: Plan) -> Iterator[Finding]:
    # 2 bytes a trained weight (adapters 4); a checkpoint adds 12 bytes for master weights and Adam.
    trained = sum(engine.trained for engine in plan.estimate.setup.engines)
    each = 4 if plan.job.uses_lora else 2
    final, checkpoint = gib(each * trained), gib((each + 12) * trained)
    if disk.free_gib < final:
        what = f"The trained weights take {final:.0f} GiB (estimated), and {disk.free_gib:.0f} are free."
        yield problem("plan", what, "Make room, or give another --output_dir.")
    elif disk.free_gib < final + 2 * checkpoint:
        what = (
            f"A checkpoint with its optimizer takes {checkpoint:.0f} GiB (estimated), and {disk.free_gib:.0f} are "
            "free; the previous checkpoint is kept until the next is complete."
        )
        yield note("plan", what, 'Set save_total_limit: 1, save_only_model: true or save_strategy: "no".')
