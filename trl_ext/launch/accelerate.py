"""Start a script through accelerate's launcher, with one command line for both.

The script's parser takes the arguments that it has; `accelerate launch` must have the others. All are checked before
a process starts. On several machines this one's rank and address come from the command line, launch file or SLURM.
"""

import math
import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import yaml

from trl_ext import resources
from trl_ext.errors import CANNOT_SAVE, LOST_PROCESS, SAVED_ON_SIGNAL, ConfigError, refuse_first
from trl_ext.launch import servers
from trl_ext.scripts.arguments import StrictParser, split_config_flag
from trl_ext.scripts.exit import INTERRUPTED, OUT_OF_MEMORY, USER_ERROR, refusals
from trl_ext.scripts.process import quiet_launcher
from trl_ext.scripts.recipe import argument_problem, launch_file, option_names, unknown_argument

PORT = 29500  # the first machine's, unless named
# Exit codes of signals, in Python's form and a shell's, whose reason no output gives.
_REASONS = dict.fromkeys(
    (-9, 137), "it was killed, often because host memory was full. Continue with --resume_from_checkpoint true."
) | dict.fromkeys(
    (-15, 143),
    "it was ended by SIGTERM before it could save: by `timeout`, `kill` or a batch system. Start it again with more "
    "time, and with --resume_from_checkpoint true if there is a checkpoint.",
)


def launch(module: str, parser: StrictParser, argv: Sequence[str]) -> int:
    """Run `module` under accelerate, wait for it, and return 0 or the exit code of the first process that failed.

    `argv` has arguments of the script and of `accelerate launch`, in any order.
    """
    from accelerate.commands.launch import launch_command
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    quiet_launcher()
    arguments = launch_arguments(module, parser, argv)
    # PyTorch's launcher would kill the processes 30 seconds after SIGTERM and Ctrl-C, and hide their exit codes.
    arguments.signals_to_handle = "SIGHUP,SIGQUIT"
    try:
        # `refusals` is for contradictions of launch arguments, before a process starts.
        with signals_passed_on(), refusals("accelerate cannot launch this"):
            launch_command(arguments)
    except subprocess.CalledProcessError as error:
        return _report_exit(error.returncode)
    except ChildFailedError as error:
        codes = [failure.exitcode for failure in error.failures.values()]
        # Other processes then fail as well, and may be seen first.
        for code in (OUT_OF_MEMORY, SAVED_ON_SIGNAL, CANNOT_SAVE, USER_ERROR):
            if code in codes:
                return _report_exit(code)
        rank, first = error.get_first_failure()
        return _report_exit(first.exitcode, f"process {rank}")
    return 0


@contextmanager
def signals_passed_on() -> Iterator[None]:
    """Pass SIGTERM and Ctrl-C to the processes of the block, which save and end; a second Ctrl-C kills them."""
    import psutil

    from trl_ext.trainers.ending.signals import SAME_PRESS_S

    first_s, has_passed = math.inf, False

    def pass_on(number: int, frame: Any) -> None:
        nonlocal first_s, has_passed
        processes = [child for child in psutil.Process().children() if child.pid not in servers.running]
        if not processes and has_passed:  # they have ended; the launcher reads their exit code next
            return
        if not processes:  # none has started yet
            signal.signal(number, before[number])
            signal.raise_signal(number)
        is_second = number == signal.SIGINT and time.monotonic() - first_s > SAME_PRESS_S
        if number == signal.SIGINT:
            first_s = min(first_s, time.monotonic())
        has_passed = True
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL if is_second else number)

    before: dict[int, Any] = {}
    for number in (signal.SIGTERM, signal.SIGINT):
        before[number] = signal.signal(number, pass_on)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def launch_arguments(module: str, parser: StrictParser, argv: Sequence[str], *, on_ray: bool = False) -> Namespace:
    """Return the launcher's arguments, which contain the script and the script's arguments.

    Args:
        module: The module that `python -m` runs.
        argv: Arguments of the script and of `accelerate launch`, in any order.
        on_ray: True if Ray places the workers; number and address of machines are then not read.

    Raises:
        ConfigError: An argument is unknown to both, or a value is invalid.
    """
    from accelerate.commands.launch import launch_command_parser

    words = split_config_flag(argv)
    rest = parser.unknown_arguments(words)
    launcher = launch_command_parser()
    launcher.error = refuse  # accelerate's own errors as sentences
    launch_names = option_names(launcher)
    for word in rest:
        if word.startswith("--") and word.partition("=")[0].removeprefix("--").replace("-", "_") not in launch_names:
            raise unknown_argument(word, [*option_names(parser), *launch_names, "config"])
    arguments = launcher.parse_args([*rest, "--module", module, *without(words, rest)])
    if arguments.training_script != module:  # accelerate reads a value without a flag as the script
        raise unknown_argument(arguments.training_script, launch_names)
    if arguments.num_processes is not None and arguments.num_processes < 1:
        raise ConfigError(f"--num_processes is {arguments.num_processes}, fewer than one process. Start at least one.")
    engines = (arguments.cpu, arguments.multi_gpu, arguments.use_deepspeed, arguments.use_fsdp)
    if arguments.config_file is None and "--config" in words and not any(engines):
        arguments.config_file = launch_file(words[words.index("--config") + 1])
    if arguments.config_file is not None and not Path(arguments.config_file).is_file():
        if Path(arguments.config_file).suffix or Path(arguments.config_file).name != arguments.config_file:
            raise ConfigError(f"There is no accelerate file {arguments.config_file}. Check --config_file.")
        arguments.config_file = str(resources.accelerate_config(arguments.config_file))
    if not on_ray:
        name_machines(arguments, content_of(arguments.config_file))
        _name_defaults(arguments)
    return arguments


def _name_defaults(arguments: Namespace) -> None:
    """Set accelerate's defaults for one process if there is no launch file, so that accelerate prints no warning.

    Several processes on a machine without cards get the shipped file `cpu`.
    """
    import torch
    from accelerate.commands.config.config_args import default_config_file

    if arguments.config_file is not None or Path(default_config_file).is_file():
        return
    is_alone = not (arguments.multi_gpu or arguments.use_deepspeed or arguments.use_fsdp)
    defaults: dict[str, Any] = {"num_machines": 1, "mixed_precision": "no", "dynamo_backend": "no"}
    if is_alone and torch.accelerator.device_count() < 2:
        if (arguments.num_processes or 1) > 1 and (arguments.num_machines or 1) < 2:
            # Without the file accelerate starts one process, even with --cpu.
            arguments.cpu, arguments.config_file = False, str(resources.accelerate_config("cpu"))
            return
        defaults["num_processes"] = 1
    _fill_in(arguments, defaults)


def _fill_in(arguments: Namespace, values: Mapping[str, Any]) -> None:
    """Set the arguments that the command line leaves open."""
    for name, value in values.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)


def content_of(path: str | None) -> dict[str, Any]:
    """Read an accelerate file, {} for None; raise ConfigError if it is no mapping. Accelerate checks its keys."""
    try:
        content = {} if path is None else yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, OSError, ValueError) as error:
        raise ConfigError(f"The accelerate file {path} cannot be read: {' '.join(str(error).split())}.") from error
    if not isinstance(content, dict):
        raise ConfigError(f"The accelerate file {path} holds no keys. Write one `key: value` per line.")
    return content


def without(words: Sequence[str], taken: Sequence[str]) -> list[str]:
    """Return `words` without `taken`, which occur there in the same order."""
    rest, left = list(taken), []
    for word in words:
        if rest and word == rest[0]:
            rest.pop(0)
        else:
            left.append(word)
    return left


def refuse(message: str) -> NoReturn:
    """Raise a message of an argument parser as a ConfigError."""
    raise argument_problem(message, {})


def _report_exit(code: int, who: str = "a process") -> int:
    """Print that a process failed, unless it has printed the reason; return the exit code."""
    if code == OUT_OF_MEMORY:
        print("\nerror: a process ran out of memory; its message above names what would fit.\n", file=sys.stderr)
    elif code not in (USER_ERROR, SAVED_ON_SIGNAL, CANNOT_SAVE, LOST_PROCESS, INTERRUPTED):
        why = _REASONS.get(
            code, "its output above gives the reason; `trl-ext report OUTPUT_DIR` shows the run up to there."
        )
        print(f"\nerror: {who} stopped with exit code {code}; {why}\n", file=sys.stderr)
    return code if code > 0 else 1


# Several machines ---------------------------------------------------------------------------------------------------


def name_machines(arguments: Namespace, file: Mapping[str, Any]) -> None:
    """Complete the launcher's arguments from SLURM, and check the arguments of a run on several machines.

    Args:
        arguments: Arguments of `accelerate launch`; None means that the launch file may set them.
        file: Content of the launch file.

    Raises:
        ConfigError: The machines could not reach each other, or would start different runs.
    """
    if arguments.num_machines is None:
        _fill_in(arguments, of_slurm(file.get("num_machines") or 1))

    def given(name: str) -> Any:
        value = getattr(arguments, name)
        return file.get(name) if value is None else value

    names = ("num_machines", "machine_rank", "main_process_ip", "num_processes")
    check_machines(*map(given, names))
    kinds = (arguments.multi_gpu, arguments.use_deepspeed, arguments.use_fsdp)
    is_alone = not any(kinds) and file.get("distributed_type", "NO") == "NO"
    if (given("num_machines") or 1) > 1 and is_alone:
        raise ConfigError(
            f"This launch starts one process alone, but num_machines is {given('num_machines')}. "
            "Give a file for many processes, such as --config_file multi_gpu, zero2 or zero3."
        )


def check_machines(num_machines: int | None, rank: int | None, address: str | None, num_processes: int | None) -> None:
    """Raise ConfigError for numbers with which a run on several machines would hang or leave cards idle.

    Args:
        num_machines: Machines of the run; None for one machine.
        rank: This machine's number, from 0.
        address: Address of machine 0.
        num_processes: Processes of all machines together; None if the launch file has the number.
    """
    if num_machines is None or num_machines == 1:
        return
    last = num_machines - 1
    refuse_first(
        {
            f"--num_machines is {num_machines}, fewer than one machine. Start at least one.": num_machines < 1,
            f"--num_machines is {num_machines}, but no --machine_rank gives the number of this machine. Give each "
            f"machine a different number, from 0 to {last}.": rank is None,
            f"--machine_rank is {rank} of {num_machines} machines. They count from 0 to {last}.": (
                rank not in range(num_machines)
            ),
            f"--num_machines is {num_machines}, but no --main_process_ip gives the address of machine 0. Give the "
            "address at which the other machines reach it.": not address,
        }
    )
    if num_processes is not None and num_processes % num_machines:
        raise ConfigError(
            f"--num_processes is {num_processes}, which {num_machines} machines cannot share equally. "
            "It counts the processes of all machines: give a multiple."
        )


def of_slurm(num_machines: int) -> dict[str, Any]:
    """Return this machine's arguments of `accelerate launch` from SLURM; {} outside SLURM and on one machine.

    `num_machines` is the launch file's, or 1. Raises ConfigError if the step lacks a task on each machine, or the file
    is for another number of machines.
    """
    variables = os.environ  # a step's variables are read first, then the allocation's
    nodes = int(variables.get("SLURM_STEP_NUM_NODES") or variables.get("SLURM_NNODES") or 1)
    if nodes == 1:
        return {}
    tasks = variables.get("SLURM_STEP_NUM_TASKS")
    if tasks is None:
        raise ConfigError(
            f"SLURM gave this job {nodes} nodes, but this command runs on one of them only. "
            "Start it by `srun --ntasks-per-node 1`, or give --num_machines 1."
        )
    if int(tasks) != nodes:
        raise ConfigError(
            f"srun starts this command {tasks} times on {nodes} nodes, but the launcher starts the processes of a "
            "machine itself. Start it once a node: `srun --ntasks-per-node 1`."
        )
    if num_machines not in (1, nodes):
        raise ConfigError(
            f"The launch file is for {num_machines} machines, but SLURM gave this step {nodes} nodes. "
            f"Ask for --nodes {num_machines}, or take another file."
        )
    listed = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST") or ""
    try:
        command = ["scontrol", "show", "hostnames", listed]
        hosts = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.split()
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"SLURM's list of nodes '{listed}' cannot be read: {error}. Give --num_machines, --machine_rank and "
            "--main_process_ip on the command line."
        ) from error
    return {
        "num_machines": nodes,
        "machine_rank": int(variables["SLURM_NODEID"]),
        "main_process_ip": hosts[0],
        # Two jobs that share a node must not share the port.
        "main_process_port": PORT + int(variables.get("SLURM_JOB_ID", 0)) % 1000,
    }
