"""`trl-ext`: a command for each training script, and for plans, checks, reports and rules.

Heavy libraries are imported only when a command needs them, so that help answers at once.
"""

import sys
from collections.abc import Sequence
from importlib import import_module

from trl_ext.errors import ConfigError, did_you_mean
from trl_ext.resources import __version__
from trl_ext.scripts.exit import user_errors

# The training scripts `trl_ext.scripts.NAME`: a line for the list, and arguments for an example.
SCRIPTS = {
    "grpo": ("train with GRPO on rules and reward functions", "--num_processes 1 --config gsm8k-grpo-1x4090"),
    "ppo": ("train with PPO on rules, reward models, or both", "--num_processes 4 --config gsm8k-ppo-4xa40"),
    "reward": ("train a reward model on pairs of answers", "--num_processes 6 --config rm-ultrafeedback-6x4090"),
}

# Other commands: the module with a function of the command's name, imported when the command runs.
COMMANDS = {
    "plan": "trl_ext.cli.plan.command",
    "check": "trl_ext.cli.check.command",
    "doctor": "trl_ext.cli.check.command",
    "report": "trl_ext.cli.report",
    "score": "trl_ext.cli.score.command",
    "recipes": "trl_ext.cli.recipes",
    "launch-file": "trl_ext.cli.recipes",
    "evaluate": "trl_ext.cli.after.command",
    "generate": "trl_ext.cli.after.command",
}

HELP = """\
usage: trl-ext COMMAND [arguments]

Trainer extensions for Hugging Face TRL.

commands:
{scripts}
  plan      find settings that fit the cards, before a run
  check     check that a recipe will start and fit: keys, tokenizer, eight rows, rules, memory
  doctor    check this machine: cards, driver, versions, kernels, memory, disks, harmful variables
  report    write the report of a run again, or compare runs in one table
  score     check rules: audit them on data, explain a reward, try known cheats, serve rewards
  recipes   list the shipped recipes, or copy one
  launch-file  print the path of a shipped accelerate file: zero2, zero3, ...
  evaluate  measure how many held-out problems a trained policy solves
  generate  let a trained policy answer the prompts of a file

  trl-ext COMMAND --help    explains a command
  trl-ext --version         prints the version
"""

SCRIPT_HELP = """\
usage: trl-ext {name} [--config RECIPE] [--KEY VALUE ...] [launch arguments]

  trl-ext {name} {example}
  trl-ext {name} --num_processes 8 --config_file zero3 --config RECIPE --model_name_or_path MODEL --output_dir OUT

Takes the arguments of two programs:
  {module:<32}  every key of a recipe; gets an argument that both programs have
  accelerate launch                 --num_processes, --config_file, --main_process_port and so on

  --config        YAML recipe, or the name of a shipped recipe: {recipes}
  --config_file   accelerate file, or the name of a shipped file: zero2, multi_gpu, cpu, ... (default: the recipe's)
  --launcher ray  start workers of Ray Train instead of accelerate's processes: --num_workers, --resources_per_worker,
                  --address, --storage_path, --max_failures, --autoscaling; see docs/cluster/ray.md
  --vllm_servers  number of vLLM servers to start on cards of this machine; those cards then do not train. They end
                  with the run. Not for reward (default: none)

All keys:              {module} --help
All launch arguments:  accelerate launch --help
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        scripts = "\n".join(f"  {name:9} {purpose}" for name, (purpose, _) in SCRIPTS.items())
        print(HELP.format(scripts=scripts), end="")
        return 0
    if words[0] == "--version":
        print(f"trl-ext {__version__}")
        return 0
    with user_errors():
        if words[0] in SCRIPTS:
            return launch_script(words[0], words[1:])
        if words[0] not in COMMANDS:
            names = [*SCRIPTS, *COMMANDS]
            hint = did_you_mean(words[0], names) or f"There are: {', '.join(names)}."
            raise ConfigError(f"There is no command '{words[0]}'. {hint}")
        return getattr(import_module(COMMANDS[words[0]]), words[0].replace("-", "_"))(words[1:])


def launch_script(name: str, argv: list[str]) -> int:
    """Launch a training script, or print its help."""
    module = f"trl_ext.scripts.{name}"
    if "-h" in argv or "--help" in argv:
        from trl_ext.cli.recipes import shipped_recipes

        names = [recipe.name for recipe in shipped_recipes() if recipe.trainer == name]
        said = {"name": name, "example": SCRIPTS[name][1], "recipes": ", ".join(names)}
        print(SCRIPT_HELP.format(**said, module=f"python -m {module}"), end="")
        return 0
    from trl_ext.cli.before_launch import check_before_launch
    from trl_ext.launch import LAUNCHERS, split_launcher
    from trl_ext.launch.servers import servers_beside, serving

    launcher, argv = split_launcher(argv)
    parser = import_module(module).make_parser()
    launch, on_ray = import_module(LAUNCHERS[launcher]), launcher == "ray"
    servers, argv = (None, argv) if on_ray else servers_beside(name, parser, argv)
    check_before_launch(module, parser, launch.split(argv)[1] if on_ray else argv, on_ray=on_ray)
    with serving(servers):
        return int(launch.launch(module, parser, argv))


if __name__ == "__main__":
    sys.exit(main())
