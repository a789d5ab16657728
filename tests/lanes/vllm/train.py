"""Trains a few steps with colocated vLLM on the CPU: `python -m tests.lanes.vllm.train MODEL FOLDER grpo|ppo ...`.

Options: `lora`, `forget` to push no weights after the first time, the name of one of PPO's advantage estimators, and
`evaluate` to answer held-out prompts twice after the training. FOLDER/logs.json gets what was logged.

vLLM's CPU backend repacks weights when it has loaded them, so that TRL's push, a call of `load_weights` for each of
them, finds no `weight_loader`. `reload_weights` of vLLM's worker takes them there; on a card TRL's own push runs.
"""

import json
import os
import sys
from pathlib import Path

os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}

import torch
import trl.generation.vllm_generation as vllm_generation
from datasets import Dataset
from peft import LoraConfig

from trl_ext import GRPOConfig, GRPOTrainer, PPOConfig, PPOTrainer
from trl_ext.trainers.ppo.objective.equations import ADVANTAGES

SETTINGS = dict(
    use_cpu=True,
    bf16=False,
    report_to="none",
    disable_tqdm=True,
    save_strategy="no",
    max_steps=4,
    per_device_train_batch_size=8,
    num_generations=4,
    max_completion_length=16,
    learning_rate=5e-3,
    lr_scheduler_type="constant",
    logging_steps=1,
    packing=True,
    use_vllm=True,
    vllm_mode="colocate",
    vllm_max_model_length=64,
)


class Push:
    """Stands in for `VLLMGeneration.sync_weights`."""

    def __init__(self, forgets: bool):
        self.forgets, self.number = forgets, 0

    def __call__(self, generation) -> None:
        self.number += 1
        if self.number == 1 or not self.forgets:
            # Copies: an adapter is merged only while its weights are walked.
            weights = [(name, weight.detach().clone()) for name, weight in generation._iter_named_params()]
            generation.llm.llm_engine.model_executor.driver_worker.reload_weights(weights_iterator=iter(weights))
        generation.llm.reset_prefix_cache()


plain_llm = vllm_generation.LLM


def exact_llm(*args, **kwargs):
    """vLLM in the dtype of the training, without a compiler."""
    return plain_llm(*args, **kwargs | {"enforce_eager": True, "dtype": "float32"})


def token_reward(completion_ids, **kwargs):
    """The mean of the ids modulo 7, over 6."""
    return [sum(token % 7 for token in ids) / (6 * max(len(ids), 1)) for ids in completion_ids]


def greedy_score(trainer: PPOTrainer, prompts: Dataset) -> float:
    """Mean reward of the completions that the policy itself gives, without vLLM and without sampling."""
    tokenizer = trainer.processing_class
    completions = []
    for prompt in prompts["prompt"]:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        settings = dict(max_new_tokens=SETTINGS["max_completion_length"], do_sample=False)
        output = trainer.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings)
        completions.append(output[0, ids.shape[1] :].tolist())
    return sum(token_reward(completions)) / len(completions)


def main(model: str, folder: str, kind: str, *options: str) -> None:
    push = Push(forgets="forget" in options)
    vllm_generation.VLLMGeneration.sync_weights = lambda self: push(self)
    vllm_generation.LLM = exact_llm
    prompts = Dataset.from_dict({"prompt": [f"w{i % 90} w{3 * i % 90} w{7 * i % 90}" for i in range(32)]})
    # Large enough for the random start of an adapter to move the policy in a step.
    lora = LoraConfig(r=8, lora_alpha=64, target_modules="all-linear") if "lora" in options else None
    if kind == "grpo":
        args = GRPOConfig(folder, **SETTINGS)
        trainer = GRPOTrainer(model, token_reward, args, prompts, peft_config=lora)
    else:
        # One pass over the episodes of a generation: each step then begins with a push and a generation.
        estimator = next((name for name in ADVANTAGES if name in options), "gae")
        critic = {"critic": "adapter" if lora else "head"} if estimator == "gae" else {}
        args = PPOConfig(folder, advantage_estimator=estimator, num_iterations=1, **critic, **SETTINGS)
        trainer = PPOTrainer(
            args,
            model=model,
            train_dataset=prompts,
            eval_dataset=prompts.select(range(8)),
            reward_funcs=token_reward,
            peft_config=lora,
        )
    trainer.train()
    found = {"steps": [entry for entry in trainer.state.log_history if "grad_norm" in entry]}
    found |= {"pushes": push.number, "packs": trainer._packs}
    if "evaluate" in options:
        found |= {"sampled": trainer.evaluate()["eval_objective/scores"]}
        trainer.args.eval_temperature = 0.0
        found |= {"greedy": [trainer.evaluate()["eval_objective/scores"] for _ in range(2)]}
        found |= {"greedy_score": greedy_score(trainer, trainer.eval_dataset)}
    Path(folder, "logs.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
