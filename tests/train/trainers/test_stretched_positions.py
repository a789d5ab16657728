"""Positions that depend on the length of a row (dynamic NTK, longrope): packed, each row has those of its own length.

Rows go beyond the length from which on they differ, and the reference forwards each row by itself.
"""

import random

import pytest
import torch
from datasets import Dataset

from tests import ppo_trainers, reward_trainers, tiny
from tests.batches import gradient
from tests.ppo_replay import Settings, check
from tests.preferences import reward_model
from trl_ext.trainers.reward.scorer import RewardModel

pytestmark = pytest.mark.own_self_check

LENGTHS = ((40, 20, 3), (9, 60, 45), (55, 1, 2), (5, 4, 9))  # of prompt, chosen and rejected: from 9 to 69 tokens


def words(draw: random.Random, count: int) -> str:
    return tiny.words(*(draw.randrange(3, tiny.VOCAB) for _ in range(count)))


def score_alone(model, ids):
    model(input_ids=torch.tensor([[1]]))  # dynamic NTK forgets the longest row so far
    return model(input_ids=torch.tensor([ids])).logits[0, 0]


@pytest.mark.parametrize("share_prompt", [True, False])
@pytest.mark.parametrize("family", tiny.STRETCHED)
def test_a_reward_step_has_the_gradient_of_each_side_alone(family, share_prompt, tmp_path):
    draw = random.Random(0)
    rows = [dict(prompt=words(draw, p) + " ", chosen=words(draw, c), rejected=words(draw, r)) for p, c, r in LENGTHS]
    own = dict(packing=True, share_prompt=share_prompt, max_length=80)
    subject = reward_trainers.trainer(tmp_path, Dataset.from_list(rows), model=family, **own)
    assert not subject._share_prompt, "a shared prompt would have another length in every row"
    (batch,) = subject.get_train_dataloader()
    reference = reward_model(tmp_path / "model", family).train()
    for _ in range(2):
        ours = gradient(subject.model.train(), subject.compute_loss(subject.model, batch))
        sides = [
            [score_alone(reference, pair[key]) for pair in batch["rows"][0].examples]
            for key in ("chosen_ids", "rejected_ids")
        ]
        chosen, rejected = map(torch.stack, sides)
        theirs = gradient(reference, -torch.nn.functional.logsigmoid(chosen - rejected).mean())
        assert (ours - theirs).norm() <= 2e-6 * theirs.norm()


def test_ppo_updates_are_the_plain_replays(tmp_path):
    """Longrope alone: the replay's padded model would keep the frequencies of dynamic NTK's longest row."""
    draw = random.Random(1)
    prompts = Dataset.from_dict({"prompt": [words(draw, length) for length in (60, 41, 3, 47) * 4]})
    options = dict(model=tiny.model("longrope"), data=prompts, packing=True, max_steps=2)
    check(ppo_trainers.stir(ppo_trainers.trainer("head", tmp_path, **options)), Settings())


def test_a_frozen_reward_model_scores_each_sequence_as_alone(tmp_path):
    model, draw = reward_model(tmp_path / "model", "longrope").eval(), random.Random(2)
    texts = [(words(draw, p) + " ", words(draw, c)) for p, c, _ in LENGTHS for _ in range(2)]
    expected = torch.stack([score_alone(model, tiny.tokenizer()(p + c)["input_ids"]) for p, c in texts])
    subject = RewardModel(model, tiny.tokenizer(), "tiny", eos="never")
    found = subject(*map(list, zip(*texts, strict=True)))
    assert subject.packs and (found - expected).abs().max() <= 5e-6
