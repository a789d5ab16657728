"""PPO trainers on tiny models with fixed rollouts, for tests."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import AutoModelForSequenceClassification, TrainerCallback

import trl_ext
from tests import tiny
from tests.rollouts import rollout

CRITICS = ("adapter", "head", "separate")
LORA = dict(r=4, lora_alpha=8, target_modules="all-linear")
_ARGUMENTS = (
    *("reward_funcs", "reward_model", "reward_adapter", "reward_processing_classes", "ref_model", "value_model"),
    *("peft_config", "eval_dataset", "callbacks"),
)
_SETTINGS = dict(
    **tiny.QUIET_ON_CPU,
    save_strategy="no",
    logging_steps=1,
    max_steps=3,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    num_ppo_epochs=1,
    response_length=12,
    temperature=1.0,
    learning_rate=1e-3,
    # Adam divides by the root of the squared gradient: where that is rounding noise, so is the step.
    adam_epsilon=1e-3,
    lr_scheduler_type="constant",
    gradient_checkpointing=False,
    vf_coef=0.5,
    score_normalisation="none",
    score_clip=None,
    value_normalisation=False,  # what is compared are the textbook's values
)


def reward(completion_ids, **_):
    """Any fixed function of the completion."""
    return [(sum(ids) % 17) / 17 for ids in completion_ids]


def prompts(num: int = 16) -> Dataset:
    draw = random.Random(0)
    lengths = ((9, 1, 4, 7) * num)[:num]
    rows = [tiny.words(*(draw.randrange(3, tiny.VOCAB) for _ in range(length))) for length in lengths]
    return Dataset.from_dict({"prompt": rows})


def actor(family: str = "llama", seed: int = 0) -> Any:
    """A tiny causal model."""
    return tiny.model(family, seed)


def decided_actor() -> Any:
    """One whose head can say something: with initial weights of 0.02 no hidden state makes a token likely."""
    model = actor()
    model.lm_head.weight.data *= 10
    return model


def classifier(seed: int = 5, family: str = "llama", num_labels: int = 1, **changes: Any) -> Any:
    """A tiny sequence classification model."""
    config = tiny.model(family, **changes).config
    config.num_labels = num_labels
    torch.manual_seed(seed)
    return AutoModelForSequenceClassification.from_config(config)


def scorer(seed: int = 9, **changes: Any) -> dict[str, Any]:
    """Arguments of a trainer that a tiny reward model scores."""
    return dict(reward_model=classifier(seed, **changes), reward_processing_classes=tiny.tokenizer())


def trainer(critic: str, folder: Any, *, model: Any = None, data: Any = None, **changes: Any) -> Any:
    """A trainer on fixed rollouts with a fixed reward.

    Args:
        critic: One of CRITICS; or "none", with an advantage_estimator that needs none.
        folder: Output directory.
        model: The actor.
        data: Training set.
        changes: Of the config, or of the trainer where its arguments are named.
    """
    options = {name: changes.pop(name) for name in _ARGUMENTS if name in changes}
    rollouts = changes.pop("rollout_func", rollout)
    if "reward_model" not in options:
        options.setdefault("reward_funcs", reward)
    if critic == "adapter":
        options.setdefault("peft_config", LoraConfig(**LORA))
    if critic == "separate" and changes.get("critic_init") is None:
        options.setdefault("value_model", classifier())
    settings = {**_SETTINGS, "critic": critic}
    if critic == "none":
        del settings["vf_coef"], settings["value_normalisation"]
    args = trl_ext.PPOConfig(str(folder), **{**settings, **changes})
    return trl_ext.PPOTrainer(
        args,
        tiny.tokenizer(),
        actor() if model is None else model,
        train_dataset=prompts() if data is None else data,
        rollout_func=rollouts,
        **options,
    )


def stir(trainer: Any) -> Any:
    """Give zero-initialised parts (LoRA's B, the value head) small numbers, so that every path has a gradient."""
    torch.manual_seed(11)
    parts = ("lora_B", "value_head")
    for name, weight in trainer.model.named_parameters():
        if weight.requires_grad and any(part in name for part in parts):  # not a reward adapter
            weight.data.normal_(0.0, 0.1)
    return trainer


def completed(trainer: Any, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The rollouts of some rows with PPO's targets, as one micro-batch of an update."""
    output: dict[str, Any] = trainer._generate_and_score_completions(rows)
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    trainer._passes.make([output])
    return output


def trained_weights(trainer: Any) -> dict[str, torch.Tensor]:
    """Everything that is trained, by name: the actor, and the critic wherever it is."""
    weights = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
    value_model = trainer._ppo_models.value_model if isinstance(trainer, trl_ext.PPOTrainer) else None
    if value_model is not None:
        weights |= {f"value_model.{n}": p.detach().clone() for n, p in value_model.named_parameters()}
    return weights


class Gradients(TrainerCallback):
    """The gradients that the optimizers of actor and critic step by.

    Args:
        trainer: A PPO trainer. Its critic's own optimizer steps before the actor's and lets its gradients go.

    Attributes:
        steps: Of each optimizer step everything that is trained, by name, in float32; zeros where there is none.
    """

    def __init__(self, trainer: Any) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []
        self._trainer, self._found = trainer, {}

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._hook = register_optimizer_step_pre_hook(self._note)

    def _note(self, optimizer: Any, *args: Any) -> None:
        of_step = {id(p) for group in optimizer.param_groups for p in group["params"]}
        parts = {n: p for n, p in self._trainer.model.named_parameters() if p.requires_grad}
        if (value_model := self._trainer._ppo_models.value_model) is not None:
            parts |= {f"value_model.{n}": p for n, p in value_model.named_parameters()}
        for name, p in parts.items():
            if id(p) in of_step:
                self._found[name] = torch.zeros(p.shape) if p.grad is None else p.grad.float().clone()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.steps.append(self._found)
        self._found = {}

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self._hook.remove()


def resumed_as_whole(make: Callable[[Path], Any], folder: Path, step: int) -> tuple[Any, Any]:
    """Train a run whole, and the same from its checkpoint of a step; the weights are the same bits.

    Args:
        make: Makes the trainer, given its output directory.
        folder: For both.
        step: Of the checkpoint.

    Returns:
        Both trainers, the resumed one last.
    """
    whole = make(folder / "whole")
    whole.train()
    again = make(folder / "again")
    again.train(resume_from_checkpoint=str(folder / "whole" / f"checkpoint-{step}"))
    assert distance(trained_weights(whole), trained_weights(again)) == 0.0
    return whole, again


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest difference between two sets of weights."""
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)
