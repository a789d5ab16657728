"""A RewardTrainer on the CPU, TRL's or ours, with settings that suit tiny models; and what it warned of."""

import torch
from datasets import Dataset
from transformers import PreTrainedModel

import trl_ext
from tests import tiny
from tests.preferences import pairs, reward_model

PAIRS = pairs(8)
ARGUMENTS = ("callbacks", "compute_metrics", "data_collator", "eval_dataset", "peft_config", "rules")
ARGUMENTS += ("processing_class",)
CHAT_TEMPLATE = "{% for m in messages %}{{ '<bos> ' if loop.first else '' }}{{ m['content'] }} <eos> {% endfor %}"


def trainer(folder, train=PAIRS, library=trl_ext, model: str | PreTrainedModel = "llama", **changes):
    """A trainer of `library`. `changes` are settings, but for those in ARGUMENTS.

    Args:
        folder: Where the model lies for a moment, and where the trainer writes.
        train: Pairs.
        model: A family of `tests.tiny`, a folder, or a model.
    """
    settings = dict(
        output_dir=str(folder),
        **tiny.QUIET_ON_CPU,
        save_strategy="no",
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        gradient_checkpointing=False,
        learning_rate=1e-3,
        # As in test_reward_step: with the usual 1e-8 Adam would turn rounding noise into steps.
        adam_epsilon=1e-3,
    )
    arguments = {name: changes.pop(name) for name in ARGUMENTS if name in changes}
    if isinstance(train, list):
        train = Dataset.from_list(train)
    return library.RewardTrainer(
        reward_model(folder / "model", model) if isinstance(model, str) and "/" not in model else model,
        library.RewardConfig(**settings | changes),
        train_dataset=train,
        **{"processing_class": chat_tokenizer()} | arguments,
    )


def chat_tokenizer():
    """tests.tiny's, with a template that puts <bos> before the first message and <eos> after every one."""
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


class Seen(torch.nn.Module):
    """A module of a user's own: notes what it is given, scores the number of tokens."""

    def __init__(self):
        super().__init__()
        self.config = tiny.model("llama").config
        self.inputs: list[dict] = []

    def forward(self, **inputs):
        self.inputs.append(inputs)
        count = inputs["attention_mask"].sum(dim=1, keepdim=True).float()
        return type("Output", (), {"logits": count})


def weights(subject) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in subject.model.parameters()])


def warnings_of(caplog) -> list[str]:
    """What trl_ext has warned of so far."""
    return [r.getMessage() for r in caplog.records if r.name.startswith("trl_ext") and r.levelname == "WARNING"]
