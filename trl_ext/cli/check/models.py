"""The part of `trl-ext check` about models: rewards that can be built, tokenizer, and the shape from the config."""

from pathlib import Path
from typing import Any

from trl_ext.cli.check.recipe import Parsed
from trl_ext.doctor.finding import Finding, note, ok
from trl_ext.errors import ConfigError
from trl_ext.memory.models.find import find_shape
from trl_ext.memory.models.shapes import ModelShape
from trl_ext.scripts import training
from trl_ext.scripts.data.hub import unloadable
from trl_ext.scripts.rewards import build_rewards, build_rules


def rewards_of(parsed: Parsed) -> list[Any]:
    """Build the rewards of the run, or the rules of a reward model's, with the script's own checks in its order.

    Raises:
        ConfigError, RuleError: The script would end before it reads data.
    """
    script_args, training_args = parsed.script_args, parsed.training_args
    if parsed.trainer == "ppo":
        from trl_ext.scripts import ppo

        ppo.take_old_paths(script_args, training_args, parsed.model_args)
        ppo.check_paths(script_args, parsed.model_args)
        rewards = ppo.scorers(script_args)
        ppo.settle_critic(script_args, training_args, parsed.model_args, rewards)
    else:
        training.check_model(parsed.model_args)
    training.resume_point(training_args)
    if parsed.trainer == "grpo":
        return build_rewards(script_args.rules, script_args.reward_funcs, script_args.reward_model_name_or_path)
    if parsed.trainer == "reward":
        return [] if script_args.rules is None else [build_rules(script_args.rules)]
    return rewards


def load_tokenizer(parsed: Parsed) -> tuple[Any, Finding]:
    """Load the model's tokenizer, with a finding about its size, chat template, EOS and padding.

    Raises:
        ConfigError: It cannot be loaded.
    """
    training.check_model(parsed.model_args)
    tokenizer = training.load_tokenizer(parsed.training_args, parsed.model_args)
    template = "with a chat template" if tokenizer.chat_template else "without a chat template"
    what = f"{len(tokenizer):,} tokens, {template}, EOS {tokenizer.eos_token!r}, padding {tokenizer.pad_token!r}."
    if tokenizer.eos_token is None:
        advice = "Without an EOS token every completion runs to its full length: name one."
        return tokenizer, note("tokenizer", what, advice)
    return tokenizer, ok("tokenizer", what)


def shape_of(parsed: Parsed) -> ModelShape:
    """Find the model's shape from its config.

    Raises:
        ConfigError: There is no config, or its family is unknown to the formulas.
    """
    training.check_model(parsed.model_args)
    name = str(parsed.model_args.model_name_or_path)
    try:
        return find_shape(Path(name).resolve() if Path(name).is_dir() else name)  # a folder called 8B is a folder
    except ConfigError:
        if Path(name).exists():
            raise
    from transformers import AutoConfig

    try:
        trusts = bool(getattr(parsed.training_args, "trust_remote_code", False))
        config = AutoConfig.from_pretrained(name, revision=parsed.model_args.model_revision, trust_remote_code=trusts)
    except (OSError, ValueError) as error:
        raise ConfigError(f"The config of {unloadable(name, error)}") from error
    return find_shape(config.to_dict())
