"""Thirty-two cards as data, and a parser for "4xA40-48GB".

Bandwidth, bf16 rate (fp16's on cards without bf16) and kind of link are from the vendors' data sheets (dense rate with
fp32 sums, half of the printed figure for sparse matrices; for a GeForce twice its shaders' rate). `total_gib` is the
total that `torch.cuda.mem_get_info` typically reports, a little below the printed GB. The rates over links are
estimates, typical of NCCL.

RTX 5090: NVIDIA RTX Blackwell GPU Architecture (white paper, 2025). B200: NVIDIA DGX B200 data sheet, an eighth of the
machine. MI300X: AMD Instinct MI300X data sheet (2023). Ascend 910B: its variants are published with 280 to 400 TFLOPS
and 1.2 to 1.6 TB/s; the table has the lowest, so times are upper bounds; its total is an estimate.
The network between machines is assumed; users can give it, because it differs between clusters.
"""

import math
import re
from dataclasses import dataclass, replace
from difflib import get_close_matches

from trl_ext.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Link:
    """The link between cards of one machine.

    Args:
        name: Kind and generation, for messages.
        gb_s: Bytes that a card sends and receives in a collective, 1e9 per second (estimated).
        host_gb_s: Rate between a card and pinned host memory, 1e9 bytes per second (estimated).
    """

    name: str
    gb_s: float
    host_gb_s: float

    @property
    def is_fast(self) -> bool:
        """True for NVLink and similar links: fast enough to gather weights in every micro-batch."""
        return self.name.startswith(("NVLink", "Infinity Fabric", "HCCS"))


PCIE3 = Link("PCIe 3", 10.0, 10.0)
PCIE4_NO_P2P = Link("PCIe 4 without peer access", 6.5, 20.0)
PCIE5_NO_P2P = Link("PCIe 5 without peer access", 12.0, 40.0)
PCIE4 = Link("PCIe 4", 20.0, 20.0)
PCIE5 = Link("PCIe 5", 40.0, 40.0)
NVLINK2 = Link("NVLink 2", 110.0, 10.0)
NVLINK3 = Link("NVLink 3", 230.0, 20.0)
NVLINK3_400 = Link("NVLink 3, 400 GB/s", 150.0, 20.0)
NVLINK4 = Link("NVLink 4", 370.0, 40.0)
NVLINK5 = Link("NVLink 5", 700.0, 40.0)
INFINITY_FABRIC = Link("Infinity Fabric", 300.0, 40.0)
HCCS = Link("HCCS", 150.0, 20.0)


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU.

    Args:
        name: Its name in `--gpus`, with the printed GB.
        total_gib: Total memory as torch reports it.
        bandwidth_gb_s: Rate of its memory, 1e9 bytes per second (data sheet).
        bf16_tflops: Rate of dense bf16 with fp32 sums, or of fp16, 1e12 operations per second (data sheet).
        link: The link to other cards in the usual machine.
        capability: CUDA compute capability (data sheet), or torch's value for another maker's card.
    """

    name: str
    total_gib: float
    bandwidth_gb_s: float
    bf16_tflops: float
    link: Link
    capability: tuple[int, int]

    @property
    def usable_gib(self) -> float:
        """GiB left for tensors, after the CUDA context, its kernels and NCCL."""
        return self.total_gib - CONTEXT_GIB

    @property
    def has_bf16(self) -> bool:
        """True if the card computes in bf16."""
        return self.capability >= BF16

    @property
    def assumed(self) -> str:
        """A sentence with the assumptions about a card that is not in the table; "" for a card of the table."""
        if any(card.name == self.name for card in CARDS):
            return ""
        capability = ".".join(map(str, self.capability))
        return (
            f"{self.name} is not in the table of cards. Assumed: {self.bandwidth_gb_s:.0f} GB/s, "
            f"{self.bf16_tflops:.0f} TFLOPS, {self.link.name}, compute capability {capability}, which has "
            f"{'bf16' if self.has_bf16 else 'no bf16'}."
        )


# CUDA context and loaded kernels 0.55 GiB, NCCL's buffers 0.65 (estimated; a single card needs no NCCL, but a plan
# should not depend on that).
CONTEXT_GIB = 1.2
# Share of the usable GiB that plans keep free: on an H100 up to 1.9 % more was reserved than the formulas give.
HEADROOM_FRAC = 0.05
# Network of a machine to all others (assumed: one InfiniBand NDR adapter; DGX H100's data sheet has eight adapters,
# many rented machines have one adapter or 100 Gbit/s Ethernet).
NETWORK_GBIT_S = 400.0

BF16 = (8, 0)  # lowest compute capability with bf16 units
# By major compute capability (Hopper, Blackwell): attention that is faster than version 2, which PyTorch has; the
# packages that contain it, each alone; and how to get it.
_VERSION_4 = "pip install flash-attn-4, and attn_implementation: flash_attention_4"
FASTER_ATTENTION = {
    9: (
        "flash-attention 3 or 4",
        ("flash-attn-3", "flash-attn-4", "kernels"),
        f"pip install kernels, and attn_implementation: kernels-community/flash-attn3; or {_VERSION_4}",
    ),
    10: ("flash-attention 4", ("flash-attn-4",), _VERSION_4),
}

CARDS = (
    Card("RTX4060Ti-8GB", 7.6, 288, 44, PCIE4_NO_P2P, (8, 9)),
    Card("RTX3080-10GB", 9.7, 760, 60, PCIE4_NO_P2P, (8, 6)),
    Card("RTX3060-12GB", 11.7, 360, 25, PCIE4_NO_P2P, (8, 6)),
    Card("RTX3080-12GB", 11.7, 912, 61, PCIE4_NO_P2P, (8, 6)),
    Card("RTX4070-12GB", 11.7, 504, 58, PCIE4_NO_P2P, (8, 9)),
    Card("T4-16GB", 14.7, 320, 65, PCIE3, (7, 5)),
    Card("V100-16GB", 15.7, 900, 125, NVLINK2, (7, 0)),
    Card("RTX4060Ti-16GB", 15.6, 288, 44, PCIE4_NO_P2P, (8, 9)),
    Card("A4000-16GB", 15.7, 448, 77, PCIE4, (8, 6)),
    Card("A10-24GB", 22.1, 600, 125, PCIE4, (8, 6)),
    Card("L4-24GB", 22.1, 300, 121, PCIE4, (8, 9)),
    Card("RTX3090-24GB", 23.6, 936, 71, PCIE4_NO_P2P, (8, 6)),
    Card("RTX4090-24GB", 23.6, 1008, 165, PCIE4_NO_P2P, (8, 9)),
    Card("A5000-24GB", 23.6, 768, 111, PCIE4, (8, 6)),
    Card("V100-32GB", 31.7, 900, 125, NVLINK2, (7, 0)),
    Card("RTX5090-32GB", 31.4, 1792, 210, PCIE5_NO_P2P, (12, 0)),
    Card("A40-48GB", 44.4, 696, 150, PCIE4, (8, 6)),
    Card("A6000-48GB", 47.5, 768, 155, PCIE4, (8, 6)),
    Card("RTX6000Ada-48GB", 47.5, 960, 364, PCIE4, (8, 9)),
    Card("L40S-48GB", 44.4, 864, 362, PCIE4, (8, 9)),
    Card("A100-40GB", 39.5, 1555, 312, NVLINK3, (8, 0)),
    Card("A100-80GB", 79.2, 2039, 312, NVLINK3, (8, 0)),
    Card("A100-PCIE-80GB", 79.2, 1935, 312, PCIE4, (8, 0)),
    Card("A800-80GB", 79.2, 2039, 312, NVLINK3_400, (8, 0)),
    Card("H100-80GB", 79.2, 3350, 989, NVLINK4, (9, 0)),
    Card("H100-PCIE-80GB", 79.2, 2000, 756, PCIE5, (9, 0)),
    Card("H20-96GB", 95.1, 4000, 148, NVLINK4, (9, 0)),
    Card("RTXPRO6000-96GB", 94.9, 1792, 504, PCIE5, (12, 0)),
    Card("H200-141GB", 139.8, 4800, 989, NVLINK4, (9, 0)),
    Card("B200-180GB", 178.4, 8000, 2250, NVLINK5, (10, 0)),
    Card("MI300X-192GB", 191.9, 5300, 1307, INFINITY_FABRIC, (9, 4)),
    Card("Ascend910B-64GB", 61.0, 1200, 280, HCCS, (8, 0)),
)
_NOISE = re.compile(r"nvidia|amd|huawei|instinct|ascend|geforce|tesla|quadro|gib|gb|sxm\d?|hbm\w*|blackwell|[^a-z0-9]")
_COUNTED = re.compile(r"\s*(?:(?P<machines>\d+)\s*[xX*]\s*)?(?P<count>\d+)\s*[xX*]\s*(?P<card>\S.*)")


@dataclass(frozen=True, slots=True)
class Hardware:
    """Cards of one kind in one machine, or in several equal ones.

    Args:
        num_gpus: Cards, over all machines.
        card: Their kind.
        host_gib: A machine's memory; None if unknown, which refuses nothing.
        num_machines: Machines.
        headroom_frac: Share of a card's usable GiB that plans keep free.
        network_gbit_s: Rate of a machine's network, 1e9 bits per second.
    """

    num_gpus: int
    card: Card
    host_gib: float | None = None
    num_machines: int = 1
    headroom_frac: float = HEADROOM_FRAC
    network_gbit_s: float = NETWORK_GBIT_S

    def __str__(self) -> str:
        machines = f"{self.num_machines}x" if self.num_machines > 1 else ""
        return f"{machines}{self.gpus_per_machine}x{self.card.name}"

    @property
    def gpus_per_machine(self) -> int:
        """Cards of one machine."""
        return self.num_gpus // self.num_machines

    @property
    def fill_gib(self) -> float:
        """GiB of a card that a plan may fill: usable GiB less the head-room."""
        return self.card.usable_gib * (1 - self.headroom_frac)

    @property
    def usable(self) -> str:
        """The usable GiB of a card, in words: "43.2 GiB usable, of which 5% stay free"."""
        kept = f", of which {self.headroom_frac:.0%} stay free" if self.headroom_frac else ""
        return f"{self.card.usable_gib:.1f} GiB usable{kept}"

    @property
    def gb_s(self) -> float:
        """Bytes that a card sends and receives in a collective over all cards, 1e9 per second. Over several machines a
        ring crosses the network once per machine, which limits its rate."""
        return min(self.card.link.gb_s, self.network_gbit_s / 8) if self.num_machines > 1 else self.card.link.gb_s


def find_card(name: str) -> Card:
    """Find a card by name.

    Args:
        name: Such as "A40-48GB", "a40", "RTX 4090" or "A100-80".

    Raises:
        ConfigError: No card has the name, or several have.
    """
    wanted = _plain(name)
    exact = [card for card in CARDS if wanted in _spellings(card)]
    if len(exact) == 1:
        return exact[0]
    if exact:
        raise ConfigError(f"'{name}' comes in several sizes. Write one of {', '.join(card.name for card in exact)}.")
    spellings = {spelling: card.name for card in CARDS for spelling in sorted(_spellings(card))}
    near = {spellings[word]: None for word in get_close_matches(wanted, spellings, n=6, cutoff=0.5)}
    names = ", ".join(list(near)[:3]) or "A40-48GB, A100-80GB, H100-80GB"
    raise ConfigError(
        f"'{name}' is not in the table of cards. Nearest: {names}. For another card give --gpu_memory_gib, its memory "
        "in GiB."
    )


def parse_headroom(value: str | float) -> float:
    """Parse a head-room, "5%" or 0.05; raise ConfigError for anything but a share below 0.9."""
    text = str(value).strip()
    try:
        frac = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        frac = -1.0
    if not 0 <= frac < 0.9:
        raise ConfigError(f"headroom is {text}. Give the share of a card that stays free: 5%, 0.05, or 0 for none.")
    return frac


def parse_gpus(text: str, gpu_memory_gib: float | None = None, host_gib: float | None = None) -> Hardware:
    """Parse "4xA40-48GB", "A40" for one card, or "2x8xH100-80GB" for two machines with eight cards each.

    Args:
        gpu_memory_gib: The card's total memory. It replaces the table's, and makes an unknown card an ordinary card on
            PCIe 4.
        host_gib: The machine's memory, if known.

    Raises:
        ConfigError: No GPU, an unknown card without its memory, or memory that is not positive.
    """
    if re.fullmatch(r"\s*\d{1,3}\s*", text):
        raise ConfigError(f"--gpus {text} has no card. Write its name after the number, such as {text}xA100-80GB.")
    counted = _COUNTED.fullmatch(text)
    count, name = (int(counted["count"]), counted["card"].strip()) if counted else (1, text.strip())
    machines = int(counted["machines"] or 1) if counted else 1
    count *= machines
    if count < 1:
        raise ConfigError(f"--gpus {text} has no GPU. Give at least one, such as 1x{name}.")
    if host_gib is not None and not host_gib > 0:
        raise ConfigError(f"--host_memory_gib {host_gib} is no machine's memory. Give more than 0, or leave it out.")
    if gpu_memory_gib is None:
        return Hardware(count, find_card(name), host_gib, machines)
    if not CONTEXT_GIB < gpu_memory_gib < math.inf:
        raise ConfigError(
            f"--gpu_memory_gib {gpu_memory_gib} is no card's memory. Give more than {CONTEXT_GIB}, which the CUDA "
            "context takes."
        )
    try:
        card = replace(find_card(name), total_gib=gpu_memory_gib)
    except ConfigError:
        # A modest card, as `assumed` states, with the given memory.
        card = Card(name, gpu_memory_gib, 600, 100, PCIE4_NO_P2P, (8, 0))
    return Hardware(count, card, host_gib, machines)


def with_network(hardware: Hardware, network_gbit_s: float) -> Hardware:
    """Return the machines with another network; raise ConfigError for one machine or a rate that is not positive."""
    if hardware.num_machines < 2 or network_gbit_s <= 0:
        raise ConfigError(
            f"--network_gbit_s {network_gbit_s} with --gpus {hardware}: it is the rate, more than 0, of the network "
            "between several machines. Remove it, or name machines, such as --gpus 2x8xH100-80GB."
        )
    return replace(hardware, network_gbit_s=network_gbit_s)


def _plain(name: str) -> str:
    return _NOISE.sub("", name.lower())


def _spellings(card: Card) -> set[str]:
    """Return the spellings of a card: with and without its GB, with and without RTX."""
    full = _plain(card.name)
    short = _plain(card.name.rpartition("-")[0])
    return {form for word in (full, short) for form in (word, word.removeprefix("rtx"))}
