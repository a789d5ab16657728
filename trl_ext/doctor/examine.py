"""Turn facts into findings: ok, worth knowing, or preventing training."""

from collections import Counter
from collections.abc import Iterator

from trl_ext.doctor.facts import Disk, Facts, Gpu
from trl_ext.doctor.finding import Finding, note, ok, problem
from trl_ext.doctor.installed import Window, optional_windows, required_windows
from trl_ext.doctor.planned import check_plan
from trl_ext.doctor.variables import check_allocator, check_variables
from trl_ext.memory.cards import BF16
from trl_ext.memory.planner.planner import Plan

FULL_DISK_GIB = 1.0
LITTLE_DISK_GIB = 20.0  # a checkpoint of a 1B model with its optimizer
LITTLE_SHARED_GIB = 1.0  # Docker gives 0.06
LITTLE_HOST_GIB = 16.0  # an 8B model in bf16 on its way to a card
OTHERS_GIB = 1.0
HOPPER = (9, 0)
NEEDED_FOR = {
    "deepspeed": "ZeRO",
    "vllm": "fast generation",
    "bitsandbytes": "4-bit bases and 8-bit Adam",
    "liger-kernel": "fused layer kernels on a card",
}


def examine(facts: Facts, plan: Plan | None = None) -> list[Finding]:
    """Judge all facts, in reading order; with a plan also whether it can run here."""
    checks = [check_cards, check_links, check_driver, check_versions, check_attention, check_compiler, check_host]
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
    for index, gpu in enumerate(facts.gpus):
        yield from _check_card(index, gpu)


def _check_card(index: int, gpu: Gpu) -> Iterator[Finding]:
    held = gpu.total_gib - gpu.free_gib
    if held > OTHERS_GIB:
        advice = "See whose they are with nvidia-smi; a run needs the whole card."
        yield note("cards", f"Card {index} is in use: {held:.1f} of {gpu.total_gib:.1f} GiB are taken.", advice)
    if gpu.is_split:
        advice = "Processes on parts of a card cannot talk over NCCL: train on one part, or switch MIG off."
        yield note("cards", f"Card {index} is split by MIG.", advice)
    if 0 < gpu.lanes <= gpu.max_lanes // 2:
        advice = "Host memory is then half as fast or less; look for another slot if the run offloads."
        yield note("cards", f"Card {index} has {gpu.lanes} of {gpu.max_lanes} PCIe lanes.", advice)
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
    for window in required_windows():
        version = facts.versions.get(window.package)
        if version is not None and window.holds(version):
            fine.append(f"{window.package} {version}")
        else:
            yield problem("versions", *_outside(window, version))
    if fine:
        yield ok("versions", f"{', '.join(fine)}.")
    yield from facts.untested
    for window in optional_windows(facts.vllm_window):
        version = facts.versions.get(window.package)
        if version is not None:
            what = f"{window.package} {version}."
            yield ok("versions", what) if window.holds(version) else note("versions", *_outside(window, version))
        elif window.package in NEEDED_FOR:
            yield ok("versions", f"{window.package} is not installed; it is for {NEEDED_FOR[window.package]}.")


def _outside(window: Window, version: str | None) -> tuple[str, str]:
    is_what = "is not installed" if version is None else f"{version} is outside the window {window.wanted}"
    return f"{window.package} {is_what}.", f"pip install '{window.package}{window.wanted}'"


def check_attention(facts: Facts) -> Iterator[Finding]:
    """Report which attention backends ran."""
    if facts.kernels is None:
        if facts.no_kernels:
            advice = "Run `python -c 'import torch'` to see all of it, and install torch again."
            yield problem("attention", f"PyTorch does not start: {facts.no_kernels}.", advice)
        return
    is_hopper = any(gpu.capability == HOPPER for gpu in facts.gpus)
    if is_hopper and not (facts.versions.get("flash-attn-3") or facts.versions.get("kernels")):
        advice = "Faster on long rows: pip install kernels, and attn_implementation: kernels-community/flash-attn3."
        yield note("attention", "A Hopper card, and flash-attention 3 is not installed.", advice)
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
