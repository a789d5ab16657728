"""A user's program, which prints and logs in a callback, and saves the model itself: a recipe and an output folder."""

import logging
import sys

import yaml
from datasets import load_dataset
from transformers import PrinterCallback, TrainerCallback

from trl_ext import GRPOConfig, GRPOTrainer

logging.basicConfig(stream=sys.stdout)


class Prints(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        print("a user's own line", state.global_step, flush=True)
        sys.stderr.write(f"and another {state.global_step}\n")
        logging.warning("and a logger's")


def reward(completions, **kwargs):
    print("a reward's line")
    return [float(len(text) % 5) for text in completions]


settings = yaml.safe_load(open(sys.argv[1])) | {"output_dir": sys.argv[2]}
model, _, file = (settings.pop(name) for name in ("model_name_or_path", "rules", "dataset_name"))
rows = load_dataset("json", data_files=file, split="train")
callbacks = [Prints(), PrinterCallback()]
trainer = GRPOTrainer(model, reward, GRPOConfig(**settings), rows, callbacks=callbacks)
trainer.train()
trainer.save_model()
print("saved")
