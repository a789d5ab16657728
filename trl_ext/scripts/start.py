"""What a process does first where a launcher has started it: it will not outlive the launcher, and can be reached.

Only the scripts do so. A notebook, or a program of the user's own, decides itself what it outlives.
"""

import ipaddress
import os
import signal
import socket
import sys
from contextlib import suppress

from trl_ext.rewards.isolation.kernel import die_with_parent
from trl_ext.trainers.record.launch import is_launcher


def end_with_launcher() -> None:
    """Get SIGTERM when the launcher ends, however it does; does nothing where none started this process, or no Linux.

    SIGTERM and not SIGKILL: once a step is done, the run saves what it has.
    """
    if sys.platform == "linux" and is_launcher(parent := os.getppid()):
        die_with_parent(parent, signal.SIGTERM)


def be_reachable() -> None:
    """Where the name of this machine stands for 127.0.0.1, tell gloo by which network the other machines are reached.

    Its processes would otherwise wait for each other at an address that each takes for its own. A user's own
    GLOO_SOCKET_IFNAME stays. Where the network cannot be told, a sentence says so at once.
    """
    num_processes = int(os.environ.get("WORLD_SIZE", "1"))
    if "GLOO_SOCKET_IFNAME" in os.environ or num_processes <= int(os.environ.get("LOCAL_WORLD_SIZE", num_processes)):
        return
    name = socket.gethostname()
    if not _is_own(address := _address(name)):
        return
    interface = ""  # by which the first machine is reached
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
    """Return the IPv4 address that a name stands for, "" if none."""
    try:
        return socket.gethostbyname(name)
    except OSError:
        return ""


def _is_own(address: str) -> bool:
    """Return True for no address, and for one that every machine takes for its own."""
    return not address or ipaddress.ip_address(address).is_loopback


def interface_of(address: str) -> str:
    """Return the name of the network interface that has this address, "" for one of this machine's own."""
    import psutil

    if _is_own(address):
        return ""
    found = (name for name, held in psutil.net_if_addrs().items() if address in [one.address for one in held])
    return next(found, "")


def has_address_of_its_own() -> bool:
    """Return True if the name of this machine stands for an address that other machines reach."""
    return not _is_own(_address(socket.gethostname()))
