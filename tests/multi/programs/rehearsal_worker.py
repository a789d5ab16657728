"""Trains tiny models with and without the rehearsal before step 1, one after the other, and saves what came of them.

`test_rehearsal_zero.py` starts this script as two processes under launch files that we ship.
"""

import argparse
import json
import time
from pathlib import Path

from accelerate import PartialState
from datasets import Dataset
from transformers import AutoTokenizer

import trl_ext
from tests.multi.programs.reward_worker import pairs
from tests.multi.programs.zero_worker import NUM_GENERATIONS, Rollout, token_reward
from trl_ext.trainers.fit.rehearsal import rehearsal

KINDS = ("grpo", "reward", "ppo")
NUM_STEPS = 3
_TIMES = ("_s", "_time", "runtime", "per_second")
_COMMON = dict(
    use_cpu=True,
    bf16=False,
    gradient_accumulation_steps=2,
    max_steps=NUM_STEPS,
    learning_rate=1e-2,
    lr_scheduler_type="constant",
    max_grad_norm=0.5,
    logging_steps=1,
    report_to="none",
    save_strategy="no",
    disable_tqdm=True,
    packing=True,
)


def grpo(options, folder, **settings):
    args = trl_ext.GRPOConfig(
        str(folder),
        per_device_train_batch_size=4,
        num_generations=NUM_GENERATIONS,
        max_completion_length=16,
        # As many forwards as ranks agree on.
        max_tokens_per_forward=24,
        **_COMMON | settings,
    )
    return trl_ext.GRPOTrainer(options.model, token_reward, args, prompts(), rollout_func=Rollout())


def reward(options, folder, **settings):
    args = trl_ext.RewardConfig(
        str(folder), per_device_train_batch_size=2, max_tokens_per_forward=110, **_COMMON | settings
    )
    tokenizer = AutoTokenizer.from_pretrained(options.reward_model)
    return trl_ext.RewardTrainer(options.reward_model, args, train_dataset=pairs(), processing_class=tokenizer)


def ppo(options, folder, **settings):
    """With a critic of its own, under DeepSpeed a second engine."""
    args = trl_ext.PPOConfig(
        str(folder), critic="separate", per_device_train_batch_size=4, response_length=16, **_COMMON | settings
    )
    return trl_ext.PPOTrainer(
        args,
        model=options.model,
        value_model=options.reward_model,
        train_dataset=prompts(),
        reward_funcs=token_reward,
        rollout_func=Rollout(),
    )


def prompts() -> Dataset:
    rows = [" ".join(f"w{(7 * i + j) % 90}" for j in range(2 + i % 5)) for i in range(48)]
    return Dataset.from_dict({"prompt": rows})


def train(kind: str, options: argparse.Namespace, is_on: bool) -> dict:
    """Train and save into a folder of its own; what was logged but for times."""
    folder = Path(options.output_dir, f"{kind}_{'with' if is_on else 'without'}")
    rehearsed = []
    plain = rehearsal.rehearse

    def timed(*args):
        start_s = time.perf_counter()
        plain(*args)
        rehearsed.append(time.perf_counter() - start_s)

    rehearsal.rehearse = timed
    trainer = {"grpo": grpo, "reward": reward, "ppo": ppo}[kind](options, folder, memory_rehearsal=is_on)
    trainer.train()
    rehearsal.rehearse = plain
    trainer.save_model()
    engine = trainer.model_wrapped
    found = {
        "world_size": trainer.accelerator.num_processes,
        "zero_stage": engine.zero_optimization_stage() if hasattr(engine, "zero_optimization_stage") else 0,
        "rehearsed_s": rehearsed,
        "packs": trainer._packs,
        "logs": [
            {name: value for name, value in entry.items() if not name.endswith(_TIMES)}
            for entry in trainer.state.log_history
        ],
    }
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.free_memory()
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--reward_model", required=True)
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--num_processes", type=int, required=True)
    parser.add_argument("--kinds", nargs="+", default=KINDS)
    parser.add_argument("--fp32_sums", help="DeepSpeed file that adds bf16 gradients in fp32; GRPO only")
    options = parser.parse_args()
    if options.fp32_sums:
        _COMMON.update(bf16=True, deepspeed=options.fp32_sums, model_init_kwargs={"dtype": "bfloat16"})
    found = {
        f"{kind}_{on}": train(kind, options, on == "with") for kind in options.kinds for on in ("without", "with")
    }
    state = PartialState()
    if state.is_main_process:
        Path(options.output_dir, "facts.json").write_text(json.dumps(found))
    # Leave together: a rank that ends while the other is at work can take it down.
    state.wait_for_everyone()
    state.destroy_process_group()


if __name__ == "__main__":
    main()
