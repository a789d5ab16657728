"""Does a critic that starts from the reward model know more than one that starts at zero? Recipe ppo_reward_model.

The policy is the small Llama of family.py that half knows its sums. A LoRA on the same weights learns to prefer the
larger of two answers, by our RewardTrainer: a taste that so small a model can learn. As a third adapter it scores what
passes the rules, that an answer is a number and short. Then PPO trains with the recipe's settings, but for sizes and
learning rates: once with the critic's LoRA and head at zero, once from the reward adapter (critic_init: reward). Held
to: explained variance above 0.3 by the third update, and scores at the tenth that are not lower.

    python benchmarks/critic_start.py --output benchmarks/results/critic_start_cpu.json
"""

import argparse
import random
import statistics
import tempfile
from pathlib import Path

import torch
import yaml
from datasets import Dataset
from family import half_knowing_model, make_tokenizer, sums
from machine import save
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PrinterCallback

import trl_ext
from trl_ext.resources import recipe
from trl_ext.rewards import Length, Pattern

LORA = dict(r=32, lora_alpha=64, target_modules="all-linear")  # of the recipe
STARTS = {"zero": None, "reward": "reward"}
# Of the recipe, what makes the run: the rest is sizes, the machine, and where things are.
KEPT = (
    "score_mode", "gate_above", "critic", "num_ppo_epochs", "num_mini_batches", "missing_eos_penalty", "temperature",
    "lr_scheduler_type", "warmup_steps", "value_lr_scheduler_type", "critic_warmup_steps",
    "max_grad_norm", "kl_coef", "kl_target", "kl_horizon", "gamma", "lam",
)  # fmt: skip
QUIET = dict(use_cpu=True, bf16=False, report_to="none", disable_tqdm=True, save_strategy="no")


def train_reward_model(base: Path, folder: Path, tokenizer, rows, seed: int) -> None:
    """A LoRA with a score head that prefers the larger of two numbers."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    pairs = []
    for row in 4 * rows:
        lower, higher = sorted(draw.sample(range(-9, 19), 2))
        pairs.append({"prompt": row["prompt"], "chosen": str(higher), "rejected": str(lower)})
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    args = trl_ext.RewardConfig(
        str(folder), **QUIET, per_device_train_batch_size=32, num_train_epochs=6, learning_rate=3e-3, seed=seed,
        gradient_checkpointing=False, logging_steps=50,
    )  # fmt: skip
    trainer = trl_ext.RewardTrainer(
        model, args, processing_class=tokenizer, train_dataset=Dataset.from_list(pairs),
        peft_config=LoraConfig(**LORA, task_type="SEQ_CLS", modules_to_save=["score"]),
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    trainer.save_model()
    print(f"reward model {seed}: accuracy {trainer.state.log_history[-2].get('accuracy')}", flush=True)


def train(start: str, seed: int, base: Path, reward: Path, tokenizer, rows, options) -> dict:
    """Explained variance and score of each update."""
    given = yaml.safe_load(recipe("ppo_reward_model").read_text())
    kept = {name: given[name] for name in KEPT}
    with tempfile.TemporaryDirectory() as out:
        args = trl_ext.PPOConfig(
            out, **QUIET, **kept, critic_init=STARTS[start], seed=seed, logging_steps=1,
            total_episodes=options.updates * options.episodes, per_device_train_batch_size=options.episodes // 2,
            gradient_accumulation_steps=1, response_length=4, learning_rate=options.learning_rate,
            value_learning_rate=5 * options.learning_rate, gradient_checkpointing=False,
        )  # fmt: skip
        trainer = trl_ext.PPOTrainer(
            args, tokenizer, AutoModelForCausalLM.from_pretrained(base), train_dataset=Dataset.from_list(4 * rows),
            reward_funcs=trl_ext.RuleSet([Pattern(r"-?\d+"), Length(high=4, slack=1, weight=0.1)]),
            reward_adapter=str(reward), peft_config=LoraConfig(**LORA, task_type="CAUSAL_LM"),
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    logs = [log for log in trainer.state.log_history if "ppo/explained_variance" in log]
    found = {"start": start, "seed": seed}
    for key, name in (("explained_variance", "ppo/explained_variance"), ("score", "objective/scores")):
        found[key] = [round(log[name], 4) for log in logs]
    print(found, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--updates", type=int, default=10)
    parser.add_argument("--episodes", type=int, default=256, help="of an update, as in the recipe")
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--supervised_steps", type=int, default=1000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer, rows, results = make_tokenizer(), sums("train"), []
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder, "base")
        half_knowing_model(tokenizer, rows + sums("test"), options.supervised_steps).save_pretrained(base)
        tokenizer.save_pretrained(base)
        for seed in options.seeds:
            reward = Path(folder, f"reward_{seed}")
            train_reward_model(base, reward, tokenizer, rows, seed)
            results += [train(start, seed, base, reward, tokenizer, rows, options) for start in STARTS]
    given = {name: value for name, value in vars(options).items() if name != "output"}
    save(options.output, "critic_start", options=given, results=results)
    for start in STARTS:
        own = [one for one in results if one["start"] == start]
        third = [max(one["explained_variance"][:3]) for one in own]
        tenth = [one["score"][-1] for one in own]
        print(
            f"{start}: explained variance by update 3 {third}, score at the end {statistics.mean(tenth):.3f} {tenth}"
        )


if __name__ == "__main__":
    main()
