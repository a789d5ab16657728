"""Writing of checkpoints into a temporary folder, which is renamed once all processes have written.

Processes exchange their errors after every stage: if a write fails on any of them, all give up.
"""

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, sort_checkpoints
from transformers.utils import logging

from trl_ext.compat.versions import installed_versions
from trl_ext.errors import ConfigError, StorageError
from trl_ext.resources import __version__
from trl_ext.trainers.checkpoints.manifest import (
    UNFINISHED,
    Damaged,
    FileEntry,
    Manifest,
    files_in,
    settled,
    share_of,
    sync_folder,
)
from trl_ext.trainers.checkpoints.ranks import gathered, of_rank_0
from trl_ext.trainers.checkpoints.saved import SavedTrainer

_NUM_THREADS = 4
# Errors that stay until somebody changes mounts or permissions. A full disk is not among them.
_LASTING = (errno.EROFS, errno.EXDEV, errno.EACCES, errno.EPERM)
_MOST_LASTING = 3  # failed saves in a row
_PACKAGES = ("trl", "transformers", "accelerate", "torch", "datasets")

logger = logging.get_logger(__name__)


@dataclass(eq=False)
class WriteErrors:
    """Stores the first write error of this process until all processes have exchanged their errors."""

    error: Exception | None = None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Store a disk error raised in the block."""
        try:
            yield
        except (OSError, SafetensorError, RuntimeError) as error:
            if not _is_of_disk(error):
                raise
            self.error = self.error or error

    def keeping(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that disk errors are stored, and so that it does nothing after an error."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.error is None:
                with self.kept():
                    return function(*args, **kwargs)
            return None

        return call


@dataclass(eq=False)
class Saver:
    """Saves the checkpoints of a trainer's run into the folder `run_dir`."""

    trainer: SavedTrainer
    run_dir: Path
    _size_bytes: int = field(init=False, default=0)
    _num_lasting: int = field(init=False, default=0)

    def save(self, step: int, run: dict[str, Any], write: Callable[[Path, WriteErrors], None]) -> Path | None:
        """Save a checkpoint after optimizer step `step`, and return its folder. Collective.

        `run` is the run's fingerprint; `write` writes all files but the manifest into a folder. If writing fails,
        returns None with a warning if there is an earlier checkpoint.

        Raises:
            ConfigError: writing failed, and there is no earlier checkpoint.
            StorageError: writing failed for the third time in a row, with an error that does not pass.
        """
        staged = self.run_dir / UNFINISHED / f"{PREFIX_CHECKPOINT_DIR}-{step}"
        entries: dict[str, FileEntry] = {}
        final, errors = self.run_dir / staged.name, WriteErrors()

        def measure() -> None:
            names = share_of(self._rank, list(range(self.trainer.args.world_size)), files_in(staged))
            with ThreadPoolExecutor(_NUM_THREADS) as pool:  # threads mostly wait for the disk
                entries.update(zip(names, pool.map(settled, [staged / name for name in names]), strict=True))

        def finish() -> None:
            if self._rank == 0:
                versions = {"trl_ext": __version__, **installed_versions(*_PACKAGES)}
                is_partial = self.trainer.args.save_only_model
                self._finish(staged, final, Manifest(step, entries, run, versions, save_only_model=is_partial))

        def write_together() -> None:
            try:
                write(staged, errors)
            except (OSError, SafetensorError, RuntimeError) as error:
                if not is_sharded(self.trainer) or not _is_of_disk(error):
                    raise
                # The other processes wait for this one in their write, and end when it ends.
                raise ConfigError(f"The checkpoint of step {step} could not be written: {error}.") from error

        for stage in (lambda: self._make_room(staged), write_together, measure, finish):
            with errors.kept():
                stage()
            said = errors.error and f"process {self._rank}: {errors.error}"
            told = gathered(self.trainer.args, (said, _is_lasting(errors.error), entries))
            failures = [text for text, _, _ in told if text]
            if failures:
                self._num_lasting = self._num_lasting + 1 if any(lasts for _, lasts, _ in told) else 0
                self._give_up(step, failures)
                return None
            for _, _, theirs in told:
                entries |= theirs
        self._num_lasting = 0
        return final

    @property
    def _rank(self) -> int:
        return self.trainer.args.process_index

    def _make_room(self, staged: Path) -> None:
        """Remove the rest of an earlier save; raise OSError if there is not enough space for a sharded save."""
        if self._rank != 0:
            return
        self._clear()
        staged.mkdir(parents=True)
        free_bytes = shutil.disk_usage(staged).free
        # With DeepSpeed and FSDP, processes wait for each other while writing: a disk that fills up then ends the run.
        # Some network file systems report 0 free bytes.
        if is_sharded(self.trainer) and 0 < free_bytes < self._size_bytes:
            raise OSError(
                errno.ENOSPC, f"{free_bytes:,} bytes are free, the last checkpoint took {self._size_bytes:,}"
            )

    def _finish(self, staged: Path, final: Path, manifest: Manifest) -> None:
        """Write the manifest and rename the folder; then remove the folder that it replaces."""
        try:
            manifest.check_sizes(staged)
        except Damaged as error:  # this process does not see what another process has written
            raise OSError(errno.EIO, str(error)) from error
        manifest.write(staged)
        for folder in (staged, *(path for path in staged.rglob("*") if path.is_dir())):
            sync_folder(folder)
        if final.exists():
            os.rename(final, staged.with_name(f"replaced-{final.name}"))
        os.rename(staged, final)
        sync_folder(self.run_dir)
        self._size_bytes = sum(entry.size_bytes for entry in manifest.files.values())
        self._clear()

    def _give_up(self, step: int, failures: list[str]) -> None:
        """Remove the unfinished checkpoint and warn; raise if there is no earlier checkpoint."""
        if self._rank == 0:
            self._clear()
        standing = of_rank_0(self.trainer.args, newest_whole(self.run_dir))
        sentence = f"The checkpoint of step {step} could not be written: {'; '.join(failures)}."
        if standing is None:
            raise ConfigError(f"{sentence} There is no earlier one in {self.run_dir}. Make room or set output_dir.")
        if self._num_lasting == _MOST_LASTING:
            raise StorageError(
                f"{sentence} That is the third in a row, and waiting does not mend it: make {self.run_dir} writable, "
                f"and start again with --resume_from_checkpoint true; {standing} stands."
            )
        if self._rank == 0:
            logger.warning(f"{sentence} Training goes on; {standing} stands.")

    def _clear(self) -> None:
        shutil.rmtree(self.run_dir / UNFINISHED, ignore_errors=True)

    def rotate(self, newest: Path) -> None:
        """Rename, then delete this run's oldest whole checkpoints above save_total_limit, never the newest or best."""
        limit, best = self.trainer.args.save_total_limit, self.trainer.state.best_model_checkpoint
        if self._rank != 0 or not limit or limit < 0:
            return
        # A resumed state may give another path to the best checkpoint.
        kept = {newest.resolve()} | ({Path(best).resolve()} if best else set())
        paths = map(Path, sort_checkpoints(str(self.run_dir), use_mtime=True))
        old = [path for path in paths if path.resolve() not in kept and is_whole(path)]
        old = [path for path in old if run_of(path) == run_of(newest)]
        for path in old[: max(len(old) + len(kept) - limit, 0)]:
            bin_ = self.run_dir / UNFINISHED / f"removed-{path.name}"
            bin_.parent.mkdir(exist_ok=True)
            os.rename(path, bin_)
        self._clear()


def is_sharded(trainer: SavedTrainer) -> bool:
    """Return True if processes wait for each other while they save."""
    return (trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled) and trainer.args.world_size > 1


def is_whole(folder: Path) -> bool:
    """Return True if there is a manifest, and all files have the sizes in it."""
    try:
        Manifest.read(folder).check_sizes(folder)
    except Damaged:
        return False
    return True


def run_of(folder: Path) -> str | None:
    """Return the id of the run that wrote a checkpoint; None without a manifest, or in older manifests."""
    try:
        return Manifest.read(folder).run.get("id")
    except Damaged:
        return None


def newest_whole(run_dir: Path) -> str | None:
    """Return the name of the whole checkpoint of the highest step; None if there is none."""
    return next((path.name for path in newest_first(run_dir) if is_whole(path)), None)


def newest_first(run_dir: Path) -> list[Path]:
    """Return the folders `checkpoint-<step>`, highest step first."""
    found = [
        path for path in run_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if step_of(path) is not None and path.is_dir()
    ]
    return sorted(found, key=lambda path: step_of(path) or 0, reverse=True)


def step_of(path: Path) -> int | None:
    """Return the step in a checkpoint's name; None if there is none."""
    prefix, _, number = path.name.rpartition("-")
    return int(number) if prefix == PREFIX_CHECKPOINT_DIR and number.isdecimal() else None


def _is_lasting(error: Exception | None) -> bool:
    """Return True for a lasting file system error; safetensors has the error number in its text only."""
    codes = (getattr(error, "errno", None), *map(int, re.findall(r"\(os error (\d+)\)", str(error))))
    return any(code in _LASTING for code in codes)


def _is_of_disk(error: Exception) -> bool:
    """Return True for an error of a failed write; torch raises a RuntimeError for it."""
    if isinstance(error, RuntimeError):
        return any(word in str(error) for word in ("PytorchStreamWriter", "inline_container", "basic_ios"))
    return True
