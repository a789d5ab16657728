"""Turn a server's tools into methods, with the signature and docstring from which transformers makes a schema."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal

from trl_ext.errors import RuleError

_TAKEN = ("reset", "get_reward", "earned", "lost", "tools")  # by TRL and by `Environment`
_TYPES: dict[Any, Any] = {"string": str, "integer": int, "number": float, "boolean": bool, "object": dict}
_Part = inspect.Parameter


def with_tools(base: type, tools: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]], page: Any = None) -> Any:
    """Give a class a method for each tool, which calls `self._call(name, arguments)`.

    Args:
        base: The class.
        tools: By name, the tool's description and the JSON schema of its arguments.
        page: The page that the schemas' references point into.

    Raises:
        RuleError: if a method cannot have the name of a tool or of an argument.
    """
    for name, (said, schema) in tools.items():
        try:
            setattr(base, name, _method(name, said.get("description") or said.get("summary") or name, schema, page))
        except ValueError as error:
            raise RuleError(f"The tool {name!r} cannot be a method: {error}. Rename that, or leave it out.") from error
    base.tools = dict(tools)  # type: ignore[attr-defined]
    return base


def _method(name: str, about: str, schema: Mapping[str, Any], page: Any) -> Callable[..., str]:
    def method(self: Any, /, **arguments: Any) -> str:
        return self._call(name, arguments)

    if not name.isidentifier() or name.startswith("_") or name in _TAKEN:
        raise ValueError(f"{name!r} is taken, or no name")
    schema = _resolved(schema, page)
    fields, needed = schema.get("properties", {}), schema.get("required", ())
    kinds = {key: _type(field, page) for key, field in fields.items()}
    parts = [_Part("self", _Part.POSITIONAL_ONLY)]
    for key, kind in kinds.items():
        parts.append(_Part(key, _Part.KEYWORD_ONLY, default=_Part.empty if key in needed else None, annotation=kind))
    said = [f"    {key}: {' '.join(field.get('description', key).split())}" for key, field in fields.items()]
    method.__doc__ = "\n".join([" ".join(about.split()), "", "Args:", *said])
    method.__name__, method.__annotations__ = name, kinds | {"return": str}
    method.__signature__ = inspect.Signature(parts)  # type: ignore[attr-defined]
    return method


def _resolved(schema: Mapping[str, Any], page: Any) -> Any:
    """Follow a schema's reference within its page, if any."""
    for part in schema["$ref"].split("/")[1:] if "$ref" in schema else ():
        page = page[part]
    return page if "$ref" in schema else schema


def _type(schema: Mapping[str, Any], page: Any) -> Any:
    """Return the type hint of a JSON schema; Any if it has no type."""
    schema = _resolved(schema, page)
    some = [one for one in schema.get("anyOf", ()) if one.get("type") != "null"]
    if len(some) == 1:
        return _type(some[0], page)
    if schema.get("enum"):
        return Literal[tuple(schema["enum"])]
    if schema.get("type") == "array":
        return list[_type(schema.get("items", {}), page)]  # type: ignore[misc]
    return _TYPES.get(schema.get("type"), Any)
