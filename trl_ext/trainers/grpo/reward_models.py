"""Reward models among GRPO's reward functions: TRL loads and prepares them, and calls our scorer instead.

So they read the text that they were trained on, in packed forwards of bounded tokens. TRL calls other modules itself.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trl_ext.compat.peft import base_model
from trl_ext.trainers.forward.reward_input import check_eos_setting, read_record
from trl_ext.trainers.reward.scorer import CompletionScorer, RewardModel
from trl_ext.trainers.step.exchange import agreed_num_forwards


def with_scorers(trainer: Any, given: Sequence[Any], policy_tokenizer: Any) -> list[Any]:
    """Return the GRPOTrainer's reward functions with a scorer instead of each model of transformers.

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


def _scorer(trainer: Any, policy_tokenizer: Any, function: Any, tokenizer: Any, path: Any) -> Any:
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
        record=read_record(name),
        as_grpo=True,
        **scorer_options(trainer, trainer.args, policy_tokenizer),
    )
    scorer.wrapped = function
    return scorer


def scorer_options(trainer: Any, args: Any, policy_tokenizer: Any) -> dict[str, Any]:
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
