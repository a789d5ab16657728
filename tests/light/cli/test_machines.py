"""Runs on several machines: their numbers from the command line, a launch file and SLURM; sentences about them."""

import os
from argparse import Namespace

import pytest

from trl_ext.errors import ConfigError
from trl_ext.launch.accelerate import name_machines

NAMES = ("num_machines", "machine_rank", "main_process_ip", "main_process_port", "num_processes")
KINDS = {"multi_gpu": True, "use_deepspeed": False, "use_fsdp": False}
SLURM = {
    "SLURM_JOB_ID": "81234",
    "SLURM_NNODES": "5",
    "SLURM_JOB_NODELIST": "gpu[0-4]",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "gpu[1-4]",
    "SLURM_NODEID": "2",
}


@pytest.fixture(autouse=True)
def slurm(tmp_path, monkeypatch):
    """A machine with SLURM's program that expands lists of nodes, and no variables of a job."""
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    program = tmp_path / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text(
        '#!/bin/sh\n[ "$*" = "show hostnames gpu[1-4]" ] || { echo "Invalid hostlist" >&2; exit 1; }\n'
        "printf 'gpu1\\ngpu2\\ngpu3\\ngpu4\\n'\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return monkeypatch


def named(file=(), **given) -> dict:
    arguments = Namespace(**dict.fromkeys(NAMES) | KINDS | given)
    name_machines(arguments, dict(file))
    return {name: getattr(arguments, name) for name in NAMES if getattr(arguments, name) is not None}


def set_all(monkeypatch, **other) -> None:
    for name, value in (SLURM | other).items():
        if value is not None:
            monkeypatch.setenv(name, value)


def test_one_machine_is_left_alone_slurms_step_names_several_and_the_command_line_comes_first(slurm):
    assert named() == {} and named(num_machines=1) == {"num_machines": 1}
    set_all(slurm)
    assert named({"num_machines": 1}, num_processes=32) == {
        "num_machines": 4,
        "machine_rank": 2,
        "main_process_ip": "gpu1",
        "main_process_port": 29500 + 234,
        "num_processes": 32,
    }
    set_all(slurm)
    assert named(num_machines=1) == {"num_machines": 1}
    assert named(main_process_port=7)["main_process_port"] == 7


@pytest.mark.parametrize(
    ("variables", "file", "sentence"),
    [
        ({"SLURM_STEP_NUM_TASKS": None}, {}, "SLURM gave this job 4 nodes, but this command runs on one of them"),
        ({"SLURM_STEP_NUM_TASKS": "32"}, {}, "srun starts this command 32 times on 4 nodes"),
        ({}, {"num_machines": 2}, "The launch file is for 2 machines, but SLURM gave this step 4 nodes."),
        ({"SLURM_STEP_NODELIST": "gpu[1-"}, {}, "SLURM's list of nodes 'gpu[1-' cannot be read"),
    ],
)
def test_a_step_that_does_not_fit_is_a_sentence(variables, file, sentence, slurm):
    set_all(slurm, **variables)
    with pytest.raises(ConfigError) as caught:
        named(file)
    assert str(caught.value).startswith(sentence)


FULL = {"num_machines": 2, "machine_rank": 1, "main_process_ip": "10.0.0.1", "num_processes": 16}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"machine_rank": None}, "--num_machines is 2, but no --machine_rank gives the number of this machine."),
        ({"machine_rank": 2}, "--machine_rank is 2 of 2 machines."),
        ({"main_process_ip": None}, "--num_machines is 2, but no --main_process_ip gives the address of machine 0"),
        ({"num_processes": 15}, "--num_processes is 15, which 2 machines cannot share equally."),
        ({"multi_gpu": False}, "This launch starts one process alone, but num_machines is 2."),
    ],
)
def test_numbers_with_which_a_run_would_hang_are_refused(change, sentence):
    assert named(**FULL) == FULL and named(FULL) == {}
    with pytest.raises(ConfigError) as caught:
        named(**FULL | change)
    assert str(caught.value).startswith(sentence)
