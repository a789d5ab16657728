"""Input and output of `trl-ext score`: files and folders, a row of a table, the dataset's row for it."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from functools import partial
from glob import escape
from itertools import takewhile
from pathlib import Path
from typing import Any

from trl_ext.errors import ConfigError, DataError
from trl_ext.monitor.pages.samples import json_mapping
from trl_ext.rewards import Explanation, RuleSet, completion_text
from trl_ext.rewards.auditing.audit import shortened, table
from trl_ext.rewards.text.task import question_text
from trl_ext.rewards.totals.composition import gate_of
from trl_ext.scripts.data.dataset import READERS, bad_line

_SHOWN_CHARS = 600
_ROUNDING = 1e-4  # TRL logs totals as float32
_OWN = ("prompt", "completion", "completion_ids")  # arguments of `RuleSet.explain` that are no columns


def read_data(path: str, split: str = "train", limit: int | None = None) -> Any:
    """Return the rows of a local file or folder, read as in training; never asks the hub."""
    source = Path(path)
    if not source.exists():
        raise DataError(f"There is no file or folder {path}. Give a local file: {', '.join(READERS)}.")
    if source.is_file() and source.suffix not in READERS:
        raise DataError(f"{path} is none of {', '.join(READERS)}. Convert it to one of them.")
    if limit is not None and limit < 1:
        raise ConfigError(f"--limit is {limit}. Give at least 1.")
    dataset = _load(source, split)
    return dataset if limit is None else dataset.select(range(min(limit, len(dataset))))


def _load(source: Path, split: str) -> Any:
    os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    import datasets
    from datasets.exceptions import DatasetsError

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it raises the same as an exception
    datasets.disable_progress_bars()  # of the conversion; the commands show other bars
    try:
        if source.is_file():
            return datasets.load_dataset(READERS[source.suffix], data_files=escape(str(source)), split="train")
        saved = any((source / name).is_file() for name in ("state.json", "dataset_dict.json"))
        found = datasets.load_from_disk(str(source)) if saved else datasets.load_dataset(str(source))
    except (DatasetsError, OSError, ValueError, StopIteration) as error:
        why = bad_line(source) if source.suffix == ".jsonl" else ""
        raise DataError(f"{source} cannot be read: {why or error or 'it has no rows'}") from error
    finally:
        datasets.enable_progress_bars()
    if isinstance(found, datasets.Dataset):
        return found
    if split not in found:
        raise DataError(f"{source} has no split '{split}', only {', '.join(found)}. Choose with --split.")
    return found[split]


def group_of(path: str, number: int) -> tuple[list[dict[str, Any]], int]:
    """Return the neighbours of a row with the same prompt and step, the row among them, and its place in this list."""
    found = read_data(path)
    if not 0 <= number < len(found):
        raise DataError(f"{path} has {len(found)} rows, counted from 0, so there is no row {number}. Check --row.")
    row = found[number]
    if "completion" not in row:
        there = ", ".join(found.column_names)
        raise DataError(f"{path} has no column 'completion'; its columns are: {there}. Rename a column.")
    if row.get("prompt") is None:
        return [row], 0
    before = list(takewhile(partial(_is_beside, row), (found[n] for n in reversed(range(number)))))
    after = takewhile(partial(_is_beside, row), (found[n] for n in range(number + 1, len(found))))
    return [*reversed(before), row, *after], len(before)


def _is_beside(row: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return row.get("step") == other.get("step") and prompt_key(row["prompt"]) == prompt_key(other["prompt"])


def columns_of(rules: RuleSet, row: Mapping[str, Any], data: str | None, split: str) -> dict[str, Any]:
    """Return the columns that the rules may read: the row's, and those in the dataset `data` if it is given.

    Args:
        rules: The rule set.
        row: A row of a table of completions, or of a file of completions.
        data: Dataset with the columns that the row lacks; None reads all from the row.
        split: Split of `data`.
    """
    columns = {name: cell for name, cell in row.items() if name not in _OWN}
    if "advantage" in columns:  # TRL's table: a column named like a rule holds its reward
        for name in (rules.name, *(rule.name for rule in rules.rules)):
            columns.pop(name, None)
    if data is not None:
        return {**columns, **_matching(read_data(data, split), row, rules.columns, data)}
    for name, cell in json_mapping(row.get("rule_columns")).items():  # what the rules of the run have read
        if not str(cell).endswith("..."):  # else it is cut
            columns[name] = cell
    missing = [name for name in rules.columns if name not in columns]
    if missing:
        raise DataError(
            f"The rules read the column '{missing[0]}', which this table lacks, or holds shortened: a run's table has "
            "the starts of long cells. Name the dataset: --data FILE."
        )
    return columns


def _matching(data: Any, row: Mapping[str, Any], needed: Sequence[str], path: str) -> dict[str, Any]:
    """Return the dataset's row with the same prompt; raise DataError if there is none, or several that differ.

    Args:
        data: The dataset.
        row: A row of a table of completions.
        needed: Columns that the rules read.
        path: Name of the dataset, for messages.
    """
    if "prompt" not in data.column_names or "prompt" not in row:
        raise DataError(f"{path} or the table has no column 'prompt' to match rows by. Rename a column.")
    wanted = prompt_key(row["prompt"])
    found = [number for number, prompt in enumerate(data["prompt"]) if prompt_key(prompt) == wanted]
    if not found:
        raise DataError(f"No row of {path} has this row's prompt: {wanted[:200]}. Give the data of that run.")
    rows = [data[number] for number in found]
    missing = [name for name in needed if name not in rows[0]]
    if missing:
        there = ", ".join(data.column_names)
        raise DataError(f"The rules read the column '{missing[0]}', which {path} lacks; its columns are: {there}.")
    if any(one[name] != rows[0][name] for one in rows for name in needed):
        raise DataError(
            f"Rows {', '.join(map(str, found[:5]))} of {path} have this prompt and differ. Remove all but one of them."
        )
    return {name: rows[0][name] for name in needed}


def prompt_key(prompt: Any) -> str:
    """Return a text that is equal for equal prompts, although a table fills missing keys of messages with None."""
    if isinstance(prompt, list):
        return json.dumps([without_nulls(message) for message in prompt])
    return str(prompt)


def without_nulls(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without the keys that a table has filled with None."""
    return {key: part for key, part in message.items() if part is not None}


def tokenizer_of_run(completions: str) -> str | None:
    """Return the tokenizer of the run that wrote the table RUN/completions/...: the saved tokenizer, or the model's.

    None if the run is not known. Raises DataError if its record is damaged.
    """
    from trl_ext.monitor.record import read_record

    folder = Path(completions).absolute().parent
    if folder.name != "completions":
        return None
    run = folder.parent
    for saved in (run, *sorted(run.glob("checkpoint-*"))):
        if (saved / "tokenizer_config.json").is_file():
            return str(saved)
    record = read_record(run)
    return None if record is None else record.model


def ids_of(rows: Sequence[Mapping[str, Any]], tokenizer: str | None) -> list[list[int] | None]:
    """Return the token ids of each completion: from the table, else from the tokenizer, else None."""
    given = [row.get("completion_ids") for row in rows]
    if tokenizer is None or None not in given:
        return [None if ids is None else list(ids) for ids in given]
    from transformers import AutoTokenizer

    try:
        found = AutoTokenizer.from_pretrained(tokenizer)
    except (OSError, ValueError) as error:
        first = str(error).splitlines()[0].rstrip(".")
        raise ConfigError(
            f"The tokenizer '{tokenizer}' cannot be loaded: {first}. Give another: --tokenizer."
        ) from error
    texts = [completion_text(row["completion"]) for row in rows]
    counted = found(texts, add_special_tokens=False)["input_ids"]
    return [list(own if ids is None else ids) for ids, own in zip(given, counted, strict=True)]


def heading(row: Mapping[str, Any], text: str) -> str:
    """Return the row's step, prompt and completion, shortened."""
    step = [f"step {row['step']}"] if row.get("step") is not None else []
    prompt = question_text(row.get("prompt"))
    if len(text) > _SHOWN_CHARS:  # answers are at either end
        half = _SHOWN_CHARS // 2
        text = f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"
    return "\n".join([*step, f"prompt: {shortened(prompt, _SHOWN_CHARS)}", f"completion: {text}"])


def dependencies(rules: RuleSet, columns: Mapping[str, Any]) -> str:
    """Return a table with each rule's columns, and when it counts."""
    lines = []
    for rule in rules.rules:
        reads = [f"{name}={shortened(repr(columns.get(name)), 60)}" for name in rule.all_columns]
        reads += ["token ids"] if getattr(rule, "unit", None) == "tokens" else []
        gate, status = gate_of(rule)
        counts = [f"where '{gate}' is {status or 'at least 1'}"] if gate else []
        counts += [f"where {name} is {' or '.join(map(repr, some))}" for name, some in (rule.when or {}).items()]
        lines.append((rule.name, ", ".join(reads) or "no column", ", ".join(counts) or "always"))
    return table([("rule", "reads", "counts"), *lines])


def logged(rules: RuleSet, row: Mapping[str, Any], found: Explanation) -> str:
    """Return total and advantage of this row in the run's log, and whether the total is the same; "" without a log."""
    if row.get("advantage") is None:
        return ""
    line = f"advantage in the log: {row['advantage']:.3f}"
    if rules.name not in row:
        return line
    total = None if row[rules.name] is None or math.isnan(row[rules.name]) else row[rules.name]
    same = total is None if found.total is None else total is not None and abs(total - found.total) < _ROUNDING
    note = "" if same else ". The log differs: the rules or the data are not the same"
    return f"total in the log: {'none' if total is None else f'{total:.3f}'}, {line}{note}"
