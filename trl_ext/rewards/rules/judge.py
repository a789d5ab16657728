"""Have a language model behind an OpenAI-compatible server judge completions: alone, or against another answer.

A judge reads text that a policy writes to please it, so what comes back is trusted as little as possible: the score is
read from the last lines of the judge's reply (or its JSON) and nowhere else, nothing that it may only quote is read
before the last one, a score out of bounds is none, and a reply without a score earns the floor, never None. Question
and answers stand between tags that the policy cannot foresee.
None of this keeps a judge from being persuaded: docs/reference/judges.md.
"""

import asyncio
import hashlib
import json
import os
import re
import statistics
import unicodedata
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib.util import find_spec
from typing import Any, ClassVar, NamedTuple, NoReturn

import regex
from jinja2 import TemplateError

from trl_ext.errors import RuleError, SupportError
from trl_ext.rewards.rows import is_null
from trl_ext.rewards.rule import Row, Verdict, check_choice, check_number, check_whole
from trl_ext.rewards.rules import judge_prompt
from trl_ext.rewards.rules.async_rule import AsyncRule, CallFailed, check_server, content_key
from trl_ext.rewards.scorer import warn_once
from trl_ext.rewards.text.prose import is_blank, text_part
from trl_ext.rewards.text.secrets import public
from trl_ext.rewards.text.visible import after_think
from trl_ext.rewards.totals.shaping import pair_of

# What templates are given beside the dataset's columns.
_GIVEN = frozenset({"prompt", "completion", "messages", "gold", "first", "second", "tag"})
_NUMBER = re.compile(r"-?\d{1,9}(?:\.\d{1,9})?")
_LONGEST_LINE = 500  # characters of a reply's last line
_LAST_LINES = 3  # in which a score may stand, blank ones not counted
_FENCED = re.compile(r"```(?:json)?[ \t]*\n(.*)```", re.DOTALL | re.IGNORECASE)
_PATTERN_S = 0.5
MOST_REPLY_BYTES = 2_000_000
_DETAIL_CHARS = 300
# HTTP codes that a completion may bring about, since it is too long or is filtered. They earn the floor, and count as
# failures all the same, since a wrong configuration brings them about for every row.
REFUSALS = (400, 403, 413, 422, 451)
_OF_SERVER = {"base_url", "model", "api_key_env", "price", "extra_body"}  # what `fallback` may change


class JudgeReply(NamedTuple):
    """A judge's reply: its text, None where it is missing, the tokens that it took, and True where it was cut off."""

    text: str | None
    tokens: int
    is_cut: bool
    tokens_in: int = 0
    tokens_out: int = 0


class JudgeRequest(NamedTuple):
    """A request to a judge: its messages, what reads the value in what a reply says, and the reply's schema."""

    messages: list[dict[str, str]]
    read: Callable[[Any], Any]
    schema: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class Judge(AsyncRule):
    """A language model's score as a share, 0.0 for the lowest of `scores` and 1.0 for the highest.

    With `against`: which of two answers it prefers, 1.0 for the completion, 0.0 for the other one, 0.5 for a tie. It
    is asked `votes` times, and the median counts, which of two values is the majority. With `against` each vote is the
    mean of both orders, since judges favour a position.

    A row has no value when the server fails (`infra_error`), or when its gold or other answer is missing
    (`gold_invalid`). A reply of another form than asked for is `no_score`, a request that the server does not take
    `refused`; both earn 0.0, since a completion may bring them about.

    Args:
        model: The model's name on the server.
        base_url: Address of the OpenAI-compatible server; by default vLLM's on this machine.
        api_key_env: Environment variable that holds the key. Empty: no key. A key itself is never a field.
        rubric: What a good answer is. Empty: right, complete, clear, no longer than needed.
        template: What the judge is shown, in Jinja: `prompt`, `completion`, `messages` (its turns, tool calls among
            them), `gold`, `tag` (a code for tags that the completion cannot foresee), with `against` also `first` and
            `second`; any other name is a column. Empty: question, right answer if there is one, and answer, each
            between tags.
        gold: Column with the right answer, or several, which the judge is shown. Empty: none.
        against: Column with the answer to compare with. Empty: the completion is judged alone.
        scores: Lowest and highest score that the judge may give.
        choices: Words that the judge chooses from, each with its value, 0.0 to 1.0, such as `{"yes": 1, "no": 0}`,
            instead of a score. Empty: it gives a score.
        pattern: Regular expression that fits one of the last three lines of the reply; its first group is the score, a
            word of `choices`, or "A", "B" or "tie". Give a rubric that asks for such a line. Empty: `Score: N`,
            `Verdict: yes`, or `Better: A`.
        schema: True, or a JSON schema that the reply must fit (`response_format`); the score is its key "score", or
            "better". False: the last lines decide.
        votes: Times that the judge is asked; odd.
        temperature: Of the judge's sampling; None leaves it to the server.
        max_tokens: Longest reply, thoughts included.
        max_chars: Longest completion, in characters; a longer one is `too_long` and not sent.
        where: "after_think" shows the judge what follows the last `</think>`, "all" the whole completion.
        extra_body: Further keys of the request, such as `{"chat_template_kwargs": {"enable_thinking": False}}`.
        fallback: Further servers, each with what differs of `base_url`, `model`, `api_key_env`, `price`, `extra_body`;
            to another address no key is sent unless it is named. The next one is asked where one cannot be reached,
            answers 5xx, or is paused.
        price: US dollars for a million tokens, `{"input": 0.1, "output": 0.4}`, for the metric `cost_usd`.

    Example:
        `RuleSet([Answer(), Judge("Qwen/Qwen3-8B", rubric="Polite, and in plain words.", weight=0.3, gate="answer")])`
    """

    makes_calls: ClassVar[bool] = True
    given: ClassVar[frozenset[str]] = _GIVEN

    model: str
    base_url: str = "http://localhost:8000/v1"
    api_key_env: str = ""
    rubric: str = ""
    template: str = ""
    gold: str = ""
    against: str = ""
    scores: tuple[float, float] = (1.0, 10.0)
    choices: Mapping[str, float] | None = None
    pattern: str = ""
    schema: bool | Mapping[str, Any] = False
    votes: int = 1
    temperature: float | None = None
    max_tokens: int = 2048
    max_chars: int = 50_000
    where: str = "after_think"
    extra_body: Mapping[str, Any] | None = None
    fallback: Sequence[Mapping[str, Any]] = ()
    price: Mapping[str, float] | None = None

    @property
    def servers(self) -> list["Judge"]:
        """The rule itself, and as it is at each server of `fallback`."""
        own = ({"api_key_env": ""} | {**one} if "base_url" in one else one for one in self.fallback)
        return [self, *(replace(self, **{**changes, "fallback": ()}) for changes in own)]

    @property
    def _key(self) -> str:
        return os.environ.get(self.api_key_env, "") if self.api_key_env else ""

    @property
    def costs(self) -> tuple[str, ...]:  # type: ignore[override]
        """What calls cost; `answered_2` counts the calls that the second server answered."""
        answered = (f"answered_{place + 1}" for place in range(len(self.servers)) if self.fallback)
        priced = ("cost_usd",) if any(server.price for server in self.servers) else ()
        return ("tokens", "tokens_in", "tokens_out", *priced, *answered)

    @property
    def judges_correctness(self) -> bool:  # type: ignore[override]
        """True where the judge is shown the right answer; else it judges a matter of form."""
        return bool(self.gold)

    def check(self) -> None:
        if find_spec("openai") is None:
            raise SupportError("Judge needs the package openai. Install it: pip install 'trl_ext[judge]'.")
        self._check_server()
        self._check_shown()
        self._check_reply()
        check_choice(self, "where", self.where, ("after_think", "all"))
        check_whole(self, "max_tokens", self.max_tokens, 1)
        check_whole(self, "max_chars", self.max_chars, 1)
        check_whole(self, "votes", self.votes, 1)
        if self.votes % 2 == 0:
            self._refuse(f"votes is {self.votes}. Give an odd number, so that there is a majority.")
        if self.temperature is not None:
            check_number(self, "temperature", self.temperature)
            if self.votes > 1 and self.temperature == 0:
                self._refuse(f"{self.votes} votes at temperature 0 are one vote. Give a temperature above 0.")
        if self.extra_body is not None and not isinstance(self.extra_body, Mapping):
            self._refuse(f"extra_body is {self.extra_body!r}. Give keys of the request, with their values.")

    def _refuse(self, sentence: str) -> NoReturn:
        raise RuleError(f"Rule '{self.name}': {sentence}")

    def _check_server(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            self._refuse(f"model is {self.model!r}. Give the name that the server has for it.")
        check_server(f"Rule '{self.name}'", "base_url", self.base_url, self.api_key_env, "http://localhost:8000/v1")
        if self.price is not None:
            if not isinstance(self.price, Mapping) or self.price.keys() != {"input", "output"}:
                self._refuse(f"price is {self.price!r}. Give {{input: 0.1, output: 0.4}}, for a million tokens.")
            for usd in self.price.values():
                check_number(self, "price", usd, "dollars of at least 0", lambda usd: usd >= 0)
        if isinstance(self.fallback, str | Mapping) or not all(
            isinstance(one, Mapping) and {"base_url", "model"} & one.keys() and one.keys() <= _OF_SERVER
            for one in self.fallback
        ):
            self._refuse(f"fallback is {self.fallback!r}. Give a list such as [{{base_url: ..., model: ...}}].")
        list(self.servers)  # each checks itself when it is made

    def _check_shown(self) -> None:
        for key in ("rubric", "template", "gold", "against", "pattern"):
            if not isinstance(getattr(self, key), str):
                self._refuse(f"{key} is {getattr(self, key)!r}. Give a text.")
        try:
            names = judge_prompt.compiled(self._template)[1]
        except TemplateError as error:
            raise RuleError(f"Rule '{self.name}': the template is not valid Jinja: {error}.") from error
        needed = judge_prompt.NEEDED[self._mode]
        if (
            not needed <= names
            or ({"first", "second"} & names) - needed
            or (self._mode not in ("pair", "rank") and not {"completion", "messages"} & names)
        ):
            shown = ", ".join(sorted(names & self.given)) or "nothing"
            wanted = "{{ completion }} or {{ messages }}, and with `against` {{ first }} and {{ second }}"
            if self._mode not in ("alone", "pair"):
                wanted = "the answer and {{ criteria }}" if self._mode == "rubric" else "{{ answers }}"
            self._refuse(f"the template must show {wanted}; it shows {shown}. Change it.")

    def _check_reply(self) -> None:
        object.__setattr__(self, "scores", pair_of(f"Rule '{self.name}'", "scores", self.scores))
        if self.choices is not None:
            self._check_choices(self.choices)
        key = judge_prompt.KEYS[self._mode]
        if not isinstance(self.schema, bool | Mapping):
            self._refuse(f"schema is {self.schema!r}. Give true, false or a JSON schema.")
        if isinstance(self.schema, Mapping) and key not in self.schema.get("properties", {}):
            self._refuse(f"the schema has no property '{key}', which is the score. Add it.")
        if self.pattern and self.schema:
            self._refuse("there are a pattern and a schema. Give one: a reply has one form.")
        if self.pattern and not self.rubric:
            self._refuse("there is a pattern. Give a rubric, too, that asks the judge for such a last line.")
        try:
            groups = regex.compile(self._pattern).groups
        except regex.error as error:
            raise RuleError(f"Rule '{self.name}': {self.pattern!r} is no regular expression: {error}.") from error
        if not groups:
            self._refuse(f"pattern is {self.pattern!r}. Put the score in a group, such as Score: (\\d+).")

    def _check_choices(self, choices: Any) -> None:
        words = dict(choices) if isinstance(choices, Mapping) else {}
        different = {word.strip().casefold() for word in words if isinstance(word, str) and word.strip()}
        if len(different) < max(2, len(words)) or not all(
            isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1
            for value in words.values()
        ):
            self._refuse(
                f"choices is {choices!r}. Give two or more different words, each with a value from 0 to 1; in YAML "
                "put yes, no, on and off in quotes."
            )
        if self.against or self.scores != (1.0, 10.0):
            self._refuse("there are choices and scores, or against. Give one: the judge gives one kind of verdict.")

    @property
    def columns(self) -> tuple[str, ...]:
        named = [self.gold, self.against, *sorted(judge_prompt.compiled(self._template)[1] - self.given)]
        return tuple(dict.fromkeys(filter(None, named)))

    def cache_key(self, row: Row) -> Hashable | None:
        """All that the judge is shown."""
        return self._verdict_at_once(row) or content_key([one.messages for one in self._requests(row)])

    async def score(self, row: Row) -> Verdict:  # type: ignore[override]
        at_once = self._verdict_at_once(row)
        if at_once:
            return at_once
        requests = self._requests(row)
        replies = await asyncio.gather(
            *(
                self.once((vote, content_key(asked.messages)), partial(self._ask, asked))
                for vote in range(self.votes)
                for asked in requests
            ),
            return_exceptions=True,
        )
        for reply in replies:  # Bugs and failures first: what was refused may be for their sake.
            if isinstance(reply, BaseException):
                raise reply
        for reply in replies:
            if isinstance(reply, str):
                return Verdict(self.floor, "refused", reply)
        return self._verdict([reply for reply in replies if isinstance(reply, JudgeReply)], requests)

    def _verdict(self, replies: list[JudgeReply], requests: list[JudgeRequest]) -> Verdict:
        """The verdict of all replies, those of one vote behind each other, each to one of the requests in turn."""
        num_orders, texts = len(requests), [reply.text for reply in replies]
        found = [self._value(reply, requests[place % num_orders]) for place, reply in enumerate(replies)]
        if all(value is None for value in found):
            return self._no_score(replies)
        values = [self.floor if value is None else value for value in found]
        votes = [statistics.fmean(values[place : place + num_orders]) for place in range(0, len(values), num_orders)]
        shown = ", ".join("none" if value is None else f"{value:.3g}" for value in found)
        reasons = next(text for text, value in zip(texts, found, strict=True) if value is not None)
        return Verdict(statistics.median(votes), "ok", f"{shown}: {str(reasons)[-_DETAIL_CHARS:]}")

    def _no_score(self, replies: list[JudgeReply]) -> Verdict:
        """The verdict where replies hold no score: one that was cut off tells why, else the first."""
        reply = next((reply for reply in replies if reply.is_cut), replies[0])
        cause = f"cut off at max_tokens={self.max_tokens}" if reply.is_cut else "no score in the reply"
        return Verdict(self.floor, "no_score", f"{cause}: {str(reply.text)[-_DETAIL_CHARS:]!r}")

    # What the judge is shown ----------------------------------------------------------------------------------------

    @property
    def _mode(self) -> str:
        return "pair" if self.against else "alone"

    @property
    def _is_json(self) -> bool:
        return bool(self.schema) or self._mode == "rubric"

    @property
    def _template(self) -> str:
        return self.template or judge_prompt.TEMPLATES[self._mode]

    def unread(self, columns: Mapping[str, Any]) -> str:
        """Return which column is empty, if one is."""
        for column in filter(None, (self.gold, self.against)):
            cell = columns.get(column)
            if is_null(cell) or is_blank(judge_prompt.shown_text(cell)):
                return f"column '{column}' is empty"
        return ""

    def _verdict_at_once(self, row: Row) -> Verdict | None:
        """The verdict on a row that needs no judge; None for all others."""
        if why := self.unread(row.columns):
            return Verdict(None, "gold_invalid", why)
        text = text_part(row.text, self.where)
        if len(text) > self.max_chars:
            return Verdict(self.floor, "too_long", f"{len(text)} characters")
        return Verdict(self.floor, "no_answer", "the text is blank") if is_blank(text) else None

    def _requests(self, row: Row) -> list[JudgeRequest]:
        """The requests to send: one, or with `against` one for each order."""
        own = text_part(row.text, self.where)
        given: dict[str, Any] = {name: judge_prompt.shown_text(row.columns.get(name)) for name in self.columns}
        given |= {"prompt": judge_prompt.shown_prompt(row.prompt), "completion": own, "gold": given.get(self.gold, "")}
        given["messages"] = [dict(message) for message in row.messages]
        shown = self._shown(row, given)
        # Nobody writes a text that holds the digest of itself. Answers that are compared give it in any order.
        compared = {"completion", "messages", self.against} if shown[0][0].keys() & {"first", "answers"} else ()
        parts = [{name: given[name] for name in given if name not in compared}, [names for names, _ in shown]]
        texts = sorted(json.dumps(part, sort_keys=True, default=str) for part in (parts[0], *parts[1]))
        code = hashlib.blake2b("\0".join(texts).encode(), digest_size=6).hexdigest()
        form = "" if self.pattern or isinstance(self.schema, Mapping) else "json" if self._is_json else "line"
        asked = judge_prompt.system_message(self._mode, self.rubric, form, self.scores, self.choices or ())
        system = {"role": "system", "content": asked}
        template = judge_prompt.compiled(self._template)[0]
        requests = []
        for names, read in shown:
            # No request can hold a lone surrogate.
            text = template.render({**given, **names, "tag": code}).encode("utf-8", "replace").decode()
            requests.append(JudgeRequest([system, {"role": "user", "content": text}], read, self._schema_of(names)))
        return requests

    def _shown(self, row: Row, given: Mapping[str, Any]) -> list[tuple[dict[str, Any], Callable[[Any], Any]]]:
        """What each request shows besides `given`, with the function that reads the value in what its reply says."""
        if not self.against:
            return [({}, self._value_of)]
        own, other = given["completion"], given[self.against]
        return [
            ({"first": own, "second": other}, self._value_of),
            ({"first": other, "second": own}, partial(self._value_of, is_swapped=True)),
        ]

    def _schema_of(self, names: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The JSON schema of a reply to what shows `names`; None where it may have any form."""
        if isinstance(self.schema, Mapping):
            return self.schema
        return judge_prompt.shipped_schema(self._mode, self.scores, self.choices or ()) if self.schema else None

    # What it replies ------------------------------------------------------------------------------------------------

    @property
    def _pattern(self) -> str:
        if self.choices and not self.pattern:
            words = "|".join(map(regex.escape, sorted(map(str.strip, self.choices), key=len, reverse=True)))
            return rf"(?i)(?:Verdict:\s*+)?({words})\.?"
        return self.pattern or judge_prompt.PATTERNS[self._mode]

    def server_key(self) -> Hashable:
        """The server's address: judges of one server pause together."""
        return self.base_url

    async def _ask(self, asked: JudgeRequest) -> JudgeReply | str:
        """The reply, or the sentence with which the server refuses the request."""
        servers = self.servers
        calls = [
            ((one.base_url, one.model), partial(self._send, one, asked, f"answered_{place}" if self.fallback else ""))
            for place, one in enumerate(servers, 1)
        ]
        try:
            return await self.call(calls[0][1], *calls[1:])
        except CallFailed as failed:
            if getattr(failed.__cause__, "status_code", None) in REFUSALS:
                return str(failed)
            raise

    async def _send(self, server: "Judge", asked: JudgeRequest, counted: str) -> JudgeReply:
        """The reply of one of `servers`, counted under the name if there is one."""
        request: dict[str, Any] = {"model": server.model, "messages": asked.messages}
        request["max_completion_tokens"] = self.max_tokens
        if self.temperature is not None:
            request["temperature"] = self.temperature
        if asked.schema is not None:
            form = {"name": "judgement", "strict": True, "schema": dict(asked.schema)}
            request["response_format"] = {"type": "json_schema", "json_schema": form}
        if server.extra_body:
            request["extra_body"] = dict(server.extra_body)
        reply = await send(client_of(os.getpid(), server.base_url, server._key, self.timeout_s), request)
        self.spend(tokens=reply.tokens, tokens_in=reply.tokens_in, tokens_out=reply.tokens_out)
        self.spend(**({counted: 1} if counted else {}))
        if server.price:
            usd = server.price["input"] * reply.tokens_in + server.price["output"] * reply.tokens_out
            self.spend(cost_usd=usd / 1e6)
            if not reply.tokens_in + reply.tokens_out:
                said = f"{server.base_url} sends no numbers of tokens (usage): cost_usd leaves its calls out."
                warn_once(("no usage", self.name, server.base_url), f"Rule '{self.name}': {public(said)}")
        return reply._replace(text=reply.text and self.without_secrets(reply.text))

    def _value(self, reply: JudgeReply, asked: JudgeRequest) -> Any:
        """The value of one reply; None where it holds no score."""
        if reply.is_cut or reply.text is None:
            return None
        read, shown = self._in_json if self._is_json else self._in_lines, asked.messages[-1]["content"]
        return asked.read(read(reply.text, shown))

    def _value_of(self, said: Any, is_swapped: bool = False) -> float | None:
        """The value of what a reply says, 0.0 to 1.0; None where that is no score."""
        if self.choices:
            words = {word.strip().casefold(): float(value) for word, value in self.choices.items()}
            return words.get(str(said).strip().casefold())
        if self.against:
            value = {"a": 1.0, "b": 0.0, "tie": 0.5}.get(str(said).lower())
            return 1.0 - value if is_swapped and value is not None else value
        if isinstance(said, str):
            said = float(said) if _NUMBER.fullmatch(said.strip()) else None
        if isinstance(said, bool) or not isinstance(said, int | float):
            return None
        low, high = self.scores
        # Out of bounds is none, and not the best or the worst: the judge did not do as asked.
        return (said - low) / (high - low) if low <= said <= high else None

    def _in_json(self, text: str, shown: str) -> Any:
        """The score of a reply that is JSON as a whole, or behind its thoughts, also in one Markdown fence."""
        for part in (text, after_think(text)):
            fenced = _FENCED.fullmatch(part.strip())
            try:
                found = json.loads(fenced[1] if fenced else part)
            except (ValueError, RecursionError):
                continue
            is_trusted = (part is text and not fenced) or not is_quoted(part, shown)
            return found.get(judge_prompt.KEYS[self._mode]) if isinstance(found, dict) and is_trusted else None
        return None

    def _in_lines(self, text: str, shown: str) -> Any:
        """What the last line that fits holds, among the last three, none of them a thought.

        Before the last one nothing counts that stands in what the judge was shown: it may quote that.
        """
        lines = [line for line in text.split("\n") if line.strip()][-_LAST_LINES:]
        for place, line in enumerate(reversed(lines)):
            bare = line.strip().strip("*_#`").strip()
            if len(bare) <= _LONGEST_LINE:
                try:
                    match = regex.compile(self._pattern).fullmatch(bare, timeout=_PATTERN_S)
                except TimeoutError:
                    return None
                if match:
                    return None if place and is_quoted(bare, shown) else match[1]
            if "think>" in line:
                return None
        return None


def is_quoted(part: str, shown: str) -> bool:
    """True where the letters and digits of a part of a reply follow each other in what the judge was shown."""
    bare = ("".join(filter(str.isalnum, unicodedata.normalize("NFKC", text).casefold())) for text in (part, shown))
    return next(bare) in next(bare)


@lru_cache(maxsize=8)
def client_of(pid: int, base_url: str, key: str, timeout_s: float) -> Any:
    """The client of a server. Its connections belong to a process, so that a forked one gets its own."""
    from openai import AsyncOpenAI

    # AsyncRule tries again, and counts. Without a key a word is sent, lest the client sends that of OPENAI_API_KEY.
    return AsyncOpenAI(api_key=key or "none", base_url=base_url, timeout=timeout_s, max_retries=0)


async def send(client: Any, request: Mapping[str, Any]) -> JudgeReply:
    """Ask for one chat completion; ValueError for a reply that is none, or that is above 2 MB."""
    body = bytearray()
    async with client.chat.completions.with_streaming_response.create(**request) as response:
        async for part in response.iter_bytes():
            body += part
            if len(body) > MOST_REPLY_BYTES:
                raise ValueError(f"the server's reply has more than {MOST_REPLY_BYTES} bytes")
    try:
        found = json.loads(body)
        choice = found["choices"][0]
        text, usage = choice["message"].get("content"), found.get("usage") or {}
        counts = [usage.get(f"{name}_tokens") for name in ("total", "prompt", "completion")]
        is_cut = choice.get("finish_reason") == "length"
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"the server's reply is no chat completion: {bytes(body)!r}") from error
    tokens, *apart = (count if isinstance(count, int) and 0 <= count < 10**9 else 0 for count in counts)
    return JudgeReply(text if isinstance(text, str) else None, tokens, is_cut, *apart)
