"""vLLM servers of a run: `trl vllm-serve` on cards that do not train, started before the run and ended after it.

A server is a child process in a separate session: Ctrl-C at a terminal does not reach it, so that the run can save
first. The server gets SIGTERM when this process ends for any reason.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trl_ext.compat.vllm import STARTS_VARIABLE, server_words
from trl_ext.errors import ConfigError, LostProcessError, SupportError
from trl_ext.rewards.isolation.kernel import die_with_parent
from trl_ext.scripts.arguments import StrictParser

FLAG = "--vllm_servers"
SHARE = 0.9  # of a card's memory: TRL's default for a server; a recipe's default is for colocated vLLM
ENDING_S = 20.0  # between SIGTERM and SIGKILL
POLL_S = 0.5
RESTARTS = 3  # of all servers of a run together
HANGING_S = 60.0  # without an answer to /health: the server is then killed
running: set[int] = set()  # process ids of the servers, which get no signals passed on
HERE = "127.0.0.1"
OF_SERVERS = ("vllm_server_base_url", "vllm_server_host", "vllm_server_port")  # servers that run already


class VLLMProcess(subprocess.Popen[bytes]):
    """The process of a server; it leads a separate session."""

    def signal_all(self, number: int) -> None:
        """Send a signal to the server and its child processes."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def answers(self, url: str) -> bool:
        """Return True if the server answers at its address."""
        with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
        return False


def _start(servers: "Serving", number: int) -> VLLMProcess:
    """Start a server as a child of this process."""
    parent, log, cards = os.getpid(), servers.logs[number], servers.cards[number]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        process = VLLMProcess(
            servers.commands[number],
            env=os.environ | ({"CUDA_VISIBLE_DEVICES": cards} if cards else {}),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(parent, signal.SIGTERM),
        )
    running.add(process.pid)
    return process


def _kill_trainers() -> None:
    """Kill the training processes: they cannot save while they wait for a lost server."""
    import psutil

    trains = [child for child in psutil.Process().children() if child.pid not in running]
    for process in [*(grandchild for child in trains for grandchild in child.children(True)), *trains]:
        with suppress(psutil.NoSuchProcess):
            process.kill()


@dataclass(frozen=True)
class Serving:
    """The servers of a run; each tuple has an entry for each server.

    Args:
        cards: CUDA_VISIBLE_DEVICES of each server; "" without cards.
        logs: Log file of each server.
        patience_s: Seconds within which all servers must answer.
        restarts: How often servers that end or hang are started again; the trainer then sends them its weights.
    """

    commands: tuple[tuple[str, ...], ...]
    cards: tuple[str, ...]
    urls: tuple[str, ...]
    logs: tuple[Path, ...]
    patience_s: float
    restarts: int = 0


def servers_beside(trainer: str, parser: StrictParser, argv: Sequence[str]) -> tuple[Serving | None, list[str]]:
    """Read `--vllm_servers N` from a command line, and hide the servers' cards from the training.

    Args:
        trainer: "grpo", "ppo" or "reward".
        argv: Arguments of the script and of the launcher.

    Returns:
        The servers, None without the flag; and the command line with the servers' addresses.

    Raises:
        ConfigError: The number is invalid, or contradicts another argument.
        SupportError: TRL's command is not installed.
    """
    num_servers, words = _taken(argv)
    if num_servers is None:
        return None, words
    given = parser.given_values(words)
    values: dict[str, Any] = {**vars(parser.parse_known_args([])[0]), **given}
    check(trainer, num_servers, given, words)
    size = int(values["vllm_tensor_parallel_size"])
    served, cards = num_servers * size, _visible_cards()
    if cards and served >= len(cards):
        raise ConfigError(
            f"{FLAG} {num_servers} with vllm_tensor_parallel_size {size} needs {served} GPUs, and {len(cards)} are "
            "visible: none is left for training. Start fewer servers."
        )
    first = len(cards) - served
    if cards:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(cards[:first])
    of_each = [",".join(cards[first + i * size : first + (i + 1) * size]) for i in range(num_servers)]
    ports = free_ports(num_servers + 1)
    folder = Path(values["output_dir"] or "trainer_output") / "vllm"
    servers = Serving(
        tuple(_command(values, given, port, seed) for seed, port in enumerate(ports[:-1])),
        tuple(of_each),
        tuple(f"http://{HERE}:{port}" for port in ports[:-1]),
        tuple(folder / f"server_{number}.log" for number in range(num_servers)),
        float(values["vllm_server_timeout"]),
        RESTARTS if str(values.get("generation_ahead")) == "1" else 0,
    )
    words += ["--use_vllm", "true", "--vllm_mode", "server", "--vllm_server_base_url", ",".join(servers.urls)]
    if "vllm_group_port" not in given:
        words += ["--vllm_group_port", str(ports[-1])]
    return servers, words


def _visible_cards() -> list[str]:
    """Return the machine's cards as CUDA_VISIBLE_DEVICES names them; an empty list without GPUs."""
    import torch

    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (named.split(",") if named else [str(number) for number in range(count)])[:count]


def _taken(argv: Sequence[str]) -> tuple[int | None, list[str]]:
    """Return the value of the flag, None without it, and the other words."""
    words = [part for word in argv for part in (word.split("=", 1) if word.startswith(f"{FLAG}=") else [word])]
    if FLAG not in words:
        return None, words
    at = words.index(FLAG)
    value = words[at + 1] if at + 1 < len(words) else ""
    del words[at : at + 2]
    if FLAG in words or not value.isdecimal() or int(value) < 1:
        raise ConfigError(f"{FLAG} is '{value}'. Give the number of vLLM servers to start, once: 1 or more.")
    return int(value), words


def check_servers(trainer: str, num_servers: int, given: Mapping[str, Any]) -> None:
    """Raise ConfigError for settings that contradict servers of this run; `given` holds values of recipe and flags."""
    if trainer == "reward":
        raise ConfigError(f"{FLAG} {num_servers} with trl-ext reward, which generates nothing. Leave it out.")
    others = {"use_vllm": ("false", "False", False), "vllm_mode": ("colocate",)}
    for key, refused in others.items():
        if given.get(key) in refused:
            raise ConfigError(
                f"{FLAG} {num_servers} starts servers, and {key} is {given[key]}. Leave one of them out."
            )
    for key in OF_SERVERS:
        if key in given:
            raise ConfigError(
                f"{key} is {given[key]}, a server that runs already, and {FLAG} {num_servers} starts new servers. "
                "Leave one of the two out."
            )


def check(trainer: str, num_servers: int, given: Mapping[str, Any], words: Sequence[str]) -> None:
    """Raise an error if settings contradict servers of this run, or if something that they need is missing.

    Args:
        trainer: "grpo" or "ppo".
        num_servers: Servers that the run would start.
        given: Settings of the recipe and the flags, by name.
        words: Words of the command line.
    """
    check_servers(trainer, num_servers, given)
    if not (given.get("model_name_or_path") or given.get("sft_model_path")):
        raise ConfigError("There is no model. Give --model_name_or_path, a name on the hub or a folder.")
    if any(word.partition("=")[0] in ("--num_machines", "--machine_rank") for word in words):
        raise ConfigError(
            f"{FLAG} {num_servers} starts servers on this machine only, and --num_machines is given. Start `trl "
            "vllm-serve` separately, and give its address: vllm_server_base_url."
        )
    if program() is None:
        raise SupportError(
            "vLLM servers are started by `trl vllm-serve`, and there is no program trl. Run: pip install trl."
        )


def program() -> str | None:
    """Return the path of the program `trl`: from PATH, or next to this Python."""
    return shutil.which("trl") or shutil.which("trl", path=str(Path(sys.executable).parent))


def _command(values: Mapping[str, Any], given: Mapping[str, Any], port: int, seed: int) -> tuple[str, ...]:
    """Return the command of a server that listens on this machine only.

    Args:
        values: Settings that the server takes from the run, defaults included.
        given: Settings of the recipe and the flags only.
        port: Port on this machine.
        seed: Seed of the server's random numbers; 0 leaves vLLM's default.
    """
    options = {
        "model": values.get("sft_model_path") or values["model_name_or_path"],
        "host": HERE,
        "port": port,
        "tensor_parallel_size": values["vllm_tensor_parallel_size"],
        "gpu_memory_utilization": given.get("vllm_gpu_memory_utilization", SHARE),
        "revision": given.get("model_revision"),
        "max_model_len": given.get("vllm_max_model_length"),
        "vllm_model_impl": given.get("vllm_model_impl"),
        "trust_remote_code": given.get("trust_remote_code"),
    }
    words = [word for name, value in options.items() if value is not None for word in (f"--{name}", str(value))]
    # TRL passes unknown options to vLLM. With equal seeds servers would use equal random numbers.
    words += [*server_words(given.get("vllm_server_options")), *(["--seed", str(seed)] if seed else [])]
    return (str(program()), "vllm-serve", *words)


def free_ports(number: int) -> list[int]:
    """Return free ports of this machine."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind((HERE, 0))
        return [one.getsockname()[1] for one in sockets]


@contextmanager
def serving(servers: Serving | None) -> Iterator[None]:
    """Run the servers during the block; the block starts when all servers answer.

    Raises:
        ConfigError: A server does not start.
        LostProcessError: A server ended during the block; the training processes were killed.
    """
    if servers is None:
        yield
        return
    started: list[VLLMProcess] = []
    has_ended = threading.Event()
    lost: list[int] = []
    watch = threading.Thread(target=_watch, args=(servers, started, lost, has_ended), daemon=True)
    try:
        for number in range(len(servers.commands)):
            started.append(_start(servers, number))
        starts = servers.logs[0].with_name("starts.json")
        starts.parent.mkdir(parents=True, exist_ok=True)
        starts.write_text(json.dumps([1] * len(started)), encoding="utf-8")
        os.environ[STARTS_VARIABLE] = str(starts.resolve())
        _wait_for(servers, started)
        watch.start()
        yield
    finally:
        has_ended.set()
        if watch.is_alive():
            watch.join()
        _end(started)
        running.difference_update(process.pid for process in started)
        if lost:  # replaces any error of the block
            last = _last_words(servers.logs[lost[0]])
            raise LostProcessError(
                f"vLLM {_which(lost[0], started)} has ended, and the run with it: {last} Start again with "
                "--resume_from_checkpoint true."
            )


def _wait_for(servers: Serving, started: Sequence[VLLMProcess]) -> None:
    """Wait until all servers answer; raise ConfigError with the last line of the log of a server that does not."""
    print(f"waiting for {len(started)} vLLM server(s): {', '.join(servers.urls)}", flush=True)
    until_s = time.monotonic() + servers.patience_s
    for number, url in enumerate(servers.urls):
        while not started[number].answers(url):
            for other, process in enumerate(started):
                if process.poll() is not None:
                    raise ConfigError(
                        f"vLLM {_which(other, started)} has not started: {_last_words(servers.logs[other])}"
                    )
            if time.monotonic() > until_s:
                raise ConfigError(
                    f"vLLM server {number + 1} of {len(started)} does not answer after {servers.patience_s:.0f} s: "
                    f"{_last_words(servers.logs[number])} Give it more time with --vllm_server_timeout."
                )
            time.sleep(POLL_S)


def _which(number: int, started: Sequence[VLLMProcess]) -> str:
    return f"server {number + 1} of {len(started)} (exit code {started[number].returncode})"


def _last_words(log: Path) -> str:
    """Return the last line of a log, and the log's path."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return f"'{lines[-1][:300] if lines else ''}'. Its log is {log}."


def _watch(servers: Serving, started: list[VLLMProcess], lost: list[int], has_ended: threading.Event) -> None:
    """Restart servers that end or hang. End the training if no restart is left.

    Args:
        servers: Addresses and commands, and the restarts that are allowed in all.
        started: The server processes; a restarted process takes its predecessor's place.
        lost: Receives the number of each server that could not be restarted.
        has_ended: Set at the end of the training, which ends the watch.
    """
    num_starts, heard_s = [1] * len(started), [time.monotonic()] * len(started)
    while not has_ended.wait(POLL_S):
        for number, url in enumerate(servers.urls) if servers.restarts else ():
            now_s = time.monotonic()
            if now_s - heard_s[number] > POLL_S * 10 and started[number].answers(url):
                heard_s[number] = now_s
            elif now_s - heard_s[number] > HANGING_S:
                started[number].signal_all(signal.SIGKILL)
                started[number].wait()
        for number, process in enumerate(started):
            if process.poll() is None:
                continue
            running.discard(process.pid)
            if sum(num_starts) - len(started) == servers.restarts:
                lost.append(number)
                continue
            num_starts[number] += 1
            started[number] = _start(servers, number)
            heard_s[number] = time.monotonic() + servers.patience_s  # it may take as long as the first start
            starts = Path(os.environ[STARTS_VARIABLE])
            part = starts.with_suffix(".part")
            part.write_text(json.dumps(num_starts), encoding="utf-8")
            part.replace(starts)
        if lost:
            _kill_trainers()
            return


def _end(started: Sequence[VLLMProcess]) -> None:
    """Ask the servers to end, and kill those that do not, with all that they have started."""
    for process in started:
        process.signal_all(signal.SIGTERM)
    until_s = time.monotonic() + ENDING_S
    for process in started:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(until_s - time.monotonic(), 0))
        process.signal_all(signal.SIGKILL)
        process.wait()
