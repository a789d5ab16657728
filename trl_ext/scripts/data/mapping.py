"""Map rows of any dataset to the columns, prompts and answers that the trainers expect.

Mistakes in the keys are reported when the recipe is parsed, mistakes in column names before a row is read, and bad
rows before a model is loaded. Rows of a stream are checked as they are read.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from string import ascii_uppercase
from typing import Any, NoReturn

from trl_ext.errors import ConfigError, DataError, did_you_mean
from trl_ext.resources import __version__
from trl_ext.scripts.data.prompts import PromptTemplate, messages_of, written

PROMPT, ANSWER = "prompt", "answer"
PAIR = (PROMPT, "chosen", "rejected")


@dataclass(frozen=True, slots=True)
class RowMapping:
    """The columns, prompts and answers that a recipe makes of its dataset.

    "Our" names are trl_ext's (`prompt`, `answer`, `chosen`, `rejected`), "their" names the dataset's.

    Args:
        columns: Their name by our name; a dotted name reads a value in a column (`messages.:-1` part of a list), None
            drops the column.
        system_prompt: System message before each prompt.
        template: Text of the prompt around columns, by their names.
        prompt_format: "chat", "text", or None: chat if the recipe makes the prompt and there is a chat template.
        answer_pattern: Regular expression whose group is the answer.
        first_option: Number of the first option, if answers are option numbers, which become letters.
        has_pairs: True for preference pairs, whose prompts are not changed.
    """

    columns: Mapping[str, str | None] = field(default_factory=dict)
    system_prompt: str | None = None
    template: PromptTemplate | None = None
    prompt_format: str | None = None
    answer_pattern: str | None = None
    first_option: int | None = None
    has_pairs: bool = False

    def __post_init__(self) -> None:
        _check_columns(self.columns)
        if self.system_prompt is not None and not self.system_prompt.strip():
            raise ConfigError("system_prompt is blank. Write its text, or leave it out.")
        if self.system_prompt is not None and self.prompt_format == "text":
            raise ConfigError(
                "prompt_format is text, which has no place for a system_prompt. Leave one of the two out, or begin "
                "prompt_template with its text."
            )
        if gone := [name for name in self._fields if name in self._left_out]:
            raise ConfigError(
                f"columns leaves out '{gone[0]}', and prompt_template reads it. Take one of the two back."
            )
        if self.answer_pattern is not None:
            _check_pattern(self.answer_pattern)

    @classmethod
    def of(cls, args: Any) -> "RowMapping":
        """Make the mapping from a script's arguments; raise ConfigError for a key that cannot work with any data."""
        template = getattr(args, "prompt_template", None)
        return cls(
            columns={} if args.columns is None else args.columns,
            system_prompt=getattr(args, "system_prompt", None),
            template=None if template is None else PromptTemplate.parse(template),
            prompt_format=getattr(args, "prompt_format", None),
            answer_pattern=args.answer_pattern,
            first_option=getattr(args, "first_option", None),
            has_pairs=not hasattr(args, "prompt_template"),
        )

    @property
    def makes_prompts(self) -> bool:
        """True if the recipe makes the prompt, False if the column `prompt` is used as it is."""
        given = self.system_prompt or self.template or self.prompt_format or self.columns.get(PROMPT)
        return bool(given) and not self.has_pairs

    def apply(self, dataset: Any, role: str, has_chat_template: Callable[[], bool]) -> Any:
        """Return the mapped rows; rows of a stream are mapped as they are read.

        Args:
            dataset: Map-style or a stream; None stays None.
            role: Name of the dataset in messages, such as "train_dataset".
            has_chat_template: Returns True if the model's tokenizer has a chat template; called only if that matters.

        Raises:
            ConfigError: A key has nothing to work on, or needs a chat template.
            DataError: A column is missing or occurs twice, or rows cannot be mapped.
        """
        from trl_ext.trainers.rows.pairs import with_answers_as_messages

        if dataset is not None and self.has_pairs:
            return with_answers_as_messages(self._map(dataset, role, has_chat_template))
        return self._map(dataset, role, has_chat_template)

    def _map(self, dataset: Any, role: str, has_chat_template: Callable[[], bool]) -> Any:
        """Return the rows with the recipe's columns, prompts and answers."""
        from datasets import IterableDataset

        from trl_ext.trainers.rows.sentence import columns_of

        if dataset is None or not (self.columns or self.makes_prompts or self._makes_answers):
            return dataset
        names = columns_of(dataset, role)
        dataset, names = self._unnest(dataset, names)
        self._check_names(names, role, dataset.features or {})
        rewrite = partial(
            _rewritten,
            mapping=self,
            makes_chats=self.makes_prompts and self.makes_chats(has_chat_template),
            version=__version__,  # part of the cache's key: rows of another version are not reused
        )
        renamed = self._under_our_names(dataset, names, role)
        if isinstance(dataset, IterableDataset):
            return renamed.map(rewrite)
        if not self._rewrites_cells_of(renamed):
            return renamed
        try:
            return renamed.map(rewrite)
        except DataError:
            self._refuse(renamed, role)

    def _under_our_names(self, dataset: Any, names: list[str], role: str) -> Any:
        """Return the rows with our names for the columns, pairs in order, and option numbers as plain numbers."""
        from datasets import ClassLabel, Value

        renamed = self._rename(dataset, names)
        if self.has_pairs and set(PAIR[1:]) & set(self.columns):
            renamed = self._in_order(renamed, role)
        if self.first_option is not None and isinstance((renamed.features or {}).get(ANSWER), ClassLabel):
            # ClassLabel would turn the letter into a number again.
            renamed = renamed.cast_column(ANSWER, Value("int64"))
        return renamed

    def _rewrites_cells_of(self, renamed: Any) -> bool:
        """Return True if the recipe makes prompts or answers, or the pairs have another project's format."""
        first = renamed[0] if self.has_pairs else {}
        are_other_pairs = any(messages_of(first.get(name)) != first.get(name) for name in PAIR)
        return self.makes_prompts or self._makes_answers or are_other_pairs

    def given_prompt(self, row: Mapping[str, Any]) -> Any:
        """Return the prompt of a row of the data, or None if `template` writes it."""
        return within(row, self.columns.get(PROMPT) or PROMPT) if self.template is None else None

    def problem(self, row: Mapping[str, Any]) -> str:
        """Return why a row, by our names, cannot be mapped, as words that follow "row 7 has"; "" if it can."""
        return self._problem_of_columns(row) or self._problem_of_prompt(row) or self._problem_of_answer(row)

    def _problem_of_columns(self, row: Mapping[str, Any]) -> str:
        """Return which column is null, or holds a value that prompt_template cannot fill in; "" if none."""
        for name in self._read:
            if row[name] is None:
                return f"no {self._theirs(name)} (null)"
        for name in self._filled_in:
            if written(row[name]) is None:
                what = f"{_kind(row[name])} as {self._theirs(name)}"
                return f"{what}, where prompt_template fills in text, numbers and lists of up to 26 of these"
        return ""

    def _problem_of_prompt(self, row: Mapping[str, Any]) -> str:
        """Return what is wrong with the column `prompt`, if the recipe reads it; "" if nothing."""
        prompt = messages_of(row[PROMPT]) if self._reads_prompt else ""
        if not isinstance(prompt, str | list):
            return f"{_kind(prompt)} as {self._theirs(PROMPT)}, which is neither text nor a list of messages"
        if not prompt:
            return ""
        if isinstance(row[PROMPT], list) and self.prompt_format == "text":
            return f"messages as {self._theirs(PROMPT)}, where prompt_format is text"
        if self.system_prompt is not None and _has_role(prompt[0], "system"):
            return "its own system message in addition to system_prompt"
        if _has_role(prompt[-1], "assistant"):
            theirs = self.columns.get(PROMPT) or PROMPT
            return f"the assistant's answer at the end of '{theirs}', which columns: {{prompt: {theirs}.:-1}} cuts off"
        return ""

    def _problem_of_answer(self, row: Mapping[str, Any]) -> str:
        """Return why the recipe cannot make an answer of the column `answer`; "" if it can, or makes none."""
        if self.answer_pattern is not None:
            if not isinstance(row[ANSWER], str):
                return f"{_kind(row[ANSWER])} as {self._theirs(ANSWER)}, where answer_pattern reads text"
            if re.search(self.answer_pattern, row[ANSWER]) is None:
                return f"no match of answer_pattern '{self.answer_pattern}' in {self._theirs(ANSWER)}"
        if self._makes_answers and self._answer(row) is None:
            return f"'{row[ANSWER]!s:.40}' as {self._theirs(ANSWER)}, no option by first_option={self.first_option}"
        return ""

    def rewritten(self, row: Mapping[str, Any], makes_chats: bool) -> dict[str, Any]:
        """Return the new prompt and answer of a row without a problem, by our names."""
        cells: dict[str, Any] = {}
        if self.makes_prompts:
            prompt = row[PROMPT] if self.template is None else self.template.filled(row, self._ours)
            if self.template is None and (makes_chats or not isinstance(prompt, str)):
                prompt = messages_of(prompt)
            if makes_chats and isinstance(prompt, str):
                prompt = [{"role": "user", "content": prompt}]
            if self.system_prompt is not None:
                prompt = [{"role": "system", "content": self.system_prompt}, *prompt]
            cells[PROMPT] = prompt
        if self.has_pairs:
            cells = {name: messages_of(row[name]) for name in PAIR if name in row}
        return cells | ({ANSWER: self._answer(row)} if self._makes_answers else {})

    @property
    def _reads_prompt(self) -> bool:
        """True if the recipe makes the prompts of the column `prompt`, and not of a template's columns."""
        return self.makes_prompts and self.template is None

    @property
    def _makes_answers(self) -> bool:
        return self.answer_pattern is not None or self.first_option is not None

    def _answer(self, row: Mapping[str, Any]) -> str | None:
        """Return the answer after `answer_pattern` and `first_option`; None if there is none."""
        answer = row[ANSWER]
        if self.answer_pattern is not None:
            match = re.search(self.answer_pattern, answer)
            answer = match and match[1].strip()
        if self.first_option is None:
            return answer
        number = int(answer) - self.first_option if re.fullmatch(r"\d{1,9}", str(answer)) else -1
        return ascii_uppercase[number] if 0 <= number < len(ascii_uppercase) else None

    # Names ----------------------------------------------------------------------------------------------------------

    @property
    def _ours(self) -> dict[str, str]:
        """Our name by the dataset's name."""
        return {theirs: ours for ours, theirs in self.columns.items() if theirs is not None}

    @property
    def _left_out(self) -> list[str]:
        """The dropped columns, for which both names are equal."""
        return [ours for ours, theirs in self.columns.items() if theirs is None]

    @property
    def _fields(self) -> list[str]:
        """The columns that the template reads, by the dataset's names."""
        return [] if self.template is None else self.template.fields

    @property
    def _filled_in(self) -> list[str]:
        """The columns that the template reads, by our names."""
        return [self._ours.get(name, name) for name in self._fields]

    @property
    def _read(self) -> list[str]:
        """The columns that may not be null, by our names."""
        prompt = [PROMPT] if self._reads_prompt else []
        answer = [ANSWER] if self._makes_answers else []
        return list(dict.fromkeys([*self._ours.values(), *self._filled_in, *prompt, *answer]))

    def _theirs(self, ours: str) -> str:
        """Return the dataset's name of a column, in quotes."""
        return f"'{self.columns.get(ours) or ours}'"

    def _unnest(self, dataset: Any, names: list[str]) -> tuple[Any, list[str]]:
        """Add a column for each dotted name, such as `reward_model.ground_truth`.

        `{prompt: prompt.:-1}` replaces the column that it reads.
        """
        features, asked = dataset.features, [*self._ours, *self._fields]
        nested = [name for name in dict.fromkeys(asked) if name not in names and name.partition(".")[0] in names]
        kinds = {name: kind for name in nested if (kind := within(features, name)) is not None or not features}
        if not kinds:
            return dataset, names
        features = features and type(features)({**features, **kinds})
        rows = dataset.map(lambda row: {name: within(row, name) for name in kinds}, features=features)
        gone = [ours for ours, theirs in self.columns.items() if theirs in kinds and theirs.partition(".")[0] == ours]
        return rows.remove_columns(gone), [name for name in (*names, *kinds) if name not in gone]

    def _check_names(self, names: list[str], role: str, features: Mapping[str, Any]) -> None:
        """Raise DataError for problems that the dataset's column names show."""
        from trl_ext.trainers.rows.sentence import listed

        has = f"{role} has the columns {listed(names)}"
        asked = [("columns names", name) for name in (*self._ours, *self._left_out)]
        asked += [("prompt_template reads", name) for name in self._fields]
        for what, name in asked:
            if name not in names:
                inside = [f"{one}.{key}" for one, kind in features.items() if isinstance(kind, dict) for key in kind]
                hint = did_you_mean(name, [*names, *inside]) or "Name one of these."
                raise DataError(f"{what} '{name}', and {has}. {hint}")
        self._check_renamed(names, role)
        needed = {"system_prompt or prompt_format": PROMPT} if self._reads_prompt else {}
        needed |= {"answer_pattern or first_option": ANSWER} if self._makes_answers else {}
        for key, name in needed.items():
            if name not in self._keep(names):
                raise DataError(
                    f"{key} reads the column '{name}': {has}. Name it in the recipe, such as columns: "
                    f"{{{name}: {names[0]}}}."
                )

    def _check_renamed(self, names: list[str], role: str) -> None:
        """Raise DataError if a column that the recipe makes, by a new name or by its template, exists already."""
        for ours, theirs in self.columns.items():
            if theirs not in (ours, None) and ours in names and ours not in self._ours:
                raise DataError(
                    f"columns makes '{theirs}' the column '{ours}', and {role} has a column of this name already. "
                    f"Rename this column as well, columns: {{..., other_{ours}: {ours}}}."
                )
        if self.template is not None and PROMPT in self._keep(names) and PROMPT not in self._filled_in:
            raise DataError(
                f"prompt_template makes the column 'prompt', and {role} has one already, which the template does not "
                "read. Leave that one out, columns: {..., prompt: null}, or leave out prompt_template."
            )

    def _keep(self, names: list[str]) -> set[str]:
        """Return our names of the columns that are not dropped."""
        return {self._ours.get(name, name) for name in names} - set(self._left_out)

    def _rename(self, dataset: Any, names: list[str]) -> Any:
        dataset = dataset.remove_columns(self._left_out) if self._left_out else dataset
        new = {theirs: ours for theirs, ours in self._ours.items() if theirs != ours}
        if set(new) & set(new.values()):  # such as {answer: solution, other_answer: answer}
            aside = {name: f"{name} (renamed)" for name in new}
            dataset = dataset.rename_columns(aside)
            new = {aside[theirs]: ours for theirs, ours in new.items()}
        return dataset.rename_columns(new) if new else dataset

    def _in_order(self, dataset: Any, role: str) -> Any:
        """Return pairs with the better side first if the recipe names a column for it; else warn of such a column."""
        from trl_ext.scripts.data.better import BETTER, put_better_first, warn_of_unread_side
        from trl_ext.trainers.rows.sentence import columns_of

        names = columns_of(dataset, role)
        if BETTER not in self.columns:
            warn_of_unread_side(names, role)
            return dataset
        first, second = (self.columns.get(side) or side for side in PAIR[1:])
        return put_better_first(dataset, (first, second), str(self.columns[BETTER]), role)

    # Rows -----------------------------------------------------------------------------------------------------------

    def makes_chats(self, has_chat_template: Callable[[], bool]) -> bool:
        """Return True if text prompts become user messages; raise ConfigError if no chat template renders them."""
        if self.prompt_format == "text":
            return False
        wanted = self.prompt_format == "chat" or self.system_prompt is not None
        if wanted and not has_chat_template():
            key = "system_prompt" if self.system_prompt else "prompt_format: chat"
            raise ConfigError(
                f"{key} makes messages of the prompts, and the model's tokenizer has no chat template. Take an "
                "instruction-tuned model, or write all text into prompt_template."
            )
        return wanted or has_chat_template()

    def _refuse(self, dataset: Any, role: str) -> NoReturn:
        """Raise a DataError that names all rows that cannot be mapped."""
        from trl_ext.trainers.rows.sentence import refuse

        found: dict[str, list[int]] = {}
        for number, row in enumerate(dataset.select_columns(self._read)):
            if problem := self.problem(row):
                found.setdefault(problem, []).append(number)
        refuse(found, role, "Drop or mend such rows, or mend the recipe.")


def _rewritten(row: Mapping[str, Any], mapping: RowMapping, makes_chats: bool, version: str) -> dict[str, Any]:
    """Return the new cells of a row; raise DataError if it cannot be mapped.

    Args:
        row: A row of a stream.
        mapping: The recipe's mapping.
        makes_chats: Whether texts become messages.
        version: Not read: it makes the fingerprint of `map` change with the package's version.
    """
    if problem := mapping.problem(row):
        raise DataError(f"A row of the stream has {problem}. Filter such rows out of the stream.")
    return mapping.rewritten(row, makes_chats)


def within(value: Any, name: str) -> Any:
    """Return the value, or the type, that a dotted name means in a row, or in column types; None if there is none.

    In a list a number means that item, `:-1` all but the last, `1:` all but the first.
    """
    for key in name.split("."):
        if type(value).__name__ == "Json":  # the type of a column of any JSON, which may hold the name
            break
        if isinstance(value, Mapping):
            value = value.get(key)
        elif place := re.fullmatch(r"(-?\d+)|(-?\d+)?:(-?\d+)?", key):
            value = _of_list(value, *(None if number is None else int(number) for number in place.groups()))
        else:
            return None
    return value


def _of_list(items: Any, place: int | None, start: int | None, stop: int | None) -> Any:
    """Return an item of a list, or a slice if `place` is None; for a list's type, the type of that.

    Args:
        items: A list, or the type of a column of lists.
        place: Index of the item, negative from the end; None for a slice.
        start, stop: The slice.
    """
    if kind := getattr(items, "feature", None):
        return items if place is None else kind
    if not isinstance(items, list):
        return None
    if place is None:
        return items[start:stop]
    return items[place] if -len(items) <= place < len(items) else None


def _check_columns(columns: Any) -> None:
    if not isinstance(columns, Mapping):
        raise ConfigError(f"columns must be a mapping, our name: the data's name, not {columns!r}.")
    for ours, theirs in columns.items():
        if not (isinstance(ours, str) and ours and (theirs is None or (isinstance(theirs, str) and theirs))):
            raise ConfigError(f"columns: '{ours}: {theirs}' does not give a column another name. Write names as text.")
    given = [theirs for theirs in columns.values() if theirs is not None]
    if twice := [name for name in given if given.count(name) > 1]:
        names = " and ".join(f"'{ours}'" for ours, theirs in columns.items() if theirs == twice[0])
        raise ConfigError(f"columns gives '{twice[0]}' the names {names}. Give each column one name.")


def _check_pattern(pattern: str) -> None:
    try:
        num_groups = re.compile(pattern).groups
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError(f"answer_pattern '{pattern}' is no regular expression: {error}.") from error
    if num_groups != 1:
        raise ConfigError(
            f"answer_pattern '{pattern}' has {num_groups or 'no'} groups; what its one group finds is the answer. "
            "Put the answer in brackets, as in '#### (.+)', and (?:...) around other groups."
        )


def _has_role(turn: Any, role: str) -> bool:
    return isinstance(turn, Mapping) and turn.get("role") == role


def _kind(value: Any) -> str:
    return "a list" if isinstance(value, list) else f"a value of type {type(value).__name__}"
