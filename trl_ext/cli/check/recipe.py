"""Read a recipe as its script would, and its launch, on a machine that need not be the training machine.

The run's devices are not here. So the config is built for the run's number of processes, on the CPU, without its
DeepSpeed file, which is read separately.
"""

import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from trl_ext.errors import ConfigError
from trl_ext.launch.servers import check_servers
from trl_ext.memory.files.launch import read_accelerate
from trl_ext.scripts.arguments import StrictParser, split_config_flag
from trl_ext.scripts.recipe import launch_file, paths_beside, read_recipe, unknown_argument

TRAINERS = ("grpo", "ppo", "reward")
# Keys that can be checked only on the training machine.
OF_THE_MACHINE = ("deepspeed", "use_cpu", "tf32")


@dataclass(frozen=True, slots=True)
class Launch:
    """The settings of a run that its launch decides.

    `num_processes` is None if left open, `engine` None without DeepSpeed; `is_known` is True if a file gives the
    launch.
    """

    num_processes: int | None = None
    engine: dict[str, Any] | None = None
    is_known: bool = False


@dataclass(frozen=True, slots=True)
class Parsed:
    """A recipe with its overrides, as the script sees it.

    Args:
        trainer: "grpo", "ppo" or "reward".
        deepspeed_file: The recipe's key `deepspeed`, "" without it.
        summary: A sentence about the recipe.
    """

    trainer: str
    script_args: Any
    training_args: Any
    model_args: Any
    dataset_args: Any
    deepspeed_file: str
    use_cpu: bool
    summary: str


def with_servers(
    num_servers: int | None, recipe: str, trainer: str | None, overrides: Sequence[str], num_gpus: int | None
) -> tuple[int, Sequence[str]]:
    """Return the number of cards that `--vllm_servers` takes, and the overrides with those that the launcher adds.

    Args:
        num_gpus: Cards of the machine; None if not known.

    Raises:
        ConfigError: No card is left for training, or a setting of the recipe contradicts the servers.
    """
    if num_servers is None:
        return 0, overrides
    words = split_config_flag(["--config", recipe, *overrides])
    name = trainer or guess_trainer(words[1], words[2:])
    if num_servers < 1:
        raise ConfigError(f"--vllm_servers is {num_servers}. Give the number of vLLM servers: 1 or more.")
    given = make_parser(name).given_values(words)
    check_servers(name, num_servers, given)
    served = num_servers * int(given.get("vllm_tensor_parallel_size") or 1)
    if num_gpus is not None and served >= num_gpus:
        raise ConfigError(f"The vLLM servers take {served} of {num_gpus} cards: none is left for training.")
    return served, [*overrides, "--use_vllm", "true", "--vllm_mode", "server"]


def parse(recipe: str, trainer: str | None, overrides: Sequence[str], num_processes: int) -> Parsed:
    """Parse a recipe and its overrides; raise ConfigError for everything that the script would refuse.

    Args:
        recipe: A YAML file, or the name of a shipped recipe.
        trainer: "grpo", "ppo" or "reward"; None finds it from the recipe's keys.
        overrides: Words of the command line, such as --learning_rate 1e-6.
        num_processes: Processes of the run, among which its batches must divide.
    """
    warnings.filterwarnings("ignore", message=r"`(is_)?gradient_checkpointing", category=FutureWarning)
    words = split_config_flag(["--config", recipe, *overrides])
    path, flags = words[1], words[2:]
    name = trainer or guess_trainer(path, flags)
    parser = make_parser(name)
    if unknown := parser.unknown_arguments(words):
        raise unknown_argument(unknown[0], list(parser.types_of))
    keys = read_recipe(path, parser.types_of)
    keys |= paths_beside(path, keys)
    own = keys | parser.given_values(flags)
    # Batches must divide among the processes of the run.
    size = {"world_size": property(lambda self: num_processes)}
    elsewhere = StrictParser([type(kind.__name__, (kind,), size) for kind in parser.dataclass_types])
    kept, skipping = [], False
    for word in flags:
        skipping = word[2:].partition("=")[0] in OF_THE_MACHINE if word.startswith("--") else skipping
        kept += [] if skipping else [word]
    with _without(keys, OF_THE_MACHINE) as quiet:
        words = ["--config", quiet, *kept, "--use_cpu", "true"]
        script_args, training_args, model_args, dataset_args = elsewhere.parse(words)
    guessed = "" if trainer else " (found from its keys; --trainer overrides it)"
    processes = "1 process" if num_processes == 1 else f"{num_processes} processes"
    summary = f"{path}: {len(keys)} keys of a {name} run{guessed}, for {processes}."
    use_cpu, file = str(own.get("use_cpu")).lower() == "true", str(own.get("deepspeed") or "")
    return Parsed(name, script_args, training_args, model_args, dataset_args, file, use_cpu, summary)


def make_parser(trainer: str) -> StrictParser:
    """Return the parser of the trainer's script."""
    parser: StrictParser = import_module(f"trl_ext.scripts.{trainer}").make_parser("trl-ext check")
    return parser


def guess_trainer(path: str, flags: Sequence[str]) -> str:
    """Guess the trainer whose script knows most of the keys; GRPO before PPO, which has all keys of GRPO."""
    try:
        keys = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return TRAINERS[0]  # its parser then reports what is wrong with the file
    given = {word[2:].partition("=")[0] for word in flags if word.startswith("--")}
    given |= keys.keys() if isinstance(keys, dict) else set()
    return min(TRAINERS, key=lambda name: len(given - make_parser(name).types_of.keys()))


@contextmanager
def _without(keys: dict[str, Any], names: Sequence[str]) -> Iterator[str]:
    """Yield the path of a copy of the recipe without some keys."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "recipe.yaml"
        file.write_text(yaml.safe_dump({key: keys[key] for key in keys if key not in names}), encoding="utf-8")
        yield str(file)


def read_launch(config_file: str | None, recipe: str | None = None) -> Launch:
    """Read the given accelerate file, else the recipe's; raise ConfigError if it is missing or not YAML."""
    if config_file is None and recipe is not None:
        config_file = launch_file(split_config_flag(["--config", recipe])[1])
    return Launch() if config_file is None else Launch(*read_accelerate(config_file), is_known=True)
