"""Count the findings of a grammar checker: Harper for English, a LanguageTool server for other languages."""

import asyncio
import json
import re
from collections.abc import Hashable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar, NamedTuple
from urllib.parse import urlencode

from trl_ext.errors import SupportError
from trl_ext.rewards.base.http_client import check_server, fetch
from trl_ext.rewards.base.rule import Row, Rule, Verdict, check_choice, check_number
from trl_ext.rewards.rules.async_rule import AsyncRule, CallFailed, run_in_loop
from trl_ext.rewards.rules.language import words_in
from trl_ext.rewards.text.prose import normalized, prose, text_part, unmarked
from trl_ext.rewards.text.secrets import public

DIALECTS = ("american", "british", "australian", "canadian", "indian")  # in the order of Harper's numbers
SERVER = "docker run --rm -p 8010:8010 erikvl87/languagetool"
_FILLER = "x"  # Replaces code and formulas, so that the sentence around them stays complete.
_MOST_CHARS = 20_000  # Harper takes some 50 ms for 1,000 characters, and
# quadratic time on brackets and marks in a row: it gets parts, cut after a sentence or a word if possible.
_PARTS = re.compile(r"(?s).{1000,1998}[.!?\n]\s|.{1,1999}\s|.{1,2000}")
_DETAIL_CHARS = 80
_FORM = "application/x-www-form-urlencoded"
_free: dict[str, list[Any]] = {}  # linters that no thread uses, by dialect: each may lint one text at a time


@dataclass(frozen=True, slots=True)
class Grammar(Rule):
    """1.0 for English without mistakes, falling linearly to 0.0 at `zero_at` findings of Harper per 100 words.

    Spelling counts, too; meaning does not (see `Relevance`). Code, LaTeX, links and tags are cut out. A word that
    is not in Latin script is a finding. A completion without words is `no_answer`, a text above 20,000 characters
    `too_long`; both earn 0.0.

    Args:
        dialect: "american", "british", "australian", "canadian" or "indian" spelling; "any" takes American or British
            spelling, word by word.
        zero_at: Findings per 100 words that earn 0.0.
        where: "all" reads the whole completion, "after_think" the text after the last `</think>`.

    Raises:
        SupportError: Harper is not installed.

    Example:
        >>> Grammar().score(Row(None, "He go home. Then she follows him.", None, {})).detail
        "1 finding in 7 words: Agreement 'go'"
    """

    dialect: str = "any"
    zero_at: float = 20.0
    where: str = "all"

    def check(self) -> None:
        check_choice(self, "dialect", self.dialect, ("any", *DIALECTS))
        check_number(self, "zero_at", self.zero_at, "findings above 0", lambda number: number > 0)
        check_choice(self, "where", self.where, ("all", "after_think"))
        if find_spec("harper") is None:
            raise SupportError(f"Rule '{self.name}' needs Harper. Run: pip install 'trl_ext[grammar]'.")

    def warm_up(self) -> None:
        found_in("Warm upp.", self.dialect)  # a mistake: "any" asks both of its dialects

    def score(self, row: Row) -> Verdict:
        read = _read(self, row)
        if isinstance(read, Verdict):
            return read
        text, num_words = read
        foreign = len(words_in(text, "any")) - len(words_in(text, "Latin"))
        found = [finding for part in _PARTS.findall(text) for finding in found_in(part, self.dialect)]
        return _grade(self, found + ["word in another script"] * foreign, num_words)


@dataclass(frozen=True, slots=True)
class LanguageTool(AsyncRule):
    """`Grammar` for other languages, with the findings of a LanguageTool server. Each Chinese character is a word.

    A row has no value if the server fails (`infra_error`). A reply of another form, or of more than 2 MB, earns the
    floor with status `no_score`.

    Args:
        url: Address of the server: "http://localhost:8010".
        language: Code of a language that the server checks, such as "de-DE" or "zh-CN".
        zero_at, where: See `Grammar`.

    Raises:
        SupportError: No such server answers when the rule is built.
    """

    makes_calls: ClassVar[bool] = True
    costs: ClassVar[tuple[str, ...]] = ()

    url: str
    language: str
    zero_at: float = 20.0
    where: str = "all"

    def check(self) -> None:
        check_server(f"Rule '{self.name}'", "url", self.url, "", "http://localhost:8010")
        check_number(self, "zero_at", self.zero_at, "findings above 0", lambda number: number > 0)
        check_choice(self, "where", self.where, ("all", "after_think"))
        try:
            messages_of(run_in_loop(asyncio.wait_for(self._asked("."), min(self.timeout_s, 10.0))).result())
        except Exception as error:  # of sockets, of HTTP, or of the reply of another kind of server
            said = f"{public(self.url)} checks no {self.language!r} ({self.without_secrets(repr(error))[:200]})"
            raise SupportError(f"Rule '{self.name}': {said}. Start LanguageTool's server: {SERVER}") from error

    def server_key(self) -> Hashable:
        return self.url

    async def _asked(self, text: str) -> bytes:
        body = urlencode({"language": self.language, "text": text}).encode()
        return await fetch(f"{self.url.rstrip('/')}/v2/check", body, "", self.timeout_s, _FORM)

    async def score(self, row: Row) -> Verdict:  # type: ignore[override]
        read = _read(self, row)
        if isinstance(read, Verdict):
            return read
        text, num_words = read
        try:
            reply = await self.call(lambda: self._asked(text))
            return _grade(self, messages_of(reply), num_words)
        except CallFailed as failed:
            return self.verdict_of(failed)
        except (ValueError, LookupError, TypeError, RecursionError):
            shown = self.without_secrets(reply.decode("utf-8", "replace"))[:_DETAIL_CHARS]
            return Verdict(self.floor, "no_score", f"not LanguageTool's reply: {shown!r}")


def messages_of(reply: bytes) -> list[str]:
    """Return LanguageTool's message for each match; an exception for another reply."""
    return [str(match["message"])[:_DETAIL_CHARS] for match in json.loads(reply)["matches"]]


class _Words(NamedTuple):
    """A text to check, and its number of words."""

    text: str
    num_words: int


def _read(rule: Grammar | LanguageTool, row: Row) -> _Words | Verdict:
    """Return the text to check, or the verdict if there is nothing to check."""
    # Without lone surrogates, which both checkers refuse.
    text = normalized(text_part(row.text, rule.where)).encode("utf-8", "replace").decode()
    if len(text) > _MOST_CHARS:
        return Verdict(rule.floor, "too_long", f"{len(text)} characters, at most {_MOST_CHARS} are checked")
    num_words = len(words_in(prose(text), "any"))
    if not num_words:
        return Verdict(rule.floor, "no_answer", "no words outside of code and formulas")
    return _Words(unmarked(prose(text, _FILLER)), num_words)


def _grade(rule: Grammar | LanguageTool, findings: list[str], num_words: int) -> Verdict:
    value = max(0.0, 1.0 - 100 * len(findings) / num_words / rule.zero_at)
    shown = f": {'; '.join(findings[:3])}" if findings else ""
    return Verdict(value, "ok", f"{len(findings)} finding{'s' * (len(findings) != 1)} in {num_words} words{shown}")


def found_in(text: str, dialect: str) -> list[str]:
    """Return Harper's findings as texts: kind and words."""
    if dialect == "any":
        found = found_in(text, "american")
        words = [one.partition(" ")[2].strip("'\"") for one in found if one.startswith("Spelling")]
        wrong = found_in("\n".join(words), "british") if words else []
        return [one for one in found if not one.startswith("Spelling") or one in wrong]
    import harper

    free = _free.setdefault(dialect, [])
    try:
        linter = free.pop()
    except IndexError:
        linter = harper.Linter(DIALECTS.index(dialect))
    found = linter.lint(text, language="plaintext")
    free.append(linter)
    return [f"{one.lint_kind} {one.problem_text[:40]!r}" for one in found]
