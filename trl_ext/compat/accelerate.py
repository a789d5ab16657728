"""accelerate: replace the batch sampler of a prepared data loader, and read the settings of FSDP."""

import os
from typing import Any

from accelerate.data_loader import DataLoaderShard
from accelerate.utils import FullyShardedDataParallelPlugin
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
