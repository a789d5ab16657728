"""Rules of one function, which tests run in their own process."""

from collections.abc import Callable
from typing import Any

from trl_ext.rewards.base.rule import Row, Rule, Verdict


def rule_class(name: str, score: Callable[[Row], Any], columns: tuple[str, ...] = (), **attributes: Any) -> type[Rule]:
    """A class of rules whose verdict is what the function returns, or has that as its value."""

    def verdict(self: Rule, row: Row) -> Verdict:
        found = score(row)
        return found if isinstance(found, Verdict) else Verdict(found)

    return type(name, (Rule,), {"tier": "inline", "columns": columns, "score": verdict, **attributes})
