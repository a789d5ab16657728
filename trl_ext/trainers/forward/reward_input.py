"""Token ids for reward models: one contract for RewardTrainer, PPOTrainer, GRPOTrainer and the reward adapter.

A score is meaningful only for token ids made as in training. RewardTrainer, TRL's and ours, makes them as follows, and
later callers of the model do the same from the text of prompt and answer:

* Conversations: the chat template's rendering, without further special tokens, as in TRL's GRPOTrainer.
* Plain text: the tokenizer's special tokens, such as BOS, around the text, and EOS after it.
* An answer that the length limit cut off ends in the same way: the model was trained to score this end only, and its
  scores of other tokens are noise.
* The model scores the last token that is not padding (`pooled_head.scored_token`). If the pad token is EOS, this is
  the token before EOS, in training too.

RewardTrainer writes `reward_input.json` next to the weights, and its model carries the same record. Without a record,
the setting `reward_model_eos` decides on plain text. With "auto", PPO encodes as RewardTrainer does, and GRPO as TRL's
GRPOTrainer: no special tokens.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers.utils import logging
from transformers.utils.hub import cached_file
from trl.data_utils import apply_chat_template, is_conversational

from trl_ext.errors import ConfigError

logger = logging.get_logger(__name__)

RECORD_FILE = "reward_input.json"
EOS_CHOICES = ("auto", "append", "never")
_ROWS_LOOKED_AT = 100
# Attribute of a trained model that holds its record.
_CARRIED = "reward_input_record"


@dataclass(frozen=True, slots=True)
class RewardInputRecord:
    """The way token ids were made when a reward model was trained; its fields are the keys of `reward_input.json`.

    Args:
        format: "plain", "conversational", or "tokenized" if the dataset had token ids.
        appends_eos: Whether plain text ended in EOS; None if training saw no plain text, or both.
        eos_token, pad_token: As text.
        chat_template_sha256: Hash of the template of conversations; None for other formats.
        max_length: Most tokens of a side in training; None without a limit.
    """

    format: str
    appends_eos: bool | None
    eos_token: str | None
    pad_token: str | None
    chat_template_sha256: str | None
    max_length: int | None

    def write(self, folder: str) -> None:
        """Write the record into a model's folder."""
        (Path(folder) / RECORD_FILE).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


def training_record(dataset: Any, tokenizer: Any, max_length: int | None) -> RewardInputRecord:
    """Return how RewardTrainer will make token ids of a dataset that it has not tokenized yet.

    Only its first rows are read: text, messages, or `chosen_ids` and `rejected_ids`. `tokenizer` has training's pad
    token.
    """
    first = next(iter(dataset))
    sides = ("chosen_ids", "rejected_ids") if "chosen_ids" in first else ("chosen_input_ids", "rejected_input_ids")
    appends: bool | None = True
    if sides[0] in first:
        kind = "tokenized"
        rows = [row[side] for row in dataset.take(_ROWS_LOOKED_AT) for side in sides]
        ends = {bool(ids) and ids[-1] == tokenizer.eos_token_id for ids in rows}
        appends = ends.pop() if len(ends) == 1 else None
    elif is_conversational(first):
        kind, appends = "conversational", None
    else:
        kind = "plain"
    template = _hash(tokenizer.chat_template) if kind == "conversational" else None
    return RewardInputRecord(kind, appends, tokenizer.eos_token, tokenizer.pad_token, template, max_length)


def attach_record(model: Any, record: RewardInputRecord) -> None:
    """Let a model carry its record, for a trainer that gets the model as an object and not by its folder."""
    setattr(model, _CARRIED, record)


def record_of(model: Any, name: str | None) -> RewardInputRecord | None:
    """Return the record that a model carries, else the record in the folder or repository `name`, or None.

    The folder that a model was loaded from may hold the record of an earlier training.
    """
    return getattr(model, _CARRIED, None) or read_record(name)


def read_record(name: str | None) -> RewardInputRecord | None:
    """Return the record in a model's folder or hub repository, or None.

    Raises:
        ConfigError: The file is not such a record.
    """
    if not name:
        return None
    try:
        file = cached_file(name, RECORD_FILE)
    except OSError:  # no such file, repository or connection
        return None
    try:
        given = json.loads(Path(str(file)).read_text(encoding="utf-8"))
        return RewardInputRecord(**{field.name: given[field.name] for field in fields(RewardInputRecord)})
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{RECORD_FILE} of the reward model {name} cannot be read: {error!r}. Save the model again, or remove the "
            "file and set reward_model_eos."
        ) from error


def check_vocabulary(tokenizer: Any, config: Any, name: str) -> None:
    """Raise ConfigError for a tokenizer with tokens, other than padding, that a reward model has no embedding for."""
    rows = config.get_text_config().vocab_size
    beyond = {number for number in tokenizer.get_vocab().values() if number >= rows}
    if beyond - {tokenizer.pad_token_id}:
        raise ConfigError(
            f"The reward model {name} has an embedding of {rows} tokens, and the tokenizer that reads for it has "
            f"token {max(beyond)}. Save the model's own tokenizer in its folder, or give it as "
            "reward_processing_classes."
        )


class RewardEncoder:
    """Makes a reward model's token ids from prompts and completions.

    Args:
        tokenizer: The reward model's. Not changed.
        name: Name of the model in messages.
        record: How the model was trained; None if unknown.
        eos: The setting `reward_model_eos`: what to assume if the record does not decide.
        chat_template_kwargs: For the chat template of conversations.
        policy_tokenizer: Tokenizer of the prompts' ids; None for `tokenizer`.
        as_grpo: If nothing is known, read plain text without special tokens, as TRL's GRPOTrainer does.

    Attributes:
        assumes: True if `eos` decides, as no record does.
        pad_token_id: The token that has no score.

    Raises:
        ConfigError: Neither pad nor EOS token, a pad token other than in training that changes the scored token, or no
            EOS token to append.
    """

    def __init__(
        self,
        tokenizer: Any,
        name: str,
        record: RewardInputRecord | None = None,
        eos: str = "auto",
        chat_template_kwargs: dict[str, Any] | None = None,
        policy_tokenizer: Any = None,
        as_grpo: bool = False,
    ):
        self.name = name
        self.record = record
        self.assumes = record is None or record.appends_eos is None
        self.pad_token_id: int = _pad_token_id(tokenizer, name, record)
        self._tokenizer = tokenizer
        token = _eos_token(tokenizer, name, record)
        self._adds_special_tokens = not (as_grpo and self.assumes and eos == "auto")
        appends = eos != "never" and self._adds_special_tokens if self.assumes else bool(record and record.appends_eos)
        self._eos = token or "" if appends else ""
        if eos == "append" and self.assumes and token is None:
            raise ConfigError(
                f"reward_model_eos='append', but the tokenizer of the reward model {name} has no EOS token. Set "
                "tokenizer.eos_token, or reward_model_eos='never'."
            )
        self._template_kwargs = chat_template_kwargs or {}
        self._policy_tokenizer = policy_tokenizer or tokenizer
        self._said: set[str] = {"assumed"} if eos != "auto" or token is None else set()

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any]) -> list[list[int]]:
        """Return the token ids of each prompt with its completion, each at least one token long.

        `prompts` and `completions` are N strings each, or N lists of messages each.

        Raises:
            ConfigError: Conversations with a tokenizer without chat template.
        """
        if not prompts:
            return []
        is_chat = is_conversational({"prompt": prompts[0]})
        own, known = "conversational" if is_chat else "plain", self.record.format if self.record else "tokenized"
        if known not in (own, "tokenized"):
            self._say_once(
                "format",
                f"The reward model {self.name} was trained on {known} data ({RECORD_FILE}), and these prompts are "
                f"{own}: it never read anything like them. Give it prompts as in its training.",
            )
        texts = (self._render if is_chat else self._plain)(prompts, completions)
        # JSON from a tool may hold a lone surrogate, which is not valid Unicode and stops fast tokenizers.
        texts = [text.encode("utf-8", "replace").decode("utf-8") for text in texts]
        special = self._adds_special_tokens and not is_chat
        sequences = [list(ids) for ids in self._tokenizer(text=texts, add_special_tokens=special)["input_ids"]]
        return [ids or [self.pad_token_id] for ids in sequences]

    def _plain(self, prompts: Sequence[str], completions: Sequence[str]) -> list[str]:
        if self.assumes and (self.record is None or self.record.format == "tokenized"):
            how = "an EOS token, as in TRL's RewardTrainer" if self._eos else "no EOS token, as in TRL's GRPOTrainer"
            self._say_once(
                "assumed",
                f"Nothing records how the reward model {self.name} was trained ({RECORD_FILE}), so text gets {how}. "
                "Set reward_model_eos='append' if it was trained with EOS, else reward_model_eos='never'.",
            )
        # The text of a tokenized prompt holds the policy's BOS, and the reward model's tokenizer adds another BOS.
        bos = self._policy_tokenizer.bos_token or ""
        plain = [p.removeprefix(bos) if hasattr(p, "ids") else p for p in prompts]
        texts = [p + c for p, c in zip(plain, completions, strict=True)]
        return [text if text.endswith(self._eos) else text + self._eos for text in texts]

    def _render(self, prompts: Sequence[Any], completions: Sequence[Any]) -> list[str]:
        template = self._tokenizer.chat_template
        if not template:
            raise ConfigError(
                f"The tokenizer of the reward model {self.name} has no chat template, and the prompts are "
                "conversations. Set tokenizer.chat_template to the template of the reward model's training."
            )
        known = self.record.chat_template_sha256 if self.record else None
        if known is not None and known != _hash(template):
            self._say_once(
                "template",
                f"The chat template of the reward model {self.name} differs from the template of its training "
                f"({RECORD_FILE}). Give its own tokenizer, or set tokenizer.chat_template to that of training.",
            )
        conversations = [{"messages": [*prompt, *own]} for prompt, own in zip(prompts, completions, strict=True)]
        return [apply_chat_template(one, self._tokenizer, **self._template_kwargs)["text"] for one in conversations]

    def _say_once(self, topic: str, sentence: str) -> None:
        if topic not in self._said and is_main_process():
            logger.warning(sentence)
        self._said.add(topic)


def check_eos_setting(eos: str, encoders: Sequence[RewardEncoder], dataset: Any) -> None:
    """Raise ConfigError if `reward_model_eos` is set and has no effect; None and streams are not read as `dataset`."""
    rows = dataset if isinstance(dataset, Dataset) and "prompt" in dataset.column_names else []
    if eos == "auto":
        return
    if not encoders:
        reason = "no reward model scores the completions"
    elif not any(encoder.assumes for encoder in encoders):
        reason = f"{RECORD_FILE} records how {', '.join(encoder.name for encoder in encoders)} was trained"
    elif len(rows) and is_conversational({"prompt": rows[0]["prompt"]}):
        reason = "the prompts are conversations, whose end the chat template writes"
    else:
        return
    raise ConfigError(f"reward_model_eos='{eos}' has no effect: {reason}. Leave it at 'auto'.")


def is_main_process() -> bool:
    """Return True on the main process of the job, or on its only process."""
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0


def _pad_token_id(tokenizer: Any, name: str, record: RewardInputRecord | None) -> int:
    token = tokenizer.eos_token if tokenizer.pad_token is None else tokenizer.pad_token
    if token is None:
        raise ConfigError(
            f"The tokenizer of the reward model {name} has neither a pad nor an EOS token. Set tokenizer.pad_token."
        )
    # Two pad tokens that no text ends in give the same score.
    if (
        record is not None
        and token != record.pad_token
        and {token, record.pad_token} & {tokenizer.eos_token, record.eos_token}
    ):
        raise ConfigError(
            f"The reward model {name} was trained with the pad token {record.pad_token!r} ({RECORD_FILE}), its "
            f"tokenizer has {token!r}: the score would be that of another token. Set tokenizer.pad_token = "
            f"{record.pad_token!r}."
        )
    return tokenizer.convert_tokens_to_ids(token)


def _eos_token(tokenizer: Any, name: str, record: RewardInputRecord | None) -> str | None:
    """Return the EOS token of training; the tokenizer's if there is no record."""
    if record is None or record.eos_token is None:
        return tokenizer.eos_token
    if record.eos_token not in tokenizer.get_vocab():
        raise ConfigError(
            f"The reward model {name} was trained with the EOS token {record.eos_token!r} ({RECORD_FILE}), which its "
            "tokenizer does not know. Give the tokenizer that was saved with it."
        )
    return record.eos_token


def _hash(template: Any) -> str | None:
    return None if template is None else hashlib.sha256(str(template).encode()).hexdigest()
