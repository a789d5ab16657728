"""Train with GRPO: `accelerate launch ... -m trl_ext.scripts.grpo --config recipe.yaml --model_name_or_path MODEL`.

The order is the order of cost: parse, check, read the data, only then load a model. What is wrong with the settings or
the data ends in one sentence and exit code 2; any other exception is a bug and keeps its traceback.
"""

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments

from trl_ext import __version__, compat
from trl_ext.errors import ConfigError
from trl_ext.scripts.arguments import StrictParser
from trl_ext.scripts.data import Source
from trl_ext.scripts.exit import user_errors
from trl_ext.scripts.rewards import build_rewards

DESCRIPTION = """\
Train a language model with GRPO on rules as rewards.

  accelerate launch --num_processes 8 --config_file accelerate_configs/zero3.yaml -m trl_ext.scripts.grpo \\
      --config recipe.yaml --model_name_or_path Qwen/Qwen2.5-7B-Instruct --dataset_name openai/gsm8k

The command line beats the recipe, the recipe beats the defaults. Every key of a recipe is a flag of the command line,
and an unknown one is an error. The keys that most runs set:

  model_name_or_path     model, on the hub or a folder
  dataset_name           dataset, on the hub, a folder with train.jsonl and test.jsonl, or one file
  rules                  rules in the recipe, or the path of a YAML file with them
  output_dir             where the model, report.html and reward.png go
  max_steps              optimizer steps
  per_device_train_batch_size, gradient_accumulation_steps
                         completions per process and forward, forwards per optimizer step
  num_generations        completions per prompt
  max_completion_length  tokens per completion
  learning_rate, beta    step size, weight of the KL penalty
  packing                forward real tokens only (on where it is exact)
  eval_strategy, eval_steps, eval_on_start, eval_temperature
                         held-out problems before, during and after
"""


@dataclass
class GRPOScriptArguments(ScriptArguments):
    """Arguments of the script itself: the dataset (from TRL) and what scores a completion."""

    rules: list | str | dict | None = field(
        default=None,
        metadata={
            "help": "Rules that score a completion: a list of rules in the recipe, or a mapping with `rules` and "
            "`clip`; or the path of a YAML file with that mapping."
        },
    )
    reward_funcs: list[str] | None = field(
        default=None,
        metadata={
            "help": "Further reward functions: accuracy_reward, reasoning_accuracy_reward, think_format_reward, "
            "get_soft_overlong_punishment, or dotted paths such as my_module.my_reward."
        },
    )
    reward_model_name_or_path: str | None = field(
        default=None, metadata={"help": "Reward model with one output, on the hub or a folder."}
    )


def make_parser(prog: str | None = None) -> StrictParser:
    """The parser of this script; `trl-ext grpo` uses it as well."""
    from trl_ext.trainers.grpo_config import GRPOConfig

    return StrictParser((GRPOScriptArguments, GRPOConfig, ModelConfig, DatasetMixtureConfig), prog, DESCRIPTION)


def check_processes() -> None:
    """A launcher that started no process for the work."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 1:
        raise ConfigError(f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, fewer than one process. Start at least one.")


def check_model(model_args: ModelConfig) -> None:
    """A model is named, and its folder exists if the name is a path."""
    name = model_args.model_name_or_path
    if not name:
        raise ConfigError("There is no model. Give --model_name_or_path, a name on the hub or a folder.")
    if name.startswith(("/", "./", "../")) and not Path(name).is_dir():
        raise ConfigError(f"There is no folder {name}. Check --model_name_or_path.")


def resume_point(training_args: Any) -> str | bool | None:
    """Where to resume: a checkpoint's folder, True for the newest in output_dir, None to start afresh.

    The field is typed as text, so `true` arrives from the command line as a word.
    """
    value = training_args.resume_from_checkpoint
    if not value or str(value).lower() == "false":
        return None
    if str(value).lower() == "true":
        if not list(Path(training_args.output_dir).glob("checkpoint-*")):
            raise ConfigError(
                f"There is no checkpoint in {training_args.output_dir} to resume from. Check --output_dir, or leave "
                "resume_from_checkpoint out to start afresh."
            )
        return True
    if not Path(value).is_dir():
        raise ConfigError(f"There is no checkpoint {value}. Check --resume_from_checkpoint.")
    return value


def data_source(script_args: GRPOScriptArguments, dataset_args: DatasetMixtureConfig, evaluates: bool) -> Source:
    """Where the rows come from, checked without reading them."""
    return Source(
        name=script_args.dataset_name,
        train_split=script_args.dataset_train_split,
        test_split=script_args.dataset_test_split if evaluates else None,
        config=script_args.dataset_config,
        streaming=script_args.dataset_streaming,
        mixture=dataset_args if dataset_args.datasets else None,
    )


def model_init_kwargs(training_args: Any, model_args: ModelConfig) -> dict[str, Any]:
    """What `from_pretrained` gets; the training arguments' own `model_init_kwargs` win, as in TRL's script."""
    return {
        "revision": model_args.model_revision,
        "trust_remote_code": training_args.trust_remote_code,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **(training_args.model_init_kwargs or {}),
    }


def report_settings(script_args: Any, training_args: Any, model_args: Any, rewards: Sequence[Any]) -> dict[str, str]:
    """The settings that the report shows."""
    packages = compat.versions("trl", "transformers", "accelerate", "torch")
    settings = {
        "model": model_args.model_name_or_path,
        "dataset": script_args.dataset_name or "mixture",
        "rewards": ", ".join(described_reward(reward) for reward in rewards),
        "processes": training_args.world_size,
        "completions per process and forward": training_args.per_device_train_batch_size,
        "gradient accumulation": training_args.gradient_accumulation_steps,
        "completions per prompt": training_args.num_generations,
        "tokens per completion, at most": training_args.max_completion_length,
        "learning rate": training_args.learning_rate,
        "KL penalty": training_args.beta,
        "temperature": training_args.temperature,
        "loss": training_args.loss_type,
        "precision": "bf16" if training_args.bf16 else "fp16" if training_args.fp16 else "fp32",
        "packing": training_args.packing,
        "seed": training_args.seed,
        "versions": ", ".join([f"trl_ext {__version__}", *(f"{name} {number}" for name, number in packages.items())]),
    }
    return {key: str(value) for key, value in settings.items()}


def described_reward(reward: Any) -> str:
    """A reward in the report: rules with their weights, else the name."""
    if rules := getattr(reward, "rules", None):
        return ", ".join(f"{rule.name} (weight {rule.weight:g})" for rule in rules)
    return reward if isinstance(reward, str) else getattr(reward, "__name__", type(reward).__name__)


def train(script_args: Any, training_args: Any, model_args: Any, dataset_args: Any) -> None:
    """Check, read the data, train, save, report."""
    check_model(model_args)
    checkpoint = resume_point(training_args)
    rewards = build_rewards(script_args.rules, script_args.reward_funcs, script_args.reward_model_name_or_path)
    evaluates = training_args.eval_strategy != "no" or training_args.eval_on_start
    train_rows, held_out_rows = data_source(script_args, dataset_args, evaluates).load()
    training_args.model_init_kwargs = model_init_kwargs(training_args, model_args)

    from trl import get_peft_config, get_quantization_config

    from trl_ext.monitor.progress import use_progress_line
    from trl_ext.trainers.grpo import GRPOTrainer

    trainer = GRPOTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=rewards,
        args=training_args,
        train_dataset=train_rows,
        eval_dataset=held_out_rows,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    use_progress_line(trainer)
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model(training_args.output_dir)
    trainer.save_state()
    if trainer.is_world_process_zero():
        print_report(trainer, report_settings(script_args, training_args, model_args, rewards))
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
    # Seen once in some forty launches: a rank aborted while exiting, as the other was still at work. Not reproduced;
    # leaving the group together and in order rules the likely cause out.
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


def print_report(trainer: Any, settings: dict[str, str]) -> None:
    """Write report.html and reward.png, and end on the table."""
    from rich.console import Console

    from trl_ext.monitor.report import HTML_FILE, summary_table, write_report

    folder = trainer.args.output_dir
    summary = write_report(folder, trainer.state.log_history, settings)
    console = Console()
    console.print(summary_table(summary))
    console.print(
        f"Model and report: {folder}, {Path(folder) / HTML_FILE}", soft_wrap=True, markup=False, highlight=False
    )


def main(argv: Sequence[str] | None = None) -> None:
    # TRL's own code uses the old names, so the user cannot heed these.
    old_names = r"`(is_)?gradient_checkpointing(_\w+)?` is deprecated"
    warnings.filterwarnings("ignore", message=old_names, category=FutureWarning)
    with user_errors():
        check_processes()
        train(*make_parser(prog="python -m trl_ext.scripts.grpo").parse(argv))


if __name__ == "__main__":
    main()
