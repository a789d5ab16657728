"""Train a reward model: `accelerate launch ... -m trl_ext.scripts.reward --config reward --model_name_or_path MODEL`.

Cheap steps come first: parse, check, read and filter the pairs, then load a model. A mistake in settings or data ends
in a sentence and exit code 2; any other exception is a bug and keeps its traceback.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from trl import DatasetMixtureConfig, ModelConfig

from trl_ext.errors import ConfigError, DataError, TrlExtError
from trl_ext.rewards import filter_pairs
from trl_ext.rewards.pairs import with_gaps
from trl_ext.scripts import training
from trl_ext.scripts.arguments import StrictParser
from trl_ext.scripts.data.dataset import Splits
from trl_ext.scripts.data.keys import DataArguments
from trl_ext.scripts.exit import refusals
from trl_ext.scripts.rewards import build_rules
from trl_ext.trainers.settings.values import setting

DESCRIPTION = """\
Train a reward model on pairs of a chosen and a rejected answer.

  accelerate launch --num_processes 8 --config_file "$(trl-ext launch-file zero3)" -m trl_ext.scripts.reward \\
      --config reward --model_name_or_path Qwen/Qwen2.5-7B-Instruct --dataset_name trl-lib/ultrafeedback_binarized

`trl-ext recipes` lists the shipped recipes; `trl-ext recipes NAME` copies a recipe here.
With LoRA: --use_peft --lora_target_modules all-linear --learning_rate 1e-4

A flag overrides the recipe, the recipe overrides the defaults. Every key of a recipe is also a flag, and an unknown
key or flag is an error. The keys that most runs set:

  model_name_or_path     language model or reward model: hub name or folder
  dataset_name           pairs: hub name, folder with train.jsonl and test.jsonl, or one file; columns chosen and
                         rejected with text or messages, with or without a column prompt
  columns                names of the dataset's columns, by the name that trl_ext uses: {chosen: good, rejected: bad};
                         {prompt: null} ignores the column prompt, if the messages of both sides begin with it
  output_dir             folder for the model and report.html
  num_train_epochs       passes over the pairs, usually 1; or max_steps, optimizer steps
  per_device_train_batch_size, gradient_accumulation_steps
                         pairs of a micro-batch on each process; micro-batches of an optimizer step
  max_tokens_per_forward bounds memory: the pairs of a step fill micro-batches of at most this number of tokens
  max_length             most tokens of a prompt with its answer; longer pairs are dropped
  learning_rate          step size; 1e-5 for all weights, 1e-4 for LoRA
  packing                compute real tokens only, and a prompt once for both answers (default: on where the result is
                         exact)
  filter_pairs           drop empty and identical pairs, pairs with two prompts, and pairs that the rules contradict
  rules, margin_from_rules
                         rules in the recipe, or the path of a YAML file; use their score gap as the margin of the loss
  eval_strategy, eval_steps, eval_on_start
                         when held-out pairs are evaluated; with rules, also by whether the rules agree with the pair
"""

_ROW = "row_before_filter"  # a column with the row's number before the filter


@dataclass
class RewardScriptArguments(DataArguments):
    """Arguments of the script: the pairs, and how rules are used on them."""

    rules: list | str | dict | None = setting(
        None,
        "Rules that score both sides of a pair, for evaluation, filter_pairs and margin_from_rules: a list of rules "
        "in the recipe; a mapping with `rules` and `clip`; or the path of a YAML file with that mapping.",
    )
    filter_pairs: bool = setting(
        False,
        "Drop pairs that are empty, identical or have different prompts. With rules, also drop training pairs whose "
        "chosen side scores lower than the rejected side. A table shows how many pairs are dropped.",
    )
    margin_from_rules: bool = setting(
        False,
        "Use the rules' score of the chosen side minus that of the rejected side as the margin of the loss. Implies "
        "filter_pairs.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.margin_from_rules and self.rules is None:
            raise ConfigError("margin_from_rules is true, but there are no rules. Give `rules`, or leave it out.")
        self.filter_pairs = self.filter_pairs or self.margin_from_rules
        if self.filter_pairs and self.dataset_streaming:
            raise ConfigError(
                "filter_pairs reads all pairs before the first step, and dataset_streaming reads none. Set one of the "
                "two to false."
            )


@dataclass
class RewardModelConfig(ModelConfig):
    """TRL's `ModelConfig` with the LoRA task type that trains and saves the score head."""

    lora_task_type: str = setting("SEQ_CLS", "Task type of LoRA; a reward model needs SEQ_CLS.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.use_peft and self.lora_task_type != "SEQ_CLS":
            raise ConfigError(
                f"lora_task_type is {self.lora_task_type}, which would leave the score head random and frozen. "
                "Leave it out: a reward model needs SEQ_CLS."
            )


def make_parser(prog: str | None = None) -> StrictParser:
    """Return the parser of this script; `trl-ext reward` uses it as well."""
    from trl_ext.trainers.reward.config import RewardConfig

    return StrictParser(
        (RewardScriptArguments, RewardConfig, RewardModelConfig, DatasetMixtureConfig), prog, DESCRIPTION
    )


def train(script_args: Any, training_args: Any, model_args: Any, dataset_args: Any, callbacks: Any = ()) -> None:
    """Check, read and filter the pairs, train, save, report.

    Args:
        script_args: Arguments of this script: data, rewards and further models.
        training_args: The trainer's config.
        model_args: Model, precision and LoRA.
        dataset_args: A mixture of datasets, as TRL's scripts read it.
        callbacks: Callbacks to add to the trainer.
    """
    training.check_model(model_args)
    checkpoint = training.resume_point(training_args)
    rules = None if script_args.rules is None else build_rules(script_args.rules)
    pairs = training.load_rows(script_args, training_args, model_args, dataset_args)
    if script_args.filter_pairs:
        pairs = Splits(
            filter_everywhere(pairs.train, rules, script_args.margin_from_rules, "training pairs"),
            # Held-out pairs that the rules contradict stay: evaluation compares both kinds.
            filter_everywhere(pairs.held_out, None, False, "held-out pairs"),
        )
    tokenizer = training.load_tokenizer(training_args, model_args)
    training.look_at_pairs(pairs, training_args, tokenizer)
    training_args.model_init_kwargs = training.model_init_kwargs(training_args, model_args)

    from trl_ext.trainers.reward.trainer import RewardTrainer

    with refusals():
        trainer = RewardTrainer(rules=rules, **training.trainer_inputs(training_args, model_args, pairs))
    training.run(trainer, checkpoint, script_args.dataset_name, callbacks)


def filter_everywhere(dataset: Any, rules: Any, margin: bool, role: str) -> Any:
    """Filter pairs as `rewards.filter_pairs` does, with the same rows on every process; the first prints the report.

    A rule with a time limit may score a row on one process and time out on another. Processes with different rows
    would wait for each other forever, so the first process filters and sends the result to the others.

    Raises DataError on every process if columns are missing or no row is left; ConfigError for a stream.

    Args:
        dataset: Pairs with `chosen` and `rejected`.
        rules: Rules that score both sides; None only drops pairs that cannot train.
        margin: Whether the gap of the rules becomes the pair's `margin`.
        role: Name of the pairs in messages, such as "training pairs".
    """
    if dataset is None:
        return None
    from accelerate import PartialState
    from accelerate.utils import broadcast_object_list

    is_first = PartialState().is_main_process
    (outcome,) = broadcast_object_list([_outcome(dataset, rules, margin, role) if is_first else None])
    if isinstance(outcome, TrlExtError):
        raise outcome
    if is_first:
        print(f"\n{role.capitalize()}:\n{outcome.report}\n", flush=True)
    left = dataset.select(outcome.rows)
    return left if outcome.gaps is None else with_gaps(left, outcome.gaps, margin)


class FilteredPairs(NamedTuple):
    """The numbers of the pairs that are left, their gaps (None without rules), and the table to print."""

    rows: list[int]
    gaps: list[float | None] | None
    report: str


def _outcome(dataset: Any, rules: Any, margin: bool, role: str) -> FilteredPairs | TrlExtError:
    """Filter the pairs.

    An error is returned instead of raised: the other processes wait for this result.

    Args:
        dataset: Pairs with `chosen` and `rejected`.
        rules: Rules that score both sides; None only drops pairs that cannot train.
        margin: Whether the gap of the rules becomes the pair's `margin`.
        role: Name of the pairs in messages, such as "training pairs".
    """
    from datasets import Dataset

    if not isinstance(dataset, Dataset):
        return ConfigError(f"filter_pairs reads the {role} whole, and they are a stream. Set one of the two to false.")
    try:
        numbered = dataset.add_column(_ROW, list(range(len(dataset))))
        pairs, report = filter_pairs(numbered, rules, margin=margin)
    except DataError as error:
        return DataError(f"The {role} cannot be filtered. {error}")
    except TrlExtError as error:
        return error
    return FilteredPairs(pairs[_ROW][:], None if rules is None else pairs["rule_gap"][:], str(report))


def main(argv: Sequence[str] | None = None, callbacks: Sequence[Any] = ()) -> None:
    training.main("trl_ext.scripts.reward", make_parser, train, argv, callbacks)


if __name__ == "__main__":
    main()
