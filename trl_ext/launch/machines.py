"""Runs on several machines: find this machine's rank and address from the command line, launch file or SLURM."""

import os
import subprocess
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from trl_ext.errors import ConfigError

PORT = 29500  # the first machine's, unless named


def name_machines(arguments: Namespace, file: Mapping[str, Any]) -> None:
    """Complete the launcher's arguments from SLURM, and check the arguments of a run on several machines.

    Args:
        arguments: Arguments of `accelerate launch`; None means that the launch file may set them.
        file: Content of the launch file.

    Raises:
        ConfigError: The machines could not reach each other, or would start different runs.
    """
    if arguments.num_machines is None:
        for name, value in of_slurm(file.get("num_machines") or 1).items():
            if getattr(arguments, name) is None:
                setattr(arguments, name, value)

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
    """Raise ConfigError for numbers with which a run on several machines would hang or leave cards idle."""
    if num_machines is None or num_machines == 1:
        return
    if rank is None:
        raise ConfigError(
            f"--num_machines is {num_machines}, but no --machine_rank gives the number of this machine. "
            f"Give each machine a different number, from 0 to {num_machines - 1}."
        )
    if not 0 <= rank < num_machines:
        raise ConfigError(
            f"--machine_rank is {rank} of {num_machines} machines. They count from 0 to {num_machines - 1}."
        )
    if not address:
        raise ConfigError(
            f"--num_machines is {num_machines}, but no --main_process_ip gives the address of machine 0. "
            "Give the address at which the other machines reach it."
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
