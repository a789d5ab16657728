"""A plan as files: accelerate YAML, DeepSpeed JSON, recipe YAML, and plan.json for reading it again."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from trl_ext.errors import ConfigError
from trl_ext.memory.cards import CARDS, Card, Hardware, Link
from trl_ext.memory.files import settings
from trl_ext.memory.formulas.estimate import estimate
from trl_ext.memory.job import Job
from trl_ext.memory.models.find import weights_of
from trl_ext.memory.models.shapes import Experts, ModelShape
from trl_ext.memory.planner.planner import Plan
from trl_ext.resources import __version__

SCHEMA = 1  # of plan.json
NAMES = ("accelerate.yaml", "deepspeed.json", "recipe.yaml", "plan.json")


def write_plan(plan: Plan, folder: str | Path, model: str | None = None) -> list[Path]:
    """Write a plan and return its files.

    Args:
        plan: The plan.
        folder: Created if needed. Files of an earlier plan in it are replaced.
        model: Name or folder that the recipe loads; the shape's name if None. A size such as "8B" and a config.json
            have no weights: the recipe then names no model, and the user adds it to the launch line.

    Raises:
        ConfigError: The folder cannot be written to.
    """
    folder = Path(folder)
    contents = _contents(plan, folder, weights_of(model or plan.estimate.shape.name))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in NAMES:
            (folder / name).unlink(missing_ok=True)
        for name, text in contents.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"The plan cannot be written to {folder}: {error}. Give another folder.") from error
    return [folder / name for name in contents]


def _contents(plan: Plan, folder: Path, model: str | None) -> dict[str, str]:
    """Return the files' texts by name."""
    estimate, engine = plan.estimate, settings.deepspeed(plan.job)
    hardware, num_gpus = estimate.hardware, estimate.num_gpus
    recipe = settings.recipe(plan.job, model, num_gpus, in_folder=True)
    lines = settings.launch_lines(plan.job, str(folder), hardware, names_model=model is not None)
    words = [*settings.to_replace(plan.job, names_model=model is not None).values()]
    words += ["ADDRESS"] * (hardware.num_machines > 1)
    launch = "\n".join((*lines, *(f"{word}: {settings.MEANINGS[word]}" for word in words)))
    head = (
        f"{plan.label}, on {hardware}: {estimate.peak_gib:.1f} GiB (estimated).\n"
        "Settings that decide memory; dataset, rules, learning rate and the rest are yours."
    )
    if model is None:
        head += f"\nmodel_name_or_path is yours, too: planned for a model of the size of {estimate.shape.name}."
    files = {"accelerate.yaml": _yaml(launch, settings.accelerate(plan.job, num_gpus))}
    if engine:
        files[settings.DEEPSPEED_FILE] = json.dumps(engine, indent=2) + "\n"
    files["recipe.yaml"] = _yaml(head, recipe)
    files[settings.PLAN_FILE] = json.dumps(as_dict(plan, str(folder), names_model=model is not None), indent=2) + "\n"
    return files


def _yaml(head: str, keys: dict[str, Any]) -> str:
    comment = "".join(f"# {line}\n" for line in head.splitlines())
    return comment + yaml.safe_dump(keys, sort_keys=False, width=119)


def as_dict(plan: Plan, launch_folder: str = "plan", *, names_model: bool = True) -> dict[str, Any]:
    """Return a plan for JSON, complete enough to be read again; see `launch_lines`."""
    shape, hardware = plan.estimate.shape, plan.estimate.hardware
    card = hardware.card
    return {
        "schema": SCHEMA,
        "trl_ext": __version__,
        **plan.estimate.as_dict(),
        "label": plan.label,
        "opt_ins": list(plan.opt_ins),
        "settings": settings.recipe(plan.job, shape.name, plan.estimate.num_gpus),
        "deepspeed": settings.deepspeed(plan.job),
        "launch": "\n".join(settings.launch_lines(plan.job, launch_folder, hardware, names_model=names_model)),
        "job": asdict(plan.job),
        "shape": asdict(shape),
        "hardware": {
            **asdict(hardware),
            "card": card.name if card in CARDS else asdict(card),
        },
    }


def read_plan(path: str | Path) -> Plan:
    """Read a plan and estimate it again.

    Args:
        path: plan.json, or the folder that holds it.

    Raises:
        ConfigError: No such file, no plan in it, or a plan of another version.
    """
    path = Path(path)
    file = path / "plan.json" if path.is_dir() else path
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"There is no plan {file}. Write one with `trl-ext plan ... --write DIR`.") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{file} cannot be read as a plan: {error}.") from error
    schema = stored.get("schema") if isinstance(stored, dict) else None
    if schema != SCHEMA:
        raise ConfigError(
            f"{file} is a plan of version {schema}; this is trl_ext {__version__}, which reads version {SCHEMA}. "
            "Write it again with `trl-ext plan ... --write DIR`."
        )
    try:
        job = Job(**{**stored["job"], "lora_target_modules": tuple(stored["job"]["lora_target_modules"])})
        shape = dict(stored["shape"])
        shape["experts"] = Experts(**shape["experts"]) if shape["experts"] else None
        machine = stored["hardware"]
        card = machine["card"]
        if isinstance(card, str):
            card = next(one for one in CARDS if one.name == card)
        else:
            card = Card(**{**card, "link": Link(**card["link"]), "capability": tuple(card["capability"])})
        hardware = Hardware(**{**machine, "card": card})
        return Plan(estimate(job, ModelShape(**shape), hardware), tuple(stored["opt_ins"]))
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{file} is damaged: {error}. Write it again with `trl-ext plan`.") from error
