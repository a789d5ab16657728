"""Reward functions around a training step: guarded, begun early, kept in step over ranks, saved with a checkpoint.

TRL gathers the rewards of all ranks. A rank whose reward function raised never gets there, and the others wait for it
until the process group times out, 30 minutes later. So an exception is kept until after that gather, and then raised
on every rank, with the name of the reward function.
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
from trl_ext.rewards import LARGEST, Rule, RuleColumn, RuleSet
from trl_ext.trainers.generation.parts import RolloutPart, Rows
from trl_ext.trainers.grpo.reward_models import as_function
from trl_ext.trainers.grpo.unscored import UnscoredRules, batches_per_step
from trl_ext.trainers.reward.scorer import CompletionScorer
from trl_ext.trainers.rows.images import without_nulls

RULES_FILE = "rules.json"
# What TRL passes on under names of its own.
_NOT_COLUMNS = ("prompt", "completion", "completion_ids")
# Shares of rows that went another way than usual, and workers that had to be started again.
_SHARE = re.compile(r"rules/.+_frac|rules/workers_restarted")

logger = logging.get_logger(__name__)


@dataclass(eq=False)
class GuardedReward:
    """Calls a reward function, keeps its exception, and lets no number beyond `LARGEST` through.

    Args:
        function: Called with TRL's arguments, returns one float or None a completion; or, where turns are taken, a
            list of floats, one for each turn of the policy, of which TRL gets the sum. One that has the attribute
            `sums_turns` may do so in any trainer.
        name: For messages.
        takes_turns: True where each turn may have its own reward.

    Attributes:
        turns: Of each completion, the values of its turns; None where it has one for the whole, or is not scored.
    """

    function: Callable[..., Any]
    name: str
    takes_turns: bool = False
    error: Exception | None = None
    turns: list[list[float] | None] = field(default_factory=list)

    def __call__(self, /, **kwargs: Any) -> list[float | None]:
        try:
            return self._checked(self.function(**kwargs), len(kwargs["completions"]))
        except Exception as error:  # whatever user code raises: it is raised again on all ranks
            self.error = error
            return [0.0] * len(kwargs["completions"])

    def _checked(self, rewards: Any, expected: int) -> list[float | None]:
        said = f"The reward '{self.name}'{_place_of(self.function)} returned"
        advice = "Return a list of one float, or None, per completion."
        is_one = not isinstance(rewards, Iterable) or getattr(rewards, "ndim", 1) == 0
        if is_one or isinstance(rewards, str | bytes | Mapping | Set):
            raise RuleError(f"{said} {_describe(rewards)} for {expected} completions. {advice}")
        values = list(rewards)
        if len(values) != expected:
            raise RuleError(f"{said} {len(values)} values for {expected} completions. {advice}")
        takes_turns = self.takes_turns or getattr(self.function, "sums_turns", False)
        if not takes_turns and (found := [v for v in values if isinstance(v, (list, tuple))]):
            raise RuleError(
                f"{said} rewards per turn, {found[0]}. GRPO has one advantage for a whole completion: return their "
                "sum, or take PPOTrainer."
            )
        for number, value in enumerate(values):
            for one in value if isinstance(value, (list, tuple)) else [value]:
                if one is not None and _size(one) < 0:
                    raise RuleError(f"{said} {_describe(one)} for completion {number}. {advice}")
        turns = [
            [float(one) if _is_bounded(one) else math.nan for one in v] if isinstance(v, (list, tuple)) else None
            for v in values
        ]
        values = [v if own is None else sum(own) for v, own in zip(values, turns, strict=True)]
        finite = [v if v is None or _is_bounded(v) else None for v in values]
        self.turns = [None if v is None else own for v, own in zip(finite, turns, strict=True)]
        if finite != values:
            _warn_of_bounds(self.name)
        return finite


class AsyncGuardedReward(GuardedReward):
    """Guards an `async def` reward function; TRL awaits all of them together."""

    async def __call__(self, /, **kwargs: Any) -> list[float | None]:  # type: ignore[override]
        try:
            return self._checked(await self.function(**kwargs), len(kwargs["completions"]))
        except Exception as error:  # as above
            self.error = error
            return [0.0] * len(kwargs["completions"])


class RewardCalls(RolloutPart):
    """A trainer's calls of its reward functions: guarded, begun early, and looked after.

    Args:
        takes_turns: True where each turn of a completion may have its own reward.

    Attributes:
        guarded: The reward functions of the rewards that were computed last.
        rows: Of the batch that is generated, for scoring that starts early.
        shares: Series of rules that are left out while they are 0.
    """

    def __init__(self, *, takes_turns: bool):
        self.guarded: list[Any] = []
        self.rows: list[dict[str, Any]] = []
        self._takes_turns = takes_turns
        self._unscored = UnscoredRules()
        self._num_looked_at, self._are_silent = 0, torch.tensor(True)
        self.shares = RuleShares()

    def before_generation(self, trainer: Any, rows: Rows) -> Rows:
        """Keep the rows, for scoring that starts early."""
        self.rows = without_nulls(rows)
        return self.rows

    def load(self, trainer: Any, checkpoint: str | None, *, has_rollouts: bool) -> None:
        """Go on with the series that were logged."""
        if checkpoint is not None:
            self.shares.resume(trainer.state.log_history)

    @contextmanager
    def guarding(self, trainer: Any) -> Iterator[None]:
        """Guard the trainer's reward functions inside the block; an exception of one rank is raised after it on all of
        them. Collective.

        Args:
            trainer: It asks its reward functions inside the block.
        """
        functions, accelerator = trainer.reward_funcs, trainer.accelerator
        self._unscored.begin(functions)
        named = zip(functions, trainer.reward_func_names, strict=True)
        self.guarded = [guard(function, name, self._takes_turns) for function, name in named]
        with swapped(trainer, reward_funcs=self.guarded), trainer.clock.phase("score"):
            yield
        raise_together(self.guarded, accelerator.num_processes, accelerator.process_index)
        synchronise(functions, is_training=trainer.model.training)
        self._unscored.look(trainer)

    def look_at_first_step(self, trainer: Any, rewards: torch.Tensor) -> None:
        """Warn of functions, rule sets apart, that scored no completion of the first step; DataError if nothing did.

        Args:
            trainer: The trainer.
            rewards: [rows of all ranks, functions] of a batch of training, NaN where a function abstains.
        """
        self._num_looked_at += 1
        self._are_silent = self._are_silent & rewards.isnan().all(dim=0)
        if trainer.state.global_step or self._num_looked_at != batches_per_step(trainer.args):
            return
        # PPO's reward models have a weight, and are no part of the functions here.
        is_all = bool(self._are_silent.all()) and len(trainer.reward_weights) == rewards.size(1)
        for place, function in enumerate(trainer.reward_funcs):
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
    """Return ` (file, line 7)` of a function, a bound method or a callable object in Python, empty for others."""
    function = inspect.unwrap(getattr(function, "func", function))
    code = getattr(function, "__code__", None) or getattr(function.__call__, "__code__", None)
    return f" ({code.co_filename}, line {code.co_firstlineno})" if code else ""


def _describe(value: Any) -> str:
    """Name what is no reward, by its kind and its beginning."""
    kind = "text" if isinstance(value, str) else "a number" if _size(value) >= 0 else f"a {type(value).__name__}"
    return "None" if value is None else f"{kind}, {' '.join(reprlib.repr(value).split())},"


def _size(value: Any) -> float:
    """Return a number's absolute value, infinity where no float holds it; -1 for what Python takes for no number."""
    try:
        return math.fabs(value)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError, RuntimeError):  # the last has a tensor of several numbers
        return -1.0


def _is_bounded(value: Any) -> bool:
    """Return whether a value is a number that float32 can square, as TRL does; False for None."""
    return 0 <= _size(value) <= LARGEST


def _warn_of_bounds(name: str, weight: float = 1.0) -> None:
    times = "" if weight == 1 else f", or would with its weight {weight:g}"
    logger.warning_once(
        f"The reward '{name}' gave NaN, infinity or more than {LARGEST:g}{times}; such completions count as not "
        "scored. One infinite reward would turn the weights into NaN."
    )


def within_bounds(rewards: torch.Tensor, weights: torch.Tensor, names: Sequence[str]) -> torch.Tensor:
    """Return the rewards, NaN for "not scored" where one, by itself or times its weight, is beyond `LARGEST`.

    Args:
        rewards: [rows of all ranks, functions], NaN where a function abstains.
        weights: [functions].
        names: Of the functions, for the warning.
    """
    is_beyond = rewards.abs() > LARGEST / weights.to(rewards.device).abs().clamp(min=1)
    for i in range(rewards.size(1)):
        if is_beyond[:, i].any():
            _warn_of_bounds(names[i], weights[i].item())
    return rewards.masked_fill(is_beyond, torch.nan)


def check_weights(functions: Sequence[Any], weights: Sequence[float] | None) -> None:
    """Raise ConfigError where everything that scores has the weight 0: no completion would be better."""
    is_zero = [isinstance(f, RuleSet) and not any(rule.weight for rule in f.rules) for f in functions]
    pairs = zip(is_zero, weights or [1.0] * len(functions), strict=False)
    if functions and all(zero or not weight for zero, weight in pairs):
        raise ConfigError("All rewards have the weight 0, so that nothing is learnt. Give one of them a weight.")


def check_groups(functions: Sequence[Any], args: Any) -> None:
    """Raise ConfigError where a rule that reads groups would see none, or such as processes share: parts of them."""
    sets = _rule_sets([one.rules if isinstance(one, RuleColumn) else one for one in functions])
    names = [rule.name for rules in sets for rule in rules.rules if rule.reads_group]
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
    """Return the reward function or reward model behind a guard; another module is returned as it is."""
    if isinstance(function, CompletionScorer):
        return GuardedReward(as_function(function), function.name)
    if isinstance(function, nn.Module):
        return function
    return (AsyncGuardedReward if is_async_callable(function) else GuardedReward)(function, name, takes_turns)


def raise_together(rewards: list[Any], num_processes: int, rank: int) -> None:
    """Raise on every rank when a reward function raised on any. Collective: call it on all ranks.

    Raises:
        RuleError: with the name, the rank and the traceback of each failure.
    """
    errors = [(r.name, r.error) for r in rewards if getattr(r, "error", None) is not None]
    messages, cause = [], None
    for name, error in errors:
        # Our own errors say all there is to say in their sentence, and carry the cause's traceback themselves.
        is_plain = isinstance(error, TrlExtError) and error.__cause__ is None
        cause = cause or (None if is_plain else error)
        text = str(error) if is_plain else "".join(traceback.format_exception(error)).rstrip()
        messages.append(f"On rank {rank} the reward '{name}' raised:\n{text}")
    if num_processes > 1:
        messages = gather_object(messages)
    if messages:
        raise RuleError("\n".join(messages)) from cause


def start_scoring(
    functions: Sequence[Any],
    inputs: Sequence[Mapping[str, Any]],
    prompts: Sequence[Any],
    completions: Sequence[Any],
    completion_ids: Sequence[Any],
    trainer_state: Any,
) -> None:
    """Let workers begin to score completions while the log-probabilities are computed.

    TRL asks for the rewards later; a rule set that is then asked for these rows waits for the workers, and only then
    says what is wrong with the rows.
    """
    if not inputs or not isinstance(completions, list):
        return  # called by no training step, or by a rollout function that gives something else
    columns: dict[str, Any] = {name: [row[name] for row in inputs] for name in inputs[0] if name not in _NOT_COLUMNS}
    columns["trainer_state"] = trainer_state
    for rules in _rule_sets(functions):
        try:
            rules.start(prompts=prompts, completions=completions, completion_ids=completion_ids, **columns)
        except TrlExtError:
            continue


def synchronise(functions: Sequence[Any], *, is_training: bool) -> None:
    """Share the running totals of rule sets that normalise by them, so that every rank knows them all. Collective.

    The totals of an evaluation are forgotten: it leaves the training as it was.
    """

    def gather(numbers: Sequence[float]) -> list[list[float]]:
        # As objects: float32 would round them, and not every device has float64.
        return gather_object([list(numbers)])

    for rules in _rule_sets(functions):
        if rules.normalise:
            rules.synchronise(gather if is_training else None)


def load_statistics(functions: Sequence[Any], checkpoint: str) -> None:
    """Restore what `save_statistics` wrote; do nothing for a checkpoint of TRL's own, which has none."""
    path = Path(checkpoint) / RULES_FILE
    if not path.is_file():
        return
    states = json.loads(path.read_text())
    for rules in _rule_sets(functions):
        if rules.name in states:
            rules.load_state_dict(states[rules.name])


def total_rewards(rewards: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum of each completion's rewards, NaN where no function scored it.

    Args:
        rewards: [rows of all ranks, functions], NaN where a function abstains.
        weights: [functions].
    """
    totals = (rewards * weights.to(rewards.device)).nansum(dim=1)
    totals[rewards.isnan().all(dim=1)] = torch.nan
    return totals


def save_statistics(functions: Sequence[Any], checkpoint: str) -> None:
    """Write the running statistics of rule sets that have some."""
    states = {rules.name: rules.state_dict() for rules in _rule_sets(functions) if rules.normalise}
    if states:
        (Path(checkpoint) / RULES_FILE).write_text(json.dumps(states))


def _rule_sets(functions: Sequence[Any]) -> list[RuleSet]:
    return [function for function in functions if isinstance(function, RuleSet)]


class RuleShares:
    """Knows which series of rules have begun that are 0 in a healthy run: each is logged once it was not."""

    def __init__(self) -> None:
        self._begun: set[str] = set()

    def resume(self, log_history: Iterable[Mapping[str, Any]]) -> None:
        """Go on with the series that a resumed run has logged."""
        self._begun |= {key for entry in log_history for key in entry if _SHARE.fullmatch(key.removeprefix("eval_"))}

    def drop_zeros(self, metrics: MutableMapping[str, list[float]], mode: str) -> None:
        """Take the series that were never anything but 0 out of TRL's metrics.

        Args:
            metrics: Values since the last entry, by name, the same on all ranks.
            mode: "train" or "eval", which have series of their own.
        """
        for key in [key for key in metrics if _SHARE.fullmatch(key)]:
            name = key if mode == "train" else f"eval_{key}"
            if any(metrics[key]):
                self._begun.add(name)
            elif name not in self._begun:
                del metrics[key]


# Rules one by one -------------------------------------------------------------------------------------------------


def per_rule(reward_funcs: Any, args: Any, options: MutableMapping[str, Any]) -> tuple[Any, list[float] | None]:
    """Return the reward functions with a column for each rule, and their weights; unchanged with another aggregation
    than `multi_objective_aggregation="normalize_then_sum"`.

    With it TRL normalises each reward function within its group (GDPO, arXiv:2601.05242). A RuleSet is one function,
    whose sum it would normalise as a whole; so the rules become columns. A standard deviation divides any weight away
    again: the columns come without theirs, which become TRL's reward weights and count after the normalisation.

    Args:
        reward_funcs: As TRL's trainer takes them.
        args: GRPOConfig.
        options: Keyword arguments of TRL's trainer; its `reward_processing_classes` are lined up with the columns.

    Raises:
        ConfigError: for a set with a setting that only a sum has.
    """
    functions = list(reward_funcs) if isinstance(reward_funcs, list) else [reward_funcs]
    is_per_rule = args.multi_objective_aggregation == "normalize_then_sum"
    if not is_per_rule or not any(isinstance(function, RuleSet | RuleColumn) for function in functions):
        return reward_funcs, args.reward_weights
    given = args.reward_weights or [1.0] * len(functions)
    tokenizers = options.get("reward_processing_classes")
    tokenizers = tokenizers if isinstance(tokenizers, list) else [tokenizers] * len(functions)
    if not len(given) == len(functions) == len(tokenizers):
        return reward_funcs, args.reward_weights  # TRL says what does not fit
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
    return [(replace(column, weighted=False), _weight(column.rules.rules[-1])) for column in columns]


def _weight(rule: Rule) -> float:
    if rule.schedule is not None:
        raise ConfigError(
            f"The schedule of rule '{rule.name}' scales its value, and multi_objective_aggregation="
            "'normalize_then_sum' divides any scale away again. Leave one of the two out."
        )
    return rule.weight
