"""One job of the PPO benchmark by TRL 1.12.0's trainer. Run by ppo.py in an environment of its own, without trl_ext.

Generation is replaced by the task's completions. The scores that TRL keeps from generation, [B, T, V] in float32 for
all episodes at once, are made by forwards of the policy before the clock starts, and are kept as TRL keeps them.
TRL's own peak while it generates is higher (it stacks and pads the scores, each a copy) and is not counted.

    python benchmarks/ppo_peer.py job.json
"""

import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import torch
from datasets import Dataset
from ppo_task import PAD, Job, Meter, Task, causal_model, policy_adapter, scoring_model, tokenizer
from transformers import TrainerCallback
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer


class UpdateEnd(TrainerCallback):
    """An update of this trainer is a step of its callbacks."""

    def __init__(self, meter: Meter):
        self._meter = meter

    def on_step_end(self, *args, **kwargs):
        self._meter.end()


def fixed_rollout(task: Task, meter: Meter):
    """Takes the place of `batch_generation`."""
    completion_of = dict(zip(map(tuple, task.prompts), task.completions, strict=True))

    @torch.no_grad()
    def rollout(model, queries, rows, pad_token_id, generation_config):
        prompts = [tuple(query[query != PAD].tolist()) for query in queries]
        completions = [torch.tensor(completion_of[prompt]) for prompt in prompts]
        responses = torch.nn.utils.rnn.pad_sequence(completions, batch_first=True, padding_value=PAD)
        sequences = torch.cat((queries, responses.to(queries.device)), dim=1)
        scores = torch.empty(*responses.shape, task.vocab, device=queries.device)
        for start in range(0, len(scores), rows):
            part = ppo_trainer.forward(model, sequences[start : start + rows], pad_token_id)
            scores[start : start + rows] = part.logits[:, queries.shape[1] - 1 : -1]
            del part
        meter.begin()
        return sequences, scores

    return rollout


def config(task: Task, folder: str) -> PPOConfig:
    return PPOConfig(
        output_dir=folder,
        per_device_train_batch_size=task.rows,
        gradient_accumulation_steps=task.episodes // task.rows,
        # The default, 64, would put all episodes in one forward.
        local_rollout_forward_batch_size=task.rows,
        num_ppo_epochs=task.epochs,
        total_episodes=task.episodes * (task.updates + 1),
        response_length=task.longest,
        stop_token="eos",
        temperature=1.0,
        num_sample_generations=0,
        use_cpu=not torch.cuda.is_available(),
        # It takes the precision from the launcher only.
        bf16=False,
        # No effect in this version.
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def train(job: Job, meter: Meter, folder: str) -> None:
    task = job.task
    trainer = PPOTrainer(
        args=config(task, folder),
        processing_class=tokenizer(task),
        model=causal_model(task),
        # With adapters the reference is the policy without them.
        ref_model=None if job.lora else causal_model(task),
        reward_model=scoring_model(task, seed=1),
        train_dataset=Dataset.from_dict({"input_ids": task.prompts}),
        value_model=scoring_model(task, seed=2),
        callbacks=[UpdateEnd(meter)],
        peft_config=policy_adapter(job),
    )
    ppo_trainer.batch_generation = fixed_rollout(task, meter)
    trainer.train()


def main() -> None:
    job = Job.load(Path(sys.argv[1]))
    if job.task.bf16:
        os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
    with tempfile.TemporaryDirectory() as folder, Meter() as meter:
        train(job, meter, folder)
    meter.report("torch", "transformers", "trl", "accelerate", "peft")


if __name__ == "__main__":
    main()
