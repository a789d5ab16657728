"""Tables of the planner, as YAML: model families, known models, presets."""

from pathlib import Path
from typing import Any

import yaml


def read_table(name: str) -> dict[str, Any]:
    """Read the table `name` of this folder, without its anchors."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C loader takes a tenth of the time
    file = Path(__file__).with_name(f"{name}.yaml")
    table: dict[str, Any] = yaml.load(file.read_text(encoding="utf-8"), Loader=loader)
    table.pop("anchors", None)
    return table
