"""Recipes of tiny runs, their models and rows as files, and commands that end in one sentence."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import tiny

RULES = [
    {"rule": "answer", "gold": "answer", "kind": "exact"},
    {"rule": "length", "high": 4, "slack": 4, "weight": 0.1},
]
SMALL = dict(per_device_train_batch_size=4, use_cpu=True, bf16=False, report_to="none", save_strategy="no")
# Each prompt has its answer beside it.
PROMPTS = [{"prompt": tiny.words(i, i + 1), "answer": tiny.words(i)} for i in range(3, 19)]


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    """Write rows as JSON lines, the folder too; for a path without a suffix, as its train.jsonl and test.jsonl."""
    files = [path] if path.suffix else [path / "train.jsonl", path / "test.jsonl"]
    files[0].parent.mkdir(parents=True, exist_ok=True)
    for file in files:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def save(folder: Path, model: Any = "llama", tokenizer: Any = None) -> Path:
    """Save a model, or a random one of this family, with its tokenizer."""
    for part in (tiny.model(model) if isinstance(model, str) else model, tokenizer or tiny.tokenizer()):
        part.save_pretrained(folder)
    return folder


def recipe(folder: Path, text: str = "", **settings: Any) -> list[str]:
    """Write a recipe, in which None leaves a key out, and `text` after it; return a script's arguments."""
    kept = {key: value for key, value in settings.items() if value is not None}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(kept) + text)
    return ["--config", str(folder / "recipe.yaml")]


def starter(main: Callable[..., Any], folder: Path, assets: Path, **settings: Any) -> Callable[..., None]:
    """Return a function that runs a script on the model and the data of `assets`, into `folder`/out.

    Its keyword arguments change the recipe, its words go to the command line.
    """

    def start(*argv: str, data: str = "data", **changes: Any) -> None:
        where = ["--model_name_or_path", str(assets / "model"), "--dataset_name", str(assets / data)]
        own = SMALL | dict(output_dir=str(folder / "out"), logging_steps=1, per_device_eval_batch_size=8) | settings
        main([*recipe(folder, **own | changes), *where, *argv])

    return start


def stopped(capture: Any, command: Callable[..., Any], *words: Any, **options: Any) -> str:
    """Run a command to its one sentence, exit code 2; return what it wrote to stderr."""
    capture.readouterr()
    with pytest.raises(SystemExit) as stop:
        command(*words, **options)
    assert stop.value.code == 2
    error: str = capture.readouterr().err
    assert "Traceback" not in error and sum(line.startswith("error: ") for line in error.splitlines()) == 1
    return error
