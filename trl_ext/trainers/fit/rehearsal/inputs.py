"""The largest micro-batch that may occur, for the rehearsal.

Legend: B rows, P prompt tokens, C completion tokens, N pairs.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from trl_ext.trainers.forward.pairs import IN_MICRO_BATCH, num_tokens_of_pair
from trl_ext.trainers.step.settings import StepSettings
from trl_ext.trainers.step.trainer import RunningTrainer, StepTrainer

# Number of prompts, the ones of the most characters, that are tokenized to find the longest.
MAX_TOKENIZED = 256


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The inputs of `training_step`, and their description for messages: "4 rows of 2,048 tokens"."""

    inputs: dict[str, Any]
    what: str


class GroupTrainer(StepTrainer, Protocol):
    """A GRPO trainer, whose micro-batches are rollouts; the names are TRL's.

    Args:
        max_completion_length: Most tokens of a completion.
        use_vllm: Whether vLLM samples.
        vllm_importance_sampling_correction: Whether the loss is weighted by the ratio to the sampler's probability.
        beta: Weight of the penalty on the KL to the reference.
    """

    max_completion_length: Any
    use_vllm: bool
    vllm_importance_sampling_correction: bool
    beta: float


class PairTrainer(RunningTrainer, Protocol):
    """A reward trainer.

    Args:
        model: The reward model.
        train_dataset: Pairs of token ids.
        data_collator: Our collator, whose `row` makes a row of pairs.
    """

    model: Any
    train_dataset: Any
    data_collator: Any


# Rollouts -----------------------------------------------------------------------------------------------------------


def rollout_batch(trainer: GroupTrainer, longest_prompt: int | None) -> MicroBatch:
    """Return rows of the longest prompt with random completions of `max_completion_length` tokens, for GRPO's loss.

    The rows have as many different prompts as may meet in one micro-batch: they share a prompt only if the trainer
    places the rows of a group together.

    Args:
        trainer: The trainer.
        longest_prompt: Tokens of the longest prompt of the training set; None if unknown. A plan may have a longer
            prompt.
    """
    args, width = trainer.args, trainer.max_completion_length
    config = trainer.model.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None) or math.inf
    width = int(min(width, positions - 1))
    plan = getattr(args, "memory_plan", None)
    planned = 1 if plan is None else plan.job.max_prompt_length
    prompt = int(min(max(planned, longest_prompt or 1), positions - width))
    dice = torch.Generator().manual_seed(0)
    groups = torch.tensor(_groups(trainer, prompt, prompt + width))
    num_rows = len(groups)
    prompt_ids = torch.randint(config.vocab_size, (int(groups.max()) + 1, prompt), generator=dice)
    # Make them different even if they are one token long.
    prompt_ids[:, 0] = torch.arange(len(prompt_ids)) % config.vocab_size
    completion_ids = torch.randint(config.vocab_size, (num_rows, width), generator=dice)
    rows_of_generation = (
        args.per_device_train_batch_size * args.steps_per_generation * trainer.accelerator.num_processes
    )
    inputs = {
        "prompt_ids": prompt_ids[groups],
        "prompt_mask": torch.ones(num_rows, prompt, dtype=torch.long),
        "completion_ids": completion_ids,
        "completion_mask": torch.ones(num_rows, width, dtype=torch.long),
        # Half of the completions are good and half are bad.
        "advantages": 1.0 - 2.0 * (torch.arange(num_rows) % 2),
        "num_items_in_batch": torch.tensor(float(rows_of_generation * width)),
        **_log_probs(trainer, num_rows, width, config.vocab_size),
    }
    device = trainer.accelerator.device
    what = f"{num_rows:,} rows of {prompt + width:,} tokens"
    return MicroBatch({name: value.to(device) for name, value in inputs.items()}, what)


def with_targets(batch: MicroBatch, *, has_values: bool = True) -> MicroBatch:
    """Add PPO's advantages, returns and values, [B, C], to GRPO rollouts; without a critic only advantages."""
    mask = batch.inputs["completion_mask"].float()
    own = {
        "advantages": batch.inputs["advantages"][:, None] * mask,
        "old_per_token_logps": batch.inputs.get("old_per_token_logps", torch.zeros_like(mask)),
    }
    if has_values:
        own |= {"returns": mask, "values": torch.zeros_like(mask)}
    inputs = {name: value for name, value in batch.inputs.items() if name != "ref_per_token_logps"}
    return MicroBatch({**inputs, **own}, batch.what)


def _log_probs(trainer: GroupTrainer, num_rows: int, width: int, vocab_size: int) -> dict[str, torch.Tensor]:
    """Return a uniform model's log-probabilities, [B, C], under each name that the trainer's rollouts have.

    Args:
        trainer: A GRPO trainer.
        num_rows, width: B and C.
        vocab_size: Of the model.
    """
    args = trainer.args
    guessed = torch.full((num_rows, width), -math.log(vocab_size))
    corrects = trainer.use_vllm and trainer.vllm_importance_sampling_correction
    found = {}
    if corrects or args.gradient_accumulation_steps % (args.steps_per_generation * trainer.num_iterations):
        found["old_per_token_logps"] = guessed
    if corrects:
        found["importance_sampling_ratio"] = torch.ones(num_rows, width)
    if trainer.use_vllm:
        found["sampling_per_token_logps"] = guessed
    if trainer.beta:
        found["ref_per_token_logps"] = guessed
    return found


def _groups(trainer: GroupTrainer, prompt: int, length: int) -> list[int]:
    """Return the prompt's number of each row of a forward.

    With a budget, the forward has as many rows as fit; else it is the micro-batch with the most different prompts.
    `prompt` and `length` are the tokens of the longest prompt and the longest row.
    """
    args, size, settings = trainer.args, trainer.num_generations, trainer.step_settings
    assert size is not None, "GRPOConfig has filled it in."
    # With all rows in one optimizer step, the rows of a group are next to each other.
    is_one_step = args.steps_per_generation == args.gradient_accumulation_steps
    mates = settings.rows_move and settings.share_prompt and is_one_step
    num_rows = args.per_device_train_batch_size
    in_step = num_rows * args.steps_per_generation * trainer.accelerator.num_processes
    if settings.max_tokens is not None and settings.packs:
        shared = max(prompt - 1, 0) if mates else 0
        groups: list[int] = []
        room = settings.max_tokens
        while len(groups) < in_step:
            room -= length - (shared if len(groups) % size else 0)
            if groups and room < 0:
                break
            groups.append(len(groups) // size if mates else len(groups))
        return groups
    if not mates:
        return list(range(num_rows))
    worst = max(range(0, in_step, num_rows), key=lambda start: (start + num_rows - 1) // size - start // size)
    return [(worst + row) // size - worst // size for row in range(num_rows)]


# Pairs --------------------------------------------------------------------------------------------------------------


def pair_batch(trainer: PairTrainer, sizes: Sequence[int] | None) -> MicroBatch:
    """Return the longest pairs of the training set or, for a stream, pairs whose sides have `max_length` tokens.

    `sizes` are the tokens of each pair of the training set; None for a stream. Under a token budget, return one full
    row.
    """
    num_pairs, settings = trainer.args.per_device_train_batch_size, trainer.step_settings
    if sizes is not None:
        order = sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)[:num_pairs]
        pairs = [trainer.train_dataset[i] for i in order]
    else:
        pairs = _random_pairs(trainer, num_pairs, trainer.args.max_length)
    if settings.max_tokens is not None:
        pairs = [{**pair, IN_MICRO_BATCH: num_pairs} for pair in _full_row(trainer, pairs, settings)]
    row = trainer.data_collator.row(pairs).to(trainer.accelerator.device)
    num_tokens = row.flat.num_tokens if settings.packs else row.num_padded_tokens
    return MicroBatch({"rows": [row]}, f"{len(pairs):,} pairs of {num_tokens:,} tokens together")


def _full_row(
    trainer: PairTrainer, longest_first: list[dict[str, Any]], settings: StepSettings
) -> list[dict[str, Any]]:
    """Fill the budget with as many pairs as fit, at least one, and a pair of random tokens for the rest."""
    pairs, share = longest_first[:1], settings.share_prompt
    room = (settings.max_tokens or 0) - num_tokens_of_pair(pairs[0], share)
    for pair in longest_first[1:]:
        tokens = num_tokens_of_pair(pair, share)
        if tokens <= room:
            pairs.append(pair)
            room -= tokens
    return pairs + (_random_pairs(trainer, 1, room // 2, like=pairs[0]) if room >= 4 else [])


def _random_pairs(trainer: PairTrainer, num_pairs: int, num_tokens: int, like: Any = None) -> list[dict[str, Any]]:
    """Return pairs without a common prefix, with a margin if the dataset's pairs have margins.

    Args:
        trainer: A reward trainer.
        num_pairs: Number of pairs.
        num_tokens: Of each side.
        like: A row of the dataset; None for a stream.
    """
    config = trainer.model.config.get_text_config()
    dice = random.Random(0)
    words = [token for token in range(min(config.vocab_size, 1000)) if token != config.pad_token_id]

    def side(first: int) -> list[int]:
        return [words[first], *dice.choices(words, k=num_tokens - 1)]

    margin = {"margin": 0.0} if like is not None and "margin" in like else {}
    return [{"chosen_ids": side(0), "rejected_ids": side(1), **margin} for _ in range(num_pairs)]
