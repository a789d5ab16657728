"""Hide secrets in settings, addresses and texts. All files about a run are written through `public`."""

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import yaml

# Names of settings and environment variables whose values are secrets; not `pad_token`, `stop_token`, or
# `api_key_env`, which holds a variable's name.
_SECRET_NAME = re.compile(
    r"(^|_)(hub|hf|auth|access|api|bearer|session|refresh|wandb|github|security|service|client|id)_?token$"
    r"|^(use_auth_)?token$|api_?key(?!_env)|secret|passw|credential|private_?key|authorization|cookie|webhook"
    r"|(provider|access|account|subscription|sign(ing|ature)|shared|encryption|auth|client|master|service|functions?"
    r"|deploy|license|session|storage)_?key$|signature$|(^|_)(pwd|sas|jwt|dsn)$",
    re.IGNORECASE,
)
# Tokens of the services that runs use, the text before @ in an address, and the text after "Bearer".
_SECRET_VALUE = re.compile(
    r"hf_[A-Za-z0-9]{16,}|\bsk-[\w-]{16,}|\bgh[opsu]_\w{16,}|github_pat_\w{16,}|(?<=://)[^/\s@]+(?=@)"
    r"|(?<=Bearer )[^\s\"']+"
)
# A name and its text in JSON, complete or cut off, or in the query of an address.
_ENTRY = re.compile(r"""((?:["']([^"'\s]+)["']\s*:\s*["']|[?&#;]([\w.-]+)=))((?<=["'])[^"']*|[^"'&#;\s]*)""")
# In an address, every value of the query that is longer than a number or a truth value may be a key.
_ADDRESS = re.compile(r"""\b\w+://[^\s"'<>]+""")
_QUERY = re.compile(r"([?&#;][^=&#;]+=)(?!(?:true|false|[^&#;]{0,4})(?:[&#;]|$))([^&#;]+)", re.IGNORECASE)
# Environment variables of a recipe whose values are shown: variables of libraries, without secrets.
_SHOWN_VARIABLE = re.compile(
    r"(?!.*(_TOKEN|KEY|SECRET|PASS|CREDENTIAL|AUTH|COOKIE)(_|$))"
    r"((PYTORCH|TORCH|CUDA|NCCL|GLOO|OMP|MKL|TOKENIZERS|VLLM|TRITON|TRL_EXT|DS|ACCELERATE|HF_HUB|HF_DATASETS)_"
    r"|(HF_HOME|WANDB_PROJECT|WANDB_MODE)$)"
)
HIDDEN = "..."


def public(value: Any) -> Any:
    """Return plain data without its secrets: entries with a secret's name are removed, secrets in texts are hidden.

    In a recipe's block `env` every value is None, except the values of variables that libraries define.
    """
    if isinstance(value, Mapping):
        shown = {key: public(item) for key, item in value.items() if not names_secret(key)}
        if isinstance(env := shown.get("env"), dict):
            shown["env"] = {name: env.get(name) if _SHOWN_VARIABLE.match(name) else None for name in value["env"]}
        return shown
    if isinstance(value, (list, tuple)):
        return [public(item) for item in value]
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith(("{", "[")):  # a mapping or list from the command line
        with suppress(yaml.YAMLError, ValueError, RecursionError):
            given = yaml.safe_load(value)
            return value if public(given) == given else json.dumps(public(given), default=str)
    text = _ENTRY.sub(lambda m: m[1] + (HIDDEN if names_secret(m[2] or m[3]) else m[4]), value)
    text = _ADDRESS.sub(lambda address: _QUERY.sub(rf"\1{HIDDEN}", address[0]), text)
    return _SECRET_VALUE.sub(HIDDEN, text)


def names_secret(name: Any) -> bool:
    """Return True if the name of a setting, variable or flag is a secret's name."""
    return bool(_SECRET_NAME.search(str(name).lstrip("-").replace("-", "_")))


def secrets_in(settings: Mapping[str, Any]) -> set[str]:
    """Return the texts that `public` hides in settings, and the values of the variables that `api_key_env` names."""
    text = json.dumps(settings, default=str, ensure_ascii=False)
    found = {entry[4] for entry in _ENTRY.finditer(text) if names_secret(entry[2] or entry[3])}
    found |= {query[2] for address in _ADDRESS.findall(text) for query in _QUERY.finditer(address)}
    found |= {os.environ.get(name, "") for name in re.findall(r'"api_key_env": "(\w+)"', text)}
    return found.union(_SECRET_VALUE.findall(text)) - {""}
