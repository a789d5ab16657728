"""A user's script of three steps: model and output folder, then options of the config."""

import sys
import warnings

from datasets import Dataset

from trl_ext import GRPOConfig, GRPOTrainer


def reward(completions: list[str], **kwargs) -> list[float]:
    warnings.warn("a user's own", FutureWarning, stacklevel=1)
    return [float(len(text) % 5) for text in completions]


model, folder, *options = sys.argv[1:]
args = GRPOConfig(
    output_dir=folder,
    max_steps=3,
    logging_steps=1,
    use_cpu=True,
    bf16=False,
    report_to="none",
    save_strategy="no",
    per_device_train_batch_size=4,
    num_generations=4,
    max_completion_length=8,
    log_completions=True,
    **{name: int(value) for name, value in (option.split("=") for option in options)},
)
rows = Dataset.from_dict({"prompt": [f"w{i} w3" for i in range(8)]})
GRPOTrainer(model, reward, args, rows).train()
