"""A LoRA reward model as another adapter of the policy: both share the base weights in memory.

It has the format that `trl_ext.RewardTrainer` saves with a `peft_config`: LoRA weights and the score head, which PEFT
saves as a module. A causal model cannot hold the head, so it is returned separately.
"""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftType, TaskType, set_peft_model_state_dict
from safetensors.torch import load_file
from transformers.modeling_outputs import SequenceClassifierOutputWithPast
from transformers.utils import logging

from trl_ext.compat.peft import HEAD_NAMES, add_adapter, base_model
from trl_ext.errors import ConfigError
from trl_ext.trainers.forward.pooled_head import scored_token
from trl_ext.trainers.forward.roles import REWARD
from trl_ext.trainers.grpo.trainer import GRPOTrainer
from trl_ext.trainers.reward.scorer import CompletionScorer, num_positions

logger = logging.get_logger(__name__)

_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_HEAD = ".score."
# Other named initialisations change the base weights, which the policy shares.
_HARMLESS_INITS = ("gaussian", "eva", "orthogonal")


class SharedRewardModel(CompletionScorer):
    """Scores completions with the adapter `role` of the actor's PeftModel, on the actor's tokens."""

    is_adapter = True

    def __init__(self, name: str, tokenizer: Any, role: str = REWARD, **options: Any):
        super().__init__(tokenizer, name, **options)
        self._role = role

    def attach(self, trainer: GRPOTrainer) -> None:
        """Score with the trainer's actor, after the adapter was loaded."""
        self._trainer = trainer
        self.model = base_model(trainer.model)
        self.wrapped = self._call
        self._num_positions = num_positions(self.model)

    def _prepare(self) -> None:
        """Pack if the actor packs; the actor has been checked, and stays in training mode."""
        settings = self._trainer.step_settings
        self.packs, self._shares_prompts = settings.packs, settings.share_prompt

    def _call(self, pool_index: torch.Tensor | None = None, **inputs: Any) -> SequenceClassifierOutputWithPast:
        actor: Any = self._trainer.model
        values = actor(role=self._role, **{"use_cache": False, **inputs}).token_values
        if pool_index is not None:
            return SequenceClassifierOutputWithPast(logits=values[0, pool_index, None])
        ends = [scored_token(row, self._pad_token_id) for row in inputs["input_ids"].tolist()]
        return SequenceClassifierOutputWithPast(logits=values[range(len(ends)), ends, None])


def load_reward_adapter(peft_model: Any, folder: str | Path, name: str = "reward") -> torch.nn.Linear:
    """Add a LoRA reward model to a policy as the frozen adapter `name`, and return its score head.

    The score of a sequence is the head's output for the backbone's hidden state, with this adapter active, at
    `pooled_head.scored_token`. The head maps hidden size to 1, in float32, frozen, on the policy's device. The other
    adapters stay unchanged: active or not, trainable or not.

    Args:
        peft_model: PeftModelForCausalLM on the base model that the reward model was trained on, before DeepSpeed or
            FSDP shards its weights.
        folder: Holds adapter_config.json and adapter_model.safetensors.

    Raises:
        ConfigError: files are missing, the adapter is not a LoRA in which only a score head is trained in addition, or
            it does not fit the policy, which then stays unchanged.
    """
    path = Path(folder)
    if name in peft_model.peft_config:
        raise ConfigError(f"The policy has an adapter {name!r} already. Give the reward adapter another name.")
    config = _read_config(path)
    weights = load_file(path / _WEIGHTS)
    head = _take_head(weights, path)
    _check_base(peft_model, config, head, path)
    trainable = {key: parameter.requires_grad for key, parameter in peft_model.named_parameters()}
    try:
        _add(peft_model, config, weights, name)
    except (ValueError, RuntimeError) as error:
        if name in peft_model.peft_config:
            peft_model.delete_adapter(name)
        raise ConfigError(
            f"The reward adapter in {path} does not fit the policy: {error}. Train it on the policy's base model."
        ) from error
    finally:
        # Adding an adapter switches the active ones to trainable in some versions of PEFT.
        for key, parameter in peft_model.named_parameters():
            parameter.requires_grad_(trainable.get(key, False))
    return head.to(peft_model.device)


def _read_config(path: Path) -> PeftConfig:
    """Read the adapter's config, changed for a frozen adapter of a causal model."""
    missing = [file for file in (_CONFIG, _WEIGHTS) if not (path / file).is_file()]
    if missing:
        raise ConfigError(
            f"The reward adapter's folder {path} lacks {' and '.join(missing)}. Give the folder that RewardTrainer "
            "saved a LoRA reward model to."
        )
    config = PeftConfig.from_pretrained(str(path))
    reason = _why_unfit(config)
    if reason:
        raise ConfigError(f"The reward adapter in {path} {reason}. Merge it, and give the whole reward model instead.")
    config.task_type = TaskType.CAUSAL_LM
    config.modules_to_save = None
    config.inference_mode = True
    # The policy may be in training mode while rewards are computed.
    config.lora_dropout = 0.0
    return config


def _why_unfit(config: PeftConfig) -> str:
    if config.peft_type != PeftType.LORA or not isinstance(config, LoraConfig):
        return f"is of the type {PeftType(config.peft_type).value}, not LoRA"
    others, init = set(config.modules_to_save or ()) - HEAD_NAMES, config.init_lora_weights
    reasons = {
        f"trains whole modules in addition to the score head: {', '.join(sorted(others))}": others,
        f"trains biases of the base model (bias={config.bias!r})": config.bias != "none",
        f"has init_lora_weights={init!r}, which changes the base weights": (
            isinstance(init, str) and init not in _HARMLESS_INITS
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _take_head(weights: dict[str, torch.Tensor], path: Path) -> torch.nn.Linear:
    """Remove the score head from the adapter's weights and return it."""
    parts = {key.rpartition(".")[2]: weights.pop(key).float() for key in list(weights) if _HEAD in key}
    if "weight" not in parts or parts["weight"].ndim != 2:
        raise ConfigError(
            f"The reward adapter in {path} has no trained score head. Train it with trl_ext.RewardTrainer, or with "
            "task_type='SEQ_CLS', under which PEFT trains and saves the layer `score`."
        )
    num_labels, hidden_size = parts["weight"].shape
    if num_labels != 1:
        raise ConfigError(
            f"A reward model has one label; the adapter in {path} has {num_labels}. Give a reward model."
        )
    head = torch.nn.Linear(hidden_size, 1, bias="bias" in parts, dtype=torch.float32)
    head.load_state_dict(parts)
    return head.requires_grad_(False)


def _check_base(peft_model: Any, config: PeftConfig, head: torch.nn.Linear, path: Path) -> None:
    """Raise ConfigError unless the adapter is a LoRA of the actor's base model.

    Args:
        peft_model: The actor.
        config: Of the reward adapter.
        head: Its score head.
        path: Its folder.
    """
    base = peft_model.get_base_model().config
    hidden_size = base.get_text_config().hidden_size
    if head.in_features != hidden_size:
        raise ConfigError(
            f"The reward adapter in {path} has hidden size {head.in_features}, the policy {hidden_size}. Train it on "
            "the policy's base model."
        )
    trained_on, policy = (Path(name or "").name for name in (config.base_model_name_or_path, base._name_or_path))
    if trained_on and policy and trained_on != policy:
        logger.warning(
            f"The reward adapter in {path} was trained on {config.base_model_name_or_path}, but the policy's base "
            f"model is {base._name_or_path}. Its scores are only right if their weights are the same."
        )


def _add(peft_model: Any, config: PeftConfig, weights: dict[str, torch.Tensor], name: str) -> None:
    """Add the adapter; raise ValueError or RuntimeError if its weights do not match the model's parameters.

    Args:
        peft_model: The actor.
        config: Of the reward adapter.
        weights: By the names of the adapter's file.
        name: The adapter's name in the model.
    """
    add_adapter(peft_model, name, config)
    result: Any = set_peft_model_state_dict(peft_model, weights, adapter_name=name)
    homeless = [*result.unexpected_keys, *(key for key in result.missing_keys if f".{name}." in key)]
    if homeless:
        raise ValueError(f"{len(homeless)} weights have no counterpart, such as {homeless[0]}")
