"""accelerate: replace the batch sampler of a prepared data loader, and read the settings of FSDP."""

import os
from typing import Any

from accelerate.data_loader import DataLoaderShard
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import Generator
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler

KEPT = tuple(
    "collate_fn num_workers pin_memory timeout worker_init_fn multiprocessing_context prefetch_factor "
    "persistent_workers in_order".split()
)


def global_batches(loader: Any) -> BatchSampler:
    """Return the batch sampler of all ranks from a loader that accelerate has prepared."""
    return getattr(loader.batch_sampler, "batch_sampler", loader.batch_sampler)


def with_batch_sampler(loader: Any, dataset: Dataset, batch_sampler: Sampler) -> DataLoader:
    """Return a prepared loader like `loader` that takes this rank's batches from `batch_sampler`."""
    return DataLoaderShard(
        dataset,
        device=loader.device,
        rng_types=loader.rng_types,
        synchronized_generator=loader.synchronized_generator,
        batch_sampler=batch_sampler,
        **{name: getattr(loader, name) for name in KEPT},
    )


def begin_without_a_draw(loader: Any, seed: int) -> None:
    """Let the workers of a data loader begin without a random number of the process, if they are persistent.

    Persistent workers draw one where they begin, once in a run. A resumed run begins them again, and has the state of
    the random generator after that draw from its checkpoint.

    Args:
        loader: As accelerate has prepared it.
        seed: Of the workers, in place of the drawn number.
    """
    plain = getattr(loader, "base_dataloader", loader)
    if plain.persistent_workers:
        plain.generator = Generator().manual_seed(seed)


def is_fsdp(args: Any) -> bool:
    """Return True for a run with FSDP, set in its arguments or by accelerate's launch."""
    return bool(args.fsdp or os.environ.get("ACCELERATE_USE_FSDP") == "true")


def fsdp_dtype(args: Any) -> str:
    """Return the dtype in which FSDP gathers weights."""
    return "bfloat16" if args.bf16 else "float16" if args.fp16 else "float32"


def fsdp_plugin(args: Any) -> Any:
    """Return the FSDP settings that accelerate will use; None without FSDP."""
    own = args.fsdp_plugin_args if args.fsdp else {}
    return FullyShardedDataParallelPlugin(**own) if is_fsdp(args) else None
