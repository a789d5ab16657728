"""`multi_objective_aggregation="normalize_then_sum"` with rules: each rule is normalised within its group by itself.

TRL does so with each reward function (GDPO, arXiv:2601.05242). A RuleSet is one function, whose sum it would normalise
as a whole; so the rules become columns of their own. A standard deviation divides any weight away again: the columns
come without theirs, which become TRL's reward weights and count after the normalisation.
"""

from collections.abc import MutableMapping
from dataclasses import replace
from typing import Any

from trl_ext.errors import ConfigError
from trl_ext.rewards import Rule, RuleColumn, RuleSet


def per_rule(reward_funcs: Any, args: Any, options: MutableMapping[str, Any]) -> tuple[Any, list[float] | None]:
    """Return the reward functions with a column for each rule, and their weights; unchanged with another aggregation.

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
        _check_sum(function)
        columns = function.split()
    elif isinstance(function, RuleColumn):
        columns = [function]
    else:
        return [(function, 1.0)]
    return [(replace(column, weighted=False), _weight(column.rules.rules[-1])) for column in columns]


def _check_sum(rules: RuleSet) -> None:
    for name, is_set in (("clip", rules.clip is not None), ("normalise", rules.normalise)):
        if is_set:
            raise ConfigError(
                f"{name}={getattr(rules, name)} of the rule set '{rules.name}' is of its sum, and "
                "multi_objective_aggregation='normalize_then_sum' takes each rule by itself. Leave one of the two out."
            )


def _weight(rule: Rule) -> float:
    if rule.schedule is not None:
        raise ConfigError(
            f"The schedule of rule '{rule.name}' scales its value, and multi_objective_aggregation="
            "'normalize_then_sum' divides any scale away again. Leave one of the two out."
        )
    return rule.weight
