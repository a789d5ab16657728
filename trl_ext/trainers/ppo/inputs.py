"""Checks and loading of PPOTrainer's arguments: models that must fit together, datasets as in TRL 1.12."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from datasets import Dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging

from trl_ext.compat.accelerate import is_fsdp
from trl_ext.compat.peft import HEAD_NAMES
from trl_ext.compat.versions import is_older
from trl_ext.errors import ConfigError, refuse_first
from trl_ext.memory.contradictions import OF_FSDP, check
from trl_ext.trainers.ppo.config import PPOConfig
from trl_ext.trainers.ppo.refusals import WITHOUT_REWARD_MODELS
from trl_ext.trainers.rows.rendering import check_ids
from trl_ext.trainers.settings.values import check_effects, check_settings

logger = logging.get_logger(__name__)


def listed(given: Any) -> list[Any]:
    """Return a list of None, an object or several objects."""
    return [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]


def check_arguments(
    args: Any,
    model: Any,
    ref_model: Any,
    value_model: Any,
    reward_models: Sequence[Any],
    reward_funcs: Sequence[Any],
    rollout_func: Any = None,
    data_collator: Any = None,
) -> None:
    """Raise ConfigError for arguments that cannot work together, before anything is loaded or moved.

    Warn of a collator, which is not used.

    Args:
        args: The PPOConfig.
        model, ref_model, value_model: As given; models or names, the last two may be None.
        reward_models: Reward models and adapters as given.
        reward_funcs: Rules and other reward functions.
        rollout_func: TRL's, or None.
        data_collator: Is not used.
    """
    if not isinstance(args, PPOConfig):
        raise ConfigError(f"args is a {type(args).__name__}. Give a PPOConfig: PPOTrainer(args=PPOConfig(...), ...).")
    check_settings(args)
    if args.kl_estimator != "k1" and args.kl_term == "reward" and args.beta > 0:
        logger.warning_once(
            f"kl_estimator='{args.kl_estimator}' in the reward hardly holds the policy back: its gradient is not the "
            "KL's and vanishes near the reference. Use k1, or kl_term='loss', unless that is what you want."
        )
    if data_collator is not None:
        logger.warning("data_collator is not used: prompts are batched as lists and padded after generation.")
    _check_models(args, model, ref_model, value_model)
    if args.advantage_estimator == "remax" and rollout_func is not None:
        raise ConfigError(
            "advantage_estimator='remax' compares with greedy completions, and a rollout_func samples. Take another "
            "estimator, or leave rollout_func out."
        )
    _check_rewards(args, value_model, reward_models, reward_funcs)


def _check_models(args: PPOConfig, model: Any, ref_model: Any, value_model: Any) -> None:
    """Raise ConfigError unless there is an actor, and reference and critic, if given, are other models.

    Args:
        args: The PPOConfig.
        model: The actor as given.
        ref_model, value_model: As given, or None.
    """
    is_reference, is_critic = _is_one_object(ref_model, model), _is_one_object(value_model, model)
    refuse_first(
        {
            "PPOTrainer has no model. Give the actor: PPOTrainer(args=..., model=..., ...).": model is None,
            "ref_model is the model itself: the KL between them would be 0 and the reference would be trained. Give "
            "None (a copy is made, or the adapters are switched off), or a separate model.": is_reference,
            "ref_model has no use with kl_coef=0, which measures no KL. Leave ref_model out, or set kl_coef.": (
                ref_model is not None and args.beta == 0
            ),
            "value_model is the actor itself. Take critic='head' to share its weights.": is_critic,
        }
    )


def _check_rewards(
    args: PPOConfig, value_model: Any, reward_models: Sequence[Any], reward_funcs: Sequence[Any]
) -> None:
    """Raise ConfigError unless something scores the completions, as `score_mode` needs it, and is not trained itself.

    Args:
        args: The PPOConfig.
        value_model: As given, or None.
        reward_models: Reward models and adapters as given.
        reward_funcs: Rules and other reward functions.
    """
    is_reward = any(_is_one_object(reward, value_model) for reward in reward_models)
    refuse_first(
        {
            "value_model is the reward model itself, which must not be trained. Load it twice.": is_reward,
            "Nothing scores the completions. Give reward_funcs, such as a RuleSet, or a reward_model.": (
                not reward_models and not reward_funcs
            ),
            "score_mode='gate' needs both reward_funcs, which decide, and a reward_model. Give both.": (
                args.score_mode == "gate" and not (reward_models and reward_funcs)
            ),
        }
    )
    if not reward_models:
        check_effects(args, WITHOUT_REWARD_MODELS)


def _is_one_object(a: Any, b: Any) -> bool:
    """Return True if two models are the same object; equal paths are loaded twice."""
    return a is b and a is not None and not isinstance(a, str)


def choose_critic(
    args: Any, lora: Any, value_model: Any, reward_adapters: Sequence[str] = (), reward_models: Sequence[Any] = ()
) -> str:
    """Return the kind of critic, "none" for an estimator without values; ConfigError if the models do not allow it.

    Args:
        args: The PPOConfig.
        lora: Config of the actor's LoRA; None if it has none.
        value_model: As given, or None.
        reward_adapters: Folders of reward models that are LoRA of the actor's base model.
        reward_models: Complete reward models.
    """
    if args.advantage_estimator != "gae":
        no_use = f"has no use with advantage_estimator='{args.advantage_estimator}', which has no critic."
        refuse_first(
            {
                f"value_model {no_use} Drop it.": value_model is not None,
                f"reward_adapter {no_use} Give the reward model as reward_model.": reward_adapters,
            }
        )
        return "none"
    critic = args.critic or ("separate" if value_model is not None else "adapter" if lora is not None else "head")
    _check_start(args, critic, lora, value_model, reward_adapters, reward_models)
    _check_launch(args, critic)
    return critic


def _check_start(
    args: PPOConfig,
    critic: str,
    lora: Any,
    value_model: Any,
    reward_adapters: Sequence[str],
    reward_models: Sequence[Any],
) -> None:
    """Raise ConfigError unless a critic of this kind starts from the given models.

    Args:
        args: The PPOConfig.
        critic: The kind of critic.
        lora: Config of the actor's LoRA; None if it has none.
        value_model: As given, or None.
        reward_adapters, reward_models: As given.
    """
    if critic == "adapter":
        _check_adapter(args, lora)
    if args.critic_init == "reward":
        _check_reward_start(critic, value_model, reward_adapters, reward_models)
    elif critic == "separate" and value_model is None:
        raise ConfigError(
            "critic='separate' needs value_model: a model or path for AutoModelForSequenceClassification with "
            "num_labels=1, of the actor's tokenizer. Or take critic='head'."
        )
    if critic != "separate" and value_model is not None:
        raise ConfigError(f"value_model has no use with critic='{critic}'. Drop one of the two.")
    if critic != "adapter" and reward_adapters:
        raise ConfigError(
            f"reward_adapter is a third LoRA after the LoRAs of actor and critic, but critic='{critic}' has none. "
            "Take critic='adapter' with a peft_config, or give the reward model as reward_model."
        )


def _check_adapter(args: PPOConfig, lora: Any) -> None:
    """Raise ConfigError unless a critic can be a second LoRA with the actor's config `lora`, or None."""
    copies = set(getattr(lora, "modules_to_save", None) or ()) - HEAD_NAMES
    refuse_first(
        {
            "critic='adapter' is a second LoRA next to the actor's, but the actor has none. Give "
            "peft_config=LoraConfig(...), or take critic='head'.": lora is None,
            f"modules_to_save={sorted(copies)} gives critic='adapter' separate copies, which it neither reads nor "
            "trains. Take critic='head' or critic='separate', or leave modules_to_save out of the LoRA.": copies,
            "ddp_find_unused_parameters=True ends in a crash with critic='adapter', whose two forwards use all "
            "trained weights in turn. Leave it out.": args.ddp_find_unused_parameters,
        }
    )


def _check_launch(args: PPOConfig, critic: str) -> None:
    """Raise ConfigError if a critic of this kind cannot be trained as the run is launched: ZeRO-3, FSDP, fp16."""
    if critic == "adapter" and args.deepspeed_plugin is not None and args.deepspeed_plugin.zero_stage == 3:
        if args.gradient_checkpointing and is_older("deepspeed", "0.19.4"):
            raise ConfigError(
                "critic='adapter' under ZeRO-3 needs DeepSpeed 0.19.4: older ones cannot recompute frozen weights "
                "without reentrant checkpointing, which cannot keep the adapters apart. Update DeepSpeed, set "
                "gradient_checkpointing=False, use ZeRO-2, or take critic='head'."
            )
    check(SimpleNamespace(fsdp=is_fsdp(args), trainer="ppo", critic=critic), OF_FSDP)
    if critic == "separate" and args.fp16:
        raise ConfigError("fp16's loss scaling does not know the optimizer of critic='separate'. Use bf16.")


def _check_reward_start(
    critic: str, value_model: Any, reward_adapters: Sequence[str], reward_models: Sequence[Any]
) -> None:
    """Raise ConfigError unless the reward model for critic_init='reward' is given.

    Args:
        critic: The kind of critic.
        value_model: As given, or None.
        reward_adapters, reward_models: As given.
    """
    if value_model is not None:
        raise ConfigError("The critic starts from value_model, so critic_init='reward' has no use. Leave it out.")
    what, name = (reward_adapters, "reward_adapter") if critic == "adapter" else (reward_models, "reward_model")
    if not what:
        raise ConfigError(
            f"critic_init='reward' starts critic='{critic}' from the {name}, and there is none. Give {name}, or leave "
            "critic_init out."
        )


def check_value_model(value_config: Any, model_config: Any, tokenizer: Any) -> None:
    """Raise ConfigError unless the critic, given by its config, reads the actor's tokens."""
    own, actors = (config.get_text_config().vocab_size for config in (value_config, model_config))
    name = value_config._name_or_path or type(value_config).__name__
    if own != actors:
        raise ConfigError(
            f"value_model {name} has {own} tokens, the actor {actors}: it has another tokenizer and would read "
            "other text. Start the critic from the actor's own base model, or from a reward model of it."
        )
    if (Path(name) / "tokenizer.json").is_file():
        read = {number: token for token, number in AutoTokenizer.from_pretrained(name).get_vocab().items()}
        written = getattr(tokenizer, "tokenizer", tokenizer).get_vocab()  # of a processor
        written = {number: token for token, number in written.items()}
        # The actor's tokenizer may have added tokens, such as a pad token.
        other = min((number for number in read if read[number] != written.get(number)), default=None)
        if other is not None:
            raise ConfigError(
                f"The tokenizer of value_model {name} has other tokens than the actor's: {other} is {read[other]!r} "
                f"there and {written.get(other)!r} here. Start the critic from the actor's own base model, or from a "
                "reward model of it."
            )


def load_classifier(model: Any, args: Any) -> Any:
    """Return the sequence classification model, loaded with one label if it is a path."""
    if not isinstance(model, str):
        return model
    # The revision belongs to the actor's repository.
    options = {k: v for k, v in (args.model_init_kwargs or {}).items() if k != "revision"}
    if args.distributed_state.distributed_type in ("MULTI_GPU", "DEEPSPEED"):
        options["device_map"] = None
    return AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, **options)


def tokenizer_in(path: str, fallback: Any) -> Any:
    """Return the tokenizer of a folder or hub repository, or the fallback if a folder has none."""
    has_own = path and (not Path(path).is_dir() or (Path(path) / "tokenizer_config.json").is_file())
    return AutoTokenizer.from_pretrained(path) if has_own else fallback


class TokenizedPrompt(str):
    """A prompt's text with its token ids."""

    ids: list[int]

    def __new__(cls, text: str, ids: Sequence[int]) -> "TokenizedPrompt":
        prompt = super().__new__(cls, text)
        prompt.ids = list(ids)
        return prompt

    def __getnewargs__(self) -> tuple[str, list[int]]:  # type: ignore[override]  # __new__ takes one more, too
        return str(self), self.ids


def with_prompts(dataset: Any, tokenizer: Any, role: str) -> Any:
    """Add a column `prompt` to a tokenized dataset; return a dataset without `input_ids`, or a stream, unchanged.

    The dataset may be a dict of datasets. `role` is its name in messages.

    Raises:
        DataError: Rows without token ids, or with ids that the tokenizer does not have.
    """
    if isinstance(dataset, dict):
        return {name: with_prompts(part, tokenizer, f"{role}['{name}']") for name, part in dataset.items()}
    columns = dataset.column_names if isinstance(dataset, Dataset) else None
    if not columns or "input_ids" not in columns:
        return dataset
    check_ids(dataset, role, "input_ids", len(tokenizer))
    if "prompt" in columns:
        return dataset
    # Special tokens stay in the text: a reward model reads a chat template's marks.
    return dataset.map(lambda rows: {"prompt": tokenizer.batch_decode(rows["input_ids"])}, batched=True)


def keep_token_ids(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows whose prompts carry their `input_ids` without padding, if the dataset has them."""
    if not rows or "input_ids" not in rows[0] or not isinstance(rows[0].get("prompt"), str):
        return list(rows)
    kept = []
    for row in rows:
        ids, mask = row["input_ids"], row.get("attention_mask")
        real = ids if mask is None else [t for t, m in zip(ids, mask, strict=True) if m]
        kept.append({**row, "prompt": TokenizedPrompt(row["prompt"], real)})
    return kept
