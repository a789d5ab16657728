"""GRPO trainers on tiny models, TRL's or ours, with fixed rollouts and a fixed reward, for tests."""

import random
from typing import Any

import torch
from datasets import Dataset

import trl_ext
from tests import tiny
from tests.rollouts import rollout

WEIGHT_TOLERANCE = 1e-6
LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo", "luspo")
_ARGUMENTS = (
    *("callbacks", "environment_factory", "eval_dataset", "peft_config", "processing_class"),
    *("reward_processing_classes", "rollout_func", "tools"),
)
_SETTINGS = dict(
    **tiny.QUIET_ON_CPU,
    max_steps=2,
    per_device_train_batch_size=4,
    num_generations=4,
    max_completion_length=12,
    learning_rate=1e-3,
    # Adam divides by the root of the squared gradient: where that is rounding noise, so is the step. A larger
    # epsilon makes the step a smooth function of the gradient, so that a difference of 1e-6 means something.
    adam_epsilon=1e-3,
    lr_scheduler_type="constant",
    logging_steps=1,
    save_strategy="no",
    gradient_checkpointing=False,
)


def reward(completion_ids, **_):
    """Any fixed function that differs within a group."""
    return [(sum(ids) % 17) / 17 for ids in completion_ids]


def prompts() -> Dataset:
    """Sixteen prompts of one to nine tokens."""
    draw = random.Random(0)
    rows = [tiny.words(*(draw.randrange(3, tiny.VOCAB) for _ in range(length))) for length in (9, 1, 4, 7) * 4]
    return Dataset.from_dict({"prompt": rows})


def trainer(folder, library=trl_ext, model="llama", rewards=reward, data=None, **changes) -> Any:
    """A trainer of `library`.

    Args:
        folder: Output directory.
        model: A family of `tests.tiny`, a folder, or a model.
        data: Training set; of eight rows that are alike, if it is a text.
        changes: Of the config, or of the trainer where its arguments are named. A rollout_func of None samples.
    """
    options = {name: changes.pop(name) for name in _ARGUMENTS if name in changes}
    if isinstance(model, str) and "/" not in model:
        model = tiny.model(model)
        if changes.get("beta"):  # TRL loads the reference by the model's name
            model.config._name_or_path = f"{folder}/model"
            model.save_pretrained(f"{folder}/model")
    if isinstance(data, str):
        data = Dataset.from_dict({"prompt": [data] * 8})
    return library.GRPOTrainer(
        model,
        rewards,
        library.GRPOConfig(str(folder), **_SETTINGS | changes),
        prompts() if data is None else data,
        **dict(processing_class=tiny.tokenizer(), rollout_func=rollout) | options,
    )


def weights(subject: Any) -> torch.Tensor:
    """All weights, flattened: a copy, on the CPU."""
    return torch.cat([weight.detach().flatten() for weight in subject.model.parameters()]).cpu()


def steps_of(subject: Any) -> list[dict[str, float]]:
    """What was logged of each optimizer step."""
    return [entry for entry in subject.state.log_history if "loss" in entry]


def trained(*given: Any, **changes: Any) -> Any:
    """A trainer after its training, as `trainer` makes it; `before` holds its first weights."""
    subject = trainer(*given, **changes)
    subject.before = weights(subject)
    subject.train()
    return subject


def learned(subject: Any) -> torch.Tensor:
    """The weights after a training, which must have moved."""
    after = weights(subject)
    assert (after - subject.before).abs().max() > 1e-4, "nothing was learned, so nothing is compared"
    return after


def weights_after(library, folder, steps: int = 1, family: str = "llama", **changes) -> torch.Tensor:
    """The weights after some steps of two forwards, packed where the trainer is ours."""
    settings = dict(max_steps=steps, gradient_accumulation_steps=2) | changes
    if library is trl_ext:
        settings["packing"] = True
    return learned(trained(folder, library, family, **settings))
