"""The reward functions that a script's arguments name: rules, functions by name or dotted path, a reward model."""

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trl_ext.errors import ConfigError, did_you_mean
from trl_ext.rewards import RuleSet
from trl_ext.scripts.data.keys import PromptArguments
from trl_ext.trainers.settings.values import setting

# Part of the scripts' --help.
PROMPT_HELP = """\
`trl-ext recipes` lists the shipped recipes; `trl-ext recipes NAME` copies a recipe here.

Keys of the recipe turn the rows of any dataset into prompts. For GSM8K from the hub:

  dataset_name: openai/gsm8k
  dataset_config: main
  columns: {prompt: question}
  answer_pattern: '#### (.+)'

A flag overrides the recipe, the recipe overrides the defaults. Every key of a recipe is also a flag, and an unknown
key or flag is an error. The keys that most runs set:

  dataset_name           dataset: hub name, folder with train.jsonl and test.jsonl, or one file; column prompt, text
                         or messages (PPO: or input_ids)
  dataset_config, dataset_streaming
                         its configuration on the hub; read rows during training, which needs max_steps
  columns                names of the dataset's columns, by the name that trl_ext uses: {prompt: question,
                         answer: solution}
  answer_pattern, first_option
                         how to read the column answer: a regular expression whose one group is the answer; the number
                         of the first option, if answers are option numbers
  system_prompt, prompt_template, prompt_format
                         text around a prompt; with these keys a prompt becomes a chat if the tokenizer has a template
  rules                  rules in the recipe, or the path of a YAML file with rules
  packing                compute real tokens only, no padding (default: on where the result is exact)
  eval_strategy, eval_steps, eval_on_start, eval_temperature
                         when and how held-out prompts are evaluated
"""

# TRL's reward functions that its GRPO script accepts by name.
TRL_REWARDS = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward", "get_soft_overlong_punishment")


@dataclass
class RewardArguments(PromptArguments):
    """The data, their prompts, and the rules and functions that score a completion."""

    rules: list | str | dict | None = setting(
        None,
        "Rules that score a completion: a list of rules in the recipe; a mapping with `rules` and `clip`; or the path "
        "of a YAML file with that mapping.",
    )
    reward_funcs: list[str] | None = setting(
        None,
        "Reward functions, in addition to rules: accuracy_reward, reasoning_accuracy_reward, think_format_reward, "
        "get_soft_overlong_punishment, or dotted paths such as my_module.my_reward.",
    )


def build_rewards(
    rules: str | Sequence[Any] | Mapping[str, Any] | None, functions: Sequence[str] | None, *models: str
) -> list[Any]:
    """Build rules and functions, rules first.

    Args:
        rules: Path of a rules file, a list of rules, or a mapping with `rules` and `clip`.
        functions: Names of TRL's reward functions, or dotted paths of others.
        models: Reward models of the run, which are not built here.

    Raises:
        ConfigError: Nothing is given, or something cannot be found or built.
    """
    own = [] if rules is None else [build_rules(rules)]
    rewards = [*own, *(find_function(name) for name in functions or ())]
    if not (rewards or models):
        raise ConfigError(
            "There is nothing to score completions with. Give `rules` in the recipe (or --rules FILE.yaml), "
            "--reward_funcs, or a reward model."
        )
    return rewards


def build_rules(rules: str | Sequence[Any] | Mapping[str, Any]) -> RuleSet:
    """Build rules from a file, or inline from the recipe."""
    if isinstance(rules, str):
        return RuleSet.from_yaml(rules)
    return RuleSet.from_dict(rules if isinstance(rules, Mapping) else {"rules": rules})


def find_function(name: str) -> Any:
    """Return a reward function by TRL's name or by dotted path, which may point into the working directory."""
    if name in TRL_REWARDS:
        function = getattr(importlib.import_module("trl.rewards"), name)
        # TRL's script builds this function with these two values.
        builds = name == "get_soft_overlong_punishment"
        return function(max_completion_len=1280, soft_punish_cache=256) if builds else function
    module_name, _, attribute = name.rpartition(".")
    if not module_name:
        path = "Give the dotted path of a function, such as my_module.my_reward."
        hint = did_you_mean(name.replace("-", "_"), TRL_REWARDS) or path
        raise ConfigError(f"There is no reward function '{name}'. {hint}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module_name), attribute)
    except ModuleNotFoundError as error:
        raise ConfigError(f"The reward function '{name}' cannot be imported: {error}.") from error
    except AttributeError as error:
        raise ConfigError(f"{module_name} has no reward function '{attribute}'. Check --reward_funcs.") from error
    if not callable(function):
        raise ConfigError(f"The reward function '{name}' is of type {type(function).__name__} and cannot be called.")
    return function
