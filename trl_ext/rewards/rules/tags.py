"""Judge whether the completion has the required tag pairs, in linear time and without regular expressions."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from trl_ext.errors import RuleError
from trl_ext.rewards.base.rule import Row, Rule, Verdict, text_tuple
from trl_ext.rewards.text.prose import is_blank


@dataclass(frozen=True, slots=True, init=False)
class Tags(Rule):
    """Share of the required tag pairs that occur exactly once, closed, not empty and in order.

    A pair counts if it begins after the end of the last pair that counted; a nested pair does not. Space (also
    `&nbsp;`) and invisible characters do not fill a pair. A tag that the prompt ends with, such as the `<think>` of
    a chat template, counts as opened by the completion; a pair that the prompt closes does not count.

    Args:
        tags: Tag names in their order: positional arguments in Python, a list in YAML.

    Example:
        >>> Tags("think", "answer").score(Row(None, "<think>2+2</think> 4", None, {})).value
        0.5
    """

    tier: ClassVar[str] = "inline"

    tags: tuple[str, ...] = ()

    def __init__(self, *names: str, tags: Iterable[str] = (), **common: Any) -> None:
        known = {item.name: item.default for item in fields(Rule)}
        unknown = [key for key in common if key not in known]
        if unknown:
            raise TypeError(f"Tags has no field '{unknown[0]}'; there are tags, {', '.join(known)}")
        for key, value in {**known, **common, "tags": names or tags}.items():
            object.__setattr__(self, key, value)
        self.__post_init__()

    def check(self) -> None:
        tags = text_tuple(self, "tags", self.tags)
        if not tags or len(set(tags)) < len(tags) or any(set(tag) & set("<>/ \t\n") for tag in tags):
            raise RuleError(f"Rule '{self.name}': tags are {list(tags)}. Give different names, such as 'think'.")
        object.__setattr__(self, "tags", tags)

    def score(self, row: Row) -> Verdict:
        prompt = (row.prompt if isinstance(row.prompt, str) else row.prompt_end).rstrip()
        begun = next((f"<{tag}>" for tag in self.tags if prompt.endswith(f"<{tag}>")), "")
        text, end = begun + row.text, 0
        failed = []
        for tag in self.tags:
            opener, closer = f"<{tag}>", f"</{tag}>"
            opened, closed = text.find(opener), text.find(closer)
            inside = opened + len(opener)
            is_once = text.find(opener, inside) < 0 and text.find(closer, closed + 1) < 0
            is_closed = is_once and end <= opened and inside < closed
            if is_closed and not is_blank(text[inside:closed]):
                end = closed + len(closer)
            else:
                failed.append(tag)
        detail = f"not once, closed, filled and in order: {', '.join(failed)}" if failed else "all there"
        return Verdict(1.0 - len(failed) / len(self.tags), "ok", detail)
