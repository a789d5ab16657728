"""Reward models among GRPO's reward functions: TRL asks them, we say which token ids they read.

TRL writes prompt and completion as text and calls the reward model's tokenizer. For that call the tokenizer has a
stand-in, which returns the ids of `trl_ext/trainers/forward/reward_input.py` instead. Forwards, metrics and modules of
the user's own stay TRL's.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trl_ext.compat.peft import base_model
from trl_ext.trainers.forward.calls import right_padded
from trl_ext.trainers.forward.reward_input import RewardEncoder, check_eos_setting, read_record


class TokenizerStandIn:
    """Returns the token ids of a batch whose text TRL wants tokenized.

    Args:
        tokenizer: The reward model's, whose part this takes.
        encoder: Makes the ids.
        batch: Prompts, completions and ids of the completions.

    Attributes:
        name: Of the reward model.
        error: What making the ids raised, for `raise_together`; the ids are then single pad tokens, so that this rank
            makes its forward, too.
    """

    def __init__(self, tokenizer: Any, encoder: RewardEncoder, batch: tuple[Any, Any, Any]):
        self.name = encoder.name
        self.error: Exception | None = None
        self._tokenizer, self._encoder = tokenizer, encoder
        try:
            self._sequences = encoder(*batch)
        except Exception as error:  # whatever a chat template raises: it is raised again on all ranks
            self.error = error
            self._sequences = [[encoder.pad_token_id]] * len(batch[0])

    def apply_chat_template(self, *args: Any, **options: Any) -> str:
        """Return no text: what it would say is in the ids."""
        return ""

    def __call__(self, *args: Any, **options: Any) -> dict[str, torch.Tensor]:
        """Return what the tokenizer would: the model's inputs, padded on the right."""
        ids, mask = right_padded(self._sequences, self._encoder.pad_token_id, torch.device("cpu"))
        inputs = {"input_ids": ids, "attention_mask": mask}
        if "token_type_ids" in self._tokenizer.model_input_names:
            inputs["token_type_ids"] = torch.zeros_like(ids)
        return inputs


def make_encoders(trainer: Any, given: Sequence[Any]) -> list[RewardEncoder | None]:
    """Return an encoder for each reward function that is a model of transformers, None for the others.

    Args:
        trainer: GRPOTrainer with its reward functions and their tokenizers.
        given: Reward functions as the user gave them; those that are paths tell where a model's record lies.

    Raises:
        ConfigError: a record that contradicts the tokenizer, or `reward_model_eos` without effect.
    """
    eos = getattr(trainer.args, "reward_model_eos", "auto")
    encoders = [
        _encoder(trainer, function, tokenizer, path, eos)
        for function, tokenizer, path in zip(
            trainer.reward_funcs,
            trainer.reward_processing_classes,
            [*given, *[None] * (len(trainer.reward_funcs) - len(given))],  # TRL adds environments' own rewards
            strict=True,
        )
    ]
    check_eos_setting(eos, [encoder for encoder in encoders if encoder is not None], trainer.train_dataset)
    return encoders


def _encoder(trainer: Any, function: Any, tokenizer: Any, path: Any, eos: str) -> RewardEncoder | None:
    if isinstance(own := getattr(function, "encoder", None), RewardEncoder):
        return own  # of a scorer of PPO's
    if not isinstance(function, nn.Module) or not isinstance(tokenizer, PreTrainedTokenizerBase):
        return None
    model = base_model(trainer.accelerator.unwrap_model(function, keep_torch_compile=False))
    if not isinstance(model, PreTrainedModel):
        return None  # a module of the user's own, whose text is TRL's
    name = path if isinstance(path, str) else model.config._name_or_path
    encoder = RewardEncoder(
        tokenizer,
        Path(name).name or type(model).__name__,
        read_record(name),
        eos,
        trainer.chat_template_kwargs,
        trainer._tokenizer,
        lambda: trainer.eos_token_ids,
    )
    # It decides which token the model scores; TRL sets it, but not for a PeftModel.
    model.config.get_text_config().pad_token_id = encoder.pad_token_id
    return encoder


def stand_ins(trainer: Any, encoders: Sequence[RewardEncoder | None], *batch: Any) -> list[Any]:
    """Return the tokenizers that TRL calls for this batch, those of encoders replaced.

    Args:
        trainer: Its reward functions may be the first ones only.
        encoders: Of all reward functions.
        batch: Prompts, completions and ids of the completions.
    """
    return [
        TokenizerStandIn(tokenizer, encoder, batch)
        if encoder is not None and isinstance(function, nn.Module)
        else tokenizer
        for function, tokenizer, encoder in zip(
            trainer.reward_funcs, trainer.reward_processing_classes, encoders, strict=False
        )
    ]
