"""The record of a run in its folder, written before the first step: settings, rules, machine and versions.

    recipe.yaml     every setting, as `trl-ext grpo --config RUN/recipe.yaml --output_dir OTHER` reads it
    rules.yaml      the rules, as `RuleSet.from_yaml` reads them; absent without rules
    versions.json   trainer, time, processes, cards and the versions of packages
    plan.json       the plan, if `memory` made one
    log.jsonl       log entries, one a line, written during the run; the last may be the error that ended it

Except for log.jsonl, each file is replaced as a whole; versions.json is written last and marks a complete record.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from trl_ext.errors import DataError

RECIPE_FILE = "recipe.yaml"
RULES_FILE = "rules.yaml"
VERSIONS_FILE = "versions.json"
PLAN_FILE = "plan.json"
LOG_FILE = "log.jsonl"
STATE_FILE = "trainer_state.json"  # written by transformers
_MOST_CHARS = 1 << 22  # of one of these files but the log, and of its values
# The first line of YAML files that a run writes: it replaces only files with this line.
MARK = "# Written by trl_ext at the start of a run."


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The record of a run.

    Args:
        recipe: Keys and values of recipe.yaml. A trainer constructed in Python leaves out arguments that are objects.
        versions: versions.json: `trainer` ("grpo", "ppo", "reward"), `run` (an id, also in its checkpoints),
            `started` (ISO 8601, UTC), `num_processes`, `launch` (the command), `cards` (names), `cuda`, `python`,
            `commit` (None if not known), and `packages`, a mapping from name to version with trl_ext first.
        rules: The mapping of rules.yaml, or None.
        plan: The mapping of plan.json, or None.
    """

    recipe: Mapping[str, Any]
    versions: Mapping[str, Any]
    rules: Mapping[str, Any] | None = None
    plan: Mapping[str, Any] | None = field(default=None, repr=False)

    @property
    def trainer(self) -> str:
        """Name of the trainer: "grpo", "ppo" or "reward"."""
        return str(self.versions["trainer"])

    @property
    def model(self) -> str | None:
        """Name or folder of the model before training, None if not known."""
        return self.recipe.get("model_name_or_path")

    @property
    def dataset(self) -> str | None:
        """Name, folder or file of the data, None if not known."""
        mixed = ", ".join(str(one.get("path")) for one in self.recipe.get("datasets") or ())
        return self.recipe.get("dataset_name") or mixed or None

    @property
    def cards(self) -> str:
        """Cards as `8 x NVIDIA A40`, empty without a card."""
        cards = [str(card) for card in self.versions.get("cards") or ()]
        return ", ".join(f"{cards.count(name)} x {name}" for name in dict.fromkeys(cards))

    @property
    def measures(self) -> list[str]:
        """Evaluation keys outside the reward, without prefix: rules of weight 0, a best-model metric to maximize."""
        rules = [rule for rule in (self.rules or {}).get("rules", ()) if rule.get("weight") == 0]
        keys = [f"rewards/{rule.get('name', rule.get('rule'))}/mean" for rule in rules]
        best = self.recipe.get("metric_for_best_model")
        is_score = best not in (None, "loss") and self.recipe.get("greater_is_better") is not False
        return [*keys, str(best).removeprefix("eval_")] if is_score else keys

    @property
    def faster_generation(self) -> str:
        """A sentence: which setting shortens generation on the run's machine; empty if samples come ahead."""
        keys = self.recipe
        if keys.get("use_cpu") or not self.cards:
            return "On a processor shorter completions help most: a lower max_completion_length."
        if keys.get("use_vllm"):
            ahead = "vLLM servers that generate during training hide it: --vllm_servers, generation_ahead: 1."
            return "" if keys.get("generation_ahead") else ahead
        if "vllm" in self.versions.get("packages", ()):
            return "vLLM is installed: set use_vllm: true."
        has_other = keys.get("use_transformers_continuous_batching") or keys.get("cache_implementation") == "static"
        static = "" if has_other else "cache_implementation: static compiles decoding. "
        return f"{static}vLLM gains more: pip install vllm, use_vllm: true."

    def settings(self) -> dict[str, str]:
        """Return the recipe without its rules, as text by name."""
        return {str(name): _in_words(value) for name, value in self.recipe.items() if name != "rules"}


def read_record(output_dir: str | Path) -> RunRecord | None:
    """Read the record of a run or of a checkpoint's run, or return None; raise DataError if it is damaged."""
    folder = Path(output_dir)
    if folder.name.startswith("checkpoint-") and not (folder / RECIPE_FILE).exists():
        folder = folder.parent
    found = {name: folder / name for name in (RECIPE_FILE, VERSIONS_FILE, RULES_FILE, PLAN_FILE)}
    if not found[RECIPE_FILE].is_file() and not found[VERSIONS_FILE].is_file():
        return None
    for name in (RECIPE_FILE, VERSIONS_FILE):
        if not found[name].is_file():
            raise DataError(
                f"The record in {folder} has no {name}: its run ended while it was beginning. Start it again."
            )
    recipe, versions, rules, plan = (_mapping(path) for path in found.values())
    if recipe is None or versions is None or "trainer" not in versions:
        raise DataError(f"{found[VERSIONS_FILE]} is damaged: it names no trainer. Start the run again.")
    return RunRecord(recipe, versions, rules, plan)


@dataclass(eq=False)
class LogFile:
    """Writer of a run's log. The log of an earlier run is overwritten."""

    path: Path
    _num_entries: int = 0
    _num_bytes: int = 0

    def write(self, log_history: Sequence[Mapping[str, Any]]) -> None:
        """Write the entries that are not in the file yet; after a failed write (OSError), the next call repeats it."""
        new = log_history[self._num_entries :]
        text = "".join(json.dumps(entry, default=str) + "\n" for entry in new).encode()
        with self.path.open("ab") as file:
            file.truncate(self._num_bytes)  # removes the remains of a failed write
            file.write(text)
        self._num_entries, self._num_bytes = len(log_history), self._num_bytes + len(text)


def read_log(output_dir: str | Path) -> list[dict[str, Any]]:
    """Read log.jsonl, empty if it is missing. An incomplete last line, of a killed run, is left out."""
    path = Path(output_dir, LOG_FILE)
    lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
    try:
        return [dict(json.loads(line)) for line in lines]
    except (ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{path} is damaged: {error}. Remove it to use the newest checkpoint's.") from error


def read_state(output_dir: str | Path) -> dict[str, Any]:
    """Read trainer_state.json of a run or its newest checkpoint, with the `log_history` of log.jsonl if that exists.

    Raises DataError if trainer_state.json is missing or damaged and there is no log.jsonl.
    """
    folder = Path(output_dir)
    log = read_log(folder)
    checkpoints = [path for path in folder.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdigit()]
    newest_first = sorted(checkpoints, key=lambda path: int(path.name.removeprefix("checkpoint-")), reverse=True)
    for path in [folder / STATE_FILE, *(checkpoint / STATE_FILE for checkpoint in newest_first)]:
        if path.is_file():
            try:
                state = json.loads(path.read_text(encoding="utf-8"))
                if not all(isinstance(entry, dict) for entry in state["log_history"]):
                    raise ValueError("its log_history is no list of entries")
                return state | {"log_history": log or state["log_history"]}
            except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
                if log:
                    break
                raise DataError(f"{path} is damaged: {error}. Remove it to use an older checkpoint's.") from error
    if log:
        return {"log_history": log}
    raise DataError(
        f"There is no {LOG_FILE} or {STATE_FILE} in {folder} or its checkpoints. Give the --output_dir of a run."
    )


def read_log_history(output_dir: str | Path) -> list[dict[str, Any]]:
    """Return the log history of a finished or stopped run; see `read_state`."""
    return read_state(output_dir)["log_history"]


def recorded_run(output_dir: str | Path) -> str | None:
    """Return the id of the run whose record is in a folder, or None."""
    try:
        record = read_record(output_dir)
    except DataError:  # The run ended while it was writing the record.
        return None
    return None if record is None else record.versions.get("run")


def _mapping(path: Path) -> dict[str, Any] | None:
    """Return the mapping of a YAML or JSON file, None if there is no such file."""
    if not path.is_file():
        return None
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
        _check_size(text, content)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise DataError(
            f"{path} is damaged: {' '.join(str(error).split())}. Remove it, or start the run again."
        ) from error
    if content is None and path.name == RULES_FILE:  # only notes: rules that no file can hold
        return None
    if not isinstance(content, dict):
        raise DataError(f"{path} is damaged: it holds no keys. Remove it, or start the run again.")
    return content


def _check_size(text: str, content: Any) -> None:
    """Raise ValueError for a text that is too long, or whose values are: a YAML alias may expand to millions."""
    left, parts = _MOST_CHARS - len(text), [content]
    while parts and left >= 0:
        part = parts.pop()
        inside = [*part, *part.values()] if isinstance(part, dict) else part if isinstance(part, list) else ()
        left -= len(part) if isinstance(part, str) else 1 + len(inside)
        parts += inside if left >= 0 else ()
    if left < 0:
        raise ValueError(f"it holds more than {_MOST_CHARS:,} characters")


def write_record(
    output_dir: str | Path,
    recipe: Mapping[str, Any],
    versions: Mapping[str, Any],
    rules: Mapping[str, Any] | None = None,
    plan: Mapping[str, Any] | None = None,
    *,
    recipe_notes: str = "",
    rules_notes: str = "",
) -> None:
    """Write the record of a run (see `RunRecord`) into its folder, created if missing, and replace an earlier record.

    Args:
        output_dir: The run's folder.
        recipe, versions, rules, plan: As in `RunRecord`; None removes an earlier run's file.
        recipe_notes, rules_notes: Comments at the head of recipe.yaml and rules.yaml; `rules_notes` alone makes a
            rules.yaml.
    """
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        RECIPE_FILE: _yaml(recipe_notes, recipe),
        RULES_FILE: _yaml(rules_notes, rules) if rules or rules_notes else None,
        PLAN_FILE: None if plan is None else json.dumps(plan, indent=2) + "\n",
        VERSIONS_FILE: json.dumps(versions, indent=2) + "\n",
    }
    (folder / VERSIONS_FILE).unlink(missing_ok=True)
    for name, text in texts.items():
        path = folder / name
        if path.suffix == ".yaml" and path.is_file() and not path.read_bytes().startswith(MARK.encode()):
            path.rename(path.with_suffix(".given.yaml"))  # a user's file
        if text is None:
            path.unlink(missing_ok=True)
        else:
            replace_text(path, text)


def replace_text(path: Path, text: str) -> None:
    """Write a file atomically."""
    beside = path.with_name(f".{path.name}.unfinished")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)


def _yaml(notes: str, content: Mapping[str, Any] | None) -> str:
    head = "".join(f"# {line}".rstrip() + "\n" for line in notes.splitlines())
    body = "" if content is None else yaml.safe_dump(dict(content), sort_keys=False, allow_unicode=True, width=119)
    return f"{MARK}\n{head}{body}"


def _in_words(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return json.dumps(value, ensure_ascii=False, default=str)
    return {True: "yes", False: "no", None: "-"}[value] if value is None or isinstance(value, bool) else str(value)
