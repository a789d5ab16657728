"""A `metric_for_best_model` that no evaluation gives is a sentence, a misspelt one before the first step."""

import pytest
import torch
from datasets import Dataset

from tests import tiny
from trl_ext import GRPOConfig, GRPOTrainer, RuleSet
from trl_ext.errors import ConfigError
from trl_ext.rewards.rules.length import Length

torch.set_num_threads(1)

ROWS = Dataset.from_list([{"prompt": tiny.words(i, i + 1)} for i in range(3, 7)])


def trained(folder, name, *rewards):
    args = GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        num_generations=2,
        max_completion_length=4,
        max_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="best",
        metric_for_best_model=name,
        **tiny.QUIET_ON_CPU,
    )
    rewards = list(rewards) or [RuleSet([Length(high=4)])]
    trainer = GRPOTrainer(tiny.model("llama"), rewards, args, ROWS, ROWS, processing_class=tiny.tokenizer())
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    ("name", "meant"), [("rewrad", "reward"), ("eval_rewards/lenght/mean", "rewards/length/mean"), ("lss", "loss")]
)
def test_a_misspelt_name_is_refused_before_the_first_step(tmp_path, monkeypatch, name, meant):
    monkeypatch.setattr(GRPOTrainer, "training_step", lambda *args: pytest.fail("took a step"))
    with pytest.raises(ConfigError, match=f"metric_for_best_model is '{name}', which no .* Did you mean '{meant}'"):
        trained(tmp_path, name)


def test_another_unknown_name_is_one_sentence_at_the_first_evaluation(tmp_path):
    with pytest.raises(ConfigError, match=r"'bleu', which the evaluation does not give\. It gives: loss, .*reward"):
        trained(tmp_path, "bleu")


def test_a_metric_of_the_users_own_reward_is_no_mistake(tmp_path):
    def mine(completions, log_metric, **columns):
        log_metric("rewerd", 0.25)
        return [0.5] * len(completions)

    assert trained(tmp_path, "rewerd", mine).state.best_metric == 0.25
