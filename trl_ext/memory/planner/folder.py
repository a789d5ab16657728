"""A plan as files: accelerate YAML, DeepSpeed JSON, recipe YAML, a README, and plan.json for reading it again."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from trl_ext.errors import ConfigError
from trl_ext.memory.cards import CARDS, Card, Hardware, Link
from trl_ext.memory.files import settings
from trl_ext.memory.formulas.estimate import estimate
from trl_ext.memory.formulas.peak import PHASE_WORDS
from trl_ext.memory.job import Job
from trl_ext.memory.models.find import weights_of
from trl_ext.memory.models.shapes import Experts, ModelShape
from trl_ext.memory.planner.planner import Plan
from trl_ext.memory.units import gib
from trl_ext.resources import __version__

SCHEMA = 1  # of plan.json
# Short runs before the full run, with its memory settings: their purpose, and their changes to the plan's recipe. In
# the smoke run Adam's state exists from the second optimizer step on.
STAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "smoke": (
        "3 optimizer steps. Go on if it ends: memory, data and rewards work.",
        {"max_steps": 3, "save_strategy": "no", "eval_strategy": "no", "logging_steps": 1},
    ),
    "pilot": (
        "60 optimizer steps. Go on if the reward, or the accuracy on pairs, rises.",
        {"max_steps": 60, "save_strategy": "steps", "save_steps": 60, "logging_steps": 1},
    ),
}
NAMES = ("accelerate.yaml", "deepspeed.json", "recipe.yaml", "README.md", "plan.json")


def write_plan(plan: Plan, folder: str | Path, model: str | None = None, *, stages: bool = False) -> list[Path]:
    """Write a plan and return its files.

    Args:
        plan: The plan.
        folder: Created if needed. Files of an earlier plan in it are replaced.
        model: Name or folder that the recipe loads; the shape's name if None. A size such as "8B" and a config.json
            have no weights: the recipe then names no model, and the user adds it to the launch line.
        stages: True to write recipes of a smoke run and a pilot, too.

    Raises:
        ConfigError: The folder cannot be written to.
    """
    folder = Path(folder)
    contents = _contents(plan, folder, weights_of(model or plan.estimate.shape.name), stages)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in (*NAMES, *(f"recipe_{stage}.yaml" for stage in STAGES)):
            (folder / name).unlink(missing_ok=True)
        for name, text in contents.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"The plan cannot be written to {folder}: {error}. Give another folder.") from error
    return [folder / name for name in contents]


def _contents(plan: Plan, folder: Path, model: str | None, stages: bool) -> dict[str, str]:
    """Return the files' texts by name."""
    estimate, engine = plan.estimate, settings.deepspeed(plan.job)
    hardware, num_gpus = estimate.hardware, estimate.num_gpus
    recipe = settings.recipe(plan.job, model, num_gpus, in_folder=True)
    launch = "\n".join(settings.launch_lines(plan.job, str(folder), hardware, names_model=model is not None))
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
    words = [*settings.to_replace(plan.job, names_model=model is not None).values()]
    files["README.md"] = readme(plan, launch, words + ["ADDRESS"] * (hardware.num_machines > 1))
    files[settings.PLAN_FILE] = json.dumps(as_dict(plan, str(folder), names_model=model is not None), indent=2) + "\n"
    for name, (shows, keys) in STAGES.items() if stages else ():
        files[f"recipe_{name}.yaml"] = _yaml(shows, {**recipe, **keys})
    return files


def _yaml(head: str, keys: dict[str, Any]) -> str:
    comment = "".join(f"# {line}\n" for line in head.splitlines())
    return comment + yaml.safe_dump(keys, sort_keys=False, width=119)


def readme(plan: Plan, launch: str, words: Iterable[str]) -> str:
    """Return the plan as a page of Markdown: its sentence, its launch line with the words that the user replaces, and
    GiB by phase and by term."""
    one = plan.estimate
    rows = "\n".join(
        f"| {PHASE_WORDS[phase]} | {peak.what} | {gib(peak.num_bytes):.1f} |" for phase, peak in one.worst.items()
    )
    terms = "\n".join(f"| {name} | {value:.2f} |" for name, value in one.terms_gib(one.peak.phase).items())
    meanings = "\n".join(f"| `{word}` | {settings.MEANINGS[word]} |" for word in dict.fromkeys(words))
    return f"""# {one.shape.name} on {one.hardware}

{plan.label}.

Peak {one.peak_gib:.1f} GiB a GPU {PHASE_WORDS[one.peak.phase]}, {gib(one.need_bytes):.1f} with the allocator's \
slack, on a card with {one.hardware.usable}. \
Host memory {gib(one.host_bytes):.0f} GiB. About {one.in_seconds()} \
s an optimizer step ({one.parts()}), rough.
All numbers are estimated, by trl_ext {__version__}.

```
{launch}
```

| put in its place | |
|---|---|
{meanings}

| phase | peak | GiB |
|---|---|---|
{rows}

| at the peak | GiB |
|---|---|
{terms}
"""


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
    """Read a plan from its plan.json, or from the file's folder, and estimate it again.

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
        machine.pop("pace", None)  # from earlier versions
        # Plans without this key had no head-room.
        hardware = Hardware(**{"headroom_frac": 0.0, **machine, "card": card})
        return Plan(estimate(job, ModelShape(**shape), hardware), tuple(stored["opt_ins"]))
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{file} is damaged: {error}. Write it again with `trl-ext plan`.") from error
