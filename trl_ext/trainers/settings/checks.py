"""Checks before the first step, so that a bad dataset or launch ends in one sentence."""

import math
import os
import socket
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

from datasets import Dataset
from transformers import TrainerState

from trl_ext.compat.accelerate import fsdp_dtype, fsdp_plugin, is_fsdp
from trl_ext.compat.distributed import has_peers, honour_timeout
from trl_ext.errors import ConfigError, DataError, GradientError, SupportError
from trl_ext.memory.contradictions import OF_FSDP, check
from trl_ext.memory.planner.keys import optimizer_name
from trl_ext.trainers.checkpoints.folder import check_seen_by_all
from trl_ext.trainers.checkpoints.ranks import gathered
from trl_ext.trainers.checkpoints.save import newest_whole
from trl_ext.trainers.record.recipe import packages
from trl_ext.trainers.step.sequence_parallel import check_processes, size_of_groups

# Enough to find the longest prompt of most datasets in seconds; a longer prompt gets a separate forward.
MAX_PROMPTS_MEASURED = 20_000
# Packages whose versions decide what a process computes and sends to other processes.
_SAME_VERSIONS = ("trl_ext", "torch", "transformers", "trl", "accelerate", "deepspeed", "peft")


def check_budget(longest_prompt: int, max_completion_length: int, max_tokens: int) -> None:
    """Raise ConfigError if the longest possible row does not fit into one forward."""
    longest = longest_prompt + max_completion_length
    if longest > max_tokens:
        raise ConfigError(
            f"max_tokens_per_forward={max_tokens} is smaller than the longest row: a prompt of {longest_prompt} "
            f"tokens and a completion of up to {max_completion_length} make {longest}. Set it to at least {longest}, "
            "or lower max_completion_length."
        )


def sample_of_prompts(dataset: Any, num_longest: int | None = None) -> list[Any]:
    """Return prompts to measure: all, evenly spaced ones of a large dataset, or none of a stream. With `num_longest`,
    only so many, those with most characters."""
    if not isinstance(dataset, Dataset) or "prompt" not in dataset.column_names:
        return []
    stride = -(-len(dataset) // MAX_PROMPTS_MEASURED)
    prompts = list(dataset.select(range(0, len(dataset), stride))["prompt"])
    return prompts if num_longest is None else sorted(prompts, key=lambda prompt: len(str(prompt)))[-num_longest:]


class PromptedTrainer(Protocol):
    """A GRPO trainer.

    Args:
        train_dataset: Its rows.
        environment_factories: TRL's, which make the environments of completions; None without environments.
    """

    train_dataset: Any
    environment_factories: Any


def longest_prompt_tokens(
    trainer: PromptedTrainer, tokenize: Callable[[list[Any]], Any], num_longest: int | None = None
) -> int | None:
    """Return the tokens of the training set's longest prompt; None if it is unknown before the run.

    It is unknown for a stream, and with environments, which append to the prompts what their `reset` returns.

    Args:
        trainer: The trainer.
        tokenize: TRL's tokenizing function, which returns the ids first.
        num_longest: Number of prompts to measure, those with most characters; None for all.
    """
    if trainer.environment_factories is not None:
        return None
    prompts = sample_of_prompts(trainer.train_dataset, num_longest)
    return max(map(len, tokenize(prompts)[0])) if prompts else None


def check_moving(args: Any) -> None:
    """Raise ConfigError for `sync_ref_model` where checkpoints could not hold the reference."""
    if args.sync_ref_model and is_fsdp(args) and fsdp_plugin(args).fsdp_version == 1:
        raise ConfigError(
            "sync_ref_model=True needs the reference's weights in every checkpoint, and FSDP1 flattens them. Launch "
            "with fsdp_version: 2, or with --config_file zero3."
        )


def check_launch(args: Any) -> None:
    """Raise ConfigError unless the launched processes form one group, and set the group's timeout.

    Separate processes would silently train several models. Processes with different versions of a package may compute
    different numbers; they raise SupportError.
    """
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started < 1:
        raise ConfigError(f"WORLD_SIZE={started} is fewer than one process. Launch with --num_processes 1 or more.")
    # Clusters set WORLD_SIZE for whole jobs; a launcher also sets LOCAL_RANK.
    if "LOCAL_RANK" in os.environ and args.world_size != started:
        raise ConfigError(
            f"The launcher started {started} processes, but each believes in a world of {args.world_size} and would "
            "train a separate model. Without GPUs, set use_cpu: true in the recipe (or --use_cpu)."
        )
    check_processes(args)
    _check_fsdp(args)
    if has_peers():
        honour_timeout(args.ddp_timeout)
        _check_versions_of_ranks(args)
        check_seen_by_all(args)


def _check_versions_of_ranks(args: Any) -> None:
    """Raise SupportError, on all processes, if their packages differ. Collective."""
    mine = {name: packages().get(name, "none") for name in _SAME_VERSIONS}
    (first_host, first), *others = gathered(args, (socket.gethostname(), mine))
    for rank, (host, found) in enumerate(others, 1):
        for name in (name for name in _SAME_VERSIONS if found[name] != first[name]):
            raise SupportError(
                f"Process {rank} on {host} has {name} {found[name]}, process 0 on {first_host} has {name} "
                f"{first[name]}. Install the same versions on all machines."
            )


def _check_fsdp(args: Any) -> None:
    """Raise ConfigError for FSDP settings with which a run would fail, or end without its model."""
    size, optim = size_of_groups(args), optimizer_name(vars(args))
    check(SimpleNamespace(fsdp=is_fsdp(args), sequence_parallel=size, optim=optim), OF_FSDP)
    plugin = fsdp_plugin(args)
    if plugin is None:
        return
    checks = {
        "fsdp_activation_checkpointing is true, and layers are recomputed by the trainer's gradient_checkpointing. "
        "Leave it out; gradient_checkpointing alone decides.": plugin.activation_checkpointing,
        "fsdp_state_dict_type is SHARDED_STATE_DICT, with which the run would end without a model that can be loaded. "
        "Set FULL_STATE_DICT.": plugin.state_dict_type.name == "SHARDED_STATE_DICT",
    }
    for sentence in (sentence for sentence, is_so in checks.items() if is_so):
        raise ConfigError(sentence)


def check_packed_bits(model: Any, args: Any) -> None:
    """Raise ConfigError for 4-bit weights that FSDP would not shard, or destroy by a cast."""
    dtype = fsdp_dtype(args) if is_fsdp(args) else ""
    stored = {str(p.dtype).removeprefix("torch.") for p in model.parameters() if type(p).__name__ == "Params4bit"}
    if dtype and stored - {dtype}:
        raise ConfigError(
            f"4-bit weights are of {', '.join(sorted(stored))}, and FSDP gathers {dtype}: others it would cast, or "
            f"leave whole on every card. Set bnb_4bit_quant_storage={dtype}."
        )


def check_trained(weights: Mapping[str, Iterable[Any]]) -> None:
    """Raise ConfigError if a model, given by role, has no trainable weight: the run would seem to succeed."""
    for role, own in weights.items():
        if not any(weight.requires_grad for weight in own):
            raise ConfigError(
                f"No weight of the {role} is trained: all that compute are frozen. Load an adapter with "
                "PeftModel.from_pretrained(..., is_trainable=True), or call requires_grad_(True) on weights; choose "
                "one of several adapters by set_adapter."
            )


def check_pad_token(model: Any, processing_class: Any) -> None:
    """Raise ConfigError for a pad token, of a tokenizer or processor, without an embedding in the model."""
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    rows = model.config.get_text_config().vocab_size
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id >= rows:
        raise ConfigError(
            f"The pad token {tokenizer.pad_token!r} has the id {tokenizer.pad_token_id}, and the model's embedding "
            f"has {rows} rows: the saved model could not be loaded. Take a token that it has (tokenizer.pad_token = "
            "tokenizer.eos_token), or make room: model.resize_token_embeddings(len(tokenizer))."
        )


class SteppedTrainer(Protocol):
    """A trainer of any kind, in an optimizer step.

    Args:
        args: Its config.
        state: Of transformers: the steps taken.
        lr_scheduler: Its schedule.
    """

    args: Any
    state: TrainerState
    lr_scheduler: Any


def check_grad_norm(trainer: SteppedTrainer, norm: Any, of: str = "") -> None:
    """Raise GradientError, on all processes, for a gradient norm that is not finite.

    fp16 is exempt: its scaler skips such steps.

    Args:
        trainer: The trainer, before its optimizer step; under DeepSpeed after it, before anything is saved.
        norm: Norm of all gradients of one optimizer step; None if unknown.
        of: The model's role and a space, for the message: "critic's ".
    """
    if norm is None or trainer.args.fp16 or math.isfinite(norm):
        return
    saved, rate = newest_whole(Path(trainer.args.output_dir)), trainer.lr_scheduler.get_last_lr()[0]
    raise GradientError(
        f"The norm of the {of}gradient is {float(norm)} in step {trainer.state.global_step + 1}, at a learning rate "
        f"of {rate:g}. A step by it destroys the weights, so nothing is saved from here on. The last whole checkpoint "
        f"is {saved or 'none'}. Look at rewards and rows of this step, or lower learning_rate."
    )


def check_steps(dataset: Any, args: Any) -> None:
    """Raise DataError if there are fewer rows than one batch takes and incomplete batches are dropped: the run would
    save the unchanged model and seem to succeed. With `num_generations` in `args` rows are prompts."""
    if not isinstance(dataset, Dataset):
        return
    num_rows, processes = len(dataset), f"{args.world_size} process{'es' if args.world_size > 1 else ''}"
    if hasattr(args, "num_generations"):
        num_needed = args.generation_batch_size // args.num_generations
        needs = f"one generation takes {num_needed} prompts, of {args.num_generations} completions each"
        advice = "per_device_train_batch_size, steps_per_generation (or gradient_accumulation_steps)"
    else:
        num_needed = args.train_batch_size * args.world_size if args.dataloader_drop_last else 1
        needs = f"one batch takes {num_needed} pairs, and dataloader_drop_last drops what is less"
        advice = "per_device_train_batch_size, or set dataloader_drop_last to False"
    if num_rows < num_needed:
        raise DataError(
            f"train_dataset has {num_rows} rows; over {processes} {needs}. No step would be taken. Give more rows, "
            f"or lower {advice}."
        )
