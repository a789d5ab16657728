"""Settings that the planner may choose, in the order of its search; none changes the optimisation.

They are: ZeRO stage, offload, checkpointed layers, micro-batch against accumulation, completions generated at once,
vLLM's share, and the dtype of weights that are frozen or have an fp32 master. Settings that the user gave stay.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import ceil, floor
from typing import Any

from trl_ext.errors import ConfigError
from trl_ext.memory.contradictions import would_hold
from trl_ext.memory.formulas.estimate import Estimate
from trl_ext.memory.formulas.generation import WORKSPACE_BYTES, vllm_cache_tokens, vllm_weight_bytes
from trl_ext.memory.formulas.peak import Setup, room_bytes
from trl_ext.memory.formulas.times import generation_seconds, step_seconds
from trl_ext.memory.job import Job
from trl_ext.memory.models.shapes import kv_bytes_per_token
from trl_ext.memory.options import OPTIONS, options_of
from trl_ext.memory.planner.keys import DECIDED_BY
from trl_ext.memory.planner.search import FULL_ENOUGH, Search
from trl_ext.memory.units import GIB

# None of these settings changes the optimisation.
FREE = frozenset(
    "per_device_train_batch_size steps_per_generation checkpoint_every dtype zero_stage offload "
    "vllm_gpu_memory_utilization vllm_tensor_parallel_size vllm_enable_sleep_mode ds3_gather_for_generation".split()
).union(option.name for option in OPTIONS)
# ZeRO stage and offload, by their cost on a machine without NVLink.
TECHNIQUES = (
    *((0, "none"), (1, "none"), (2, "none"), (3, "none")),
    *((1, "optimizer"), (2, "optimizer"), (3, "optimizer"), (3, "all")),
)
# Stages that are tried under each offload. ZeRO-1 with its optimizer in host memory must be given: its gradients stay
# on the card, and ZeRO-2's do not.
TRIED = {"none": (0, 1, 2, 3), "optimizer": (2, 3), "all": (3,)}
ON_ONE_GPU = ((0, "none"), (2, "optimizer"), (3, "all"))
# Pairs: every n-th layer is checkpointed, and checkpoints wait in host memory.
CHECKPOINTING = ((0, False), (4, False), (2, False), (1, False), (1, True))
LARGEST_MICRO_BATCH = 64


def techniques(search: Search) -> Iterator[Job]:
    """Yield the job under each ZeRO stage and offload that the user leaves open and that can work."""
    # One GPU has nothing to shard, but a launch with a given stage is planned as it runs.
    shards = search.num_gpus > 1 or not search.may("zero_stage")
    for zero_stage, offload in TECHNIQUES if shards else ON_ONE_GPU:
        if zero_stage not in search.choices("zero_stage", TRIED[offload]):
            continue
        if offload not in search.choices("offload", (offload,)):
            continue
        if search.job.uses_lora and offload == "optimizer" and search.may("offload"):
            continue  # adapters have hardly any optimizer state
        dtype = search.job.dtype
        if search.may("dtype"):  # float32 for an only master copy, else bfloat16; TRL always loads float32
            dtype = "float32" if search.job.method == "full" and zero_stage == 0 else "bfloat16"
        try:
            yield replace(search.job, zero_stage=zero_stage, offload=offload, dtype=dtype)
        except ConfigError:
            continue  # a 4-bit base in host memory: the technique contradicts itself, not the user


def micro_batches(search: Search) -> list[int]:
    """Return the micro-batches that divide the global batch, ascending."""
    if not search.may("per_device_train_batch_size"):
        return [search.job.per_device_train_batch_size]
    per_gpu = search.job.global_batch // search.num_gpus
    return [size for size in range(1, min(per_gpu, LARGEST_MICRO_BATCH) + 1) if per_gpu % size == 0]


def checkpointing(search: Search) -> list[tuple[int, bool]]:
    """Return pairs of checkpoint_every and activation_offloading that the user leaves open, most memory first."""
    job, has_offloading = search.job, search.job.trainer == "reward"
    return [
        (every, offloads)
        for every, offloads in CHECKPOINTING
        if (has_offloading or not offloads)
        and _suits_options(job, checkpoint_every=every, activation_offloading=offloads)
        and (search.may("activation_offloading") or offloads == job.activation_offloading)
        and (search.may("checkpoint_every") or every == job.checkpoint_every)
    ] or [(job.checkpoint_every, job.activation_offloading)]


def _suits_options(job: Job, **changes: Any) -> bool:
    """Return True if the options that are on in the job work with these changes, too."""
    return not any(would_hold(option.conflict, job, changes) for option in options_of(job))


def most_frugal(search: Search, technique: Job) -> list[Job]:
    """Return a technique's job with the least memory; under ZeRO-3 without vLLM also without gathered weights."""
    every, offloads = checkpointing(search)[-1]
    frugal = replace(
        technique,
        checkpoint_every=every,
        activation_offloading=offloads,
        per_device_train_batch_size=micro_batches(search)[0],
    )
    if frugal.zero_stage == 3 and frugal.generates and not frugal.use_vllm and search.may("ds3_gather_for_generation"):
        # Last resort: every token of every completion gathers all weights.
        return [frugal, replace(frugal, ds3_gather_for_generation=False)]
    return [frugal]


def fastest(search: Search, technique: Job) -> Estimate | None:
    """Return a technique's fastest job that fits; None if none fits.

    The search tries each checkpointing and micro-batch in the order of its time if vLLM had all the memory it can use,
    or if all completions were generated at once. It skips jobs that cannot be the fastest.
    """
    sizes, frugal = micro_batches(search), most_frugal(search, technique)[0]
    # A single micro-batch has no earlier gradients to hold; else the smallest needs least.
    if not any(fitted(search, replace(frugal, per_device_train_batch_size=size)) for size in {sizes[0], sizes[-1]}):
        return None
    ideal = technique
    if ideal.shares_with_vllm and search.may("vllm_gpu_memory_utilization"):
        ideal = replace(ideal, vllm_gpu_memory_utilization=FULL_ENOUGH)
    ideal = min(_over_groups(search, ideal), key=lambda job: _generation_s(search, job))
    jobs = [
        replace(ideal, checkpoint_every=every, activation_offloading=offloads, per_device_train_batch_size=size)
        for every, offloads in checkpointing(search)
        for size in sizes
    ]
    at_best = [sum(step_seconds(Setup.of(search.shape, job, search.hardware)).values()) for job in jobs]
    best: Estimate | None = None
    for least_s, job in sorted(zip(at_best, jobs, strict=True), key=lambda pair: pair[0]):
        if best is not None and least_s >= best.step_s:
            break
        found = _with_options(search, job)
        if found and (best is None or found.step_s < best.step_s):
            best = found
    return best


def _with_options(search: Search, job: Job) -> Estimate | None:
    """Return the job's fastest estimate that fits, with each option that the planner tries and that fits, too; None if
    none fits."""
    found = fitted(search, job)
    for option in OPTIONS:
        # A user who gives the setting of an option's block decides the option, too.
        is_open = search.given.isdisjoint((option.name, DECIDED_BY.get(option.block)))
        if found and is_open and option.is_tried(job):
            switched_on: dict[str, Any] = {option.name: True}
            more = replace(job, **switched_on)
            if better := fitted(search, more):
                found, job = better, more
    return found


def _generation_s(search: Search, job: Job) -> float:
    """Seconds of generation in a step, which with vLLM do not depend on the training settings."""
    return generation_seconds(Setup(search.shape, job, search.hardware, (), ()))


def largest_that(ascending: list[int], attempt: Callable[[int], Estimate | None]) -> Estimate | None:
    """Return the result for the largest value with a result. All smaller values must have results, too."""
    low, high, best = 0, len(ascending) - 1, None
    while low <= high:
        middle = (low + high) // 2
        answer = attempt(ascending[middle])
        if answer is None:
            high = middle - 1
        else:
            low, best = middle + 1, answer
    return best


def fitted(search: Search, job: Job) -> Estimate | None:
    """Return the job's fastest estimate that fits; None if none fits. Chooses vLLM's group, share and sleep, or the
    number of completions at once and whether ZeRO-3's weights are gathered for them."""
    if job.shares_with_vllm:
        return next((one for one in map(search.estimate, vllm_choices(search, job)) if one.fits), None)
    if job.zero_stage != 3 or job.use_vllm or not job.generates:
        return _with_fewer(search, job)
    # Without gathering in advance, every token of every completion gathers all weights.
    gathers = search.choices("ds3_gather_for_generation", (True, False))
    found = [_with_fewer(search, replace(job, ds3_gather_for_generation=one)) for one in gathers]
    return min(filter(None, found), key=lambda one: one.step_s, default=None)


def _with_fewer(search: Search, job: Job) -> Estimate | None:
    """Return the job's estimate if it fits, or with as many completions at once as fit; else None."""
    estimate = search.estimate(job)
    if estimate.fits:
        return estimate
    others = [peak.num_bytes for phase, peak in estimate.worst.items() if phase != "generate"]
    if not (
        job.generates and search.may("steps_per_generation") and room_bytes(search.hardware, job, max(others)) >= 0
    ):
        return None
    return next((one for one in map(search.estimate, fewer_at_once(search, job)) if one.fits), None)


def fewer_at_once(search: Search, job: Job) -> Iterator[Job]:
    """Yield jobs with fewer completions generated at once, in whole groups; one policy generates them all."""
    num_gpus, group = search.num_gpus, job.num_generations
    steps = job.accumulation(num_gpus) if job.trainer == "grpo" else 0  # PPO generates a whole update at once
    for fewer in range(steps - 1, 0, -1):
        if steps % fewer == 0 and job.per_device_train_batch_size * num_gpus * fewer % group == 0:
            one = replace(job, steps_per_generation=fewer)
            if one.samples_whole_groups(num_gpus):
                yield one


def vllm_choices(search: Search, job: Job) -> list[Job]:
    """Return jobs with vLLM awake and asleep during training, over each group of GPUs with which it can start in the
    remaining memory. The fastest is first; of equal ones the smaller group, awake."""
    found, card = [], search.hardware.card
    total = card.total_gib * GIB
    for sleeps in search.choices("vllm_enable_sleep_mode", (False, True)):
        choice = replace(job, vllm_enable_sleep_mode=sleeps)
        held = search.estimate(replace(choice, vllm_gpu_memory_utilization=0.01)).worst
        phases = ["generate"] if sleeps else list(held)  # phases in which vLLM holds its share
        others = max(held[phase].num_bytes - held[phase].terms["vLLM"] for phase in phases)
        left = room_bytes(search.hardware, choice, others)
        for one in _over_groups(search, choice):
            if search.may(
                "vllm_gpu_memory_utilization"
            ):  # the remaining share, limited to the need of all completions
                # Per GPU: a group of g GPUs serves g times the completions with g times the memory.
                wanted = one.global_batch / search.num_gpus * one.sequence_tokens * kv_bytes_per_token(search.shape)
                needed = vllm_weight_bytes(search.shape, one) + WORKSPACE_BYTES + wanted
                # In hundredths of a card: at most what is left, at least what is needed.
                percent = min(floor(100 * left / total), ceil(110 * needed / total), floor(100 * FULL_ENOUGH))
                share = max(percent, 1) / 100
                one = replace(one, vllm_gpu_memory_utilization=share)
            found.append(one)
    # vLLM starts if its share holds its weights and at least one completion.
    starts = [one for one in found if vllm_cache_tokens(search.shape, card, one) >= one.sequence_tokens]
    return sorted(starts, key=lambda one: (_generation_s(search, one), one.vllm_tensor_parallel_size))


def _over_groups(search: Search, job: Job) -> list[Job]:
    """Return vLLM over each group of GPUs that divides a machine, or the job itself if nothing is to choose."""
    here, heads = search.hardware.gpus_per_machine, search.shape.num_kv_heads
    possible = tuple(size for size in (1, 2, 4, 8) if here % size == 0 and heads % size == 0)
    if not job.shares_with_vllm:
        return [job]
    return [
        replace(job, vllm_tensor_parallel_size=size) for size in search.choices("vllm_tensor_parallel_size", possible)
    ]
