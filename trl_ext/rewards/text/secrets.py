"""Hide secrets in settings, addresses and texts. All files about a run are written through `public`."""

import json
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import yaml

# Names of settings and environment variables whose values are secrets; not `pad_token` and other tokens of a
# tokenizer, `per_token`, or `api_key_env`, which holds a variable's name.
_SECRET_NAME = re.compile(
    r"(?<!(?:pad|eos|bos|unk|sep|cls|end|new|per)_)(?<!(?:mask|stop|last)_)(?<!(?:start|first|image|video|audio)_)token$"
    r"|api_?key(?!_env)|secret|passw|passphrase|credential|private_?key|authorization|cookie|webhook|signature$"
    r"|(provider|access|account|subscription|sign(ing|ature)|shared|encryption|auth|client|master|service|functions?"
    r"|deploy|license|session|storage|openai|wandb|judge|ssh)_?key(s|_id)?$|connection_?string|(^|_)((basic|o)?auth(_|$)|(pwd|sas|jwt|dsn)$)",
    re.IGNORECASE,
)
# A text under the name `key` that looks like a secret, and not like the name of a column.
_KEY = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[^\s{}]{8,}")
# Tokens of known services, the text before @ in an address, and the text after "Bearer".
_SECRET_VALUE = re.compile(
    r"(?P<secret>(?:hf|gsk)_[A-Za-z0-9]{16,}|\b(?:sk|glpat|nvapi)-[\w-]{16,}|\bgh[oprsu]_\w{16,}|github_pat_\w{16,}"
    r"|\bxox[a-z]-[\w-]{10,}|\b[rs]k_(?:live|test)_\w{10,}|\bAIza[\w-]{20,}|\bAKIA[A-Z0-9]{12,}|\br8_\w{16,}"
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?|(?<=://)(?:[^\s\"'<>/@:]{0,99}:[^\s\"'<>]{1,299}|[^/\s@]+)(?=@)"
    r"|(?<=[Bb]earer )[^\s\"']+)"
)
# A name and its text: in JSON, complete or cut off, with quotes that may be escaped; in an assignment or an address's
# query; in a header.
_NAMED = (
    re.compile(
        r"""["'](?P<name>[^"'\s\\]+)\\*["']\s*:\s*(?P<quote>\\*["'])(?P<secret>(?s:(?!(?P=quote)).|(?<=\\)["'])*)"""
    ),
    re.compile(r"""(?<![\w.-])(?P<name>[\w.-]+)=(?P<secret>[^"'&#;\s]+)"""),
    re.compile(
        r"(?i)(?<![\w-])(?P<name>authorization|cookie|api_?key|[\w-]+-(?:authorization|cookie|auth|token|secret|key)):"
        r"[ \t]*(?:(?:basic|bearer|digest|token)[ \t]+)?(?P<secret>[^\"'\s][^\"'\n]*)"
    ),
)
# In an address, every value of the query that is longer than a number or a truth value may be a key.
_ADDRESS = re.compile(r"""\b\w+://[^\s"'<>]+""")
_QUERY = re.compile(r"[?&#;][^=&#;]+=(?!(?:true|false|[^&#;]{0,4})(?:[&#;]|$))(?P<secret>[^&#;]+)", re.IGNORECASE)
_SEGMENT = re.compile(r"(?<=[^/]/)(?P<secret>[^/?#]+)")
# Environment variables of a recipe whose values are shown: variables of libraries, without secrets.
_SHOWN_VARIABLE = re.compile(
    r"(?!.*(_TOKEN|KEY|SECRET|PASS|CREDENTIAL|AUTH|COOKIE)(_|$))"
    r"((PYTORCH|TORCH|CUDA|NCCL|GLOO|OMP|MKL|TOKENIZERS|VLLM|TRITON|TRL_EXT|DS|ACCELERATE|HF_HUB|HF_DATASETS)_"
    r"|(HF_HOME|WANDB_PROJECT|WANDB_MODE)$)"
)
HIDDEN = "..."
_SHORTEST = 8  # characters; a shorter secret may be a part of any word or number


def public(value: Any, found: set[str] | None = None) -> Any:
    """Return plain data without its secrets: entries with a secret's name are removed, secrets in texts are hidden.

    In a recipe's block `env` every value is None, except the values of variables that libraries define. The secrets
    are added to `found`.
    """
    found = set() if found is None else found
    if isinstance(value, Mapping):
        return _public_mapping(value, found)
    if isinstance(value, (list, tuple)):  # pairs of name and value, too
        secret = [item for item in value if isinstance(item, (list, tuple)) and len(item) == 2 and is_secret(*item)]
        found.update(_texts(secret))
        return [public(item, found) for item in value if item not in secret]
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith(("{", "[")):  # a mapping or list from the command line
        with suppress(yaml.YAMLError, ValueError, RecursionError):
            given = yaml.safe_load(value)
            shown = public(given, found)
            return value if shown == given else json.dumps(shown, default=str)
    return _public_text(value, found)


def _public_mapping(value: Mapping[str, Any], found: set[str]) -> dict[str, Any]:
    shown = {key: public(item, found) for key, item in value.items() if not is_secret(key, item)}
    found.update(*(_texts(item) for key, item in value.items() if is_secret(key, item)))
    if isinstance(env := shown.get("env"), dict):
        shown["env"] = {name: env.get(name) if _SHOWN_VARIABLE.match(name) else None for name in value["env"]}
    return shown


def _public_text(text: str, found: set[str]) -> str:
    def hidden(match: re.Match[str]) -> str:
        if "name" in match.re.groupindex and not is_secret(match["name"], match["secret"]):
            return match[0]
        found.add(match["secret"])
        start, end = (place - match.start() for place in match.span("secret"))
        return match[0][:start] + HIDDEN + match[0][end:]

    def hidden_in_address(match: re.Match[str]) -> str:
        address = _QUERY.sub(hidden, match[0])
        is_web = address.startswith(("http", "ws"))
        return _SEGMENT.sub(lambda part: hidden(part) if is_web and _is_key(part[0]) else part[0], address)

    for pattern in (*_NAMED, _SECRET_VALUE):
        text = pattern.sub(hidden, text)
    return _ADDRESS.sub(hidden_in_address, text)


def _is_key(segment: str) -> bool:
    """Return True if a part of a path looks like a key: 16 or more letters and digits, or 8 in `bot123:key`."""
    runs = re.findall(r"[A-Za-z0-9]+", segment)
    shortest = _SHORTEST if ":" in segment else 2 * _SHORTEST
    return any(len(run) >= shortest and not run.isalpha() and not run.isdigit() for run in runs)


def _texts(secret: Any) -> set[str]:
    """Return the texts within a secret, and their words: a server may quote a header's key without `Basic`."""
    if isinstance(secret, (list, tuple, Mapping)):
        return set().union(*map(_texts, secret.values() if isinstance(secret, Mapping) else secret))
    return {str(secret), *str(secret).split()}


def names_secret(name: Any) -> bool:
    """Return True if the name of a setting, variable or flag is a secret's name."""
    return bool(_SECRET_NAME.search(str(name).lstrip("-").replace("-", "_")))


def is_secret(name: Any, value: Any) -> bool:
    """Return True if a mapping's entry is a secret, by its name, or by its text if the name is `key`."""
    return names_secret(name) or (name == "key" and isinstance(value, str) and bool(_KEY.fullmatch(value)))


def secrets_in(settings: Mapping[str, Any]) -> set[str]:
    """Return the texts that `public` hides in settings, and the values of the variables that `api_key_env` names."""
    found: set[str] = set()
    names = re.findall(r'"api_key_env": "(\w+)"', json.dumps(public(settings, found), default=str))
    return found.union("".join(os.environ.get(name, "").split()) for name in names)  # as they are sent


def hide(text: str, secrets: Iterable[str]) -> str:
    """Return a text without these secrets; a secret of fewer than 8 characters stays."""
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= _SHORTEST:  # A server may quote it within JSON, with backslashes.
            text = re.sub(r"\\{0,4}".join(map(re.escape, secret)), "***", text)
    return text
