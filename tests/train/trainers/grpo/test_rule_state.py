"""Rules around a GRPO step: scored early, normalised over the run, saved and resumed with the checkpoint."""

import json

import pytest
import torch
from datasets import Dataset

from tests import tiny
from trl_ext import GRPOConfig, GRPOTrainer, RuleSet
from trl_ext.rewards import Call
from trl_ext.rewards.scorer import Scorer
from trl_ext.trainers.grpo.rewards import RULES_FILE

torch.set_num_threads(1)

STEPS, SAVED_AT = 4, 2


def length_of_text(row) -> float:
    return float(len(row.text))


def trainer(folder, rules, **changes):
    settings = dict(
        use_cpu=True,
        bf16=False,
        report_to="none",
        disable_tqdm=True,
        max_steps=STEPS,
        save_steps=SAVED_AT,
        logging_steps=1,
        max_completion_length=6,
        per_device_train_batch_size=4,
        num_generations=4,
    )
    prompts = Dataset.from_dict({"prompt": [tiny.words(5, 6)] * 32})
    args = GRPOConfig(str(folder), **settings | changes)
    return GRPOTrainer(tiny.model("llama"), rules, args, prompts, processing_class=tiny.tokenizer())


def normalising() -> RuleSet:
    return RuleSet([Call(length_of_text, isolate=False)], normalise=True)


def test_a_checkpoint_holds_what_the_rules_have_seen(tmp_path):
    rules = normalising()
    trainer(tmp_path, rules).train()
    early, late = (json.loads((tmp_path / f"checkpoint-{n}" / RULES_FILE).read_text()) for n in (SAVED_AT, STEPS))
    assert early["rules"]["moments"][0] == SAVED_AT * 4
    assert late["rules"] == rules.state_dict()


def test_a_resumed_run_scores_like_the_uninterrupted_one(tmp_path):
    whole = trainer(tmp_path, normalising())
    whole.train()
    rules = normalising()
    resumed = trainer(tmp_path, rules)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{SAVED_AT}"))
    rewards = [[log["reward"] for log in t.state.log_history if "reward" in log] for t in (whole, resumed)]
    assert rewards[1] == pytest.approx(rewards[0])
    assert rules.state_dict() == whole.reward_funcs[0].state_dict()


def test_without_state_nothing_is_saved(tmp_path):
    trainer(tmp_path, RuleSet([Call(length_of_text, isolate=False)])).train()
    assert not list(tmp_path.glob(f"*/{RULES_FILE}"))


def test_rules_in_workers_have_begun_before_they_are_asked(tmp_path, monkeypatch):
    taken = []
    original = Scorer._started_with

    def note(self, rules, rows):
        taken.append(original(self, rules, rows))
        return taken[-1]

    monkeypatch.setattr(Scorer, "_started_with", note)
    trainer(tmp_path, RuleSet([Call(length_of_text)]), max_steps=2, save_strategy="no").train()
    assert taken and all(taken)
