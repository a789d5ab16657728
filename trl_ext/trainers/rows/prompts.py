"""Checks of the prompts of GRPO and PPO: of a dataset before the model loads, of a stream before generation.

The tokenizer is loaded for it (special tokens, chat template, length), which takes a moment, not minutes.
"""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from accelerate.utils import gather_object
from datasets import Dataset, IterableDataset, Value
from torch import nn
from transformers import AutoConfig, AutoProcessor
from transformers.utils import logging

from trl_ext.errors import ConfigError, DataError
from trl_ext.rewards.base.rows import TRL_EXTRAS
from trl_ext.trainers.rows.gold import check_gold
from trl_ext.trainers.rows.images import problem_of_row, unreadable
from trl_ext.trainers.rows.rendering import check_rendered, positions
from trl_ext.trainers.rows.screen import are_empty, batches, role_sequences, rows_where
from trl_ext.trainers.rows.sentence import columns_of_all, listed, refuse
from trl_ext.trainers.rows.text import TextCheck, warn_of_two_begins

logger = logging.get_logger(__name__)

# Arguments that TRL gives a reward function in addition to columns; environments only if there are any.
_ARGUMENTS = {"prompts", "completions", "completion_ids", *TRL_EXTRAS} - {"environments"}
# Columns that TRL does not give a reward function, and columns that remain with `remove_unused_columns`.
_KEPT_BACK = {"prompt", "completion", "completion_ids"}
_USED = ("prompt", "image", "images")
_ADVICE = "Drop or mend such rows: dataset.filter(...)."
_ENDS_WITH_ANSWER = (
    "prompt that ends with the assistant's answer: the model reads it before it answers, and rules may pay for a "
    "copy. Cut it off: in a recipe columns: {prompt: prompt.:-1}, else dataset.map(lambda row: {'prompt': "
    "row['prompt'][:-1]})."
)
_TEMPLATE_ADVICE = "Give a tokenizer with one (tokenizer.chat_template = ...), or prompts that are text."


@dataclass(eq=False)
class PromptChecks:
    """Checks the rows of a trainer that generates completions."""

    model: Any  # a model, or its name or folder
    reward_funcs: list[Any]
    args: Any
    options: Mapping[str, Any]  # of TRL's trainer: processing_class, tools, rollout_func, environment_factory
    has_late_rows: bool = False
    may_hold_images: bool = False

    def look_at(self, datasets: Any, role: str) -> None:
        """Raise DataError for rows that cannot be used for training or evaluation.

        `datasets` is a dataset, a stream, a dict of them or None. A stream's rows are checked as they arrive.
        """
        limit, most = positions(self._config), self.args.max_completion_length or 0
        if limit is not None and most > limit:
            raise ConfigError(
                f"max_completion_length={most} is more than the {limit} tokens that the model reads. Lower it."
            )
        for name, dataset, columns in columns_of_all(datasets, role):
            self._check_needed(columns, name)
            self._check_columns(columns, name)
            self.may_hold_images |= may_hold_images(dataset)
            if isinstance(dataset, IterableDataset) or dataset.format["type"] == "custom":  # custom: a transform
                self.has_late_rows = True
            else:
                self._check_rows(dataset, name)

    def look_at_batch(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Raise DataError on all ranks if any of them has bad rows of a stream. Collective."""
        if not self.has_late_rows or self.options.get("rollout_func") is not None:
            return
        for rank, problem in enumerate(gather_object([self._problem_of_batch(rows)])):
            if problem:
                raise DataError(f"On rank {rank} a row came with {problem}. Filter such rows out of the stream.")

    @property
    def _has_environment(self) -> bool:
        return self.options.get("environment_factory") is not None

    @cached_property
    def _config(self) -> Any:
        return config_of(self.model, self.args)

    @cached_property
    def _processor(self) -> Any:
        given = self.options.get("processing_class")
        name = self.model if isinstance(self.model, str) else getattr(self.model.config, "_name_or_path", "")
        if given is not None or not name:
            return given
        try:
            return AutoProcessor.from_pretrained(name, **_loading(self.args))
        except (OSError, ValueError):  # TRL raises it when it loads it
            return None

    @property
    def _image_token(self) -> str:
        return str(getattr(self._processor, "image_token", None) or "")

    def _text_check(self, columns: Sequence[str]) -> TextCheck:
        is_filled = self._has_environment or "image" in columns or "images" in columns
        return TextCheck.of(self._processor, may_be_blank=is_filled)

    def _check_needed(self, columns: list[str], role: str) -> None:
        """Raise if there is neither a prompt nor an environment, or if a rule's column is missing."""
        if not self._has_environment and "prompt" not in columns:
            raise DataError(
                f"{role} has no column 'prompt', only {listed(columns)}. Name the column that holds the prompts: in a "
                f"recipe columns: {{prompt: {columns[0]}}}, else dataset.rename_column('{columns[0]}', 'prompt')."
            )
        # A rollout_func may add columns; rules without theirs then end the first step.
        for rules in self.reward_funcs if self.options.get("rollout_func") is None else ():
            if missing := sorted(set(getattr(rules, "columns", ())) - set(columns)):
                raise DataError(
                    f"{role} has no column {listed(missing)}, which {getattr(rules, '__name__', rules)} scores "
                    f"against; it has {listed(columns)}. Rename a column of the dataset or name another one in the "
                    "rule."
                )

    def _check_columns(self, columns: list[str], role: str) -> None:
        """Raise for a column that TRL shadows, keeps back or drops, and for an argument that TRL does not give."""
        dropped = set(columns) - set(_USED) if self.args.remove_unused_columns else set()
        arguments = _ARGUMENTS | ({"environments"} if self._has_environment else set())
        for function in self.reward_funcs:
            # Reward models (PPO's have an encoder) read text only.
            if not callable(function) or isinstance(function, nn.Module) or hasattr(function, "encoder"):
                continue
            name = getattr(function, "__name__", type(function).__name__)
            read = set(getattr(function, "columns", ()))
            shadowed = (arguments | read & TRL_EXTRAS) - _KEPT_BACK | read & _KEPT_BACK
            if lost := sorted(shadowed & set(columns) - dropped):
                raise DataError(
                    f"{role} has a column {listed(lost)}, which TRL does not give to reward functions: it is an "
                    f"argument of TRL's, or kept back. Rename it: dataset.rename_column('{lost[0]}', "
                    f"'own_{lost[0]}')."
                )
            if gone := sorted(read & dropped):
                raise ConfigError(
                    f"remove_unused_columns=True drops the column {listed(gone)} of {role}, which {name} reads. Set "
                    "it to False."
                )
            given = arguments | (set(columns) - _KEPT_BACK - dropped)
            if self.options.get("rollout_func") is None and (missing := _missing_arguments(function, given)):
                raise DataError(
                    f"The reward function {name} needs the argument {listed(missing)}, which is a column for TRL, and "
                    f"{role} has {listed(columns)}. Rename a column so (columns: in a recipe), or give the argument a "
                    "default."
                )

    def _check_rows(self, dataset: Dataset, role: str) -> None:
        """Raise for golds that rules cannot read, damaged images and bad prompts."""
        check_gold(dataset, self.reward_funcs, role)
        if may_hold_images(dataset) and (damaged := unreadable(dataset, self._image_token)):
            refuse(damaged, role, _ADVICE)
        if "prompt" in dataset.column_names and self.options.get("rollout_func") is None:
            self._check_prompts(dataset, role)
        elif "prompt" in dataset.column_names and not self._text_check(dataset.column_names).may_be_blank:
            # Other problems of a prompt are up to the rollout_func.
            if rows := [row for row, _ in rows_where(dataset, ["prompt"], lambda c: are_empty(c["prompt"]))]:
                refuse({"an empty prompt": rows}, role, _ADVICE)

    def _check_prompts(self, dataset: Dataset, role: str) -> None:
        check = self._text_check(dataset.column_names)
        found: dict[str, list[int]] = {}
        first = None
        for row, cells in rows_where(dataset, ["prompt"]):
            problem = check.problem(prompt := cells["prompt"], "prompt")
            if not problem:
                first = prompt if first is None else first
                problem = _other_kind(prompt, first)
            if problem:
                found.setdefault(problem, []).append(row)
        if found:
            refuse(found, role, _ADVICE)
        first = next(iter(dataset.select_columns(["prompt"]).with_format(None)))["prompt"]
        if problem := self._template_problem(first):
            refuse({problem: range(len(dataset))}, role, _TEMPLATE_ADVICE)
        warn_of_two_begins(first, role, self._processor)
        for start, cells in batches(dataset, "prompt"):
            ends = [row for roles, row in role_sequences(cells).items() if roles.endswith("assistant")]
            if ends:
                logger.warning(f"{role}: row {start + min(ends)} has a {_ENDS_WITH_ANSWER}")
                break
        if problem := _problem_of_images(dataset.column_names, first):
            raise DataError(f"{role} has {problem}. Rename or drop the column, or make messages of the prompts.")
        has_more = check.may_be_blank or self.options.get("tools") or hasattr(self._processor, "tokenizer")
        if self._processor is not None and not has_more:
            check_rendered(dataset, role, self._processor, self._config, self.args)

    def _template_problem(self, prompt: Any) -> str:
        is_missing = self._processor is not None and getattr(self._processor, "chat_template", None) is None
        return "messages, and the tokenizer has no chat template" if is_missing and isinstance(prompt, list) else ""

    def _problem_of_batch(self, rows: Sequence[Mapping[str, Any]]) -> str:
        """Return the problem of the first bad row and the start of its prompt; empty if there is none."""
        check = self._text_check(list(rows[0]) if rows else [])
        prompts = [row["prompt"] for row in rows if "prompt" in row or not self._has_environment]
        for prompt in prompts:
            problem = check.problem(prompt, "prompt") or _other_kind(prompt, prompts[0])
            if problem := problem or self._template_problem(prompt) or _problem_of_images(rows[0], prompt):
                return f"{problem}; its prompt begins {str(prompt)[:60]!r}"
        images = (problem_of_row(row, self._image_token) for row in rows) if self.may_hold_images else ()
        return next(filter(None, images), "")


def _missing_arguments(function: Any, given: set[str]) -> list[str]:
    """Return the arguments without a default that are not among those given."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # some functions in C have no signature
        return []
    by_name = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    return [one.name for one in by_name if one.default is one.empty and one.name not in given]


def config_of(model: Any, args: Any) -> Any:
    """Return the config of a model, or of its name or folder; None if it cannot be read."""
    if not isinstance(model, str):
        return model.config
    try:
        return AutoConfig.from_pretrained(model, **_loading(args))
    except (OSError, ValueError):  # TRL raises it when it loads the model
        return None


def _loading(args: Any) -> dict[str, Any]:
    given = getattr(args, "model_init_kwargs", None) or {}
    options = {name: given[name] for name in ("revision", "trust_remote_code") if name in given}
    return {"trust_remote_code": getattr(args, "trust_remote_code", False), **options}


def _problem_of_images(columns: Iterable[str], prompt: Any) -> str:
    taken = next((name for name in ("image", "images") if name in columns), "")
    is_bad = taken and isinstance(prompt, str)
    return f"the column '{taken}', which TRL takes for images, next to text as prompt" if is_bad else ""


def _other_kind(prompt: Any, first: Any) -> str:
    if isinstance(prompt, list) == isinstance(first, list):
        return ""
    kinds = ("messages", "text") if isinstance(prompt, list) else ("text", "messages")
    return f"{kinds[0]} as prompt, where the first row has {kinds[1]}"


def may_hold_images(dataset: Dataset | IterableDataset) -> bool:
    """Return False if no row can hold an image; True if types are unknown: some streams, datasets with a transform."""
    is_transformed = isinstance(dataset, Dataset) and dataset.format["type"] == "custom"
    if is_transformed or dataset.features is None:
        return True
    has_column = "image" in dataset.features or "images" in dataset.features
    return has_column or ("prompt" in dataset.features and _may_hold_image(dataset.features["prompt"]))


def _may_hold_image(feature: Any) -> bool:
    """Return False for text, and for messages without a field `image`."""
    if isinstance(feature, dict):
        return "image" in feature or any(map(_may_hold_image, feature.values()))
    inner = getattr(feature, "feature", None)  # of a list
    return _may_hold_image(inner) if inner is not None else not isinstance(feature, Value)
