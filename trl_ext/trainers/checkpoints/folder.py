"""Checks and lock of the output folder: all processes must see it, and only one run may use it at a time.

The operating system holds the lock and releases it when the process ends, however it ends: no lock is ever stale. NFS,
Lustre, GPFS and CephFS share it between machines, if they are mounted with locks.
"""

import getpass
import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from transformers.utils import logging

from trl_ext.errors import ConfigError
from trl_ext.trainers.checkpoints.manifest import UNFINISHED, Damaged, Manifest
from trl_ext.trainers.checkpoints.ranks import gathered, of_rank_0
from trl_ext.trainers.checkpoints.save import is_whole, newest_first
from trl_ext.trainers.ending.signals import saves_on_signal

# Uploads to the hub leave out all names with a leading `_`.
LOCK, OWNER = "_lock", "_owner.json"
# A killed run may still be ending when the next run starts.
PATIENCE_S = 30.0
# Time until a network file system shows a machine what another has written.
_SEEN_S = 3.0
_MAX_WORD = 100  # characters of a printed name

logger = logging.get_logger(__name__)


def check_seen_by_all(args: Any) -> None:
    """Raise ConfigError if a run will save and not all processes see the same output_dir. Collective."""
    if args.save_strategy == "no" and not saves_on_signal(args):
        return
    folder = Path(args.output_dir)
    # A new name: a network file system may cache that an old name does not exist.
    token = folder / of_rank_0(args, f"_{secrets.token_hex(8)}")
    if args.process_index == 0:
        with suppress(OSError):  # saving raises the error if it cannot write
            folder.mkdir(parents=True, exist_ok=True)
            token.touch()
    written = of_rank_0(args, token.exists())
    deadline_s = time.monotonic() + _SEEN_S
    while written and not token.exists() and time.monotonic() < deadline_s:
        time.sleep(0.1)
    seen = gathered(args, token.exists() or not written)
    if args.process_index == 0:
        token.unlink(missing_ok=True)
    hosts = gathered(args, socket.gethostname())
    if not all(seen):
        rank = seen.index(False)
        raise ConfigError(
            f"Process {rank} on {hosts[rank]} does not see what process 0 on {hosts[0]} writes into output_dir "
            f"{args.output_dir}: no run could resume from a checkpoint. Give an output_dir on a disk that all "
            "machines share, or set save_strategy: no."
        )


@contextmanager
def held(args: Any, model: str, *, is_fresh: bool) -> Iterator[None]:
    """Keep other runs out of output_dir while the block runs. Collective; process 0 holds the lock.

    Args:
        args: Training arguments.
        model: Name or folder of the model that training begins with.
        is_fresh: True if the run does not resume: checkpoints of an earlier run are removed or refused.

    Raises:
        ConfigError: on all processes, if another run uses the folder, or has left checkpoints in it.
    """
    folder, lock, sentence = Path(args.output_dir), None, ""
    if args.process_index == 0:
        try:
            lock = _lock(folder, min(PATIENCE_S, args.ddp_timeout / 2))
            if is_fresh:
                check_unused(args)
                _remove_earlier_run(folder, model)
        except ConfigError as error:
            sentence = str(error)
        except OSError as error:
            sentence = f"The earlier run in output_dir {folder} cannot be removed: {error}. Give another output_dir."
    try:
        if sentence := of_rank_0(args, sentence):
            raise ConfigError(sentence)
        yield
    finally:
        if lock is not None:
            _release(lock, folder)


def check_free(folder: Path) -> None:
    """Raise ConfigError if a run uses the folder and does not end within PATIENCE_S."""
    if (folder / LOCK).exists() and (lock := _lock(folder, PATIENCE_S)) is not None:
        _release(lock, folder)


def check_unused(args: Any) -> None:
    """Raise ConfigError if output_dir holds checkpoints of an earlier run, and `overwrite` is not set."""
    folder = Path(args.output_dir)
    there = [*newest_first(folder), *filter(is_whole, newest_first(folder / UNFINISHED))]
    if there and str(getattr(args, "overwrite", False)).lower() != "true":
        raise ConfigError(
            f"output_dir {folder} holds {there[0].name} of an earlier run. Go on with that run by "
            "--resume_from_checkpoint true (in Python: train(resume_from_checkpoint=True)), remove it by "
            "overwrite: true, or give another output_dir."
        )


def _remove_earlier_run(folder: Path, model: str) -> None:
    """Remove checkpoints, tables and the saved model of an earlier run; keep files that no run has written.

    Each is renamed before it is deleted, the newest checkpoint last, so that a kill leaves it whole. If training
    begins with the model in this folder, the model stays until the end of this run replaces it.
    """
    if not (checkpoints := newest_first(folder)):
        return
    bin_, saved = folder / UNFINISHED, {"completions", "trainer_state.json"}
    with suppress(Damaged):
        saved |= {name.partition("/")[0] for name in Manifest.read(checkpoints[0]).files} - {"", ".", ".."}
    if Path(model).resolve() == folder.resolve():
        saved = {"completions"}
    shutil.rmtree(bin_, ignore_errors=True)
    bin_.mkdir()
    for path in [*(folder / name for name in sorted(saved)), *reversed(checkpoints)]:
        if path.exists():
            os.rename(path, bin_ / f"removed-{path.name}")
    shutil.rmtree(bin_, ignore_errors=True)


def _lock(folder: Path, patience_s: float) -> FileLock | None:
    """Lock a folder and write its owner; None if it cannot be locked. Raise ConfigError if another run holds it."""
    lock = FileLock(folder / LOCK)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            logger.warning(f"{_in_use(folder)} Waiting up to {patience_s:g} s for its end.")
            lock.acquire(timeout=patience_s)
        (folder / OWNER).write_text(json.dumps(_owner()))
    except Timeout:
        elsewhere = _owner_of(folder).get("host") not in (None, socket.gethostname())
        gone = f"; if that machine is gone, remove {folder / LOCK}" if elsewhere else ""
        raise ConfigError(f"{_in_use(folder)} Wait for its end, or give this run another output_dir{gone}.") from None
    except OSError as error:
        logger.warning(f"Nothing keeps a second run out of {folder}: it cannot be locked ({error}).")
        if not lock.is_locked:
            return None
    return lock


def _release(lock: FileLock, folder: Path) -> None:
    for name in (OWNER, LOCK):  # a process that waits for the removed file opens a new file
        with suppress(OSError):
            (folder / name).unlink()
    lock.release()


def _owner() -> dict[str, Any]:
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container's user without a name
        user = f"user {os.getuid()}"
    since = datetime.now(UTC).isoformat(timespec="seconds")
    return {"host": socket.gethostname(), "pid": os.getpid(), "user": user, "since": since}


def _owner_of(folder: Path) -> dict[str, str]:
    """Return host, pid, user and start of the lock's owner; empty if they cannot be read."""
    try:
        with (folder / OWNER).open("rb") as file:
            content = json.loads(file.read(10_000))
        found = {name: str(content[name]) for name in ("host", "pid", "user", "since")}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    return found if all(word.isprintable() and len(word) <= _MAX_WORD for word in found.values()) else {}


def _in_use(folder: Path) -> str:
    if not (owner := _owner_of(folder)):
        return f"output_dir {folder} is in use by another run."
    return (
        f"output_dir {folder} is in use: process {owner['pid']} of {owner['user']} on {owner['host']} trains into it "
        f"since {owner['since']}."
    )
