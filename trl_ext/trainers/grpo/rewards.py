"""Reward functions in a training step: guarded, started early, synchronised over ranks, saved with a checkpoint.

TRL gathers the rewards of all ranks. If a reward function raises on one rank, the others wait in the gather until the
process group times out, after 30 minutes. So an exception is kept until after the gather, and then raised on every
rank, with the name of the reward function.
"""

import inspect
import json
import math
import re
import reprlib
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import nn
from transformers.utils import logging
from trl.trainer.utils import is_async_callable

from trl_ext.compat.swap import swapped
from trl_ext.errors import ConfigError, DataError, RuleError, TrlExtError
from trl_ext.rewards import LARGEST, RuleColumn, RuleSet
from trl_ext.rewards.base.rows import as_columns
from trl_ext.trainers.generation.parts import RolloutPart, Rows
from trl_ext.trainers.generation.trainer import RolloutTrainer
from trl_ext.trainers.reward.scorer import CompletionScorer, as_function
from trl_ext.trainers.rows.gold import UnscoredRules, batches_per_step
from trl_ext.trainers.rows.images import without_nulls
from trl_ext.trainers.rows.rendering import render_prompt

RULES_FILE = "rules.json"
_NOT_COLUMNS = ("prompt", "completion", "completion_ids")  # TRL passes these on under other names
# Shares of rows with an exceptional outcome, and workers that had to be started again.
_SHARE = re.compile(r"rules/.+_frac|rules/workers_restarted")

_LIST_WANTED = "Return a list of one float, or None, per completion."

logger = logging.get_logger(__name__)


@dataclass(eq=False)
class GuardedReward:
    """Calls a reward function, keeps its exception, and lets no number beyond `LARGEST` through.

    Args:
        function: Called with TRL's arguments, returns one float or None per completion. With `takes_turns`, or if it
            has the attribute `sums_turns`, it may return a list of floats, one per turn of the policy; TRL gets a sum.
        name: For messages.

    Attributes:
        turns: The rewards of each completion's turns; None if it has one reward for the whole, or is not scored.
    """

    function: Callable[..., Any]
    name: str
    takes_turns: bool = False
    error: Exception | None = None
    turns: list[list[float] | None] = field(default_factory=list)

    def __call__(self, /, **kwargs: Any) -> list[float | None]:
        try:
            return self._checked(self.function(**kwargs), len(kwargs["completions"]))
        except Exception as error:  # any exception of user code is raised again on all ranks
            self.error = error
            return [0.0] * len(kwargs["completions"])

    def _checked(self, rewards: Any, expected: int) -> list[float | None]:
        """Return a reward, or None, for each completion, and keep the rewards of its turns; RuleError for others."""
        values = self._values(rewards, expected)
        takes_turns = self.takes_turns or getattr(self.function, "sums_turns", False)
        if not takes_turns and (found := [v for v in values if isinstance(v, (list, tuple))]):
            raise self._error(
                f"rewards per turn, {found[0]}. GRPO has one advantage for a whole completion: return their sum, or "
                "take PPOTrainer."
            )
        totals: list[float | None] = []
        self.turns = []
        for number, value in enumerate(values):
            has_turns = isinstance(value, (list, tuple))
            self._check_numbers(value if has_turns else [value], number)
            turns = [float(one) if _is_bounded(one) else math.nan for one in value] if has_turns else None
            total = value if turns is None else sum(turns)
            if total is not None and not _is_bounded(total):
                _warn_of_bounds(self.name)
                total, turns = None, None
            totals.append(total)
            self.turns.append(turns)
        return totals

    def _values(self, rewards: Any, expected: int) -> list[Any]:
        """Return the rewards as a list; RuleError unless there is a value for each completion."""
        is_one = not isinstance(rewards, Iterable) or getattr(rewards, "ndim", 1) == 0
        if is_one or isinstance(rewards, str | bytes | Mapping | Set):
            raise self._error(f"{_describe(rewards)} for {expected} completions. {_LIST_WANTED}")
        values = list(rewards)
        if len(values) != expected:
            raise self._error(f"{len(values)} values for {expected} completions. {_LIST_WANTED}")
        return values

    def _check_numbers(self, values: Iterable[Any], number: int) -> None:
        """Raise RuleError if a reward of completion `number` is neither a number nor None."""
        for value in values:
            if value is not None and _size(value) < 0:
                raise self._error(f"{_describe(value)} for completion {number}. {_LIST_WANTED}")

    def _error(self, returned: str) -> RuleError:
        return RuleError(f"The reward '{self.name}'{_place_of(self.function)} returned {returned}")


class AsyncGuardedReward(GuardedReward):
    """Guards an `async def` reward function; TRL awaits all of them together."""

    async def __call__(self, /, **kwargs: Any) -> list[float | None]:  # type: ignore[override]
        try:
            return self._checked(await self.function(**kwargs), len(kwargs["completions"]))
        except Exception as error:  # as above
            self.error = error
            return [0.0] * len(kwargs["completions"])


class RewardCalls(RolloutPart):
    """A trainer's calls of its reward functions; with `takes_turns` each turn of a completion may have a reward.

    Attributes:
        num_called: How many reward functions TRL calls, the first ones; None: all. A part adds the others' rewards.
        guarded: The reward functions of the last rewards.
        rows: The rows of the batch that is generated, for scoring that starts early.
        shares: Series of rules that are left out while they are 0.
    """

    def __init__(self, *, takes_turns: bool):
        self.num_called: int | None = None
        self.guarded: list[Any] = []
        self.rows: list[dict[str, Any]] = []
        self._takes_turns = takes_turns
        self._unscored = UnscoredRules()
        self._num_looked_at, self._are_silent = 0, torch.tensor(True)
        self.shares = RuleShares()

    def before_generation(self, trainer: RolloutTrainer, rows: Rows) -> Rows:
        """Store the rows without nulls."""
        self.rows = without_nulls(rows)
        return self.rows

    def load(self, trainer: RolloutTrainer, checkpoint: str) -> None:
        """Go on with the series that were logged."""
        self.shares.resume(trainer.state.log_history)

    @contextmanager
    def guarding(self, trainer: RolloutTrainer) -> Iterator[None]:
        """Guard the reward functions inside the block; then raise an exception of one rank on all. Collective."""
        called, accelerator = slice(self.num_called), trainer.accelerator
        functions, names = trainer.reward_funcs[called], trainer.reward_func_names[called]
        tokenizers = trainer.reward_processing_classes[called]
        self._unscored.begin(functions)
        self.guarded = [
            guard(function, name, self._takes_turns) for function, name in zip(functions, names, strict=True)
        ]
        guarded = swapped(
            trainer, reward_funcs=self.guarded, reward_func_names=names, reward_processing_classes=tokenizers
        )
        with guarded, trainer.clock.phase("score"):
            yield
        raise_together(self.guarded, accelerator.process_index)
        synchronise(functions, is_training=trainer.model.training)
        self._unscored.look(trainer)

    def look_at_first_step(self, trainer: RolloutTrainer, rewards: torch.Tensor) -> None:
        """Warn of functions, except rule sets, that scored no completion of the first step; DataError if none did.

        `rewards` is [rows of all ranks, functions that TRL calls] of a training batch, NaN where a function abstains.
        """
        self._num_looked_at += 1
        self._are_silent = self._are_silent & rewards.isnan().all(dim=0)
        if trainer.state.global_step or self._num_looked_at != batches_per_step(trainer.args):
            return
        # PPO's reward models have a weight, and are not among the functions that TRL calls.
        is_all = bool(self._are_silent.all()) and len(trainer.reward_weights) == rewards.size(1)
        for place, function in enumerate(trainer.reward_funcs[: self.num_called]):
            if isinstance(function, RuleSet | RuleColumn) or not self._are_silent[place]:
                continue
            said = (
                f"The reward '{trainer.reward_func_names[place]}' scored no completion of the first step: it returned "
            )
            said += "None, NaN or infinity alone."
            if is_all and getattr(function, "on_unscored", "error") == "error":
                advice = "Return finite numbers; if it is meant, set its attribute on_unscored = 'warn'."
                raise DataError(f"{said} Nothing would be learned. {advice}")
            if trainer.accelerator.is_main_process:
                logger.warning(f"{said} Only the other rewards are learned from.")


def _place_of(function: Any) -> str:
    """Return ` (file, line 7)` for a function, bound method or callable object in Python; empty for others."""
    function = inspect.unwrap(getattr(function, "func", function))
    code = getattr(function, "__code__", None) or getattr(function.__call__, "__code__", None)
    return f" ({code.co_filename}, line {code.co_firstlineno})" if code else ""


def _describe(value: Any) -> str:
    """Describe a value that is not a reward by its type and its beginning."""
    kind = "text" if isinstance(value, str) else "a number" if _size(value) >= 0 else f"a {type(value).__name__}"
    return "None" if value is None else f"{kind}, {' '.join(reprlib.repr(value).split())},"


def _size(value: Any) -> float:
    """Return a number's absolute value, infinity if it is too large for a float, -1 if it is not a number."""
    try:
        return math.fabs(value)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError, RuntimeError):  # a tensor of several numbers raises RuntimeError
        return -1.0


def _is_bounded(value: Any) -> bool:
    """Return True for a number that float32 can square, as TRL does; False for None."""
    return 0 <= _size(value) <= LARGEST


def _warn_of_bounds(name: str, weight: float = 1.0) -> None:
    times = "" if weight == 1 else f", or would with its weight {weight:g}"
    logger.warning_once(
        f"The reward '{name}' gave NaN, infinity or more than {LARGEST:g}{times}; such completions count as not "
        "scored. One infinite reward would turn the weights into NaN."
    )


def within_bounds(rewards: torch.Tensor, weights: torch.Tensor, names: Sequence[str]) -> torch.Tensor:
    """Return the rewards, with NaN for rewards that exceed `LARGEST`, alone or times their weight.

    `rewards` is [rows of all ranks, functions], NaN where a function abstains; `weights` is [functions].
    """
    is_beyond = rewards.abs() > LARGEST / weights.to(rewards.device).abs().clamp(min=1)
    for i in range(rewards.size(1)):
        if is_beyond[:, i].any():
            _warn_of_bounds(names[i], weights[i].item())
    return rewards.masked_fill(is_beyond, torch.nan)


def check_groups(functions: Sequence[Any], args: Any) -> None:
    """Raise ConfigError if a rule that reads groups would see single completions, or a part of a group per process."""
    names = [rule.name for rules in _rule_sets_of_all(functions) for rule in rules.rules if rule.reads_group]
    eval_size = (args.num_generations_eval or args.num_generations) if args.eval_strategy != "no" else 1
    for size, rows in (
        (args.num_generations, args.generation_batch_size // args.world_size),
        (eval_size, args.per_device_eval_batch_size),
    ):
        if names and (rows % size or args.num_generations == 1):
            raise ConfigError(
                f"Rule '{names[0]}' reads the group of a completion, num_generations={size}, and a process has {rows} "
                "rows of a batch: it needs whole groups of 2 or more. Change the batch or num_generations."
            )


def guard(function: Any, name: str, takes_turns: bool = False) -> Any:
    """Return the guarded reward function or reward model; any other module is returned unchanged."""
    if isinstance(function, CompletionScorer):
        return GuardedReward(as_function(function), function.name)
    if isinstance(function, nn.Module):
        return function
    return (AsyncGuardedReward if is_async_callable(function) else GuardedReward)(function, name, takes_turns)


def raise_together(rewards: list[Any], rank: int) -> None:
    """Raise RuleError on every rank if a reward function raised on any, with name, rank and traceback. Collective."""
    errors = [(r.name, r.error) for r in rewards if getattr(r, "error", None) is not None]
    messages, cause = [], None
    for name, error in errors:
        # An error of ours without a cause needs no traceback: its sentence is complete.
        is_plain = isinstance(error, TrlExtError) and error.__cause__ is None
        cause = cause or (None if is_plain else error)
        text = str(error) if is_plain else "".join(traceback.format_exception(error)).rstrip()
        messages.append(f"On rank {rank} the reward '{name}' raised:\n{text}")
    if everyones := gather_object(messages):
        raise RuleError("\n".join(everyones)) from cause


def start_scoring(
    functions: Sequence[Any],
    inputs: Sequence[Mapping[str, Any]],
    prompts: Sequence[Any],
    completions: Sequence[Any],
    completion_ids: Sequence[Any],
    trainer_state: Any,
) -> None:
    """Let workers begin to score completions while the log-probabilities are computed.

    When TRL asks for the rewards later, a rule set waits for its workers, and raises errors about these rows then.

    Args:
        functions: The trainer's reward functions; rule sets among them begin.
        inputs: Rows of the dataset, one for each completion.
        prompts, completions, completion_ids: As TRL gives them to reward functions.
        trainer_state: Of transformers.
    """
    if not inputs or not isinstance(completions, list):
        return  # not in a training step, or a rollout function returned another type
    columns: dict[str, Any] = as_columns(inputs, [name for name in inputs[0] if name not in _NOT_COLUMNS])
    columns["trainer_state"] = trainer_state
    for rules in _rule_sets(functions):
        try:
            rules.start(prompts=prompts, completions=completions, completion_ids=completion_ids, **columns)
        except TrlExtError:
            continue


def show_prompt_end(functions: Sequence[Any], tokenizer: Any, chat_options: Mapping[str, Any] | None) -> None:
    """Show the rules how the chat template ends a prompt: it may open a tag there."""
    for rules in _rule_sets_of_all(functions):
        rules.prompt_end = render_prompt([{"role": "user", "content": "?"}], tokenizer, chat_options)


def synchronise(functions: Sequence[Any], *, is_training: bool) -> None:
    """Add up the running totals of normalising rule sets over all ranks. Collective.

    The totals of an evaluation are dropped, so that it does not change the training.
    """

    def gather(numbers: Sequence[float]) -> list[list[float]]:
        # As objects: float32 would round them, and not every device has float64.
        return gather_object([list(numbers)])

    for rules in _rule_sets(functions):
        if rules.normalise:
            rules.synchronise(gather if is_training else None)


def load_statistics(functions: Sequence[Any], checkpoint: str) -> None:
    """Restore the statistics that `save_statistics` wrote; do nothing for a checkpoint of plain TRL."""
    path = Path(checkpoint) / RULES_FILE
    if not path.is_file():
        return
    states = json.loads(path.read_text())
    for rules in _rule_sets(functions):
        if rules.name in states:
            rules.load_state_dict(states[rules.name])


def save_statistics(functions: Sequence[Any], checkpoint: str) -> None:
    """Write the running statistics of normalising rule sets."""
    states = {rules.name: rules.state_dict() for rules in _rule_sets(functions) if rules.normalise}
    if states:
        (Path(checkpoint) / RULES_FILE).write_text(json.dumps(states))


def _rule_sets(functions: Sequence[Any]) -> list[RuleSet]:
    return [function for function in functions if isinstance(function, RuleSet)]


def _rule_sets_of_all(functions: Sequence[Any]) -> list[RuleSet]:
    """Return the rule sets among reward functions, and the set of each column of a set."""
    return _rule_sets([one.rules if isinstance(one, RuleColumn) else one for one in functions])


class RuleShares:
    """Filter for series that are 0 in a healthy run: each is logged from its first value that is not 0."""

    def __init__(self) -> None:
        self._begun: set[str] = set()

    def resume(self, log_history: Iterable[Mapping[str, Any]]) -> None:
        """Go on with the series that a resumed run has logged."""
        self._begun |= {key for entry in log_history for key in entry if _SHARE.fullmatch(key.removeprefix("eval_"))}

    def drop_zeros(self, metrics: MutableMapping[str, list[float]], mode: str) -> None:
        """Remove series that were always 0 from TRL's metrics, for `mode` "train" or "eval" separately.

        `metrics` has the values since the last entry by name, the same on all ranks.
        """
        for key in [key for key in metrics if _SHARE.fullmatch(key)]:
            name = key if mode == "train" else f"eval_{key}"
            if any(metrics[key]):
                self._begun.add(name)
            elif name not in self._begun:
                del metrics[key]


def per_rule(reward_funcs: Any, args: Any, options: MutableMapping[str, Any]) -> tuple[Any, list[float] | None]:
    """Return the reward functions with a column for each rule, and their weights.

    Only `multi_objective_aggregation="normalize_then_sum"` changes them: with it TRL normalises each reward function
    within its group (GDPO, arXiv:2601.05242). TRL would normalise a RuleSet's sum as a whole; so its rules become
    columns. Normalisation cancels a column's weight; so weights become TRL's reward weights, which count after it.
    `options` are keyword arguments of TRL's trainer; its `reward_processing_classes` get an entry for each column.

    Raises:
        ConfigError: for a set with a setting that applies to a sum only.
    """
    functions = list(reward_funcs) if isinstance(reward_funcs, list) else [reward_funcs]
    is_per_rule = args.multi_objective_aggregation == "normalize_then_sum"
    if not is_per_rule or not any(isinstance(function, RuleSet | RuleColumn) for function in functions):
        return reward_funcs, args.reward_weights
    given = args.reward_weights or [1.0] * len(functions)
    tokenizers = options.get("reward_processing_classes")
    tokenizers = tokenizers if isinstance(tokenizers, list) else [tokenizers] * len(functions)
    if not len(given) == len(functions) == len(tokenizers):
        return reward_funcs, args.reward_weights  # TRL raises an error about the lengths
    columns, weights, classes = [], [], []
    for function, weight, tokenizer in zip(functions, given, tokenizers, strict=True):
        for column, own_weight in _columns(function):
            columns.append(column)
            weights.append(weight * own_weight)
            classes.append(tokenizer)
    if options.get("reward_processing_classes") is not None:
        options["reward_processing_classes"] = classes
    return columns, weights


def _columns(function: Any) -> list[tuple[Any, float]]:
    """Return the columns of a reward function, unweighted, each with its weight."""
    if isinstance(function, RuleSet):
        for name, is_set in (("clip", function.clip is not None), ("normalise", function.normalise)):
            if is_set:
                raise ConfigError(
                    f"{name}={getattr(function, name)} of the rule set '{function.name}' is of its sum, and "
                    "multi_objective_aggregation='normalize_then_sum' takes each rule by itself. Leave one of the two "
                    "out."
                )
        columns = function.split()
    elif isinstance(function, RuleColumn):
        columns = [function]
    else:
        return [(function, 1.0)]
    return [(replace(column, weighted=False), column.rules.rules[-1].weight) for column in columns]
