"""The launch files that we ship."""

import json
from typing import Any

import yaml

from tests.conftest import ROOT

YAMLS = {path.stem: path for path in sorted((ROOT / "accelerate_configs").iterdir())}
JSONS = {path.stem: path for path in sorted((ROOT / "deepspeed_configs").iterdir())}
ZERO = [name for name in YAMLS if name.startswith("zero")]


def read_yaml(name: str) -> dict[str, Any]:
    return yaml.safe_load(YAMLS[name].read_text())


def read_json(name: str) -> dict[str, Any]:
    return json.loads(JSONS[name].read_text())
