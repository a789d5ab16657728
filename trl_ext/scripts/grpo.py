"""Train with GRPO: `accelerate launch ... -m trl_ext.scripts.grpo --config recipe.yaml --model_name_or_path MODEL`.

Cheap steps come first: parse, check, read the data, then load a model. A mistake in settings or data ends in a
sentence and exit code 2; any other exception is a bug and keeps its traceback.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trl import DatasetMixtureConfig, ModelConfig

from trl_ext.scripts import training
from trl_ext.scripts.arguments import StrictParser
from trl_ext.scripts.exit import refusals
from trl_ext.scripts.rewards import PROMPT_HELP, RewardArguments, build_rewards
from trl_ext.trainers.settings.values import setting

DESCRIPTION = f"""\
Train a language model with GRPO on rules and reward functions.

  accelerate launch --num_processes 8 --config_file "$(trl-ext launch-file zero2)" -m trl_ext.scripts.grpo \\
      --config gsm8k-grpo-8x40gb

{PROMPT_HELP}\
  model_name_or_path     model: hub name or folder
  output_dir             folder for the model and report.html
  max_steps              optimizer steps of the run
  per_device_train_batch_size, gradient_accumulation_steps
                         completions of a micro-batch on each process; micro-batches of an optimizer step
  num_generations        completions per prompt
  oversample             generate this many times the groups (1: off); extra groups replace groups with equal rewards
  max_completion_length  most tokens of a completion
  learning_rate, beta    step size; weight of the KL penalty
"""


@dataclass
class GRPOScriptArguments(RewardArguments):
    """Arguments of the script: the dataset and the rewards."""

    reward_model_name_or_path: str | None = setting(
        None, "Reward model with one output, in addition to rules or instead of them: hub name or folder."
    )


def make_parser(prog: str | None = None) -> StrictParser:
    """Return the parser of this script; `trl-ext grpo` uses it as well."""
    from trl_ext.trainers.grpo.config import GRPOConfig

    return StrictParser((GRPOScriptArguments, GRPOConfig, ModelConfig, DatasetMixtureConfig), prog, DESCRIPTION)


def all_rewards(script_args: Any) -> list[Any]:
    """Build all rewards in the form that GRPOTrainer takes: rules, the reward model, functions."""
    models = list(filter(None, [script_args.reward_model_name_or_path]))
    rewards = build_rewards(script_args.rules, script_args.reward_funcs, *models)
    at = 0 if script_args.rules is None else 1
    return [*rewards[:at], *models, *rewards[at:]]


def train(script_args: Any, training_args: Any, model_args: Any, dataset_args: Any, callbacks: Any = ()) -> None:
    """Check, read the data, train, save, report.

    Args:
        script_args: Arguments of this script: data, rewards and further models.
        training_args: The trainer's config.
        model_args: Model, precision and LoRA.
        dataset_args: A mixture of datasets, as TRL's scripts read it.
        callbacks: Callbacks to add to the trainer.
    """
    training.check_model(model_args)
    checkpoint = training.resume_point(training_args)
    rewards = all_rewards(script_args)
    rows = training.load_rows(script_args, training_args, model_args, dataset_args)
    training_args.model_init_kwargs = training.model_init_kwargs(training_args, model_args)

    from trl_ext.trainers.grpo.trainer import GRPOTrainer

    with refusals():
        trainer = GRPOTrainer(reward_funcs=rewards, **training.trainer_inputs(training_args, model_args, rows))
    training.run(trainer, checkpoint, script_args.dataset_name, callbacks)


def main(argv: Sequence[str] | None = None, callbacks: Sequence[Any] = ()) -> None:
    training.main("trl_ext.scripts.grpo", make_parser, train, argv, callbacks)


if __name__ == "__main__":
    main()
