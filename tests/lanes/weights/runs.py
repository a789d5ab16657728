"""Short runs of all trainers on tiny models, and the SHA-256 of the weights that each ends with.

    python tests/lanes/weights/runs.py found.json                   # the runs of one process
    accelerate launch ... tests/lanes/weights/runs.py found.json    # the runs of several processes

`trl_ext` and `tests` are imported from PYTHONPATH, which may be another checkout.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig

import trl_ext
from tests import grpo_trainers, ppo_trainers, reward_trainers, tiny_images

LORA = LoraConfig(r=4, target_modules="all-linear", exclude_modules=["lm_head", "score"])
SAVES = dict(save_strategy="steps", save_steps=2, max_steps=4)
# Settings of the runs of one process, by trainer. A run with SAVES is resumed from its second step, in another folder.
GRPO: dict[str, dict[str, Any]] = {
    "packed": dict(packing=True),
    "padded": dict(packing=False),
    "KL, two updates": dict(packing=True, beta=0.05, num_iterations=2),
    "ratios of sequences": dict(packing=True, importance_sampling_level="sequence", num_iterations=2),
    "dr_grpo, several forwards": dict(loss_type="dr_grpo", max_tokens_per_forward=60, gradient_accumulation_steps=2),
    "Qwen3, checkpointing": dict(model="qwen3", packing=True, gradient_checkpointing=True),
    "LoRA": dict(packing=True, peft_config=LORA, beta=0.05),
    "bf16": dict(packing=True, bf16=True),
    "sampled": dict(packing=True, rollout_func=None, seed=3),
    "oversampled": dict(packing=True, rollout_func=None, seed=3, oversample=2.0),
    "resumed": dict(packing=True, rollout_func=None, seed=3, lr_scheduler_type="linear", **SAVES),
}
REWARD: dict[str, dict[str, Any]] = {
    "packed": dict(packing=True, max_steps=2),
    "padded": dict(packing=False, max_steps=2),
    "LoRA": dict(packing=True, max_steps=2, peft_config=LORA),
    "bf16": dict(packing=True, max_steps=2, bf16=True),
    "resumed": dict(packing=True, per_device_train_batch_size=2, **SAVES),
}
PPO: dict[str, dict[str, Any]] = {
    "head, padded": dict(critic="head", packing=False, num_ppo_epochs=2),
    "separate, warm-up": dict(critic="separate", critic_warmup_steps=1, value_learning_rate=3e-3),
    "adapter, whitened": dict(critic="adapter", whiten_rewards=True, value_normalisation=True),
    "head, bf16, KL in the loss": dict(critic="head", bf16=True, kl_term="loss", kl_estimator="k2"),
    "rloo": dict(critic="none", advantage_estimator="rloo", num_generations=4),
    "resumed": dict(critic="adapter", kl_target=0.1, lr_scheduler_type="linear", **SAVES),
}
# The runs of several processes, which share no file of a model.
SHARED: dict[str, tuple[str, dict[str, Any]]] = {
    "GRPO": ("GRPO", dict(packing=True, gradient_accumulation_steps=2)),
    "reward": ("reward", dict(packing=True, max_steps=2, model=ppo_trainers.classifier())),
    "PPO": ("PPO", dict(critic="separate", num_ppo_epochs=2)),
}


def digest(weights: dict[str, torch.Tensor]) -> str:
    """Return the SHA-256 of tensors with their names, in the order of the names."""
    found = hashlib.sha256()
    for name, weight in sorted(weights.items()):
        found.update(name.encode())
        found.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    """Return copies of all weights that training changes; of PPO with its critic's."""
    if isinstance(trainer, trl_ext.PPOTrainer):
        return {name: weight.clone() for name, weight in ppo_trainers.trained_weights(trainer).items()}
    return {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}


def trainer_of(kind: str, folder: Path, settings: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    settings = dict(settings)
    if kind == "GRPO":
        return grpo_trainers.trainer(folder, **settings)
    if kind == "reward":
        return reward_trainers.trainer(folder, **settings)
    return ppo_trainers.trainer(settings.pop("critic"), folder, **settings)


def images(folder: Path) -> Any:
    """A GRPO trainer on rows with one or two images."""
    shown = [[tiny_images.image(seed) for seed in range(row, row + 1 + row % 2)] for row in range(8)]
    model, processor = tiny_images.model("qwen2_5_vl"), tiny_images.processor()
    settings = dict(rollout_func=None, processing_class=processor, seed=3)
    return grpo_trainers.trainer(folder, model=model, data=tiny_images.rows(shown), **settings)


def trained(make: Callable[[Path], Any], folder: Path, resumes: bool) -> str:
    """Train; return the digest of the weights, which must have moved."""
    trainer = make(folder / "whole")
    before = digest(weights_of(trainer))
    trainer.train()
    if resumes:
        trainer = make(folder / "again")
        trainer.train(resume_from_checkpoint=str(folder / "whole" / "checkpoint-2"))
    found = digest(weights_of(trainer))
    if found == before:
        raise SystemExit("A run has moved no weight, so it compares nothing.")
    return found


def main() -> None:
    torch.set_num_threads(1)
    found: dict[str, str] = {}
    tables = {"GRPO": GRPO, "reward": REWARD, "PPO": PPO}
    runs = [(f"{kind}, {name}", kind, settings) for kind in tables for name, settings in tables[kind].items()]
    if "WORLD_SIZE" in os.environ:
        runs = [(name, kind, settings) for name, (kind, settings) in SHARED.items()]
    scratch = Path(f"{sys.argv[1]}.runs")  # of all processes
    for number, (name, kind, settings) in enumerate(runs):

        def make(out: Path, kind: str = kind, settings: dict[str, Any] = settings) -> Any:
            out.mkdir(parents=True, exist_ok=True)
            return trainer_of(kind, out, settings)

        found[name] = trained(make, scratch / str(number), resumes="save_steps" in settings)
    if "WORLD_SIZE" not in os.environ:
        found["GRPO, images"] = trained(images, scratch / "images", resumes=False)
    if os.environ.get("RANK", "0") == "0":
        Path(sys.argv[1]).write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
