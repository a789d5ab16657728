"""Judge whether the completion is JSON that fits a schema.

JSON is read strictly: no NaN or Infinity, no key twice, no lone surrogate, at most 64 levels. `jsonschema-rs` checks
the schema, without references to other files or the web. Patterns have no look-around and cost at most pattern size
times text size.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any, ClassVar

from trl_ext.errors import RuleError, SupportError
from trl_ext.rewards.base.rule import Row, Rule, Verdict, check_choice, check_number
from trl_ext.rewards.text.prose import after_think

MAX_CHARS = 200_000  # of JSON text; a longer text is `too_long`
MAX_DEPTH = 64  # levels of lists and objects; deeper JSON is `too_complex`
WHERE = ("all", "last_block", "either")
_MAX_PATTERN_BYTES = 1_000_000  # of a compiled pattern; limits the work per character of the completion

# Errors multiply with each level below `oneOf`, so only for small values the first error is explained.
_EXPLAINED_DEPTH = 3
_EXPLAINED_CHARS = 2000

# Matches a string, closed or not, as a whole, because brackets inside it are no levels.
_STRING_OR_BRACKET = re.compile(r'"(?>(?:[^"\\]++|\\(?:.|\Z))*)(?:"|\Z)|[\[\]{}]', re.DOTALL)


@dataclass(frozen=True, slots=True)
class JsonSchema(Rule):
    """1.0 if the completion is JSON that fits the schema, else 0.0.

    Only the text after the last `</think>` is read, even if that tag is part of a string. A row has no value
    (`gold_invalid`) if its schema cannot be used; a schema in the configuration is tested when the rule is built.

    Args:
        schema: Column with each row's schema, as JSON text (a mapping works too, but the `datasets` library fills
            mappings of different shape with nulls); or one schema for all rows, as a mapping.
        where: "all" allows nothing but JSON, "last_block" reads the last fenced block marked `json`, "either" reads
            such a block if it exists, else all.
        partial: Value of JSON that does not fit, from 0 to below 1.
        formats: True tests `format` (date, email, ...), which JSON Schema does not test from 2019-09 on.

    Example:
        >>> rule = JsonSchema({"type": "object", "required": ["name"]})
        >>> rule.score(Row(None, '{"name": "Ada"}', None, {})).value
        1.0
    """

    # The rule takes linear time: it limits size and depth first, and `is_valid` stores its result for each value and
    # part of the schema.
    tier: ClassVar[str] = "inline"

    schema: str | Mapping[str, Any] = "schema"
    where: str = "all"
    partial: float = 0.0
    formats: bool = False

    def check(self) -> None:
        check_choice(self, "where", self.where, WHERE)
        check_number(self, "partial", self.partial, "a number from 0 to below 1", lambda value: 0 <= value < 1)
        if not isinstance(self.schema, Mapping) and not (isinstance(self.schema, str) and self.schema):
            raise RuleError(f"Rule '{self.name}': schema is {self.schema!r}. Give a column's name or a mapping.")
        library()
        if self.columns:
            return
        try:
            compiled(self._schema_text({}), self.formats)
        except ValueError as error:
            raise RuleError(
                f"Rule '{self.name}': the schema cannot be used: {first_line(error)}. Correct it: references stay "
                "inside the schema, patterns have no look-around."
            ) from error

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.schema,) if isinstance(self.schema, str) else ()

    def score(self, row: Row) -> Verdict:
        try:
            validator = compiled(self._schema_text(row.columns), self.formats)
        except (TypeError, ValueError) as error:
            return Verdict(None, "gold_invalid", f"column '{self.schema}': {first_line(error)}")
        if isinstance(read := read_json(self, row, self.where), Verdict):
            return read
        found, value = read
        if validator.is_valid(value):
            return Verdict(1.0, "ok", "fits")
        small = len(found) <= _EXPLAINED_CHARS and nesting(found) <= _EXPLAINED_DEPTH
        first = next(iter(validator.iter_errors(value)), None) if small else None
        if first is None:
            return Verdict(float(self.partial), "ok", "does not fit")
        place = "".join(f"[{step!r}]" for step in first.instance_path)
        detail = f"does not fit{' at ' + place if place else ''}: {first_line(first)}"
        return Verdict(float(self.partial), "ok", detail[:300])

    def _schema_text(self, columns: Mapping[str, Any]) -> str:
        """Return the schema as JSON text, which is the key of the cache of compiled validators."""
        schema = self.schema if isinstance(self.schema, Mapping) else columns[self.schema]
        return json_text(schema)


def json_text(cell: Any) -> str:
    """Return a column's cell as JSON text: a text unchanged."""
    return cell if isinstance(cell, str) else json.dumps(cell)


def library(name: str = "jsonschema_rs") -> Any:
    """Return a module of the extra `json`, or raise SupportError."""
    try:
        return import_module(name)
    except ImportError as error:
        raise SupportError(f"Rules for JSON need {name}. Run: pip install 'trl_ext[json]'.") from error


@lru_cache(maxsize=1024)  # The completions of a GRPO group share their schema.
def compiled(schema: str, formats: bool) -> Any:
    """Compile a schema's validator; ValueError for a schema that cannot be used."""
    if len(schema) > MAX_CHARS or nesting(schema) > MAX_DEPTH:
        raise ValueError(f"more than {MAX_CHARS} characters or {MAX_DEPTH} levels")
    value = strict_json(schema)
    if not isinstance(value, dict):
        raise ValueError(f"a schema is an object, not {schema[:60]!r}")
    rs = library()
    patterns = rs.RegexOptions(size_limit=_MAX_PATTERN_BYTES)
    # Without `offline` an unknown $ref would be fetched from the web or read from the disk.
    return rs.validator_for(value, validate_formats=formats, pattern_options=patterns, offline=True)


def read_json(rule: Rule, row: Row, where: str) -> tuple[str, Any] | Verdict:
    """Return the completion's JSON as text and value, or the verdict on a completion without JSON."""
    text = after_think(row.text).strip()
    found = "" if where == "all" else last_block(text)
    found = text if where == "all" or (where == "either" and not found) else found
    if not found:
        return Verdict(rule.floor, "no_answer", "no closed ```json block" if text else "empty")
    if len(found) > MAX_CHARS:
        return Verdict(rule.floor, "too_long", f"{len(found)} of at most {MAX_CHARS} characters")
    if nesting(found) > MAX_DEPTH:
        return Verdict(rule.floor, "too_complex", f"more than {MAX_DEPTH} levels")
    try:
        return found, strict_json(found)
    except ValueError as error:
        return Verdict(rule.floor, "ok", f"not JSON: {first_line(error)}")


def last_block(text: str) -> str:
    """Return the content of the last closed block between lines "```json" and "```"; "" without a block.

    Example:
        >>> last_block("Here:\\n```json\\n{}\\n```\\nDone.")
        '{}'
    """
    inside: list[str] | None = None
    found = ""
    for line in text.split("\n"):
        mark = line.strip().lower()
        if mark.startswith("```") and inside is not None:
            found, inside = "\n".join(inside).strip(), None
        elif mark == "```json":
            inside = []
        elif inside is not None:
            inside.append(line)
    return found


def nesting(text: str) -> int:
    """Return the deepest level of brackets outside strings, 0 for a bare value, at most MAX_DEPTH + 1."""
    depth = deepest = 0
    for match in _STRING_OR_BRACKET.finditer(text):
        mark = match[0]
        if mark in ("[", "{"):
            depth += 1
            deepest = max(deepest, depth)
            if depth > MAX_DEPTH:
                break
        elif mark in ("]", "}"):
            depth -= 1
    return deepest


def strict_json(text: str) -> Any:
    """Read JSON text by RFC 8259; ValueError for anything less strict. Test `nesting` first."""
    value = json.loads(text, object_pairs_hook=_unique_keys)  # whole numbers of at most 4300 digits, Python's limit
    # ValueError for NaN and numbers beyond the range of floats; for a lone "\ud800" too, as UnicodeEncodeError.
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    return value


def first_line(error: Exception) -> str:
    message = getattr(error, "message", None) or str(error)
    return str(message).partition("\n")[0][:200].rstrip(".")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = dict(pairs)
    if len(keys) < len(pairs):
        raise ValueError("a key occurs twice in an object")
    return keys
