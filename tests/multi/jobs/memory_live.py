"""Trains with DeepSpeed on two processes and counts the bytes of live tensors by term, at four moments of a step.

Trainer, arguments and data are the memory twin's, on real tensors and in a
real process group; what the twin replaces (kernels of a GPU, fake values) stays as it is.

Moments, of the last optimizer step: "backward", when all gradients have come; "held", when DeepSpeed has cleaned up
after it; "step", when the optimizer inside the engine begins; "resident", after the step. The peak of each phase is
counted besides, by the twin's tracker.
"""

import contextlib
import gc
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

import deepspeed
import torch
from accelerate.state import AcceleratorState
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _disable_current_modes
from transformers import TrainerCallback

from tests.multi.jobs.shared import num_processes
from tests.twin import run as twin
from tests.twin import simulation_of
from tests.twin.adapters import engine_steps
from tests.twin.tracker import Tracker
from trl_ext.memory.job import Job

# Where DeepSpeed's optimizers clean up after a backward. ZeRO-1 first reduces what has come.
_EPILOGUE = "independent_gradient_partition_epilogue"
END_OF_BACKWARD = {1: "reduce_gradients", 2: _EPILOGUE, 3: _EPILOGUE}
NUM_STEPS = 2  # Adam's state appears in the first


# Tensors ----------------------------------------------------------------------------------------------------------


def flattened(found: object) -> Iterable[torch.Tensor]:
    """All tensors in nested lists and dicts."""
    if isinstance(found, torch.Tensor):
        yield found
    elif isinstance(found, dict):
        yield from (tensor for value in found.values() for tensor in flattened(value))
    elif isinstance(found, (list, tuple)):
        yield from (tensor for value in found for tensor in flattened(value))


def storages_of(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Address and bytes of each storage once. DeepSpeed keeps meta copies of weights, which take nothing."""
    real = (tensor.untyped_storage() for tensor in tensors if tensor.device.type != "meta")
    return {storage.data_ptr(): storage.nbytes() for storage in real if storage.nbytes()}


def live_tensors() -> Iterable[torch.Tensor]:
    """Everything that the garbage collector knows, and gradients, which only their weights know."""
    for thing in gc.get_objects():
        # By type: isinstance asks lazy modules for their class, and so imports them.
        if issubclass(type(thing), torch.Tensor):
            yield thing
            if thing.is_leaf and thing.grad is not None:
                yield thing.grad


def owners(engine) -> dict[str, list[torch.Tensor]]:
    """The tensors of each term, by the names that DeepSpeed's optimizers have for them."""
    optimizer, weights = engine.optimizer, list(engine.module.parameters())
    is_split = engine.zero_optimization_stage() == 3
    masters = optimizer.fp32_partitioned_groups_flat if is_split else optimizer.single_partition_of_fp32_groups
    kept = ["grad_partitions_flat_buffer"] if is_split else ["averaged_gradients", "all_grad_tensors"]
    kept += [] if is_split else ["grads_in_partition"]
    gradients = [tensor for name in kept for tensor in flattened(getattr(optimizer, name))]
    gradients += [p.grad for p in weights if p.grad is not None]
    return {
        "weights": [*weights, *(p.ds_tensor for p in weights if hasattr(p, "ds_tensor"))],
        "masters": list(masters),
        "adam": list(flattened(list(optimizer.optimizer.state.values()))),
        "buckets": list(flattened([bucket.buffer for bucket in optimizer.ipg_buckets.values()])),
        "gradients": gradients,
        "fp32 gradients": [master.grad for master in masters if master.grad is not None],
    }


def bytes_by_term(engine, known: Collection[int]) -> dict[str, int]:
    """Live bytes, each storage in the first term that owns it; what no term owns is "other"."""
    owned = owners(engine)
    live = {address: size for address, size in storages_of(live_tensors()).items() if address not in known}
    terms = {}
    for term, tensors in owned.items():
        sizes = storages_of(tensors)
        terms[term] = sum(sizes[address] for address in sizes.keys() & live.keys())
        live = {address: size for address, size in live.items() if address not in sizes}
    return terms | {"other": sum(live.values())}


@contextlib.contextmanager
def collectives_of_a_gpu() -> Iterator[None]:
    """Gloo's, but for what only gloo holds: a copy of what it reduces and scatters, which is not counted; and the
    tensor of an all-reduce for a moment after the result is there, which is waited for. On a busy machine backward
    would have gone on by then, and peaks be a bucket higher, 4 % here."""
    backend = deepspeed.comm.comm.cdb
    all_reduce, reduce_scatter = torch.distributed.all_reduce, backend.reduce_scatter_tensor

    def reduced(tensor, *args, **options):
        before = tensor._use_count()
        handle = all_reduce(tensor, *args, **options)
        while handle is None and tensor._use_count() > before:
            time.sleep(0)
        return handle

    def scattered(*args, **options):
        with _disable_current_modes():
            return reduce_scatter(*args, **options)

    torch.distributed.all_reduce, backend.reduce_scatter_tensor = reduced, scattered
    try:
        yield
    finally:
        torch.distributed.all_reduce, backend.reduce_scatter_tensor = all_reduce, reduce_scatter


# Moments ----------------------------------------------------------------------------------------------------------


class Count(TrainerCallback):
    """Counts at each moment of the last step.

    Args:
        trainer: Whose.
        known: Storages of what went before in this process: some things of ZeRO-3 outlive their trainer.
    """

    def __init__(self, trainer, known: Collection[int]):
        self.moments: dict[str, dict[str, int]] = {}
        self._trainer, self._known = trainer, known

    def note(self, moment: str) -> None:
        terms = bytes_by_term(self._trainer.model_wrapped, self._known)
        so_far = self.moments.get(moment, {})
        # Of the micro-batches the fullest, and of the groups of parameters, which DeepSpeed steps one by one.
        self.moments[moment] = max(so_far, terms, key=lambda terms: sum(terms.values()))

    def on_substep_end(self, args, state, control, **kwargs):
        gc.collect()

    def on_step_begin(self, args, state, control, **kwargs):
        gc.collect()
        if state.global_step == state.max_steps - 1:
            self._note_backward()
            self._hook = register_optimizer_step_pre_hook(lambda *_: self.note("step"))

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == state.max_steps:
            self._hook.remove()
            self.note("resident")

    def _note_backward(self) -> None:
        engine = self._trainer.model_wrapped
        name = END_OF_BACKWARD[engine.zero_optimization_stage()]
        clean_up = getattr(engine.optimizer, name)

        def noting(*args, **options):
            self.note("backward")
            clean_up(*args, **options)
            self.note("held")

        setattr(engine.optimizer, name, noting)


def objects_of(engine) -> dict[str, object]:
    """Sizes that DeepSpeed's objects have, in elements; groups of parameters are those with and without decay."""
    optimizer = engine.optimizer
    facts = {"stage": engine.zero_optimization_stage(), "dtypes": sorted({str(p.dtype) for p in engine.parameters()})}
    if facts["stage"] == 3:
        trained = [p for group in optimizer.fp16_groups for p in group]
        sizes = {"weights": [p.ds_numel for p in trained], "shares": [p.ds_tensor.numel() for p in trained]}
        return facts | sizes | {"masters": [m.numel() for m in optimizer.fp32_partitioned_groups_flat]}
    groups = [sum(p.numel() for p in group) for group in optimizer.bit16_groups]
    return facts | {"groups": groups, "masters": [m.numel() for m in optimizer.single_partition_of_fp32_groups]}


def train_one(job: Job, config: dict) -> dict:
    """The job's trainer for two steps; what was counted."""
    simulation, tracker = replace(simulation_of(job, config, num_processes()), num_steps=NUM_STEPS), Tracker()
    known = storages_of(live_tensors()).keys()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        arguments = twin.make_arguments(simulation, folder)
        stack.enter_context(twin.optimizer_steps(tracker))
        stack.enter_context(engine_steps(lambda: tracker.open_phase(twin.STEP), tracker.close_phase))
        stack.enter_context(collectives_of_a_gpu())
        stack.enter_context(tracker)
        trainer = twin.make_trainer(simulation, arguments)
        twin.follow(trainer, tracker)
        count = Count(trainer, known)
        trainer.add_callback(count)
        trainer.train()
    found = {"moments": count.moments, **objects_of(trainer.model_wrapped)}
    found["peaks"] = {phase: peak.num_bytes for phase, peak in tracker.peaks.items()}
    trainer.model_wrapped.destroy()
    trainer.accelerator.free_memory()
    return found


def train(folder, config: dict, jobs: dict[str, dict]) -> dict:
    """By name of a job, which has settings of the planner's."""
    # At fixed moments instead: what is freed late by chance would move peaks by 4 %.
    gc.disable()
    # Before the first model: ZeRO-3 splits it while it is made.
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    found = {}
    for name, settings in jobs.items():
        torch.manual_seed(0)
        found[name] = train_one(Job(**settings), config)
        AcceleratorState._reset_state()
        gc.collect()
    return found
