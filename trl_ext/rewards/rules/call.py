"""Make a rule from a plain function."""

from collections.abc import Callable
from dataclasses import dataclass
from inspect import iscoroutinefunction, signature

from trl_ext.errors import RuleError
from trl_ext.rewards.base.rule import Row, Rule, Verdict, text_tuple


@dataclass(frozen=True, slots=True)
class Call(Rule):
    """The value that a module-level function `f(row) -> float` returns; the rule is named after the function.

    In a YAML file: `{rule: call, function: my_rules.shouts}`, which imports the module `my_rules`.

    Args:
        function: Takes a Row and returns the value, a verdict, or None if the row cannot be judged.
        columns: Dataset columns that the function reads.
        isolate: True calls it in a process that can be killed; False in this process, in which a debugger works.
        group: True if the function reads `row.group`.

    Example:
        `RuleSet([Call(polite), Call(cites_source, columns=("source",), weight=0.5)])`
    """

    function: Callable[[Row], float | Verdict | None]
    columns: tuple[str, ...] = ()
    isolate: bool = True
    group: bool = False

    @property
    def reads_group(self) -> bool:  # type: ignore[override]
        return self.group

    @property
    def tier(self) -> str:  # type: ignore[override]
        return "worker" if self.isolate else "inline"

    def __post_init__(self) -> None:
        qualified = getattr(self.function, "__qualname__", "")
        if not qualified.isidentifier():  # "<lambda>", "f.<locals>.g" and callable objects
            raise RuleError(f"{self.function!r} is not a module-level function, so it does not pickle. Use def.")
        if iscoroutinefunction(self.function):
            raise RuleError(f"{qualified} is async. Write a subclass of AsyncRule, whose score() awaits it.")
        try:
            (first,) = signature(self.function).bind(None).arguments
        except (TypeError, ValueError):  # ValueError: a function of C without a signature
            first = "prompts"
        if first in ("prompts", "completions"):
            raise RuleError(
                f"{qualified} does not take one row. A rule's function is `def {qualified}(row)`, with `row.text`, "
                "`row.prompt` and `row.columns`. A function of TRL's form, `f(prompts, completions, **columns)`, is "
                "no rule: give it as reward_funcs."
            )
        object.__setattr__(self, "columns", text_tuple(self, "columns", self.columns))
        if not self.name:
            object.__setattr__(self, "name", qualified)
        Rule.__post_init__(self)

    def score(self, row: Row) -> Verdict:
        found = self.function(row)
        return found if isinstance(found, Verdict) else Verdict(found)
