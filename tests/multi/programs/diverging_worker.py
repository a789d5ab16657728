"""Trains GRPO until the loss of one process is NaN in the second step, and saves the weights that it is left with."""

import json
from pathlib import Path

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from safetensors.torch import load_file

from tests.multi.programs.zero_worker import Rollout, config, parse_options, token_reward
from trl_ext import GRPOTrainer
from trl_ext.errors import GradientError


class Diverges(GRPOTrainer):
    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        is_here = self.state.global_step == 1 and self.accelerator.process_index == 1
        return loss * torch.nan if is_here else loss


def main() -> None:
    options = parse_options()
    args = config(options)
    args.save_strategy, args.save_steps = "steps", 1
    prompts = [" ".join(f"w{(7 * i + j) % 90}" for j in range(2 + i % 5)) for i in range(9)]
    trainer = Diverges(
        options.model, token_reward, args, Dataset.from_dict({"prompt": prompts}), rollout_func=Rollout()
    )
    said = ""
    try:
        trainer.train()
    except GradientError as error:
        said = str(error)
    sentences = gather_object([said])
    trainer.save_model()
    if trainer.accelerator.is_main_process:
        folder = Path(options.output_dir)
        left, saved = (load_file(one / "model.safetensors") for one in (folder, folder / "checkpoint-1"))
        difference = max((left[name] - saved[name]).abs().max().item() for name in saved)
        start = load_file(Path(options.model) / "model.safetensors")
        moved = max((left[name] - start[name]).abs().max().item() for name in start)
        facts = {"sentences": sentences, "difference": difference, "moved": moved}
        (folder / "facts.json").write_text(json.dumps(facts))
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
