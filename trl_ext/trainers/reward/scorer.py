"""A frozen reward model that scores completions in forwards of bounded tokens.

TRL pads the local batch to its longest row and scores it in one forward, where long completions run out of memory.
Here sequences are packed into flat rows, after one copy of their prompt, or padded if packing is not exact.

Legend: N completions.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from trl_ext.compat.peft import adds_virtual_tokens, base_model
from trl_ext.compat.torch import computes_below_float32
from trl_ext.errors import ConfigError, PackingError
from trl_ext.packing.attention import take_segments
from trl_ext.packing.check import CheckResult
from trl_ext.packing.families.rope import begin_anew as begin_positions_anew
from trl_ext.packing.families.rope import kinds_of
from trl_ext.packing.families.state import begin_anew, carries_state
from trl_ext.packing.layout import flatten
from trl_ext.packing.plan import PlannedRow, plan_rows
from trl_ext.packing.ragged import Ragged
from trl_ext.packing.step_plan import RowSize
from trl_ext.packing.ulysses import SequenceGroup
from trl_ext.trainers.forward.calls import right_padded
from trl_ext.trainers.forward.pairs import num_shared_tokens
from trl_ext.trainers.forward.pooled_head import add_pooled_head, pooled_scores, scored_token
from trl_ext.trainers.forward.reward_input import (
    RewardEncoder,
    check_eos_setting,
    check_vocabulary,
    is_main_process,
    record_of,
)
from trl_ext.trainers.step.exchange import agreed_num_forwards
from trl_ext.trainers.step.self_check import check_reward_model
from trl_ext.trainers.step.unpadded import renumbered

logger = logging.get_logger(__name__)

DEFAULT_MAX_TOKENS = 16_384
# Forwarded by a rank that has fewer forwards than other ranks. The score is dropped.
_SURPLUS = [0, 0]


class CompletionScorer:
    """Scores completions: makes their token ids, plans forwards and runs them.

    Args:
        tokenizer: The reward model's tokenizer, which may differ from the policy's. Not changed.
        name: The model's name in messages and logs.
        max_tokens_per_forward: Most tokens of one forward, with padding; None for 16,384. A longer sequence gets a
            separate forward.
        autocast: Makes the context of every forward.
        agree: Takes this rank's number of forwards and returns the largest of all ranks, which each rank then runs:
            forwards are collectives under ZeRO-3. Called once per call, on every rank.
        reading: Keyword arguments of RewardEncoder, which may raise ConfigError.

    Attributes:
        model: The bare model.
        wrapped: The module to call; set it to `model` as wrapped by accelerate or DeepSpeed.
        packs: True if forwards are flat rows.
        group: Processes that forward their flat rows together; None if each process forwards its rows alone.
        error: With `agree`, an error of the last call in making token ids. Nothing was scored, and the caller has to
            raise it on all ranks.
        is_adapter: True for an adapter on the policy's weights, False for a separate model.
    """

    is_adapter = False
    model: Any
    wrapped: Any
    packs: bool
    group: SequenceGroup | None = None
    _num_positions: int | None
    _shares_prompts = True  # True if equal prompts go through the model once

    def __init__(
        self,
        tokenizer: Any,
        name: str,
        *,
        max_tokens_per_forward: int | None = None,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        agree: Callable[[int], int] | None = None,
        **reading: Any,
    ):
        self.encoder = RewardEncoder(tokenizer, name, **reading)
        self.name = self.__name__ = name  # TRL's logs read __name__
        self.error: Exception | None = None
        self._pad_token_id = self.encoder.pad_token_id
        self._max_tokens = max_tokens_per_forward or DEFAULT_MAX_TOKENS
        self._autocast = autocast
        self._agree = agree

    def _prepare(self) -> None:
        """Get ready to score; runs at the start of every call."""
        raise NotImplementedError

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], keep: Any = None) -> torch.Tensor:
        """Return scores of N completions, [N] float32 on the model's device. Collective under `agree`.

        `prompts` and `completions` are strings or lists of messages. Where `keep` [N] is False, the score is NaN and
        costs nothing. Raises ConfigError for messages if the tokenizer has no chat template.
        """
        kept = [i for i in range(len(prompts)) if keep is None or bool(keep[i])]
        self._prepare()
        self.error = None
        try:
            sequences = self._fitting(self.encoder([prompts[i] for i in kept], [completions[i] for i in kept]))
        except Exception as error:  # a chat template may raise anything, and the other ranks wait in `agree`
            if self._agree is None:
                raise
            self.error, kept, sequences = error, [], []
        values = self._score(sequences, [repr(prompts[i]) for i in kept])
        scores = torch.full((len(prompts),), torch.nan, device=values.device)
        scores[torch.tensor(kept, dtype=torch.long, device=values.device)] = values
        return scores

    @property
    def device(self) -> torch.device:
        """The device of the model's inputs."""
        return self.model.device

    def _fitting(self, sequences: list[list[int]]) -> list[list[int]]:
        """Return the sequences; too long sequences lose their first tokens."""
        limit = self._num_positions
        if not sequences or limit is None or max(map(len, sequences)) <= limit:
            return sequences
        if is_main_process():
            logger.warning_once(
                f"Sequences longer than the {limit} positions of the reward model {self.name} lose their first tokens "
                "before they are scored. Shorten prompts or completions to avoid it."
            )
        return [ids[-limit:] for ids in sequences]

    @torch.no_grad()
    def _score(self, sequences: list[list[int]], prompts: list[str]) -> torch.Tensor:
        """Return the scores [n]. Sequences with equal `prompts` share one copy of their common prefix."""
        own = slice(len(sequences))
        if self.group is not None and self.packs:
            of_processes = self.group.gather_object((sequences, prompts))
            first = sum(len(others) for others, _ in of_processes[: self.group.rank])
            own = slice(first, first + len(sequences))
            sequences, prompts = (list(chain(*parts)) for parts in zip(*of_processes, strict=True))
        forwards = self._plan(sequences, prompts)
        values = torch.full((len(sequences),), torch.nan, device=self.device)
        num_forwards = len(forwards) if self._agree is None else self._agree(len(forwards))
        for forward in forwards:
            items, scores = self._forward(forward, sequences)
            values[torch.tensor(items, device=self.device)] = scores.float()
        for _ in range(num_forwards - len(forwards)):
            self._forward(self._plan([_SURPLUS], [""])[0], [_SURPLUS])
        return values[own]

    def _plan(self, sequences: list[list[int]], prompts: list[str]) -> list[Any]:
        if not self.packs:
            return plan_padded(sequences, self._max_tokens)
        # A cut sequence begins with other tokens: in the group of its prompt, nothing could be shared.
        groups = [(p, len(ids) == self._num_positions) for p, ids in zip(prompts, sequences, strict=True)]
        return plan_packed(sequences, groups if self._shares_prompts else None, self._max_tokens)

    def _forward(self, forward: Any, sequences: list[list[int]]) -> tuple[Sequence[int], torch.Tensor]:
        """Return the sequences that end in a forward, and their scores [n], from one model call of each process."""
        pad = self._pad_token_id
        with self._autocast():
            if not self.packs:
                ids, mask = right_padded([sequences[i] for i in forward], pad, self.device)
                return forward, self.wrapped(input_ids=ids, attention_mask=mask).logits[:, 0]
            own = [segment for segment in forward.segments if not segment.is_prefix]
            places = [forward.place(segment, scored_token(sequences[segment.item], pad)) for segment in own]
            flat = flatten(forward, Ragged.of(sequences), self.device)
            scores = pooled_scores(self.wrapped, flat, torch.tensor(places, device=self.device), self.group)
            return [segment.item for segment in own], scores[:, 0]


class RewardModel(CompletionScorer):
    """A frozen sequence classification model with one label, which scores completions.

    `model` may be in a PeftModel, and is changed in place: evaluation mode, no gradients, no cache, the tokenizer's
    pad token in its config, packed attention. The first call runs the self-check, after which `packs` may be False.
    Raises ConfigError if the model has not exactly one label.
    """

    def __init__(self, model: Any, tokenizer: Any, name: str, **options: Any):
        super().__init__(tokenizer, name, **options)
        self.wrapped = model
        self.model = base_model(model)
        if self.model.config.num_labels != 1:
            raise ConfigError(
                f"A reward model has one label; {name} has {self.model.config.num_labels}. Give a reward model, "
                "loaded with AutoModelForSequenceClassification and num_labels=1."
            )
        check_vocabulary(tokenizer, self.model.config, name)
        self._num_positions = num_positions(self.model)
        # The model scores the last token that is not padding.
        self.model.config.get_text_config().pad_token_id = self._pad_token_id
        model.eval().requires_grad_(False)
        for config in (model.config, model.config.get_text_config()):
            # A padded forward would store a KV cache that nothing reads.
            config.use_cache = False
        self.packs = self._start_packing()
        self._check_is_due = self.packs

    def _start_packing(self) -> bool:
        if adds_virtual_tokens(self.wrapped):
            return self._pad_instead("prompt tuning puts virtual tokens before every row")
        try:
            add_pooled_head(self.model)
            self._attention_before = take_segments(self.model.config)
            self._shares_prompts = begin_anew(self.model) and not kinds_of(self.model.config.get_text_config())
            begin_positions_anew(self.model)
        except PackingError as error:
            return self._pad_instead(str(error).removesuffix(" Set packing=False."))
        return True

    def _pad_instead(self, reason: str) -> bool:
        if is_main_process():
            logger.warning(
                f"The reward model {self.name} scores padded batches, without packing: {reason.rstrip('.')}."
            )
        return False

    def _prepare(self) -> None:
        """Switch to evaluation mode; run the self-check before the first packed forward, when weights are in place."""
        if self.wrapped.training or self.model.training:
            self.wrapped.eval()
        if not self._check_is_due:
            return
        self._check_is_due = False
        result = self._self_check()
        if not result.is_exact and self._shares_prompts and carries_state(self.model.config):
            self._shares_prompts = False
            result = self._self_check()
        if not result.is_exact:
            self.model.config._attn_implementation = self._attention_before
            self.packs = self._pad_instead(str(result))

    def _self_check(self) -> CheckResult:
        with self._autocast():
            half_precision = torch.is_autocast_enabled(self.device.type) or computes_below_float32(
                self.model.dtype, self.device
            )
        return check_reward_model(
            self.wrapped,
            head=self.model.score,
            config=self.model.config.get_text_config(),
            pad_token_id=self._pad_token_id,
            device=self.device,
            autocast=self._autocast,
            half_precision=half_precision,
            share_prompt=self._shares_prompts,
            group=self.group,
        )


def num_positions(model: Any) -> int | None:
    """Return the most tokens of a sequence by the model's config; None if it has no limit."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1:
        return None
    for name, module in model.named_modules():
        # RoBERTa and similar models count positions from padding_idx + 1.
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            return limit - module.padding_idx - 1
    return limit


Sequences = Sequence[list[int]]


def plan_packed(sequences: Sequences, groups: Sequence[Any] | None, max_tokens: int) -> list[PlannedRow]:
    """Plan flat rows of at most `max_tokens`, and a separate row for each longer sequence.

    Sequences with equal keys in `groups` share their common prefix; None shares nothing.
    """
    items = _shared_sizes(sequences, groups)
    fitting = [i for i, item in enumerate(items) if item.length <= max_tokens]
    rows = []
    if fitting:
        shareable = [np.array(sequences[i][: items[i].shared]) for i in fitting]
        rows = renumbered(plan_rows([items[i] for i in fitting], max_tokens, shareable), fitting)
    for i, item in enumerate(items):
        if item.length > max_tokens:
            rows += renumbered(plan_rows([item]), [i])
    return rows


def _shared_sizes(sequences: Sequences, groups: Sequence[Any] | None) -> list[RowSize]:
    """Return the size of each sequence; the common prefix of a group leaves at least one token to every member."""
    if groups is None:
        return [RowSize(i, 0, len(ids)) for i, ids in enumerate(sequences)]
    first: dict[Any, int] = {}
    shared: dict[Any, int] = {}
    for i, (ids, group) in enumerate(zip(sequences, groups, strict=True)):
        in_common = num_shared_tokens(sequences[first.setdefault(group, i)], ids)
        shared[group] = min(shared.get(group, len(ids) - 1), in_common)
    return [
        RowSize(first[group], shared[group], len(ids) - shared[group])
        for ids, group in zip(sequences, groups, strict=True)
    ]


def plan_padded(sequences: Sequences, max_tokens: int) -> list[list[int]]:
    """Plan batches of similar lengths: at most `max_tokens` with padding, or a single longer sequence."""
    batches: list[list[int]] = []
    # Longest first: the first sequence sets the width of its batch, and too large sequences fail at once.
    for i in sorted(range(len(sequences)), key=lambda i: (-len(sequences[i]), i)):
        if batches and len(sequences[batches[-1][0]]) * (len(batches[-1]) + 1) <= max_tokens:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


class ScoringTrainer(Protocol):
    """A GRPO trainer with reward functions; the names are TRL's.

    Args:
        args: Its config.
        accelerator: Its accelerator.
        train_dataset: Its rows.
        reward_funcs, reward_processing_classes: The reward functions, and a tokenizer or None for each.
    """

    args: Any
    accelerator: Accelerator
    train_dataset: Any
    reward_funcs: Any
    reward_processing_classes: Any


def with_scorers(trainer: ScoringTrainer, given: Sequence[Any], policy_tokenizer: Any) -> list[Any]:
    """Return the GRPOTrainer's reward functions with a scorer instead of each model of transformers.

    So they read the text of their training, in packed forwards. TRL loads them, and calls other modules itself.
    `given` are the reward functions as the user gave them; a path is the folder of a model's record.

    Raises:
        ConfigError: several labels, a record that contradicts the tokenizer, or `reward_model_eos` without effect.
    """
    paths = [*given, *[None] * (len(trainer.reward_funcs) - len(given))]  # TRL adds the rewards of environments
    triples = zip(trainer.reward_funcs, trainer.reward_processing_classes, paths, strict=True)
    functions = [_scorer(trainer, policy_tokenizer, *triple) for triple in triples]
    encoders = [function.encoder for function in functions if isinstance(function, CompletionScorer)]
    check_eos_setting(getattr(trainer.args, "reward_model_eos", "auto"), encoders, trainer.train_dataset)
    return functions


def _scorer(trainer: ScoringTrainer, policy_tokenizer: Any, function: Any, tokenizer: Any, path: Any) -> Any:
    """Return a scorer for a reward model, and any other reward function unchanged.

    Args:
        trainer: A GRPO trainer.
        policy_tokenizer: The policy's.
        function: A reward function.
        tokenizer: The reward model's tokenizer; None for other functions.
        path: What the user gave: the model's name, if it is a text.
    """
    if not isinstance(function, nn.Module) or not isinstance(tokenizer, PreTrainedTokenizerBase):
        return function
    model = trainer.accelerator.unwrap_model(function, keep_torch_compile=False)
    if not isinstance(base_model(model), PreTrainedModel):
        return function
    name = path if isinstance(path, str) else base_model(model).config._name_or_path
    scorer = RewardModel(
        model,
        tokenizer,
        Path(name).name or type(base_model(model)).__name__,
        record=record_of(base_model(model), name),
        as_grpo=True,
        **scorer_options(trainer, trainer.args, policy_tokenizer),
    )
    scorer.wrapped = function
    return scorer


def scorer_options(trainer: ScoringTrainer, args: Any, policy_tokenizer: Any) -> dict[str, Any]:
    """Return the options of `CompletionScorer` for reward models; the trainer need not be built yet."""
    return dict(
        max_tokens_per_forward=getattr(args, "reward_tokens_per_forward", None),
        autocast=lambda: trainer.accelerator.autocast(),
        agree=lambda num_forwards: agreed_num_forwards(num_forwards, trainer.accelerator),
        eos=getattr(args, "reward_model_eos", "auto"),
        chat_template_kwargs=args.chat_template_kwargs,
        policy_tokenizer=policy_tokenizer,
    )


def as_function(scorer: CompletionScorer) -> Any:
    """Return the scorer as a reward function of TRL; it raises tokenization errors after its collective forwards."""

    def score(prompts: Any, completions: Any, **_: Any) -> list[float]:
        scores = scorer(prompts, completions)
        if scorer.error is not None:
            raise scorer.error
        return scores.tolist()

    return score
