"""Models whose value heads have another size than their query and key heads (DeepSeek-V2, V3) train packed.

Prompts are so long that their keys stand once. The weights are TRL's, or those of the plain replay of PPO.
"""

import random
from collections.abc import Iterator

import pytest
import trl
from datasets import Dataset

import trl_ext
from tests import ppo_trainers, reward_trainers, tiny
from tests.grpo_trainers import WEIGHT_TOLERANCE, learned, trained
from tests.nightly import daily
from tests.ppo_replay import Settings, check
from trl_ext.packing import kernels

pytestmark = pytest.mark.own_self_check


@pytest.fixture(autouse=True)
def merged(monkeypatch) -> Iterator[list[int]]:
    """Head sizes of every call of merged attention; a test that makes none is not of it."""
    sizes: list[int] = []
    whole = kernels.merged_attention

    def noted(query, *rest, **how):
        sizes.append(query.shape[-1])
        return whole(query, *rest, **how)

    monkeypatch.setattr(kernels, "merged_attention", noted)
    yield sizes
    assert sizes


def long_prompts(num: int = 16) -> Dataset:
    draw = random.Random(1)
    rows = [tiny.words(*(draw.randrange(3, tiny.VOCAB) for _ in range(length))) for length in (60, 41, 75, 50) * num]
    return Dataset.from_dict({"prompt": rows[:num]})


@pytest.mark.parametrize("num_generations", daily([2, 8], 8))
@pytest.mark.parametrize("family", daily(tiny.LATENT, "deepseek_v3"))
def test_grpo_steps_are_trls(family, num_generations, merged, tmp_path):
    options = dict(num_generations=num_generations, per_device_train_batch_size=8, data=long_prompts())
    ours, theirs = (
        trained(tmp_path, library, family, **options, **own)
        for library, own in ((trl_ext, dict(packing=True)), (trl, {}))
    )
    assert ours._packs
    assert (learned(ours) - learned(theirs)).abs().max() <= WEIGHT_TOLERANCE
    assert set(merged) == {24}, "values are padded to the size of the keys"


@pytest.mark.parametrize("family", daily(tiny.LATENT, "deepseek_v2"))
def test_reward_steps_are_trls(family, tmp_path):
    draw = random.Random(2)

    def words(count: int) -> str:
        return tiny.words(*(draw.randrange(3, tiny.VOCAB) for _ in range(count)))

    data = Dataset.from_list(
        [{"prompt": words(60) + " ", "chosen": words(1 + i % 3), "rejected": words(1 + i % 5)} for i in range(16)]
    )
    after = []
    for library, own in ((trl_ext, dict(packing=True)), (trl, {})):
        subject = reward_trainers.trainer(tmp_path, data, library, family, max_steps=2, **own)
        before = reward_trainers.weights(subject)
        subject.train()
        after.append(reward_trainers.weights(subject))
        assert (after[-1] - before).abs().max() > 1e-4
    assert (after[0] - after[1]).abs().max() <= WEIGHT_TOLERANCE


@pytest.mark.parametrize("family", daily(tiny.LATENT, "deepseek_v3"))
def test_ppo_updates_are_the_plain_replays(family, tmp_path):
    subject = ppo_trainers.trainer(
        "head", tmp_path, model=tiny.model(family), data=long_prompts(), packing=True, max_steps=2, num_generations=4
    )
    check(ppo_trainers.stir(subject), Settings(num_generations=4))
