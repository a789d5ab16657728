"""Train with PPO: `accelerate launch ... -m trl_ext.scripts.ppo --config recipe.yaml --model_name_or_path MODEL`.

Cheap steps come first: parse, check, read the data, then load models. A mistake in settings or data ends in a sentence
and exit code 2; any other exception is a bug and keeps its traceback.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trl import DatasetMixtureConfig, ModelConfig

from trl_ext.errors import ConfigError
from trl_ext.scripts import training
from trl_ext.scripts.arguments import StrictParser
from trl_ext.scripts.exit import refusals
from trl_ext.scripts.rewards import PROMPT_HELP, RewardArguments, build_rewards
from trl_ext.trainers.settings.values import setting

DESCRIPTION = f"""\
Train a language model with PPO on rules, reward models, or both.

  accelerate launch --num_processes 4 --config_file "$(trl-ext launch-file zero2)" -m trl_ext.scripts.ppo \\
      --config gsm8k-ppo-4xa40

{PROMPT_HELP}\
  model_name_or_path     policy: hub name or folder
  reward_model           reward models with one output, in addition to rules or instead of them
  score_mode             add, or gate (reward models only score completions that pass the rules)
  output_dir             folder for the policy, critic/ and report.html
  use_peft, lora_r, lora_target_modules
                         LoRA: policy, critic and reference model share one backbone
  critic, value_model    adapter, head or separate; for separate, the model that the critic starts from
  total_episodes         completions to sample in the run; or max_steps, its optimizer steps
  per_device_train_batch_size, gradient_accumulation_steps, num_mini_batches, num_ppo_epochs
                         each process samples the product of the first three for an update; each epoch over these
                         completions takes num_mini_batches optimizer steps
  response_length        most tokens of a completion
  learning_rate, value_learning_rate
                         step size of the policy; step size of the critic
  kl_coef, kl_target     weight of the KL penalty in the reward; target to which that weight is adapted
"""


@dataclass
class PPOScriptArguments(RewardArguments):
    """Arguments of the script: the dataset, rewards, and models in addition to the policy."""

    reward_model: list[str] | None = setting(None, "Reward models with one output: hub names or folders.")
    # This order of types lets the flag take several folders, and a recipe a list or a string.
    reward_adapter: list[str] | None | str = setting(  # noqa: RUF036
        None,
        "Reward models that are LoRA adapters on the policy's backbone: folders, as `trl-ext reward` saves them. They "
        "share the policy's weights, and so need almost no memory.",
    )
    ref_model: str | None = setting(
        None, "Reference model of the KL penalty: hub name or folder. Unset: the policy before training."
    )
    value_model: str | None = setting(
        None,
        "Model that a separate critic starts from: a reward model, or the policy's base model. It needs the policy's "
        "tokenizer.",
    )


def make_parser(prog: str | None = None) -> StrictParser:
    """Return the parser of this script; `trl-ext ppo` uses it as well."""
    from trl_ext.trainers.ppo.config import PPOConfig

    return StrictParser((PPOScriptArguments, PPOConfig, ModelConfig, DatasetMixtureConfig), prog, DESCRIPTION)


def take_old_paths(script_args: Any, training_args: Any, model_args: Any) -> None:
    """Move TRL 1.12's `sft_model_path` and `reward_model_path` to today's arguments.

    Raises:
        ConfigError: Old and new name are given, and differ; or `dataset_num_proc` is set, which has no effect here.
    """
    if training_args.dataset_num_proc is not None:
        raise ConfigError(
            f"dataset_num_proc={training_args.dataset_num_proc} has no effect: prompts are tokenized as they are "
            "sampled. Leave it out."
        )
    for old, holder, new, value in [
        ("sft_model_path", model_args, "model_name_or_path", training_args.sft_model_path),
        ("reward_model_path", script_args, "reward_model", [training_args.reward_model_path]),
    ]:
        path, current = getattr(training_args, old), getattr(holder, new)
        if path == type(training_args).__dataclass_fields__[old].default:
            continue
        if current not in (None, value):
            raise ConfigError(f"{old} ({path}) and {new} ({current}) name the same model. Give one of them.")
        setattr(holder, new, value)


def check_paths(script_args: Any, model_args: Any) -> None:
    """Raise ConfigError if a model's path is no folder."""
    training.check_model(model_args)
    for flag in ("ref_model", "value_model"):
        training.check_folder(getattr(script_args, flag) or "", flag)
    for name in script_args.reward_model or ():
        training.check_folder(name, "reward_model")
    for adapter in reward_adapters(script_args):
        if not Path(adapter).is_dir():
            raise ConfigError(f"There is no folder {adapter}. Check --reward_adapter.")


def settle_critic(script_args: Any, training_args: Any, model_args: Any, reward_funcs: Sequence[Any]) -> None:
    """Set `critic`, and raise the trainer's errors about models before the data are read.

    Args:
        script_args: Arguments of this script: data, rewards and further models.
        training_args: The trainer's config.
        model_args: Model, precision and LoRA.
        reward_funcs: Rule sets and reward functions of the recipe.
    """
    from trl import get_peft_config

    from trl_ext.trainers.ppo.inputs import check_arguments, choose_critic

    check_arguments(
        training_args,
        model_args.model_name_or_path,
        script_args.ref_model,
        script_args.value_model,
        reward_models(script_args),
        reward_funcs,
    )
    training_args.critic = choose_critic(
        training_args,
        get_peft_config(model_args),
        script_args.value_model,
        reward_adapters(script_args),
        script_args.reward_model or (),
    )


def reward_adapters(script_args: Any) -> list[str]:
    """Return the folders of reward models that are adapters."""
    given = script_args.reward_adapter or []
    return [given] if isinstance(given, str) else list(given)


def reward_models(script_args: Any) -> list[str]:
    """Return the names of all reward models, adapters last."""
    return [*(script_args.reward_model or ()), *reward_adapters(script_args)]


def train(script_args: Any, training_args: Any, model_args: Any, dataset_args: Any, callbacks: Any = ()) -> None:
    """Check, read the data, train, save, report.

    Args:
        script_args: Arguments of this script: data, rewards and further models.
        training_args: The trainer's config.
        model_args: Model, precision and LoRA.
        dataset_args: A mixture of datasets, as TRL's scripts read it.
        callbacks: Callbacks to add to the trainer.
    """
    take_old_paths(script_args, training_args, model_args)
    check_paths(script_args, model_args)
    checkpoint = training.resume_point(training_args)
    reward_funcs = build_rewards(script_args.rules, script_args.reward_funcs, *reward_models(script_args))
    settle_critic(script_args, training_args, model_args, reward_funcs)
    rows = training.load_rows(script_args, training_args, model_args, dataset_args)
    training_args.model_init_kwargs = training.model_init_kwargs(training_args, model_args)
    training.look_at_prompts(rows, model_args.model_name_or_path, training_args, reward_funcs)

    from trl_ext.trainers.ppo.trainer import PPOTrainer

    with refusals():
        trainer = PPOTrainer(
            ref_model=script_args.ref_model,
            reward_model=script_args.reward_model,
            value_model=script_args.value_model,
            reward_funcs=reward_funcs,
            reward_adapter=script_args.reward_adapter,
            **training.trainer_inputs(training_args, model_args, rows),
        )
    training.run(trainer, checkpoint, script_args.dataset_name, callbacks)


def main(argv: Sequence[str] | None = None, callbacks: Sequence[Any] = ()) -> None:
    training.main("trl_ext.scripts.ppo", make_parser, train, argv, callbacks)


if __name__ == "__main__":
    main()
