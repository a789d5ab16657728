r"""Gaps between the rules' totals of the two sides of a preference pair, in any of TRL's four formats.

Rules read a prompt and a completion. If both sides hold the whole text (implicit prompt), they are split:

    messages           the completion is the last assistant turn, with its tool calls and tool results
    dialogue as text   both sides hold "\n\nHuman:" and "\n\nAssistant:"; the completion follows the last "Assistant:"
    other text         the prompt is the common beginning, cut back to its last whole line, else to its last whole word

A single line in a script without spaces has no whole word: the whole text is then the completion.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trl_ext.errors import ConfigError, DataError, RuleError

if TYPE_CHECKING:
    from datasets import Dataset

# A RuleSet, one column of `RuleSet.split()`, or any other callable that returns one total per completion.
Scorer = Callable[..., list[float | None]]

PAIR_COLUMNS = (("prompt", "chosen", "rejected"), ("chosen", "rejected"))

_CHUNK_ROWS = 256  # in memory as Python objects at one time, and one step of the progress bar
_BAR_DELAY_S = 2.0
# Keyword arguments of TRL's call, and columns that would show a rule the answer. TRL, too, withholds the first three.
_NOT_FOR_RULES = frozenset(
    {"prompt", "completion", "completion_ids", "prompts", "completions", "chosen", "rejected", "log_metric"}
)
_HUMAN, _ASSISTANT = "\n\nHuman:", "\n\nAssistant:"
_TURN_ROLES = ("assistant", "tool")


@dataclass(frozen=True, slots=True)
class SplitPair:
    """A pair as rules read it, the chosen side first.

    `same_prompt` is False if the sides answer different prompts and cannot be compared.
    """

    prompts: tuple[Any, Any]
    completions: tuple[Any, Any]
    same_prompt: bool = True


def checked_pairs(dataset: Any) -> "Dataset":
    """Return a dataset of pairs with plain Python values; DataError without rows or without the columns of pairs."""
    from datasets import Dataset  # Here, so that rules do not need it.

    if not isinstance(dataset, Dataset):
        raise DataError(f"The dataset is a {type(dataset).__name__}. Give a datasets.Dataset: one split, no stream.")
    if not any(set(columns) <= set(dataset.column_names) for columns in PAIR_COLUMNS):
        wanted = " or ".join(f"({', '.join(columns)})" for columns in PAIR_COLUMNS)
        there = ", ".join(dataset.column_names) or "none"
        raise DataError(f"The dataset needs the columns {wanted}; its columns are: {there}. Rename its columns.")
    if len(dataset) == 0:
        raise DataError("The dataset has no rows. Give at least one row.")
    return dataset.with_format(None)


def chunks(items: Sequence[Any], task: str, unit: str) -> Iterator[Sequence[Any]]:
    """Yield slices of `items`, with a progress bar that appears only if the work takes long."""
    from datasets.utils.tqdm import tqdm

    with tqdm(total=len(items), desc=task, unit=unit, delay=_BAR_DELAY_S) as bar:
        for start in range(0, len(items), _CHUNK_ROWS):
            chunk = items[start : start + _CHUNK_ROWS]
            yield chunk
            bar.update(len(chunk))


def rule_gaps(dataset: "Dataset", rules: Scorer, rows: Sequence[int] | None = None) -> list[float | None]:
    """Return the total of the chosen side minus the total of the rejected side per row; None if a total is missing.

    `dataset` has explicit or implicit prompts, text or messages, and the columns that rules read. `rows` are the
    numbers of the rows to score, by default all. An error names the rows where it arose.
    """
    dataset = checked_pairs(dataset)
    if not callable(rules):
        raise ConfigError(f"rules is {rules!r}. Give a RuleSet, such as RuleSet([Answer()]).")
    gaps: list[float | None] = []
    for part in chunks(range(len(dataset)) if rows is None else rows, "Scoring pairs", " pairs"):
        batch = dataset[list(part)]
        pairs = split_batch(batch)
        # One call of the rules: all chosen sides, then all rejected sides.
        prompts = [pair.prompts[side] for side in (0, 1) for pair in pairs]
        completions = [pair.completions[side] for side in (0, 1) for pair in pairs]
        columns = {name: [*cells, *cells] for name, cells in batch.items() if name not in _NOT_FOR_RULES}
        try:
            totals = rules(prompts=prompts, completions=completions, **columns)
        except RuleError as error:
            where = f"rows {min(part)} to {max(part)} of the dataset (the samples counted from there)"
            raise RuleError(f"While scoring {where}: {error}") from error
        sides = zip(totals[: len(pairs)], totals[len(pairs) :], strict=True)
        gaps += [None if best is None or worst is None else best - worst for best, worst in sides]
    return gaps


def split_batch(batch: Mapping[str, list[Any]]) -> list[SplitPair]:
    """Split the pairs of a batch; without a column `prompt`, prompts are implicit."""
    sides = zip(batch["chosen"], batch["rejected"], strict=True)
    if "prompt" in batch:
        prompted = zip(batch["prompt"], sides, strict=True)
        return [SplitPair((prompt, prompt), completions) for prompt, completions in prompted]
    return [split_implicit(chosen, rejected) for chosen, rejected in sides]


def split_implicit(chosen: Any, rejected: Any) -> SplitPair:
    """Cut both sides into prompt and completion; a missing side is a completion without a prompt.

    Example:
        >>> split_implicit("How many?\\nA: 18", "How many?\\nA: 17").completions
        ('A: 18', 'A: 17')
    """
    if chosen is None or rejected is None:
        return SplitPair((None, None), (chosen, rejected), same_prompt=False)
    if isinstance(chosen, str) and isinstance(rejected, str):
        return split_texts(chosen, rejected)
    if isinstance(chosen, list) and isinstance(rejected, list):
        cuts = []
        for side in (chosen, rejected):  # The last assistant turn follows the last user or system message.
            openers = (i + 1 for i, message in reversed([*enumerate(side)]) if message.get("role") not in _TURN_ROLES)
            cuts.append(next(openers, 0))
        prompts = (chosen[: cuts[0]], rejected[: cuts[1]])
        completions = (chosen[cuts[0] :], rejected[cuts[1] :])
        return SplitPair(prompts, completions, bare(prompts[0]) == bare(prompts[1]))
    kinds = f"'chosen' holds a {type(chosen).__name__} and 'rejected' a {type(rejected).__name__}"
    raise DataError(f"{kinds}. Give text on both sides, or message lists on both.")


def split_texts(chosen: str, rejected: str) -> SplitPair:
    """Split two texts; prompts differ without a common beginning, or if dialogues differ before the last reply."""
    if all(mark in side for mark in (_HUMAN, _ASSISTANT) for side in (chosen, rejected)):
        cuts = [side.rindex(_ASSISTANT) + len(_ASSISTANT) for side in (chosen, rejected)]
        same = chosen[: cuts[0]] == rejected[: cuts[1]]
    else:
        # Without the blank ends, so that equal sides keep their last line as completion.
        first, second = chosen.rstrip(), rejected.rstrip()
        differ = (place for place, (one, two) in enumerate(zip(first, second, strict=False)) if one != two)
        common = first[: next(differ, min(len(first), len(second)))]
        ends = (common.rfind(mark) + 1 for mark in ("\n", " "))
        cuts = [next((end for end in ends if common[:end].strip()), 0)] * 2
        same = bool(common.strip())
    prompts, completions = (chosen[: cuts[0]], rejected[: cuts[1]]), (chosen[cuts[0] :], rejected[cuts[1] :])
    return SplitPair(prompts, completions, same)


def bare(value: Any) -> Any:
    """Return the value to compare: text without blank ends, messages without the empty fields that Arrow adds."""
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, Mapping):
        return {key: bare(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [bare(item) for item in value]
    return value
