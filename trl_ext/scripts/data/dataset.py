"""The dataset of a run: on the hub, a local folder, or one local file.

Checks that need no row come first, so that a wrong path costs a second and not a model load.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any, NamedTuple

from transformers.utils import logging

from trl_ext.errors import ConfigError, DataError
from trl_ext.memory.models.find import leave_a_silent_hub, nearest_models
from trl_ext.trainers.rows.screen import check_utf8

logger = logging.get_logger(__name__)

# Name of the reader in `datasets`, by suffix.
READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
SMALL_BYTES = 32 << 20

_ADVICE = (
    "Name the splits with --dataset_train_split and --dataset_test_split; without held-out rows set eval_strategy to "
    '"no" and eval_on_start to false.'
)


class Splits(NamedTuple):
    """The rows of a run: for training, and held out; None if the run does not evaluate."""

    train: Any
    held_out: Any


@dataclass(frozen=True, slots=True)
class DatasetSource:
    """The dataset that a run reads.

    Args:
        name: Hub name, folder or file; None for a mixture.
        test_split: None if no held-out rows are read.
        config: Configuration name on the hub.
        streaming: Read rows during training.
        mixture: TRL's DatasetMixtureConfig if it lists datasets, else None.
    """

    name: str | None
    train_split: str = "train"
    test_split: str | None = None
    config: str | None = None
    streaming: bool = False
    mixture: Any = None

    def __post_init__(self) -> None:
        if not self.name and self.mixture is None:
            raise ConfigError("There is no dataset. Give --dataset_name, or list `datasets` in the recipe.")
        if self.name and self.mixture is not None:
            raise ConfigError(f"Both dataset_name ('{self.name}') and `datasets` are given. Give one of them.")
        if self.is_local:
            self._check_local(Path(str(self.name)))
        # Only a warning for files, so that a recipe for a hub dataset reads a local copy with --dataset_name alone.
        if self.config and self._files():
            logger.warning_once(f"dataset_config '{self.config}' has no effect on {self.name}: it is read as it is.")
        if self.config and self.mixture is not None:
            raise ConfigError(
                f"dataset_config is '{self.config}', which has no effect on a mixture. Give `name` to its `datasets`."
            )

    @property
    def is_local(self) -> bool:
        """True for a path; False for a hub name and for a mixture."""
        path = Path(self.name or "")
        looks_so = path.suffix in READERS or str(self.name).startswith(("/", "./", "../"))
        return bool(self.name) and (path.exists() or looks_so)

    @property
    def is_small(self) -> bool:
        """True for local files of at most SMALL_BYTES."""
        if not self.is_local:
            return False
        path, num_bytes = Path(str(self.name)), 0
        for file in [path] if path.is_file() else path.rglob("*"):
            num_bytes += file.stat().st_size if file.is_file() else 0
            if num_bytes > SMALL_BYTES:
                return False
        return True

    @property
    def splits(self) -> list[str]:
        """Names of the splits that the run needs."""
        return [self.train_split, *([self.test_split] if self.test_split else [])]

    def load(self) -> Splits:
        """Return the rows; raise DataError if they cannot be read."""
        dataset = self._read()
        for split in self.splits:
            if split not in dataset:
                has = ", ".join(dataset)
                raise DataError(f"{self.name or 'The mixture'} has no split '{split}', only {has}. {_ADVICE}")
            if self.is_local and not self.streaming:
                check_utf8(dataset[split], f"{self.name}, split '{split}'", dataset[split].column_names)
        return Splits(dataset[self.train_split], dataset[self.test_split] if self.test_split else None)

    def _read(self) -> Any:
        from datasets import load_dataset
        from datasets.exceptions import DatasetsError
        from trl import get_dataset

        if not self.is_local:
            leave_if_unreachable()
        try:
            if self.mixture is not None:
                return get_dataset(self.mixture)
            if files := self._files():
                reader = READERS[files[self.train_split].suffix]
                exactly = {split: escape(str(file)) for split, file in files.items()}  # a name is no pattern
                return load_dataset(reader, data_files=exactly, streaming=self.streaming)
            return load_dataset(self.name, name=self.config or None, streaming=self.streaming)
        except ConnectionError as error:
            quoted = re.search("'([^']+)'", str(error))  # the dataset's name in a mixture
            raise DataError(unreachable(self.name or (quoted[1] if quoted else "of the mixture"))) from error
        except (DatasetsError, OSError, ValueError, StopIteration) as error:
            what = f"The dataset '{self.name}'" if self.name else "The mixture of `datasets`"
            reason = self._reason(error)
            advice = " Choose a configuration by dataset_config." if "onfig" in reason else ""
            raise DataError(f"{what} cannot be loaded: {reason}.{advice}") from error

    def _reason(self, error: Exception) -> str:
        """Return why loading failed, in one line: a JSON Lines file's first bad line, or the message of `datasets`."""
        for file in self._files().values():
            if file.suffix == ".jsonl" and (found := bad_line(file)):
                return f"{file.name}, {found}"
        if isinstance(error, StopIteration) or "corresponds to no data" in str(error):
            return "it has no rows"
        return one_line(error)

    def _files(self) -> dict[str, Path]:
        """Return one file for each split, of a local file or of a folder with `<split>.jsonl` or similar; else {}."""
        path = Path(self.name or "")
        if path.is_file():
            return {self.train_split: path}
        for suffix in READERS:
            files = {split: path / f"{split}{suffix}" for split in self.splits}
            if files[self.train_split].is_file():
                return files
        return {}

    def _check_local(self, path: Path) -> None:
        if not path.exists():
            raise DataError(f"There is no file or folder {path}. Check --dataset_name.")
        if path.is_file() and path.suffix not in READERS:
            raise DataError(f"{path} is none of {', '.join(READERS)}. Convert it to one of them.")
        if path.is_file() and self.train_split != "train":
            raise DataError(
                f"{path} is one file and has no split '{self.train_split}'. Leave dataset_train_split out."
            )
        if path.is_file() and self.test_split:
            raise DataError(f"{path} is one file and has no split '{self.test_split}'. Give a folder. {_ADVICE}")
        for split, file in self._files().items():
            if file.is_file() and not file.stat().st_size:
                raise DataError(f"{file} is empty. Check what wrote it.")
            if not file.is_file():
                there = ", ".join(sorted(other.name for other in path.glob(f"*{file.suffix}")))
                raise DataError(f"There is no {file.name} in {path} for the split '{split}', only {there}. {_ADVICE}")


@contextmanager
def unreadable_rows() -> Iterator[None]:
    """Raise a DataError in the block for a row of a stream that cannot be read."""
    from datasets.exceptions import DatasetsError
    from pyarrow import ArrowInvalid

    try:
        yield
    except (DatasetsError, ArrowInvalid, UnicodeDecodeError) as error:
        raise DataError(f"A row of the stream cannot be read: {one_line(error)}. Check the data's files.") from error


def one_line(error: Exception) -> str:
    """Return the message of an error of `datasets`, or of its cause, in one line."""
    return " ".join(str(error.__cause__ or error).split()).rstrip(".")


def bad_line(file: Path) -> str:
    """Describe the first line of a JSON Lines file that cannot be read; "" if all can be read."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                row = json.loads(text) if text.strip() else {}
            except ValueError as error:
                return f"line {number}: {error}"
            if not isinstance(row, dict):
                return f"line {number}: a {type(row).__name__}, where each line must be an object such as {{...}}"
    return ""


# Datasets and models of the hub: whether it can be reached, and messages that a user can act on ---------------------


def leave_if_unreachable() -> None:
    """Read only from the cache, as with HF_HUB_OFFLINE=1, if the hub does not answer; see `leave_a_silent_hub`."""
    import datasets.config

    datasets.config.HF_HUB_OFFLINE |= bool(leave_a_silent_hub())


def unreachable(
    name: str, what: str = "dataset", kind: str = " --repo-type dataset", flag: str = "--dataset_name "
) -> str:
    """Return a sentence that a dataset or model is neither here nor reachable, with two remedies.

    Args:
        name, what: Its name on the hub, and "dataset" or "model".
        kind, flag: Flags by which `hf download` gets it, and by which a run reads its folder.
    """
    from huggingface_hub import constants

    return (
        f"The {what} '{name}' is not on this machine, and the hub ({constants.ENDPOINT}) cannot be reached. "
        f"Copy it (elsewhere: `hf download {name}{kind} --local-dir FOLDER`; here: {flag}FOLDER), or name a "
        "mirror, HF_ENDPOINT=URL."
    )


def unloadable(name: str, error: Exception) -> str:
    """Return a sentence why a model cannot be loaded; with the nearest known name if there is no such folder."""
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    if Path(name).exists():
        return f"{name} cannot be loaded: {reason}."
    near = nearest_models(name)
    hint = f" Did you mean {near[0]}?" if near else ""
    if "connect" in reason:
        reason = unreachable(name, "model", kind="", flag="").rstrip(".")
    return f"{name} cannot be loaded, and there is no folder of this name: {reason}.{hint}"
