"""The manifest of a checkpoint: `manifest.json`, written last, with the size and the checksum of every file.

If it matches the folder, all processes have finished writing, and no file that is read has changed since. The
checksum, xxh3, finds damage; it is not a signature.
"""

import errno
import json
import mmap
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import xxhash

MANIFEST = "manifest.json"
ADAPTER = "adapter_config.json"  # PEFT's; transformers reads weights as an adapter's where it is
# Folder of checkpoints that are being written or removed. Not `checkpoint-*`, so that nobody takes one for complete;
# uploads to the hub leave out names with a leading `_`.
UNFINISHED = "_unfinished"
LAYOUT = 1
_BLOCK_BYTES = 1 << 20
# Names of files that each process writes for itself, from transformers, DeepSpeed, FSDP and us.
_RANK = re.compile(r"(?:^rng_state_|^rollouts_|rank_|^__)(\d+)[_.]")


class Damaged(ValueError):
    """A checkpoint that does not match its manifest, or has none. The text gives the reason without its name."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Size and checksum of a file."""

    size_bytes: int
    xxh3: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of `manifest.json`."""

    step: int  # optimizer steps taken
    files: Mapping[str, FileEntry]  # by path below the checkpoint, with slashes
    run: Mapping[str, Any]  # fingerprint of the run; see `fingerprint.py`
    versions: Mapping[str, str] = field(default_factory=dict)  # installed versions by package
    save_only_model: bool = False  # True if there are weights only, so that no run can resume
    layout: int = LAYOUT  # version of this format

    def write(self, folder: Path) -> None:
        """Write `manifest.json` with its checksum, and wait until it is on the disk."""
        text = json.dumps(asdict(self) | {"checksum": self.checksum}, indent=1, sort_keys=True)
        with (folder / MANIFEST).open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    @property
    def checksum(self) -> str:
        """Checksum of all fields."""
        return _checksum_of(asdict(self))

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Return the manifest of a checkpoint. Raise Damaged if it is missing, unreadable or changed."""
        try:
            content = json.loads((folder / MANIFEST).read_bytes())
            checksum = content.pop("checksum")
            if content["layout"] != LAYOUT:
                raise Damaged(f"its {MANIFEST} has layout {content['layout']}, which this version does not read")
            if checksum != _checksum_of(content):
                raise Damaged(f"its {MANIFEST} is damaged")
            if (number := re.fullmatch(r"checkpoint-(\d+)", folder.name)) and int(number[1]) != content["step"]:
                raise Damaged(f"its {MANIFEST} is of step {content['step']}: the folder was renamed or copied")
            files = {name: FileEntry(**entry) for name, entry in content.pop("files").items()}
            return cls(files=files, **content)
        except FileNotFoundError:
            raise Damaged(f"it has no {MANIFEST}") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            if isinstance(error, Damaged):
                raise
            raise Damaged(f"its {MANIFEST} is damaged") from error
        except OSError as error:
            raise Damaged(f"its {MANIFEST} cannot be read: {error.strerror}") from error

    def check_sizes(self, folder: Path) -> None:
        """Raise Damaged if a file is missing or has another size, or if an adapter was added."""
        if ADAPTER not in self.files and (folder / ADAPTER).exists():
            raise Damaged(f"{ADAPTER} was added, as its {MANIFEST} does not name it: remove it")
        for name, entry in self.files.items():
            try:
                size = (folder / name).stat().st_size
            except OSError:
                raise Damaged(f"{name} is missing") from None
            if size != entry.size_bytes:
                raise Damaged(f"{name} has {size} bytes, not {entry.size_bytes}")

    def check_files(self, folder: Path, names: Iterable[str]) -> None:
        """Raise Damaged if the content of one of these files has changed."""
        for name in names:
            try:
                found = measured(folder / name)
            except OSError as error:
                raise Damaged(f"{name} cannot be read: {error.strerror}") from error
            if found != self.files[name]:
                raise Damaged(f"{name} is damaged")


def measured(path: Path) -> FileEntry:
    """Read a file and return its size and checksum."""
    digest, size, block = xxhash.xxh3_128(), 0, memoryview(bytearray(_BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        while num_read := file.readinto(block):
            digest.update(block[:num_read])
            size += num_read
    return FileEntry(size, digest.hexdigest())


def settled(path: Path) -> FileEntry:
    """Return size and checksum of a file that was just written, after it is on the disk.

    Its pages are still in memory: mapping them takes a third of the time of reading.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest = xxhash.xxh3_128()
        if size:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
                digest.update(pages)
        os.fsync(file.fileno())
    return FileEntry(size, digest.hexdigest())


def files_in(folder: Path) -> list[str]:
    """Return the sorted paths, with slashes, of the files below a folder, without its manifest."""
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in found if name != MANIFEST)


def rank_of(name: str) -> int:
    """Guess from its name which process wrote a file; 0 if the name has no rank. Only divides the work of reading."""
    found = _RANK.search(name.rsplit("/", 1)[-1])
    return int(found.group(1)) if found else 0


def share_of(rank: int, ranks: list[int], names: Iterable[str]) -> list[str]:
    """Return the files that this process reads; the processes `ranks`, which see the folder, read each file once."""
    return [name for name in names if (owner if (owner := rank_of(name)) in ranks else ranks[0]) == rank]


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk, if the file system supports it."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:  # on Windows
        return
    try:
        os.fsync(handle)
    except OSError as error:  # not every network file system syncs folders
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def _checksum_of(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128(json.dumps(content, sort_keys=True).encode()).hexdigest()
