"""`trl_ext.AsyncGRPOTrainer` on each rank, with the stand-ins of `tests.async_rollouts` on the first."""

from typing import Any

import torch

from tests import async_rollouts


def train(folder, batch: int, dtype: str = "float32", **changes: Any) -> list[dict]:
    """Train two optimizer steps, save the model in the folder, and return the log.

    Args:
        batch: Completions of a forward on a rank.
        dtype: Of the model's weights, as torch names it.
        changes: Of the config.
    """
    settings = dict(per_device_train_batch_size=batch, adam_epsilon=1e-3, max_grad_norm=1e9) | changes
    folder.mkdir(parents=True, exist_ok=True)
    trainer = async_rollouts.trainer(folder, dtype=getattr(torch, dtype), **settings)
    trainer.train()
    trainer.save_model(folder)
    return trainer.state.log_history
