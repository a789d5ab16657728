"""Trains GRPO for three optimizer steps on rows of which some show images, and saves the weights.

The rows of one process may show none.
"""

import argparse
import json
import random
from pathlib import Path

import trl
from datasets import Dataset

import trl_ext
from tests import tiny, tiny_images
from tests.tiny_images import image
from trl_ext.packing import step_plan

NUM_STEPS, NUM_PROMPTS, NUM_GENERATIONS = 3, 4, 4
SHOWN = [[image(1), image(2, 24, 16)], [], [], []], [[], [], [], [image(4)]], [[], [image(3)], [], [image(1)]]


def reward(completion_ids, **_):
    """Between 0 and 1: the mean of the ids modulo 7, over 6."""
    return [sum(token % 7 for token in ids) / (6 * len(ids)) for ids in completion_ids]


def completions(prompts, trainer):
    """Completions that depend on the prompt's text and on the place in its group."""
    first = trainer.accelerator.process_index * len(prompts)
    found = []
    for row, prompt in enumerate(prompts, start=first):
        content = prompt[0]["content"]  # text alone, or parts of which the last is the text
        text = content if isinstance(content, str) else content[-1]["text"]
        draw = random.Random(f"{text} {row % NUM_GENERATIONS}")
        found.append([draw.randrange(7, tiny.VOCAB) for _ in range(draw.randint(1, 12))])
    return {"prompt_ids": trainer._tokenize_prompts(prompts)[0], "completion_ids": found, "logprobs": None}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--num_processes", type=int, required=True)
    parser.add_argument("--library", default="trl_ext")
    parser.add_argument("--deepspeed")
    parser.add_argument("--text_step", action="store_true", help="no row of the second step shows an image")
    parser.add_argument("--kept", action="store_true", help="groups take several forwards behind a kept prompt")
    options = parser.parse_args()
    # One micro-batch in TRL, which calls the vision tower without patches for one whose rows show no image.
    library, accumulation, own = trl, 1, {}
    if options.library == "trl_ext":
        accumulation = 2
        library, own = trl_ext, {"packing": True, "max_tokens_per_forward": 40 if options.kept else 64}
    if options.kept:
        step_plan.CALL_COST = 0
    args = library.GRPOConfig(
        output_dir=options.output_dir,
        deepspeed=options.deepspeed,
        **tiny.QUIET_ON_CPU,
        per_device_train_batch_size=NUM_PROMPTS * NUM_GENERATIONS // accumulation // options.num_processes,
        gradient_accumulation_steps=accumulation,
        num_generations=NUM_GENERATIONS,
        max_completion_length=16,
        max_steps=NUM_STEPS,
        shuffle_dataset=False,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        adam_epsilon=1e-3,
        loss_type="dapo",
        beta=0.05,
        logging_steps=1,
        save_strategy="no",
        **own,
    )
    shown = [images for step in SHOWN for images in step]
    if options.text_step:
        shown[NUM_PROMPTS : 2 * NUM_PROMPTS] = [[]] * NUM_PROMPTS
    prompts = [[{"role": "user", "content": tiny.words(9 + i, 30 + i)}] for i in range(len(shown))]
    data = Dataset.from_dict({"prompt": prompts, "images": shown})
    processor = tiny_images.processor()
    trainer = library.GRPOTrainer(
        options.model, reward, args, data, processing_class=processor, rollout_func=completions
    )
    calls: list[int] = []
    backbone = trainer.accelerator.unwrap_model(trainer.model).base_model
    backbone.visual.register_forward_pre_hook(lambda _tower, given: calls.append(len(given[0])))
    trainer.train()
    trainer.save_model()
    if trainer.accelerator.is_main_process:
        steps = [log for log in trainer.state.log_history if "grad_norm" in log]
        facts = {
            "world_size": trainer.accelerator.num_processes,
            "grad_norms": [log["grad_norm"] for log in steps],
            "padded_over_forwarded": [log.get("packing/padded_over_forwarded") for log in steps],
            "patches": calls,
        }
        Path(options.output_dir, "facts.json").write_text(json.dumps(facts))
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
