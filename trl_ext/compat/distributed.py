"""torch.distributed: timeouts, gloo groups in host memory, and whole weights for a model that FSDP2 has sharded."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

# Seconds within which processes must connect, and must meet after one of them has failed.
CONNECT_S = 30.0
_NAMED = re.compile(r"Ranks? ([\d, ]+) failed to pass monitoredBarrier")


def has_peers() -> bool:
    """Return True if this is one of several processes that can meet in a gloo group."""
    if not (dist.is_available() and dist.is_initialized() and dist.is_gloo_available()):
        return False
    return dist.get_world_size() > 1 and dist.get_backend() != "fake"


def honour_timeout(timeout_s: float) -> None:
    """Set this timeout for every gloo group that has PyTorch's default timeout.

    Issue: with `use_cpu` transformers makes the process group without `ddp_timeout`; DeepSpeed's gloo groups lack it,
    too. Fixed in: not yet. Remove when: TrainingArguments passes `timeout` with `cpu=True`, and DeepSpeed's gloo
    groups use it.
    """
    if not has_peers():
        return
    for group in list(dist.distributed_c10d._world.pg_map):
        if dist.get_backend(group) == "gloo":
            options: Any = group._get_backend(torch.device("cpu")).options
            if options._timeout == dist.distributed_c10d.default_pg_timeout:
                set_timeout(group, timeout_s)


def set_timeout(group: Any, timeout_s: float) -> None:
    """Set how long a collective of this group waits; the wait of processes other than 0 in `meet` is unchanged."""
    group.set_timeout(timedelta(seconds=timeout_s))


def side_group(timeout_s: float) -> Any:
    """Make a group of all processes. Collective.

    `timeout_s` limits connecting, and monitored barriers of processes other than 0. Raises RuntimeError if the
    processes cannot reach each other at the addresses that gloo found.
    """
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))


def meet(group: Any, timeout_s: float) -> None:
    """Wait until all processes are here; raise RuntimeError if a process is missing.

    Only process 0 uses `timeout_s`, the others use the group's timeout.
    """
    dist.monitored_barrier(group, timeout=timedelta(seconds=timeout_s))


def missing_ranks(error: Exception, group: Any) -> list[int]:
    """Return the processes that made `meet` fail; in processes other than 0 that is always process 0."""
    if dist.get_rank() != 0:
        return [0]
    if named := _NAMED.search(str(error)):
        return [int(rank) for rank in named[1].split(",")]
    lost = []
    for rank in range(1, dist.get_world_size()):
        try:
            dist.isend(torch.zeros(1), rank, group)  # refused at once where the connection is closed
        except RuntimeError:
            lost.append(rank)
    return lost


def has_hung_up(error: Exception) -> bool:
    """Return True if the other side closed the connection, False if it only did not answer."""
    return "Timed out" not in str(error)


def is_collective_error(error: BaseException) -> bool:
    """Return True for errors of a collective when another process does not come."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/transport" in str(error))


def meeting_store() -> Any:
    """Return the key-value store through which the processes have met; any thread may use it."""
    return dist.distributed_c10d._get_default_store()


def greatest(number: int, group: Any) -> int:
    """Return the maximum of all processes' numbers. Collective."""
    value = torch.tensor([number])
    dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group)
    return int(value.item())


def everyones(value: Any, group: Any) -> list[Any]:
    """Return all processes' values, by rank. Collective."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values


def sharded_as(weight: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Return a whole tensor, which every process gives; sharded as `weight`, if FSDP2 has sharded that. Collective."""
    if not isinstance(weight, DTensor):
        return whole
    return distribute_tensor(whole.to(weight.device), weight.device_mesh, weight.placements)


@contextmanager
def takes_whole_weights(model: nn.Module) -> Iterator[None]:
    """Let `model.load_state_dict` take whole weights inside the block, also if FSDP2 has sharded the model's.

    Every process gives them. Collective if the weights are sharded.
    """

    def shard(_: nn.Module, given: dict[str, Any], *others: Any) -> None:
        own = model.state_dict()
        given |= {name: sharded_as(own[name], given[name]) for name in own if name in given}

    hook = model.register_load_state_dict_pre_hook(shard)
    try:
        yield
    finally:
        hook.remove()
