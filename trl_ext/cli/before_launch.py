"""Checks that the launcher makes once, before it starts processes, so that an error is printed once.

Nothing is loaded and no device is started. The scripts repeat the checks, because other launchers skip these.
"""

from collections.abc import Sequence
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trl_ext.errors import ConfigError, SupportError, did_you_mean
from trl_ext.launch.accelerate import content_of, launch_arguments
from trl_ext.scripts import training
from trl_ext.scripts.arguments import StrictParser, split_config_flag
from trl_ext.scripts.rewards import build_rules
from trl_ext.trainers.checkpoints.folder import check_free
from trl_ext.trainers.settings.values import check_values

LAUNCHED = "DeepSpeed of the launch"
# A setting, the package that it needs, and the package's install command.
PACKAGES = (
    ("use_vllm", "vllm", "trl_ext[vllm]"),
    ("deepspeed", "deepspeed", "trl_ext[deepspeed]"),
    (LAUNCHED, "deepspeed", "trl_ext[deepspeed]"),
    ("use_liger_kernel", "liger_kernel", "liger-kernel"),
    ("layer_kernels", "liger_kernel", "liger-kernel"),
    ("load_in_4bit", "bitsandbytes", "bitsandbytes"),
    ("load_in_8bit", "bitsandbytes", "bitsandbytes"),
)


def check_before_launch(module: str, parser: StrictParser, argv: Sequence[str], *, on_ray: bool = False) -> None:
    """Check a command line and its recipe.

    Args:
        module, parser: The script's module and its parser.
        argv: Arguments of the script and of `accelerate launch`, in any order.
        on_ray: True if Ray finds the machines.

    Raises:
        ConfigError, DataError, RuleError, SupportError: The run could not start.
    """
    argv = split_config_flag(argv)
    launch = launch_arguments(module, parser, argv, on_ray=on_ray)
    keys: Any = parser.parse_known_args([])[0]  # the defaults
    vars(keys).update(parser.given_values(argv))
    settings = dict(vars(keys))
    given = parser.given_keys(argv)
    kind, *_ = parser.dataclass_types
    kind(**{one.name: settings[one.name] for one in fields(kind) if one.init})  # raises for contradictions
    for one in parser.dataclass_types:
        check_values(keys, one)
    if "sft_model_path" not in given:
        training.check_model(keys)
    if keys.output_dir is not None:
        training.check_output_dir(keys.output_dir)
        check_free(Path(keys.output_dir))
    training.resume_point(keys)
    training.data_source(keys, keys, keys)
    if keys.rules is not None:
        build_rules(keys.rules)
    check_trackers(keys.report_to)
    file = content_of(launch.config_file)
    by_launcher = launch.use_deepspeed or file.get("distributed_type") == "DEEPSPEED"
    needs = settings | {LAUNCHED: by_launcher}
    for key, package, source in PACKAGES:
        if needs.get(key) not in (None, False, "false") and find_spec(package) is None:
            raise SupportError(f"{key} is set, and {package} is not installed: pip install '{source}'.")
    if not (launch.cpu or file.get("use_cpu") or str(keys.use_cpu).lower() == "true"):
        num_processes = launch.num_processes or file.get("num_processes") or 1
        check_cards(num_processes // (launch.num_machines or file.get("num_machines") or 1))


def check_trackers(report_to: str | Sequence[str] | None) -> None:
    """Raise ConfigError for an unknown tracker, SupportError for a tracker whose package is missing."""
    from transformers.integrations.integration_utils import (
        INTEGRATION_TO_CALLBACK,
        get_available_reporting_integrations,
    )

    names = [report_to] if isinstance(report_to, str) else report_to or ()
    for name in names:
        if name in ("all", "none"):
            continue
        if name not in INTEGRATION_TO_CALLBACK:
            known = sorted(INTEGRATION_TO_CALLBACK)
            hint = did_you_mean(name, known) or f"There are: {', '.join(known)}."
            raise ConfigError(f"report_to is {name}, which is no tracker. {hint}")
        if name not in get_available_reporting_integrations():
            raise SupportError(
                f"report_to is {name}, and its package is not installed: pip install {name}. Or set report_to: none."
            )


def check_cards(num_processes: int) -> None:
    """Raise ConfigError for several processes on fewer accelerators."""
    import torch

    num_cards = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    if num_processes <= max(num_cards, 1):
        return
    if not num_cards:
        raise ConfigError(
            f"{num_processes} processes are to start on this machine, and no GPU is visible. To train on the CPU, set "
            "use_cpu: true and bf16: false; `trl-ext doctor` finds out why a GPU is not seen."
        )
    raise ConfigError(
        f"{num_processes} processes are to start on this machine, and {num_cards} GPUs are visible. Start one process "
        f"for each: --num_processes {num_cards}."
    )
