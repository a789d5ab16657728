"""Find a model's shape: a config, a folder, a file, the hub's local cache, a known name, or a size such as 8B."""

import glob
import http.client
import json
import os
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from trl_ext.errors import ConfigError, did_you_mean
from trl_ext.memory.models.families import shape_from_config
from trl_ext.memory.models.shapes import ModelShape
from trl_ext.memory.tables import read_table

HUB_TIMEOUT_S = 10.0  # for the first answer of the hub
OFFLINE = "HF_HUB_OFFLINE"
_NOT_THERE = (502, 503, 504)  # codes of a proxy that does not reach the hub
_IS_OFF = f"{OFFLINE} is set"
_SNAPSHOTS = "models--*/snapshots/*"  # in the hub's cache
_SIZE = re.compile(r"\d+(\.\d+)?[bm]", re.IGNORECASE)
# Suffixes of a tuned version with the same shape.
_VERSIONS = re.compile(r"-(instruct|base|it|pt|chat|hf|sft|dpo|grpo|rm|2507|thinking)(?=-|$)", re.IGNORECASE)
_TABLE = read_table("models")
_SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")


def _config(line: str, sizes: list[int], others: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the keys of a model's config.json that differ from its family's default."""
    base = _TABLE["lines"].get(line, {"model_type": line})
    return {**base, **dict(zip(_SIZES, sizes, strict=True)), **(others or {})}


# name: (published parameters, config.json)
MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    name: (num_params, _config(*config)) for name, (num_params, *config) in _TABLE["models"].items()
}
# Names with another model's shape.
ALIASES: dict[str, str] = _TABLE["aliases"]
# Names of models that no formula fits, with their family.
APART: dict[str, str] = {name.lower(): family for name, family in _TABLE["apart"].items()}
# A typical model for each size.
TYPICAL: dict[str, str] = _TABLE["typical"]


def find_shape(model: "str | os.PathLike[str] | Mapping[str, Any] | ModelShape") -> ModelShape:
    """Find the shape of a model, without its weights.

    Args:
        model: A shape; the keys and values of a config.json; its path or folder; a name on the hub, looked up in the
            local cache, in the package's table, and then on the hub unless HF_HUB_OFFLINE is set; or a size such as
            "8B" for a typical model.

    Raises:
        ConfigError: The model has no config here, or its family is unknown.
    """
    if isinstance(model, ModelShape):
        return model
    if isinstance(model, Mapping):
        return shape_from_config(model)
    text = os.fspath(model)
    if _SIZE.fullmatch(text):
        if text.upper() not in TYPICAL:
            sizes = ", ".join(TYPICAL)
            raise ConfigError(f"There is no typical model of size {text}. Sizes: {sizes}; or give a config.json.")
        name = TYPICAL[text.upper()]
        return shape_from_config(MODELS[name][1], name)
    path = Path(text).expanduser()
    if path.exists() or text.startswith(("/", "./", "../", "~")):
        file = path / "config.json" if path.is_dir() else path
        return shape_from_config(_read(file), path.name if path.is_dir() else file.parent.name)
    cached = cached_config(text)
    return shape_from_config(_read(cached), text) if cached else _known(text)


def weights_of(model: str) -> str | None:
    """Return the name or folder from which a model's weights load; None for a size or a config.json."""
    is_file = Path(model).expanduser().is_file() or model.endswith(".json")
    return None if _SIZE.fullmatch(model) or is_file else model


def _hub_cache() -> Path:
    home = Path(os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()


def cached_config(name: str) -> Path | None:
    """Return the newest config.json of a hub model in the local cache. The folders are read directly: importing
    huggingface_hub takes longer than the whole plan."""
    found = _hub_cache().glob(f"models--{glob.escape(name.replace('/', '--'))}/snapshots/*/config.json")
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def check_here(model: Any) -> None:
    """Raise ConfigError for the name of a hub model that is not in the cache, if the hub does not answer; see
    `leave_a_silent_hub`."""
    if not isinstance(model, str) or Path(model).exists() or not (reason := leave_a_silent_hub()):
        return
    names = [path.parts[-3].removeprefix("models--").replace("--", "/") for path in _hub_cache().glob(_SNAPSHOTS)]
    if model not in names:
        raise ConfigError(
            f"The model {model} is not on this machine, and {reason}. {did_you_mean(model, names)} Give a folder: "
            f"elsewhere `hf download {model} --local-dir FOLDER`, here FOLDER as the model's name. Or name a mirror, "
            "HF_ENDPOINT=URL."
        )


def leave_a_silent_hub() -> str:
    """Read only from the cache from here on, also in child processes, if the hub does not answer.

    huggingface_hub would try each file six times, for minutes. Returns the reason; "" if it answers, or was off.
    """
    if (reason := no_hub()) in ("", _IS_OFF):
        return ""
    from huggingface_hub import constants

    os.environ[OFFLINE], constants.HF_HUB_OFFLINE = "1", True
    return reason


def no_hub() -> str:
    """Return why the hub must not be asked, in a few words: it is off, or does not answer one call; "" if it answers.
    huggingface_hub itself asks six times, for half a minute, and prints each attempt."""
    if os.environ.get(OFFLINE, "").upper() in ("1", "ON", "TRUE", "YES"):
        return _IS_OFF
    hub = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    try:
        urllib.request.urlopen(urllib.request.Request(hub, method="HEAD"), timeout=HUB_TIMEOUT_S).close()
    except urllib.error.HTTPError as error:  # an answer
        return f"{hub} answers {error.code}" if error.code in _NOT_THERE else ""
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        return "" if isinstance(reason, ssl.SSLError) else f"{hub} does not answer ({reason})"
    return ""


def _read(file: Path) -> Mapping[str, Any]:
    if not file.is_file():
        where = f"{file.parent} has no config.json" if file.name == "config.json" else f"There is no {file}"
        raise ConfigError(f"{where}. Give a model's folder, its config.json, a name on the hub, or a size such as 8B.")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{file} cannot be read as JSON: {error}.") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{file} holds no keys. Give the config.json from the folder of a model's weights.")
    return config


def nearest_models(name: str) -> list[str]:
    """Return up to three models of the package's table with the most similar names, nearest first; none if the name is
    in the table."""
    names, plain = _names(), _plain(name)
    if plain in names:
        return []
    base, _, variant = plain.rpartition("-")
    if base in names and get_close_matches(variant, ["instruct"]):
        return [f"{names[base]}-Instruct"]
    family = plain.partition("-")[0]
    alike = [known for known in names if known.partition("-")[0] == family]
    # Models of another family only for a probable typing error: Qwen2.5-7B is not meant by Qwen3.5-9B.
    near = get_close_matches(plain, alike, n=3) or get_close_matches(plain, names, n=1, cutoff=0.85)
    return [names[one] for one in near]


def _names() -> dict[str, str]:
    return {_plain(known): known for known in (*MODELS, *ALIASES)}


def _known(name: str) -> ModelShape:
    names, plain = _names(), _plain(name)
    if plain in APART:
        return shape_from_config({"model_type": APART[plain]}, name)
    if plain not in names:
        try:
            if reason := no_hub():
                raise OSError(reason)
            from huggingface_hub import hf_hub_download  # takes longer than the whole plan

            file = hf_hub_download(name, "config.json", etag_timeout=HUB_TIMEOUT_S)
            return shape_from_config(_read(Path(file)), name)
        except (OSError, ValueError) as error:  # no hub, no such model there, or no access for this user
            near = nearest_models(name)
            hint = f" Nearest: {', '.join(near)}." if near else ""
            reason = " ".join(str(error).split()).rstrip(".")
            raise ConfigError(
                f"The config of {name} is neither in the local cache nor in the package's table, and not to be had "
                f"from the hub: {reason}.{hint} Give its folder or config.json, or a size such as 8B."
            ) from error
    known = names[plain]
    return shape_from_config(MODELS[ALIASES.get(known, known)][1], name)


def _plain(name: str) -> str:
    """Return a name without owner, maker and tuned version: "llama-3-8b" for "Meta-Llama-3-8B-Instruct"."""
    return _VERSIONS.sub("", name.rpartition("/")[2].lower()).removeprefix("meta-")
