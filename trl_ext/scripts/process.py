"""Set up a process of a run: its console, its end with the launcher, its address for other machines.

Only the scripts do this, not a notebook or a user's program. Rank 0 prints warnings and bars of libraries, all ranks
print errors. Messages of our code and the user's are not filtered.
"""

import ipaddress
import logging
import os
import signal
import socket
import sys
import warnings
from contextlib import suppress

from trl_ext.rewards.isolation.kernel import die_with_parent
from trl_ext.trainers.record.launch import is_launcher

# Libraries that all processes call in the same way.
LIBRARIES = r"(accelerate|datasets|deepspeed|huggingface_hub|peft|torch|transformers|trl)(\.|$)"
_UNHEEDED = r"`torch\.distributed\.\w+` is deprecated"  # DeepSpeed's and accelerate's code
_OMP = "Setting OMP_NUM_THREADS"


def quiet_launcher() -> None:
    """Drop the banner of torch's launcher; PyTorch still sets one thread a process."""
    logging.getLogger("torch.distributed.run").addFilter(lambda record: _OMP not in str(record.msg))


def quiet_libraries() -> None:
    """Let only rank 0 show bars and warnings of libraries, and bars only on a terminal."""
    from transformers.utils import logging as transformers_logging

    quiet_launcher()
    warnings.filterwarnings("ignore", message=_UNHEEDED, category=FutureWarning)
    is_first = os.environ.get("RANK", "0") == "0"
    if not (is_first and sys.stderr.isatty()):
        import datasets

        transformers_logging.disable_progress_bar()
        datasets.disable_progress_bars()
    if not is_first:
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()
        transformers_logging.set_verbosity_error()
        warnings.filterwarnings("ignore", module=LIBRARIES)


def end_with_launcher() -> None:
    """Get SIGTERM when the launcher ends for any reason; does nothing without a launcher or outside Linux.

    SIGTERM and not SIGKILL: after its current step the run saves.
    """
    if sys.platform == "linux" and is_launcher(parent := os.getppid()):
        die_with_parent(parent, signal.SIGTERM)


def be_reachable() -> None:
    """Set GLOO_SOCKET_IFNAME if this machine's name resolves to 127.0.0.1, unless the user has set it.

    Otherwise processes on other machines would try to connect to themselves, and wait forever. If the network
    interface cannot be found, a warning is printed.
    """
    num_processes = int(os.environ.get("WORLD_SIZE", "1"))
    if "GLOO_SOCKET_IFNAME" in os.environ or num_processes <= int(os.environ.get("LOCAL_WORLD_SIZE", num_processes)):
        return
    name = socket.gethostname()
    if not _is_own(address := _address(name)):
        return
    interface = ""  # the interface that leads to the first machine
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect((os.environ.get("MASTER_ADDR", ""), 1))  # sends nothing: asks the kernel for the way
        interface = interface_of(probe.getsockname()[0])
    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    elif os.environ.get("LOCAL_RANK", "0") == "0":
        print(
            f"\nwarning: The name of this machine, {name}, resolves to {address or 'no address'}, where other "
            "machines cannot reach it. Give --main_process_ip as an address and not as a name, or name the network "
            "interface: GLOO_SOCKET_IFNAME=eth0.\n",
            file=sys.stderr,
            flush=True,
        )


def _address(name: str) -> str:
    """Return the IPv4 address of a name, "" if it has none."""
    try:
        return socket.gethostbyname(name)
    except OSError:
        return ""


def _is_own(address: str) -> bool:
    """Return True for a loopback address and for ""."""
    return not address or ipaddress.ip_address(address).is_loopback


def interface_of(address: str) -> str:
    """Return the name of the network interface with this address, "" for a loopback address."""
    import psutil

    if _is_own(address):
        return ""
    for name, held in psutil.net_if_addrs().items():
        if any(one.address == address for one in held):
            return name
    return ""


def has_address_of_its_own() -> bool:
    """Return True if this machine's name resolves to an address that other machines can reach."""
    return not _is_own(_address(socket.gethostname()))
