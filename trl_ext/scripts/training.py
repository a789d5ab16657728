"""Code that the training scripts share: checks before a model is loaded, and a run from first step to report."""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import TrainerCallback
from transformers.utils import logging
from trl import DatasetMixtureConfig, ModelConfig

from trl_ext.compat.accelerate import fsdp_dtype, is_fsdp
from trl_ext.errors import ConfigError, DataError
from trl_ext.memory.models.find import check_here
from trl_ext.monitor.ending import ending
from trl_ext.monitor.streams import ignore_failed_writes
from trl_ext.rewards.text.secrets import public
from trl_ext.scripts.arguments import StrictParser
from trl_ext.scripts.data.dataset import DatasetSource, Splits, unloadable, unreadable_rows
from trl_ext.scripts.data.keys import DataArguments
from trl_ext.scripts.data.mapping import RowMapping
from trl_ext.scripts.exit import refusals, user_errors
from trl_ext.scripts.process import be_reachable, end_with_launcher, quiet_libraries
from trl_ext.scripts.trainer import ScriptTrainer
from trl_ext.trainers.checkpoints.folder import check_unused
from trl_ext.trainers.checkpoints.manifest import UNFINISHED
from trl_ext.trainers.checkpoints.ranks import gathered
from trl_ext.trainers.checkpoints.resume import no_checkpoint
from trl_ext.trainers.checkpoints.save import WriteErrors, newest_whole
from trl_ext.trainers.fit.message import out_of_memory_in_words
from trl_ext.trainers.rows.text import special_token_in
from trl_ext.trainers.settings.values import check_settings, check_text

logger = logging.get_logger(__name__)

ROLES = ("train_dataset", "eval_dataset")
NOT_APPLIED = "The prompts are text, and the model's chat template is not applied."
AS_MEANT = "prompt_format: chat asks as a user would; prompt_format: text confirms that this is meant."
_RENDERED = (
    "holds '{}', which chat templates write: it is rendered already, and prompt_format: text keeps it as it is."
)


def main(
    module: str,
    make_parser: Callable[[str], StrictParser],
    train: Callable[..., None],
    argv: Sequence[str] | None,
    callbacks: Sequence[TrainerCallback] = (),
) -> None:
    """Parse the arguments and train.

    A mistake in settings or data ends in a sentence and exit code 2; out of memory ends in exit code 5 and settings
    that fit.

    Args:
        module: The script, as in `python -m`.
        make_parser: Makes the script's parser; takes the name in the usage line.
        train: Takes the parser's results, and `callbacks`.
        argv: Arguments without the program's name, `sys.argv[1:]` if None.
        callbacks: The launcher's callbacks, for the trainer.
    """
    ignore_failed_writes()
    quiet_libraries()
    with user_errors(), out_of_memory_in_words():
        if int(os.environ.get("WORLD_SIZE", "1")) < 1:
            raise ConfigError(f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, fewer than one process. Start at least one.")
        end_with_launcher()
        be_reachable()
        parser = make_parser(f"python -m {module}")
        parsed = parser.parse(argv)
        training_args = parsed[1]  # the script's own arguments come first
        recipe = parser.given_values(sys.argv[1:] if argv is None else argv)
        # Without secrets: transformers pickles the arguments into training_args.bin.
        training_args.recipe = public(recipe)
        training_args.recipe_lacks = [name for name in recipe if training_args.recipe.get(name) != recipe[name]]
        if "log_level_replica" not in training_args.given:
            training_args.log_level_replica = "error"  # rank 0 prints the warnings
        check_settings(training_args)
        check_output_dir(training_args.output_dir)
        with unreadable_rows():
            train(*parsed, callbacks)


# Checks -----------------------------------------------------------------------------------------------------------

_LONGEST_NAME = 255  # characters of a folder's name, on the file systems of Linux


def check_model(model_args: ModelConfig) -> None:
    """Raise ConfigError if there is no model, or if its path is no folder."""
    name = model_args.model_name_or_path
    if not name:
        raise ConfigError("There is no model. Give --model_name_or_path, a name on the hub or a folder.")
    check_folder(name, "model_name_or_path")
    revision = model_args.model_revision
    if Path(name).is_dir() and revision not in (None, "main"):
        raise ConfigError(f"model_revision={revision} has no effect on the folder {name}. Leave it out.")


def check_folder(name: str, flag: str) -> None:
    """Raise ConfigError for a path that is no folder, and for a hub name that is not here if the hub is silent."""
    if max(map(len, name.split("/"))) > _LONGEST_NAME:
        raise ConfigError(f"{flag} has {len(name):,} characters: no folder or model has such a name. Check --{flag}.")
    if name.startswith(("/", "./", "../")) and not Path(name).is_dir():
        raise ConfigError(f"There is no folder {name}. Check --{flag}.")
    check_here(name)


def check_output_dir(name: str, flag: str = "output_dir") -> None:
    """Raise ConfigError for a folder of `flag` that cannot be made or written, before anything is loaded."""
    check_text(flag, name)
    path = Path(name).absolute()
    there = next(part for part in (path, *path.parents) if part.exists())
    if not there.is_dir():
        raise ConfigError(f"{flag} {name} cannot be a folder: {there} is a file. Give another --{flag}.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{flag} {name} cannot be written: {there} is read-only for you. Give another --{flag}.")


def resume_point(training_args: Any) -> str | bool | None:
    """Return the checkpoint folder to resume from, True for the newest in output_dir, None for a new run.

    The field is typed as text, so `true` comes from the command line as a string.

    Raises:
        ConfigError: There is no such checkpoint; or a new run would write into the folder of an earlier run.
    """
    value = training_args.resume_from_checkpoint
    if not value or str(value).lower() == "false":
        if training_args.output_dir is not None:
            check_unused(training_args)
        return None
    if str(value).lower() == "true":
        folder = Path(training_args.output_dir)
        if not [*folder.glob("checkpoint-*"), *folder.glob(f"{UNFINISHED}/checkpoint-*")]:
            raise no_checkpoint(folder)
        return True
    if not Path(value).is_dir():
        raise ConfigError(f"There is no checkpoint {value}. Check --resume_from_checkpoint.")
    return value


def data_source(script_args: DataArguments, training_args: Any, dataset_args: DatasetMixtureConfig) -> DatasetSource:
    """Return the dataset, with held-out rows only if the run evaluates. Reads no row.

    Raises ConfigError or DataError if there is no such data, or a stream and no `max_steps`.
    """
    if (script_args.dataset_streaming or dataset_args.streaming) and training_args.max_steps <= 0:
        raise ConfigError(
            "The number of rows of a stream is not known, so num_train_epochs does not end the run: set max_steps, "
            "the optimizer steps to take, or set dataset_streaming to false."
        )
    evaluates = training_args.eval_strategy != "no" or training_args.eval_on_start
    return DatasetSource(
        name=script_args.dataset_name,
        train_split=script_args.dataset_train_split,
        test_split=script_args.dataset_test_split if evaluates else None,
        config=script_args.dataset_config,
        streaming=script_args.dataset_streaming,
        mixture=dataset_args if dataset_args.datasets else None,
    )


def load_rows(
    script_args: DataArguments, training_args: Any, model_args: ModelConfig, dataset_args: DatasetMixtureConfig
) -> Splits:
    """Return the rows, mapped by the recipe.

    Raises ConfigError or DataError if they cannot be read or mapped, or if the run would take no step with them.

    Args:
        script_args: Arguments of this script: data, rewards and further models.
        training_args: The trainer's config.
        model_args: Model, precision and LoRA.
        dataset_args: A mixture of datasets, as TRL's scripts read it.
    """
    from trl_ext.trainers.settings.checks import check_steps

    rows = data_source(script_args, training_args, dataset_args).load()
    mapping = script_args.mapping()
    train_rows, held_out_rows = (
        apply_mapping(mapping, part, role, training_args, model_args) for part, role in zip(rows, ROLES, strict=True)
    )
    if training_args.memory is None:  # else the plan may choose other batches; the trainer checks again
        check_steps(train_rows, training_args)
    if isinstance(train_rows, Dataset) and getattr(script_args, "prompt_format", "text") is None:
        tokenizer = load_tokenizer(training_args, model_args)
        if is_unrendered_text(train_rows[0].get("prompt"), tokenizer):
            logger.warning_once(f"{NOT_APPLIED} {AS_MEANT}")
    return Splits(train_rows, held_out_rows)


def apply_mapping(mapping: RowMapping, rows: Any, role: str, training_args: Any, model_args: ModelConfig) -> Any:
    """Return the mapped rows of a split.

    Args:
        mapping: The recipe's mapping.
        rows: Rows of the split; None stays None.
        role: Name of the split in messages.
        training_args, model_args: For the tokenizer, loaded only if the mapping makes prompts.

    Raises:
        ConfigError, DataError: The rows cannot be mapped, or text that is rendered already would become a message.
    """
    mapped = mapping.apply(rows, role, lambda: has_chat_template(training_args, model_args))
    if mapped is not None and mapping.makes_prompts:
        given, prompt = mapping.given_prompt(next(iter(rows))), next(iter(mapped))["prompt"]
        is_made = isinstance(prompt, list) and not isinstance(given, list)
        if is_made and (found := special_token_in(prompt[-1]["content"], load_tokenizer(training_args, model_args))):
            raise ConfigError(f"{role}: the text of row 0's prompt {_RENDERED.format(found)}")
    return mapped


def is_unrendered_text(prompt: Any, tokenizer: Any) -> bool:
    """Return True for text that the tokenizer's chat template could render, and that is not its rendering already."""
    has_template = bool(getattr(tokenizer, "chat_template", None))
    return isinstance(prompt, str) and has_template and not special_token_in(prompt, tokenizer)


def look_at_prompts(
    parts: Sequence[Any], model_name: str, training_args: Any, rewards: Sequence[Any], tokenizer: Any = None
) -> None:
    """Raise DataError for rows that GRPO or PPO would refuse. The model is not loaded.

    Args:
        parts: Training rows, and held-out rows or None; rows of token ids, for PPO, are not checked here.
        model_name: Model whose tokenizer is loaded if `tokenizer` is None.
        training_args: The trainer's config.
        rewards: Rule sets and reward functions, whose columns the rows must have.
        tokenizer: The model's; None loads it.
    """
    from trl_ext.trainers.rows.prompts import PromptChecks
    from trl_ext.trainers.rows.sentence import columns_of

    checks = PromptChecks(model_name, list(rewards), training_args, {"processing_class": tokenizer})
    for part, role in zip(parts, ROLES, strict=True):
        if part is not None and "input_ids" not in columns_of(part, role):
            checks.look_at(part, role)


def look_at_pairs(parts: Sequence[Any], training_args: Any, tokenizer: Any = None) -> None:
    """Raise DataError for pairs that the reward trainer would refuse; with `tokenizer`, chats need its template."""
    from trl_ext.trainers.rows.pairs import check_pairs

    # A template that the recipe names replaces the tokenizer's.
    reader = None if training_args.chat_template_path else tokenizer
    for part, role in zip(parts, ROLES, strict=True):
        if part is not None:
            check_pairs(part, role, reader)


def load_tokenizer(training_args: Any, model_args: ModelConfig) -> Any:
    """Return the model's tokenizer; raise ConfigError if it cannot be loaded."""
    from transformers import AutoTokenizer

    name, trusts = str(model_args.model_name_or_path), bool(getattr(training_args, "trust_remote_code", False))
    try:
        return AutoTokenizer.from_pretrained(name, revision=model_args.model_revision, trust_remote_code=trusts)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(f"The tokenizer of {unloadable(name, error)}") from error


def has_chat_template(training_args: Any, model_args: ModelConfig) -> bool:
    """Return True if the model's tokenizer has a chat template."""
    return bool(getattr(load_tokenizer(training_args, model_args), "chat_template", None))


def model_init_kwargs(training_args: Any, model_args: ModelConfig) -> dict[str, Any]:
    """Return the arguments of `from_pretrained`; the user's `model_init_kwargs` win, as in TRL's script.

    A `dtype` that is only TRL's default is left to `memory`.
    """
    is_open = training_args.memory is not None and "dtype" not in training_args.given
    return {
        "revision": model_args.model_revision,
        "trust_remote_code": training_args.trust_remote_code,
        "attn_implementation": model_args.attn_implementation,
        **({} if is_open else {"dtype": model_args.dtype}),
        **(training_args.model_init_kwargs or {}),
    }


def trainer_inputs(training_args: Any, model_args: ModelConfig, rows: Splits) -> dict[str, Any]:
    """Return the arguments of every trainer: model, adapters, quantization, settings, and the rows of `load_rows`."""
    from trl import get_peft_config, get_quantization_config

    if model_args.load_in_4bit and is_fsdp(training_args):
        model_args.bnb_4bit_quant_storage = model_args.bnb_4bit_quant_storage or fsdp_dtype(training_args)
    return {
        "model": model_args.model_name_or_path,
        "args": training_args,
        "train_dataset": rows.train,
        "eval_dataset": rows.held_out,
        "quantization_config": get_quantization_config(model_args),
        "peft_config": get_peft_config(model_args),
    }


# The run ----------------------------------------------------------------------------------------------------------


class FirstStep(TrainerCallback):
    """Records that training has begun: models, optimizers and checkpoint are loaded, and later errors are bugs."""

    has_come = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.has_come = True


def run(
    trainer: ScriptTrainer,
    checkpoint: str | bool | None,
    dataset_name: str | None,
    callbacks: Sequence[TrainerCallback] = (),
) -> None:
    """Train, save, report, and leave the process group together.

    Args:
        trainer: A trainer of this package.
        checkpoint: From `resume_point`: a folder, True for the newest, or None.
        dataset_name: For the model card; None if the data have no name on the Hub.
        callbacks: Callbacks to add to the trainer.
    """
    start, trainer.reports_itself, trainer.saves_afterwards = FirstStep(), False, True  # the model first
    for callback in (start, *callbacks):
        trainer.add_callback(callback)
    try:
        with refusals(has_begun=lambda: start.has_come):
            trainer.train(resume_from_checkpoint=checkpoint)
    except SystemExit:  # saved on a signal
        _leave_together(trainer)
        raise
    try:
        if not trainer.state.global_step:
            raise DataError("The stream of training rows ended before the first batch was full. Give more rows.")
        _save(trainer)
    finally:
        trainer.end_signals()
        trainer.report()
    try:
        trainer.create_model_card(Path(trainer.args.output_dir).absolute().name, dataset_name)
    except OSError as error:
        print(f"\nwarning: the model card could not be written: {error}.\n", file=sys.stderr, flush=True)
    if trainer.is_world_process_zero():
        folder = Path(trainer.args.output_dir)
        print(f"Model: {folder}", "", *ending(folder, trainer.memory_kind), sep="\n", flush=True)
    if trainer.args.push_to_hub:
        trainer.push_to_hub(dataset_name=dataset_name)
    _leave_together(trainer)


def _save(trainer: ScriptTrainer) -> None:
    """Save the trained model; raise ConfigError on all processes if one of them cannot write it."""
    errors = WriteErrors()
    with errors.kept():
        trainer.save_model(trainer.args.output_dir)
        trainer.save_state()
    told = gathered(trainer.args, errors.error and f"process {trainer.args.process_index}: {errors.error}")
    if failed := next(filter(None, told), None):
        standing = newest_whole(Path(trainer.args.output_dir))
        advice = (
            f"Make room and start again with --resume_from_checkpoint true: {standing} is complete."
            if standing
            else "There is no complete checkpoint to resume from: make room before the next start."
        )
        raise ConfigError(
            f"All steps are done, but the model could not be written into {trainer.args.output_dir}: {failed}. "
            + advice
        )


def _leave_together(trainer: ScriptTrainer) -> None:
    # Once in some forty launches a rank aborted at exit while the other was still at work. Not reproduced; leaving the
    # group together rules out the likely cause.
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()
