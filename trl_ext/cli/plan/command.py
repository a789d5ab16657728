"""`trl-ext plan`: settings that fit the cards, as a table or JSON, in under a second and without torch.

Only the settings of a job are imported for --help, so it prints at once.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from trl_ext.cli.parser import CommandParser
from trl_ext.errors import ConfigError

# Flags that each plan needs, with an example.
REQUIRED = {"trainer": "grpo", "model": "8B", "gpus": "4xA100-80GB"}
NOTHING_FITS = 1  # the exit code; 2 is a user's mistake

DESCRIPTION = """\
Find settings that fit your cards before anything runs, from formulas: every number is estimated.

A plan keeps the global batch and everything else that the optimisation depends on; settings that you give stay.
Changes to the training need an opt-in: --allow lora, qlora, adam8bit."""
EXAMPLES = """\
examples:
  trl-ext plan --trainer ppo --model meta-llama/Meta-Llama-3-8B --gpus 4xA40-48GB \\
      --max_prompt_length 1024 --max_completion_length 1024 --allow lora
  trl-ext plan --trainer reward --model 8B --gpus 6x4090 --method lora --lora_r 64 --max_length 8192 --write plan
  trl-ext plan --trainer grpo --model ./my-model --gpus 8xA100-40GB --use_vllm --what-if max_completion_length=8192
  trl-ext plan --trainer grpo --model 7B --gpus 2xA100-40GB --method lora --max max_completion_length
  trl-ext plan --trainer grpo --model 32B --gpus 8xH100-80GB --vllm_servers 2
  trl-ext plan --trainer grpo --model 7B --gpus 8xA100-80GB --vllm_servers auto --generation_ahead 1
  trl-ext plan --trainer reward --model 70B --gpus 2x8xH100-80GB --headroom 8%
  trl-ext plan --preset grpo-7b-8xa100-40gb --write plan

exit code 0 if something fits, 1 if nothing does, 2 if the arguments cannot work"""
SERVERS = "vllm_servers"
ACCUMULATION = "gradient_accumulation_steps"  # not a field of the job; it decides the global batch


def plan(argv: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    arguments = _parser().parse_args(list(argv))
    if arguments.presets:
        if set(argv) - {"--presets", "--json"}:
            raise ConfigError("--presets lists the presets and takes --json alone. Ask for one by --preset NAME.")
        from trl_ext.memory.planner.presets import PRESETS

        if arguments.json:
            print(json.dumps({name: asdict(one) for name, one in PRESETS.items()}, indent=2))
        else:
            for name, one in PRESETS.items():
                print(f"{name:24}{one.purpose}, on {one.gpus}")
        return 0
    if arguments.preset:
        from trl_ext.memory.planner.presets import preset

        one = preset(arguments.preset)
        for name, value in {"trainer": one.trainer, "model": one.model, "gpus": one.gpus, **one.settings}.items():
            if getattr(arguments, name) is None:
                setattr(arguments, name, value)
    plans = _search(arguments)
    _print(plans, arguments)
    if plans.plans and arguments.write:
        from trl_ext.memory.planner.folder import write_plan

        files = write_plan(plans.best, arguments.write, arguments.model)
        if not arguments.json:
            print("\nwritten: " + " ".join(str(file) for file in files))
    return 0 if plans.plans else NOTHING_FITS


def _search(arguments: argparse.Namespace) -> Any:
    """Plan for the given trainer, model and cards; raise ConfigError for options that are missing or cannot work."""
    missing = [f"--{name} {value}" for name, value in REQUIRED.items() if getattr(arguments, name) is None]
    if missing:
        raise ConfigError(f"Give also, for example, {' '.join(missing)}; or a preset: --presets lists them.")
    if arguments.rows is not None and arguments.rows < 1:
        raise ConfigError(f"--rows is {arguments.rows}. Give at least one row.")
    from trl_ext.memory.cards import parse_gpus, with_network
    from trl_ext.memory.planner.planner import plan as make_plans

    hardware = parse_gpus(arguments.gpus, arguments.gpu_memory_gib, arguments.host_memory_gib)
    if arguments.network_gbit_s is not None:
        hardware = with_network(hardware, arguments.network_gbit_s)
    options: dict[str, Any] = {"allow": [name for names in arguments.allow for name in names.split(",")]}
    options |= {"headroom": arguments.headroom, **_settings(arguments)}
    return make_plans(arguments.trainer, arguments.model, hardware, **options)


def _parser() -> CommandParser:
    parser = CommandParser(
        "trl-ext plan",
        usage="%(prog)s --trainer {reward,grpo,ppo} --model MODEL --gpus NxCARD [settings]\n"
        "       %(prog)s --preset NAME | --presets",
        description=DESCRIPTION,
        epilog=EXAMPLES,
    )
    parser.add_argument("--trainer", choices=("reward", "grpo", "ppo"), help="the trainer")
    parser.add_argument("--model", help="name on the hub, folder, config.json, or a size such as 8B")
    parser.add_argument("--gpus", help="number and card: 4xA40-48GB, 6x4090; several machines: 2x8xH100-80GB")
    parser.add_argument("--gpu_memory_gib", type=float, help="total memory of a card that is not in the table")
    parser.add_argument("--host_memory_gib", type=float, help="a machine's memory (default: not checked)")
    parser.add_argument("--network_gbit_s", type=float, help="a machine's network, with several (default 400)")
    parser.add_argument("--rows", type=int, help="rows of your data (pairs, or prompts), to print the hours for all")
    parser.add_argument(
        "--headroom", metavar="SHARE", help="share of a card that stays free (default 5%%; 0 for none)"
    )
    parser.add_argument("--allow", action="append", default=[], metavar="OPT-INS", help="lora, qlora, adam8bit")
    parser.add_argument(
        "--what-if",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="also estimate the best plan with another setting",
    )
    parser.add_argument("--max", metavar="KEY", help="find the largest length, micro-batch or rank that fits")
    parser.add_argument(
        "--write", metavar="DIR", help="write the best plan: launch file, DeepSpeed file, recipe, plan.json"
    )
    parser.add_argument("--preset", metavar="NAME", help="a named job; other options override its settings")
    parser.add_argument("--presets", action="store_true", help="list the presets")
    parser.add_argument("--json", action="store_true", help="print JSON")
    group = parser.add_argument_group("settings, which the plan keeps")
    purpose = "micro-batches of an optimizer step; with the micro-batch fixes the global batch"
    group.add_argument(f"--{ACCUMULATION}", type=int, help=purpose)
    for one in _options():
        kind: Any = type(one.default)
        how: dict[str, Any] = {"type": str if kind is tuple else _or_auto if one.name == SERVERS else kind}
        how = {"action": argparse.BooleanOptionalAction} if kind is bool else how
        group.add_argument(f"--{one.name}", **how, help=one.metadata["purpose"])
    return parser


def _options() -> list[Any]:
    """Return the fields of a job that the command has as options."""
    from trl_ext.memory.job import Job

    return [one for one in fields(Job) if one.metadata]


def _or_auto(text: str) -> int | str:
    return text if text == "auto" else int(text)


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that the user gave."""
    names = (ACCUMULATION, *(one.name for one in _options()))
    return {name: value for name in names if (value := getattr(arguments, name)) is not None}


def _print(plans: Any, arguments: argparse.Namespace) -> None:
    changes: dict[str, str] = {}
    for text in arguments.what_if:
        key, _, value = text.partition("=")
        if not key or not value:
            raise ConfigError(f"--what-if {text} is no KEY=VALUE. Write for example --what-if max_length=8192.")
        changes[key] = value
    if arguments.json:
        print(json.dumps(_as_dict(plans, arguments, changes), indent=2))
        return
    from trl_ext.cli.plan.tables import print_plans, print_what_if
    from trl_ext.memory.models.find import weights_of

    print_plans(plans, arguments.write, arguments.rows, names_model=weights_of(arguments.model) is not None)
    if changes:
        print_what_if(plans.best.estimate, plans.best.what_if(**changes), changes)
    if arguments.max:
        name, found = arguments.max, _largest(plans, arguments.max)
        words = f"largest {name} that fits: {found[name]:,}"
        words = f"{words}, as {found['label']}, about {found['step']} s a step" if found[name] else f"No {name} fits."
        print(f"\n{words}")


def _largest(plans: Any, name: str) -> dict[str, Any]:
    """Return a setting's largest value with its plan."""
    found = plans.at_largest(name)
    if found is None:
        return {name: 0}
    one = found.estimate
    return {
        name: getattr(one.job, name),
        "step": one.in_seconds(),
        "step_s": round(one.step_s, 2),
        "label": found.label,
    }


def _as_dict(plans: Any, arguments: argparse.Namespace, changes: dict[str, str]) -> dict[str, Any]:
    from trl_ext.memory.files.settings import recipe
    from trl_ext.memory.models.find import weights_of
    from trl_ext.memory.planner.folder import as_dict

    folder, refused = arguments.write or "plan", []
    for one in plans.refused:
        job, shape = one.estimate.job, one.estimate.shape
        keys = recipe(job, shape.name, one.estimate.num_gpus)
        settings = {**keys, "zero_stage": job.zero_stage, "offload": job.offload}
        refused.append({"peak_gib": round(one.estimate.peak_gib, 3), "settings": settings, "reason": one.reason})
    answer: dict[str, Any] = {
        "plans": [as_dict(one, folder, names_model=weights_of(arguments.model) is not None) for one in plans.plans],
        "refused": refused,
        "advice": [*plans.advice, *filter(None, [plans.dead_end])],
    }
    if changes:
        answer["what_if"] = {"changes": changes, **plans.best.what_if(**changes).as_dict()}
    if arguments.rows and plans.plans:
        answer["hours"] = round(plans.best.estimate.hours(arguments.rows), 2)
    if arguments.max:
        answer["largest"] = _largest(plans, arguments.max)
    return answer
