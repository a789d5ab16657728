"""Two runs into one folder: the second is refused and told whose the first is; a dead owner's lock is taken over."""

import errno
import getpass
import json
import os
import signal
import socket
from contextlib import suppress

import pytest
from filelock import FileLock
from transformers import TrainerCallback

from tests.reward_trainers import trainer as reward_trainer
from trl_ext.errors import ConfigError
from trl_ext.trainers.checkpoints import folder
from trl_ext.trainers.checkpoints.folder import LOCK, OWNER, check_free


def trainer(path, *callbacks):
    return reward_trainer(path, callbacks=list(callbacks), max_steps=1)


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    monkeypatch.setattr(folder, "PATIENCE_S", 0.2)


@pytest.fixture
def owner(tmp_path):
    """Process id of another process that holds the lock of the folder, and has a fork as data loaders have."""
    is_ready, ready = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            lock = folder._lock(tmp_path, 0.0)
            worker = os.fork()
            if worker:
                os.write(ready, worker.to_bytes(4, "big"))
            signal.pause()
        finally:
            os._exit(lock is None)
    worker = int.from_bytes(os.read(is_ready, 4), "big")
    os.close(is_ready)
    os.close(ready)
    yield child
    with suppress(ChildProcessError):  # a test has ended it
        if os.waitpid(child, os.WNOHANG) == (0, 0):
            end(child)
    os.kill(worker, signal.SIGKILL)


def end(child) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_a_second_run_is_told_who_has_the_folder_and_leaves_it_alone(owner, tmp_path):
    with pytest.raises(ConfigError, match=f"in use: process {owner} of {getpass.getuser()} on {socket.gethostname()}"):
        trainer(tmp_path).train()
    assert json.loads((tmp_path / OWNER).read_text())["pid"] == owner
    assert not (tmp_path / "recipe.yaml").exists()
    with pytest.raises(ConfigError, match=r"give this run another output_dir\.$"):  # before anything is launched
        check_free(tmp_path)


def test_the_lock_of_a_run_that_was_killed_is_taken_over(owner, tmp_path):
    end(owner)
    check_free(tmp_path)
    done = trainer(tmp_path)
    done.train()
    assert done.state.global_step == 1
    assert not {LOCK, OWNER} & set(os.listdir(tmp_path))


class Fails(TrainerCallback):
    """Ends training with a bug; notes that the folder was locked."""

    def on_step_end(self, args, state, control, **kwargs):
        self.owner = json.loads((folder.Path(args.output_dir) / OWNER).read_text())["pid"]
        raise ZeroDivisionError


def test_a_run_that_fails_gives_its_folder_back(tmp_path):
    fails = Fails()
    with pytest.raises(ZeroDivisionError):
        trainer(tmp_path, fails).train()
    assert fails.owner == os.getpid()
    assert not {LOCK, OWNER} & set(os.listdir(tmp_path))


def test_a_file_system_without_locks_is_said_and_does_not_stop_the_run(tmp_path, monkeypatch):
    said = []

    def unsupported(*_, **__):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(FileLock, "acquire", unsupported)
    monkeypatch.setattr(folder.logger, "warning", said.append)
    done = trainer(tmp_path)
    done.train()
    assert done.state.global_step == 1
    assert [text.partition(":")[0] for text in said] == [f"Nothing keeps a second run out of {tmp_path}"]
