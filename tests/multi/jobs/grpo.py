"""GRPO for three optimizer steps, from which weights may differ only by the order in which numbers were added."""

import os

import torch
import trl
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

import trl_ext
from tests.multi.jobs.shared import (
    GRADIENT_ACCUMULATION_STEPS,
    NUM_GENERATIONS,
    NUM_PROMPTS,
    NUM_STEPS,
    SETTINGS,
    Rollout,
    engine_facts,
    forked_completion,
    given_completion,
    num_processes,
    prompts,
    reward_of_long_prompts,
    steps_of,
    token_reward,
)
from trl_ext import GRPOConfig, GRPOTrainer
from trl_ext.errors import GradientError


def made(folder, model, rollout, num_prompts=NUM_PROMPTS, max_tokens=24, trainer_class=GRPOTrainer, **changes):
    """`max_tokens` are of a forward, where rows are packed: by default one to three rows."""
    settings = dict(
        gradient_accumulation_steps=GRADIENT_ACCUMULATION_STEPS,
        per_device_train_batch_size=num_prompts * NUM_GENERATIONS // GRADIENT_ACCUMULATION_STEPS // num_processes(),
        num_generations=NUM_GENERATIONS,
        max_completion_length=16,
        packing=False,
        max_tokens_per_forward=max_tokens if changes.get("packing") else None,
        max_grad_norm=0.5,  # a third of this run's gradient norms or less, so that every step is clipped
        loss_type="dapo",
        beta=0.05,  # above 0: brings in the reference model
    )
    args = GRPOConfig(str(folder), **SETTINGS | settings | changes)
    reward = token_reward if args.beta else reward_of_long_prompts
    return trainer_class(model, reward, args, prompts(NUM_STEPS * num_prompts), rollout_func=rollout)


def train(folder, model, forked=False, **options) -> dict:
    rollout = Rollout(forked_completion if forked else given_completion)
    own = {"max_completion_length": 64} if forked else {}
    trainer = made(folder, model, rollout, **own, **options)
    trainer.train()
    trainer.save_model()  # as a user does; under ZeRO-3 it gathers the shards
    engine, steps = trainer.model_wrapped, steps_of(trainer)
    optimizer = trainer.optimizer.optimizer  # below accelerate's wrapper; DeepSpeed has one more
    return engine_facts(trainer) | {
        "reduce_bucket_size": engine.zero_reduce_bucket_size() if hasattr(engine, "zero_reduce_bucket_size") else None,
        "optimizer": type(getattr(optimizer, "optimizer", optimizer)).__name__,
        "prompts_of_steps": rollout.prompts_of_steps,
        "max_grad_norm": trainer.args.max_grad_norm,
        "grad_norms": [log["grad_norm"] for log in steps],
        "skipped_rows_frac": [log.get("packing/skipped_rows_frac", 0.0) for log in steps],
        "padded_over_forwarded": [log["packing/padded_over_forwarded"] for log in steps],
    }


def generate(folder, model) -> dict:
    """This process's completions by TRL's trainer and by ours, which transformers' `generate` gives."""
    found = {}
    for library in (trl, trl_ext):
        seen = found[library.__name__] = []

        def reward(completion_ids, *, seen=seen, **_):
            seen.append([list(ids) for ids in completion_ids])
            return token_reward(completion_ids)

        set_seed(3 + int(os.environ["RANK"]))
        policy = AutoModelForCausalLM.from_pretrained(model)
        policy.generation_config.eos_token_id = list(range(10, 30))
        settings = dict(num_generations=NUM_GENERATIONS, per_device_train_batch_size=6, max_completion_length=24)
        args = library.GRPOConfig(str(folder), **SETTINGS | settings)
        processing_class = AutoTokenizer.from_pretrained(model, padding_side="left")
        library.GRPOTrainer(policy, reward, args, prompts(12), processing_class=processing_class).train()
    return found


class Diverges(GRPOTrainer):
    """The loss of one process is NaN in the second step."""

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        is_here = self.state.global_step == 1 and self.accelerator.process_index == 1
        return loss * torch.nan if is_here else loss


def diverge(folder, model, **options) -> dict:
    """What the process says, and how far the weights that it is left with are from the checkpoint and the start."""
    trainer = made(
        folder, model, Rollout(), trainer_class=Diverges, save_strategy="steps", save_steps=1, packing=True, **options
    )
    said = ""
    try:
        trainer.train()
    except GradientError as error:
        said = str(error)
    trainer.save_model()
    trainer.accelerator.wait_for_everyone()
    left, *others = (load_file(f"{one}/model.safetensors") for one in (folder, folder / "checkpoint-1", model))
    saved, start = (max((left[name] - other[name]).abs().max().item() for name in left) for other in others)
    return {"said": said, "difference": saved, "moved": start}
