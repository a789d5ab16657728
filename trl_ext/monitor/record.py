"""The record of a run: what it was given and on what it ran, in its folder from before the first step.

    recipe.yaml     every setting, as `trl-ext grpo --config RUN/recipe.yaml --output_dir OTHER` reads it
    rules.yaml      the rules, as `RuleSet.from_yaml` reads them; absent where nothing was scored by rules
    versions.json   trainer, time, processes, cards and the versions of packages
    plan.json       the plan, where `memory` made one
    log.jsonl       what was logged, an entry a line, as it came; an error that ended the run is the last

Each other file is replaced as a whole, and versions.json comes last: where it is, the others are.
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
FILES = (RECIPE_FILE, RULES_FILE, VERSIONS_FILE, PLAN_FILE, LOG_FILE)
# The first line of YAML files that a run writes: it replaces them, and nobody else's.
MARK = "# Written by trl_ext at the start of a run."


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The record of a run.

    Args:
        recipe: Keys and values of recipe.yaml. A trainer constructed in Python leaves out what it got as objects.
        versions: versions.json: `trainer` ("grpo", "ppo", "reward"), `run` (an id, which its checkpoints have, too),
            `started` (ISO 8601, UTC), `num_processes`, `launch` (the line), `cards` (names), `cuda`, `python`,
            `commit` (None where not known), and `packages`, a mapping from name to version with trl_ext first.
        rules: The mapping of rules.yaml, None without.
        plan: The mapping of plan.json, None without.
    """

    recipe: Mapping[str, Any]
    versions: Mapping[str, Any]
    rules: Mapping[str, Any] | None = None
    plan: Mapping[str, Any] | None = field(default=None, repr=False)

    @property
    def trainer(self) -> str:
        """Return "grpo", "ppo" or "reward"."""
        return str(self.versions["trainer"])

    @property
    def model(self) -> str | None:
        """Return the name or folder of the model that training began with, None where it is not known."""
        return self.recipe.get("model_name_or_path")

    @property
    def dataset(self) -> str | None:
        """Return the name, folder or file of the data, None where it is not known."""
        mixed = ", ".join(str(one.get("path")) for one in self.recipe.get("datasets") or ())
        return self.recipe.get("dataset_name") or mixed or None

    @property
    def cards(self) -> str:
        """Return `8 x NVIDIA A40`, empty without a card."""
        cards = [str(card) for card in self.versions.get("cards") or ()]
        return ", ".join(f"{cards.count(name)} x {name}" for name in dict.fromkeys(cards))

    @property
    def measures(self) -> list[str]:
        """Return the keys of evaluations that training does not reward, without their prefix: rules of weight 0, and
        `metric_for_best_model` where more is better."""
        rules = [rule for rule in (self.rules or {}).get("rules", ()) if rule.get("weight") == 0]
        keys = [f"rewards/{rule.get('name', rule.get('rule'))}/mean" for rule in rules]
        best = self.recipe.get("metric_for_best_model")
        is_score = best not in (None, "loss") and self.recipe.get("greater_is_better") is not False
        return [*keys, str(best).removeprefix("eval_")] if is_score else keys

    def settings(self) -> dict[str, str]:
        """Return what a person reads of the run, as text by name: the recipe without its rules, then the versions."""
        facts = {name: _in_words(value) for name, value in self.recipe.items() if name != "rules"}
        packages = ", ".join(f"{name} {number}" for name, number in self.versions.get("packages", {}).items())
        rules = []  # such as "answer (gold answer, kind number)"
        for rule in (self.rules or {}).get("rules", ()):
            name, keys = str(rule.get("name", rule.get("rule"))), rule.keys() - {"rule", "name"}
            rest = ", ".join(f"{key} {_in_words(rule[key])}" for key in rule if key in keys)
            rules.append(f"{name} ({rest})" if rest else name)
        own = {
            "rules": ", ".join(rules),
            "started": self.versions.get("started"),
            "processes": self.versions.get("num_processes"),
            "cards": self.cards,
            "versions": packages,
        }
        return facts | {name: str(value) for name, value in own.items() if value}


def read_record(output_dir: str | Path) -> RunRecord | None:
    """Read the record of a run, or of the run that a checkpoint is of; None where the folder holds none.

    Raises:
        DataError: A file of the record is damaged, or the run ended while it was writing them.
    """
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
    """Writes the entries of a run's log as they come. The log of an earlier run is overwritten."""

    path: Path
    _num_entries: int = 0
    _num_bytes: int = 0

    def write(self, log_history: Sequence[Mapping[str, Any]]) -> None:
        """Write the entries of a history that are not in the file yet; a failed write (OSError) is made up for."""
        new = log_history[self._num_entries :]
        text = "".join(json.dumps(entry, default=str) + "\n" for entry in new).encode()
        with self.path.open("ab") as file:
            file.truncate(self._num_bytes)  # which a write that failed may have passed
            file.write(text)
        self._num_entries, self._num_bytes = len(log_history), self._num_bytes + len(text)


def read_log(output_dir: str | Path) -> list[dict[str, Any]]:
    """Read log.jsonl; empty where there is none. A last line that a kill has cut is left out."""
    path = Path(output_dir, LOG_FILE)
    lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
    try:
        return [dict(json.loads(line)) for line in lines]
    except (ValueError, TypeError) as error:
        raise DataError(f"{path} is damaged: {error}. Remove it to use the newest checkpoint's.") from error


def recorded_run(output_dir: str | Path) -> str | None:
    """Return the id of the run whose record lies in a folder; None where none is known."""
    try:
        record = read_record(output_dir)
    except DataError:  # it ended while it was beginning
        return None
    return None if record is None else record.versions.get("run")


def _mapping(path: Path) -> dict[str, Any] | None:
    """Return the mapping of a YAML or JSON file, None where there is no such file."""
    if not path.is_file():
        return None
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise DataError(
            f"{path} is damaged: {' '.join(str(error).split())}. Remove it, or start the run again."
        ) from error
    if content is None and path.name == RULES_FILE:  # notes alone: rules that no file can hold
        return None
    if not isinstance(content, dict):
        raise DataError(f"{path} is damaged: it holds no keys. Remove it, or start the run again.")
    return content


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
    """Write the record of a run, in the place of an earlier run's.

    Args:
        output_dir: The run's folder, made if missing.
        recipe, versions, rules, plan: See `RunRecord`; rules and plan None for no file.
        recipe_notes, rules_notes: Lines of comment at the head of the two files; rules.yaml is also written where
            only its notes say something.
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
            path.rename(path.with_suffix(".given.yaml"))  # a user has written it
        if text is None:
            path.unlink(missing_ok=True)
        else:
            replace_text(path, text)


def replace_text(path: Path, text: str) -> None:
    """Write a file that is there as a whole or not at all."""
    beside = path.with_name(f".{path.name}.unfinished")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)


def _yaml(notes: str, content: Mapping[str, Any] | None) -> str:
    head = "".join(f"# {line}".rstrip() + "\n" for line in notes.splitlines())
    body = "" if content is None else yaml.safe_dump(dict(content), sort_keys=False, allow_unicode=True, width=119)
    return f"{MARK}\n{head}{body}"


def _in_words(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return json.dumps(value, ensure_ascii=False)
    return {True: "yes", False: "no", None: "-"}[value] if value is None or isinstance(value, bool) else str(value)
