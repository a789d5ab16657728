"""Facts about a machine, as data that a test can write."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from trl_ext.doctor.build_locks import BuildLock
from trl_ext.doctor.finding import Finding
from trl_ext.memory.cards import CONTEXT_GIB

BY_SPEED = (  # what is wrong with `Facts.counts_by_speed`, and what to do
    "The cards differ, and CUDA counts them by speed: a number in CUDA_VISIBLE_DEVICES may be another card than for "
    "nvidia-smi.",
    "Set CUDA_DEVICE_ORDER=PCI_BUS_ID.",
)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A card as the driver reports it, or the part of a card that MIG splits.

    Args:
        name: The driver's name for the card, such as "NVIDIA A40".
        total_gib: Memory of the card or part without the driver's reserve.
        free_gib: Memory of it that is free now.
        uuid: "GPU-...", or "MIG-..." of a part, by which CUDA_VISIBLE_DEVICES may name it.
        is_split: True if MIG divides the card.
    """

    name: str
    total_gib: float
    free_gib: float
    capability: tuple[int, int]
    uuid: str = ""
    is_split: bool = False

    @property
    def usable_gib(self) -> float:
        """Memory for tensors, on a card that no other process uses."""
        return self.total_gib - CONTEXT_GIB


@dataclass(frozen=True, slots=True)
class Kernels:
    """Answers of PyTorch about this machine.

    Args:
        cuda: CUDA version that it is built for, None without CUDA.
        num_gpus: Cards that it sees.
        nccl: Version, "" without NCCL.
        works: By attention backend, "" if it ran on the first card, else why not. Empty without a card.
    """

    cuda: str | None
    num_gpus: int
    nccl: str = ""
    works: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Disk:
    """A folder that a run writes to.

    Args:
        purpose: "output", "model cache" or "shared memory".
        path: The folder.
        free_gib: Free space of its file system.
        is_writable: Whether this user may write there.
    """

    purpose: str
    path: str
    free_gib: float
    is_writable: bool = True


@dataclass(frozen=True, slots=True)
class Facts:
    """All facts about a machine.

    Args:
        gpus: Cards that CUDA_VISIBLE_DEVICES shows.
        no_gpus: Why there are none; "" if there are some.
        driver, driver_cuda: Version of the driver, and its newest CUDA version; "" without a driver.
        has_nvlink: All pairs of cards have NVLink; None if there are no pairs or the driver does not report it.
        has_peer_access: All pairs reach each other's memory.
        counts_by_speed: True if CUDA may show other cards than `gpus`, because it numbers unequal cards by speed.
        versions: Installed version of a package, None if it is missing.
        untested: Findings about versions that are newer than the tested versions.
        vllm_window: Versions of vLLM that the installed TRL takes; "" for any.
        vllms_transformers: Versions of transformers that the installed vLLM takes; "" for any, or without vLLM.
        kernels: None if PyTorch did not answer.
        no_kernels: Why it did not.
        compiler, ninja: Paths, None if missing.
        build_locks: Locks in the folder where helpers are compiled.
        host_total_gib, host_free_gib: Host memory, or the container's limit if that is less; None if unknown.
        disks: Folders that a run writes to.
        sandbox: Level of the rule `code`'s sandbox, -1 if it does not start, and why the next level fails; None if
            unknown.
        environment: Variables that matter and are set.
    """

    gpus: tuple[Gpu, ...] = ()
    no_gpus: str = ""
    driver: str = ""
    driver_cuda: str = ""
    has_nvlink: bool | None = None
    has_peer_access: bool | None = None
    counts_by_speed: bool = False
    versions: Mapping[str, str | None] = field(default_factory=dict)
    untested: tuple[Finding, ...] = ()
    vllm_window: str = ""
    vllms_transformers: str = ""
    kernels: Kernels | None = None
    no_kernels: str = ""
    compiler: str | None = None
    ninja: str | None = None
    build_locks: tuple[BuildLock, ...] = ()
    host_total_gib: float | None = None
    host_free_gib: float | None = None
    disks: tuple[Disk, ...] = ()
    sandbox: tuple[int, str] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
