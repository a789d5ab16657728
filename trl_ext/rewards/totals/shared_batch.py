"""One batch that the columns of a split set score one after the other: each rule is asked once for all of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trl_ext.rewards.rows import TRL_EXTRAS
from trl_ext.rewards.rule import Row, Rule
from trl_ext.rewards.scorer import Column


@dataclass(slots=True)
class SharedBatch:
    """The rows of the batch that TRL passes to every column, and the verdicts found so far.

    A batch is known by its argument objects, which are held as long as it is open. A column that asks a second time
    opens a new one, whatever it brings: the caller may have changed the lists in place.

    Pickles as a batch that nobody has asked for.
    """

    arguments: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    found: dict[str, Column] = field(default_factory=dict)
    served: set[str] = field(default_factory=set)

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedBatch, ()

    def columns(
        self,
        rules: Sequence[Rule],
        arguments: Mapping[str, Any],
        make: Callable[[], list[Row]],
        score: Callable[[Sequence[Rule], list[Row]], list[Column]],
    ) -> list[Column]:
        """The verdicts of these rules, of which the last is the one whose column asks.

        Args:
            rules: A rule and its gates.
            arguments: The call's arguments by name.
            make: Makes the rows of this call.
            score: Judges rows by rules.
        """
        given = {name: value for name, value in arguments.items() if name not in TRL_EXTRAS}
        same = given.keys() == self.arguments.keys() and all(self.arguments[name] is given[name] for name in given)
        if rules[-1].name in self.served or not same:
            self.arguments, self.rows, self.found, self.served = given, make(), {}, set()
        self.served.add(rules[-1].name)
        missing = [rule for rule in rules if rule.name not in self.found]
        self.found.update(zip((rule.name for rule in missing), score(missing, self.rows), strict=True))
        return [self.found[rule.name] for rule in rules]
