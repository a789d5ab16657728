"""Rules that wait, within a training step: of ours and of plain TRL, beside an `async def` reward of TRL's own."""

import asyncio
from dataclasses import dataclass

import pytest
import torch
import trl
from datasets import Dataset

import trl_ext
from tests import tiny
from tests.rollouts import rollout
from trl_ext import RuleSet
from trl_ext.rewards import AsyncRule, Length, Row, Verdict

torch.set_num_threads(1)

ROWS = 8
UNDER_WAY: list[int] = []


@dataclass(frozen=True, kw_only=True)
class Slow(AsyncRule):
    """1.0, once all other rows are under way, too; the third row that asks fails."""

    async def score(self, row: Row) -> Verdict:
        UNDER_WAY.append(1)
        mine = len(UNDER_WAY)
        while len(UNDER_WAY) < ROWS:
            await asyncio.sleep(0.001)
        if mine == 3:
            raise ConnectionError("away")
        return Verdict(1.0)

    def cache_key(self, row: Row) -> None:
        return None


async def reward_of_their_own(completions, **_):
    await asyncio.sleep(0)
    return [0.5] * len(completions)


@pytest.mark.parametrize("library", [trl, trl_ext], ids=["trl", "trl_ext"])
def test_a_step_awaits_all_rows_at_a_time_and_a_failing_call_costs_its_own(library, tmp_path):
    UNDER_WAY.clear()
    args = library.GRPOConfig(
        str(tmp_path), use_cpu=True, bf16=False, report_to="none", per_device_train_batch_size=ROWS,
        num_generations=4, max_completion_length=8,
    )  # fmt: skip
    data = Dataset.from_dict({"prompt": [tiny.words(5, 6 + n) for n in range(2)]})
    rules = RuleSet([Slow(retries=0), Length(low=0, high=100, weight=0.1)])
    trainer = library.GRPOTrainer(
        tiny.model("llama"), [rules, reward_of_their_own], args, data,
        processing_class=tiny.tokenizer(), rollout_func=rollout,
    )  # fmt: skip
    trainer._generate_and_score_completions([row for row in trainer.train_dataset for _ in range(4)])
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    assert metrics["rewards/rules/mean"] == pytest.approx((7 * 1.1 + 0.1) / ROWS)
    assert metrics["rewards/reward_of_their_own/mean"] == 0.5
    assert metrics["rules/slow/none_frac"] == 1 / ROWS
    assert metrics["rules/slow/calls"] == ROWS
