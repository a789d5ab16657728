"""Trains GRPO for three optimizer steps on rows of which some show images, and saves the weights.

The rows of one process may show none.
"""

import random

import trl
from datasets import Dataset

import trl_ext
from tests import tiny, tiny_images
from tests.multi.jobs.shared import NUM_GENERATIONS, SETTINGS, engine_facts, num_processes, token_reward
from tests.tiny_images import image
from trl_ext.packing import step_plan

NUM_PROMPTS = 4
SHOWN = [[image(1), image(2, 24, 16)], [], [], []], [[], [], [], [image(4)]], [[], [image(3)], [], [image(1)]]


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


def train(folder, model: str, library="trl_ext", text_step=False, kept=False, deepspeed=None) -> dict:
    """With `text_step` no row of the second step shows an image; with `kept` groups take several forwards."""
    # One micro-batch in TRL, which calls the vision tower without patches for one whose rows show no image.
    of, accumulation, own = trl, 1, {}
    if library == "trl_ext":
        of, accumulation, own = trl_ext, 2, {"packing": True, "max_tokens_per_forward": 40 if kept else 64}
    if kept:
        step_plan.CALL_COST = 0
    settings = dict(
        deepspeed=deepspeed,
        per_device_train_batch_size=NUM_PROMPTS * NUM_GENERATIONS // accumulation // num_processes(),
        gradient_accumulation_steps=accumulation,
        num_generations=NUM_GENERATIONS,
        max_completion_length=16,
        shuffle_dataset=False,
        loss_type="dapo",
        beta=0.05,
    )
    shown = [images for step in SHOWN for images in step]
    if text_step:
        shown[NUM_PROMPTS : 2 * NUM_PROMPTS] = [[]] * NUM_PROMPTS
    prompts = [[{"role": "user", "content": tiny.words(9 + i, 30 + i)}] for i in range(len(shown))]
    trainer = of.GRPOTrainer(
        model,
        token_reward,
        of.GRPOConfig(str(folder), **SETTINGS | settings | own),
        Dataset.from_dict({"prompt": prompts, "images": shown}),
        processing_class=tiny_images.processor(),
        rollout_func=completions,
    )
    calls: list[int] = []
    backbone = trainer.accelerator.unwrap_model(trainer.model).base_model
    backbone.visual.register_forward_pre_hook(lambda _tower, given: calls.append(len(given[0])))
    trainer.train()
    trainer.save_model()
    logs = [log for log in trainer.state.log_history if "grad_norm" in log]
    own = {"padded_over_forwarded": [log.get("packing/padded_over_forwarded") for log in logs], "patches": calls}
    return engine_facts(trainer) | own
