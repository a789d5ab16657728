"""The model card: TRL's, with what was trained, on which data, scored by what, with which versions and recipe."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from trl_ext.monitor.record import replace_text

# TRL's sentences on the base model and itself, which name "None" for a model of a folder.
_OPENING = re.compile(r"This model is a fine-tuned version of .*?\n(?=\n)", re.DOTALL)
_VERSIONS = "### Framework versions\n\n"


def complete_card(
    path: Path,
    trainer_name: str,
    facts: Sequence[tuple[str, str]],
    recipe: Mapping[str, Any],
    packages: Mapping[str, str],
) -> None:
    """Complete the model card that TRL has written.

    Args:
        path: README.md, in the folder of the model.
        trainer_name: Class of the trainer.
        facts: What a reader asks first, by name.
        recipe: Keys of the run's recipe, its rules among them.
        packages: Versions by package.
    """
    text = path.read_text(encoding="utf-8")
    rows = "".join(f"| {name} | {_cell(value)} |\n" for name, value in facts if value)
    opening = (
        f"Trained with trl_ext's `{trainer_name}`, an extension of [TRL](https://github.com/huggingface/trl).\n\n"
        f"| | |\n|---|---|\n{rows}"
    )
    text = _OPENING.sub(lambda _: opening, text, count=1)
    text = text.replace('model="None"', f'model="{path.absolute().parent.name}"')
    content = yaml.safe_dump(dict(recipe), sort_keys=False, allow_unicode=True, width=119)
    # A prompt may hold a fence of its own.
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", content)), default=0))
    shown = f"### Recipe\n\n{fence}yaml\n{content}{fence}\n\n"
    text = text.replace(_VERSIONS, f"{shown}{_VERSIONS}- trl_ext: {packages['trl_ext']}\n", 1)
    replace_text(path, text)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
