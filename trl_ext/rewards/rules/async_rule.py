"""The base of rules that wait for a server, such as a model that judges. Calls run at the same time and fail alone.

All calls of a process run in one event loop, in a separate thread, because Jupyter and TRL run other event loops.
"""

import asyncio
import hashlib
import json
import logging
import math
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any, ClassVar, NoReturn, TypeVar
from weakref import WeakSet

from trl_ext.errors import RuleError
from trl_ext.rewards.base.http_client import REFUSALS, LongReply
from trl_ext.rewards.base.rule import Row, Rule, Verdict, as_verdict, check_number, check_whole, place_of
from trl_ext.rewards.isolation.workers.breaker import FAILED
from trl_ext.rewards.isolation.workers.wire import Judged
from trl_ext.rewards.text.secrets import hide, secrets_in

Reply = TypeVar("Reply")
Result = TypeVar("Result")
Judgement = tuple[list[Judged], dict[str, float]]  # of a batch, with the metrics of its calls

# Pauses between the attempts of a call: 0.5 s, 1 s, 2 s, ..., each shortened at random, so that calls that failed
# together are not repeated together.
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
# Times that a call may meet the server's limit (429) before this counts among its attempts: a server that limits a
# third of the calls would otherwise lose a row in 27.
_LIMITED, _FREE_LIMITED = 429, 8
# Seconds from a call's first limit or pause on in which it may be repeated: longer than a limit per minute lasts.
_LONGEST_LIMIT_S = 60.0
# Bugs in the rule, which another attempt does not repair.
_BUGS = (TypeError, AttributeError, NameError, ImportError, AssertionError, NotImplementedError, RecursionError)
# HTTP codes of 400 to 499 after which another attempt may succeed.
_PASSING_CODES = (408, 409, 425, 429)


class CallFailed(Exception):
    """A call failed in all its attempts; the message gives the reason."""


@dataclass(slots=True)
class Calls:
    """The calls of one batch of rows."""

    slots: asyncio.Semaphore  # limits the number of simultaneous calls
    secrets: set[str]  # of the rule, to be hidden in texts
    most_failed: int | None = None  # rows that may fail before the remaining rows are given up; None: all may
    latencies_s: list[float] = field(default_factory=list)  # of each answered call
    num_attempts: int = 0
    num_retries: int = 0  # attempts after the first of each call
    num_failed: int = 0  # rows
    last_failure: str = ""  # of a call that was made
    costs: Counter[str] = field(default_factory=Counter)  # of the rule, by name

    @property
    def given_up(self) -> bool:
        """True if so many rows have failed that the remaining rows are given up."""
        return self.most_failed is not None and self.num_failed > self.most_failed

    @property
    def metrics(self) -> dict[str, float]:
        mean_s = sum(self.latencies_s) / len(self.latencies_s) if self.latencies_s else 0.0
        return {"latency_s": mean_s, "calls": self.num_attempts, "retries": self.num_retries, **self.costs}


@dataclass(slots=True)
class Pace:
    """The pause of a server: a limit that one call meets holds for all calls of this process."""

    until: float = 0.0  # end of the pause on the monotonic clock, in seconds
    num_pauses: int = 0  # since the server's last answer; each is twice as long, unless the server sets the time

    async def wait(self, latest: float) -> None:
        """Wait until the pause is over, or `latest`, and up to a quarter longer: calls are not repeated together."""
        while (left_s := min(self.until, latest) - time.monotonic()) > 0:
            await asyncio.sleep(left_s * random.uniform(1.0, 1.25))

    def pause(self, error: Exception, sent_at: float) -> None:
        """Start a pause after a call that met the limit; calls that were sent before it began do not extend it."""
        if sent_at >= self.until:
            self.until = time.monotonic() + pause_after(error, self.num_pauses)
            self.num_pauses += 1


@dataclass(slots=True)
class _Attempts:
    """The attempts of one call."""

    num_made: int = 0
    num_free: int = 0  # attempts that met the server's limit, and do not count
    latest: float = math.inf  # time on the monotonic clock after which a limit ends the call

    def meet_limit(self) -> None:
        """Set the end of the call, if this is its first limit."""
        self.latest = min(self.latest, time.monotonic() + _LONGEST_LIMIT_S)


@lru_cache(maxsize=256)
def pace_of(server: Hashable) -> Pace:
    return Pace()


_calls: ContextVar[Calls] = ContextVar("trl_ext_calls")


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncRule(Rule):
    """Base of rules with `async def score(self, row)`, which is awaited for many rows at a time.

    A row whose call fails in every attempt has no value (status `infra_error`); other rows keep their values. Above
    `max_infra_frac` of `Limits` the run ends. Equal rows are judged once, and their verdicts are cached (`cache_key`).

    TypeError, AttributeError, NameError, ImportError, AssertionError, NotImplementedError and RecursionError are bugs
    in the rule (`on_error`); all other exceptions are failures of the call. HTTP codes such as 401, which another
    attempt would meet again, are not repeated. A completion must not be able to cause a failure, because no value
    is better for it than a low value: give the floor if a server's reply has an unexpected form.

    Examples:
        >>> class Slow(AsyncRule):
        ...     async def score(self, row):
        ...         await asyncio.sleep(0.001)
        ...         return Verdict(float("thanks" in row.text))
        >>> [verdict.value for verdict in Slow().score_batch([Row(None, "thanks", None, {}), Row(None, "", None, {})])]
        [1.0, 0.0]

    Args:
        concurrency: Most simultaneous calls of each process of the training.
        timeout_s: Seconds until an attempt is given up.
        retries: Attempts after the first. The pause before each is 0.5 s, 1 s, 2 s and so on up to 30 s, or the time
            that the server asks for (`Retry-After` in seconds). A limit (429) pauses all calls to the server,
            and counts among a call's attempts from the ninth time on; 60 s after its first, a call is given up.
    """

    tier: ClassVar[str] = "inline"
    is_async: ClassVar[bool] = True
    # True: `score` makes calls by `await self.call(...)`. False: `score` is the call.
    makes_calls: ClassVar[bool] = False
    # Names that `spend` counts, each logged as `rules/<rule>/<name>`.
    costs: ClassVar[tuple[str, ...]] = ("tokens",)

    concurrency: int = 32
    timeout_s: float = 60.0
    retries: int = 2

    def __post_init__(self) -> None:
        if type(self).score is AsyncRule.score:
            raise RuleError(f"{type(self).__name__} is abstract. Give it async def score(self, row).")
        Rule.__post_init__(self)
        check_whole(self, "concurrency", self.concurrency, 1)
        check_whole(self, "retries", self.retries)
        check_number(self, "timeout_s", self.timeout_s, "seconds above 0", lambda seconds: seconds > 0)

    async def score(self, row: Row) -> Verdict | float:  # type: ignore[override]
        """Judge one row. It runs in an event loop and must not block."""
        raise NotImplementedError

    def score_batch(self, rows: Sequence[Row]) -> list[Verdict]:
        """Judge several rows at a time, from any thread."""
        return [judged.verdict for judged in self.submit(rows).result()[0]]

    def submit(self, rows: Sequence[Row], most_failed: int | None = None) -> "Future[Judgement]":
        """Start judging rows and return at once; after `most_failed` failed rows the remaining ones are given up."""
        return run_in_loop(self._all(list(rows), most_failed))

    def spend(self, **costs: float) -> None:
        """Add to metrics of this batch that `costs` names, as in `self.spend(tokens=200)`."""
        unknown = sorted(set(costs) - set(self.costs))
        if unknown:
            raise TypeError(f"spend({unknown[0]}=...) is not declared. Write costs = {(*self.costs, *unknown)!r}.")
        _calls.get().costs.update(costs)

    def unread(self, columns: Mapping[str, Any]) -> str:
        """Return the problem of a row's data, or "". Called for all rows before the first step."""
        return ""

    def verdict_of(self, failed: CallFailed) -> Verdict:
        """Return the floor for a failure that a completion may have caused; raise all others again."""
        if getattr(failed.__cause__, "status_code", None) in REFUSALS:
            return Verdict(self.floor, "refused", str(failed))
        if isinstance(failed.__cause__, LongReply):
            return Verdict(self.floor, "no_score", str(failed))
        raise failed

    async def call(self, make: Callable[[], Awaitable[Reply]]) -> Reply:
        """Await `make()` within `concurrency` and `timeout_s`, repeat it when it fails, and count it.

        Raises CallFailed if every attempt failed.
        """
        calls, pace, attempts = _calls.get(), pace_of(self.server_key()), _Attempts()
        while True:
            async with calls.slots:
                if pace.until > time.monotonic():
                    attempts.meet_limit()
                await pace.wait(attempts.latest)
                if calls.given_up:
                    raise CallFailed(f"{calls.last_failure}, as {calls.num_failed} rows before; not asked any more")
                calls.num_attempts += 1
                calls.num_retries += attempts.num_made > 0
                attempts.num_made += 1
                start = time.monotonic()
                try:
                    async with asyncio.timeout(LAST_S if _is_ending else self.timeout_s) as limit:
                        _limits.add(limit)
                        answer = await make()
                except (*_BUGS, CallFailed):
                    raise
                except Exception as error:  # A failure of any client: sockets, HTTP, the reply.
                    if code_of(error) == _LIMITED:
                        pace.pause(error, start)
                        attempts.meet_limit()
                    pause_s = self._pause_before_next(error, attempts)
                else:
                    calls.latencies_s.append(time.monotonic() - start)
                    pace.num_pauses = 0
                    return answer
            await asyncio.sleep(pause_s)

    def _pause_before_next(self, error: Exception, attempts: _Attempts) -> float:
        """Return the seconds until a failed call is repeated, 0 after a limit, for which `Pace` waits.

        Raises CallFailed if this attempt was the last.
        """
        is_limit = code_of(error) == _LIMITED
        is_last = _is_ending or not may_pass(error) or (is_limit and time.monotonic() >= attempts.latest)
        if is_limit and not is_last and attempts.num_free < _FREE_LIMITED:
            attempts.num_free += 1
        elif is_last or attempts.num_made - attempts.num_free > self.retries:
            is_late = isinstance(error, TimeoutError) and not str(error)
            late = f"no answer within {self.timeout_s:g} s" if is_late else ""
            said = (late or self.without_secrets(f"{type(error).__name__}: {error}"))[:300]
            raise CallFailed(f"{said} ({attempts.num_made} attempt{'s' * (attempts.num_made > 1)})") from error
        return 0.0 if is_limit else pause_after(error, attempts.num_made - attempts.num_free - 1)

    def _refuse(self, sentence: str) -> NoReturn:
        raise RuleError(f"Rule '{self.name}': {sentence}")

    def server_key(self) -> Hashable:
        """Return a key of the server: calls with equal keys pause together after a limit."""
        return type(self), self.name

    def without_secrets(self, text: str) -> str:
        """Return a text, such as a server's, without the rule's keys and the secrets in its addresses.

        Secrets of fewer than 8 characters stay. Parse a reply first: the result is for people.
        """
        calls = _calls.get(None)
        return hide(text, calls.secrets if calls else self._secrets())

    def _secrets(self) -> set[str]:
        return secrets_in({one.name: getattr(self, one.name) for one in fields(self)})

    def cache_key(self, row: Row) -> Hashable | None:
        """Return a digest of prompt, messages, the rule's columns, and the group if `reads_group`; None if they are
        not plain data. A rule that reads `row.step` overrides this."""
        group = [other.text for other in row.group] if self.reads_group else []
        cells = [row.columns.get(name) for name in self.columns]
        return content_key([row.prompt, row.text, row.messages, cells, group])

    async def _all(self, rows: list[Row], most_failed: int | None) -> Judgement:
        calls = Calls(asyncio.Semaphore(self.concurrency), self._secrets(), most_failed)
        calls.costs.update(dict.fromkeys(self.costs, 0))
        _calls.set(calls)
        return list(await asyncio.gather(*(self._one(row, calls) for row in rows))), calls.metrics

    async def _one(self, row: Row, calls: Calls) -> Judged:
        start = time.perf_counter()
        try:
            found = await (self.score(row) if self.makes_calls else self.call(lambda: self.score(row)))
            verdict = as_verdict(found)
        except CallFailed as error:
            if not calls.given_up:
                calls.last_failure = str(error)
            calls.num_failed += 1
            verdict = Verdict(None, "infra_error", str(error))
        # SystemExit, too: it would end the loop, and with it every later batch.
        except (Exception, SystemExit) as error:
            verdict = Verdict(None, "error", f"{type(error).__name__}: {error} ({place_of(error)})")
        verdict = replace(verdict, detail=self.without_secrets(verdict.detail))
        return Judged(verdict, 1e3 * (time.perf_counter() - start), verdict.status in FAILED and not _is_ending)


def may_pass(error: Exception) -> bool:
    """Return True if another attempt may succeed: the HTTP code does not mean that the request itself is wrong."""
    code = code_of(error)
    return not (isinstance(code, int) and 400 <= code < 500 and code not in _PASSING_CODES)


def code_of(error: Exception) -> Any:
    return getattr(error, "status_code", None) or getattr(getattr(error, "response", None), "status_code", None)


def pause_after(error: Exception, attempt: int) -> float:
    """Return the seconds to wait after an attempt (from 0): the server's time, or twice the last pause."""
    headers: Any = getattr(getattr(error, "response", None), "headers", None) or {}
    try:
        asked_s = float(headers.get("retry-after"))
    except (TypeError, ValueError):  # absent, or in another form
        asked_s = 0.0
    own_s = _FIRST_PAUSE_S * 2 ** min(attempt, 9) * random.uniform(0.5, 1.0)
    return min(asked_s if asked_s > 0 else own_s, _LONGEST_PAUSE_S)


def content_key(content: Any) -> bytes | None:
    """Return a digest of plain data; None for anything else."""
    try:
        text = json.dumps(content, sort_keys=True)
    except (TypeError, ValueError):
        return None
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def run_in_loop(coroutine: Coroutine[Any, Any, Result]) -> "Future[Result]":
    """Start a coroutine in this process's event loop; cancelling the future cancels it."""
    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            # They log each call's address with its secrets, if a handler shows INFO, as Ray's does.
            for client in ("httpx", "httpx2"):
                logging.getLogger(client).setLevel(logging.WARNING)
            # A daemon, so that a server that does not answer cannot keep the process alive.
            threading.Thread(target=_loop.run_forever, name="trl_ext-loop", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(coroutine, _loop)


LAST_S = 3.0
_limits: WeakSet[asyncio.Timeout] = WeakSet()  # of calls under way
_is_ending = False


def end_calls(*, soon: bool) -> None:
    """Give calls only LAST_S more seconds and no further attempt (`soon`), or end this limit.

    For a process that has to save and end. Rows without an answer have no value and do not count as failures.
    """
    global _is_ending
    _is_ending = soon

    def shorten(loop: asyncio.AbstractEventLoop) -> None:
        for limit in [one for one in _limits if not one.expired()]:
            with suppress(RuntimeError):  # its call has ended
                limit.reschedule(min(limit.when() or math.inf, loop.time() + LAST_S))

    if soon and _loop is not None:
        _loop.call_soon_threadsafe(shorten, _loop)


def _forget() -> None:
    """Forget the parent's loop, whose thread a forked child does not have, and its lock, which may be locked."""
    global _loop, _lock
    _loop, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)
