"""vLLM servers of a run under Ray: each is the child of an actor, on GPUs that a placement group keeps for it.

The driver watches them as it watches servers of its own machine without Ray.
"""

import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from trl_ext.launch import servers
from trl_ext.launch.servers import POLL_S, Serving, VLLMProcess, serving

_ACTOR_S = 60.0  # without an answer of an actor, after which its server counts as one that has ended
_GONE = -signal.SIGKILL  # the exit code of a server whose actor is gone


class ServerActor:
    """Starts a server on its machine, which ends with the actor.

    Args:
        folder: Where the command was given.
        patience_s: Seconds in which a server is up.
    """

    def __init__(self, folder: str, patience_s: float) -> None:
        if Path(folder).is_dir():
            os.chdir(folder)  # as the workers do
        self._process: VLLMProcess | None = None
        self._started: tuple[Sequence[str], Path] | None = None
        self._patience_s, self._patient_until_s, self._num_attempts = patience_s, 0.0, 0

    def address(self, is_alone: bool) -> tuple[str, int]:
        """Return where the server is to listen: where other machines reach it only if there are others."""
        import ray

        return servers.HERE if is_alone else ray.util.get_node_ip_address(), servers.free_ports(1)[0]

    def start(self, command: Sequence[str], log: Path) -> None:
        """Start the server, in the place of the one that is there."""
        self.signal_all(signal.SIGKILL)
        self._started = (command, log)
        self._process = servers.start_server((servers.program() or command[0], *command[1:]), log)

    def begin_attempt(self) -> None:
        """Start the server again for workers that begin again: it may wait without end for the ones that are gone."""
        self._num_attempts += 1
        if self._num_attempts > 1 and self._started:
            self.start(*self._started)
            self._patient_until_s = time.monotonic() + self._patience_s

    def poll(self) -> int | None:
        """Return the server's exit code, None while it runs."""
        return _GONE if self._process is None else self._process.poll()

    def answers(self, url: str) -> bool:
        """Return True where the server answers, or may still be starting again."""
        return time.monotonic() < self._patient_until_s or bool(self._process and self._process.answers(url))

    def signal_all(self, number: int) -> None:
        """Send a signal to the server and to what it has started."""
        if self._process is not None:
            self._process.signal_all(number)
            if number == signal.SIGKILL:
                self._process.wait()


class ActorProcess:
    """The server of an actor, as the driver sees it, with the methods of `VLLMProcess`."""

    pid = 0  # it is no child of the driver

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the server's exit code, None while it runs."""
        if self.returncode is None:
            self.returncode = self.ask("poll", otherwise=_GONE)
        return self.returncode

    def wait(self, timeout: float = math.inf) -> int:
        """Return the exit code when there is one; raises subprocess.TimeoutExpired after so many seconds."""
        until_s = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > until_s:
                raise subprocess.TimeoutExpired("trl vllm-serve", timeout)
            time.sleep(POLL_S)
        return code

    def answers(self, url: str) -> bool:
        """Return True where the server answers at its address."""
        return bool(self.ask("answers", url))

    def signal_all(self, number: int) -> None:
        """Send a signal to the server and to what it has started."""
        self.ask("signal_all", number)

    def ask(self, method: str, *values: Any, otherwise: Any = None) -> Any:
        """Return what the actor's method returns; `otherwise` where the actor is gone, or silent."""
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError

        try:
            return ray.get(getattr(self._actor, method).remote(*values), timeout=_ACTOR_S)
        except (RayActorError, GetTimeoutError):
            return otherwise


@contextmanager
def serving_on_ray(
    num_servers: int, num_gpus: int, values: Mapping[str, Any], given: Mapping[str, Any], is_alone: bool
) -> Iterator[tuple[list[Any], list[str]]]:
    """Let servers run inside the block, which starts when all answer; yields actors, and arguments of the script.

    Args:
        num_servers: 0 for none.
        num_gpus: Of each server; 0 on the CPU.
        values: Of all settings of the run.
        given: Of those that recipe and flags name.
        is_alone: Whether the cluster is one machine, where servers listen at 127.0.0.1.

    Raises:
        ConfigError: One does not start.
        LostProcessError: One has ended before the block, whose run was ended.
    """
    if not num_servers:
        yield [], []
        return
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    # A bundle lies on one machine. Without GPUs it may not be empty: a byte.
    group = placement_group([{"GPU": num_gpus} if num_gpus else {"memory": 1}] * num_servers, strategy="PACK")
    try:
        while not group.wait(timeout_seconds=60):
            print(f"waiting for the GPUs of {num_servers} vLLM server(s): {num_gpus} each", flush=True)
        planned = servers.servers_of(values, given, [], [])
        # An actor that is gone comes again where its server may, and calls wait for it.
        own: dict[str, Any] = {"num_gpus": num_gpus} if num_gpus else {"memory": 1}
        own |= {"num_cpus": 0, "max_restarts": planned.restarts, "max_task_retries": -1 if planned.restarts else 0}
        places = [PlacementGroupSchedulingStrategy(group, number) for number in range(num_servers)]
        kinds = [ray.remote(scheduling_strategy=place, **own)(ServerActor) for place in places]
        actors = [kind.remote(os.getcwd(), planned.patience_s) for kind in kinds]
        addresses = ray.get([actor.address.remote(is_alone) for actor in actors])
        planned = servers.servers_of(values, given, addresses, [""] * num_servers)
        logs = tuple(log.absolute() for log in planned.logs)
        # As after Ctrl-C, Ray ends the run.
        end = partial(signal.pthread_kill, threading.get_ident(), signal.SIGINT)
        start = partial(_start, actors)
        with serving(replace(planned, logs=logs, start=start, end_training=end)):
            words = ["--vllm_server_base_url", ",".join(planned.urls)]
            if "vllm_group_port" not in given:
                words += ["--vllm_group_port", str(servers.free_ports(1)[0])]
            yield actors, words
    finally:
        remove_placement_group(group)


def _start(actors: Sequence[Any], planned: Serving, number: int) -> ActorProcess:
    server = ActorProcess(actors[number])
    server.ask("start", planned.commands[number], planned.logs[number])
    return server
