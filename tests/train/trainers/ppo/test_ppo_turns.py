"""Several turns: a tool's tokens are no step in time, and each turn may have a reward of its own."""

import itertools

import pytest
import torch

import trl_ext
from tests import ppo_trainers, tiny, tool_task
from tests.documents import BLOCKS
from tests.ppo_trainers import CRITICS, distance
from tests.rollouts import rollout
from tests.train.trainers.ppo.test_ppo_exactness import (
    GAMMA,
    KL,
    TOLERANCE,
    after_a_nudge,
    gradients,
    old_logps_of_reference,
    reference_forward,
    reference_loss,
    reference_targets,
    settled,
    whole_batch,
)
from trl_ext.errors import RuleError

torch.set_num_threads(1)


def spoken(ids):
    """[T] 1 where the policy speaks: of each three tokens the second is a tool's, and never the last."""
    return [int(i % 3 != 1 or i == len(ids) - 1) for i in range(len(ids))]


def with_tools(prompts, trainer):
    output = rollout(prompts, trainer)
    return output | {"env_mask": [spoken(ids) for ids in output["completion_ids"]]}


def num_turns(ids):
    mask = [*spoken(ids), 0]
    return sum(now and not after for now, after in itertools.pairwise(mask))


def of_each_turn(completion_ids, **_):
    return [[(sum(ids) + 5 * turn) % 17 / 17 for turn in range(num_turns(ids))] for ids in completion_ids]


def replayed(trainer, inputs, by_turn):
    """Scores, and what is moved: rows of the tokens that the policy spoke, by loops."""
    scores = trainer._scores.tolist()
    if not by_turn:
        return scores, [[] for _ in scores]
    early = []
    completions = [ids[mask.bool()].tolist() for ids, mask in zip(
        inputs["completion_ids"], inputs["completion_mask"], strict=True)]  # fmt: skip
    for ids, values in zip(completions, of_each_turn(completions), strict=True):
        mask, rewards = spoken(ids), []
        for t, is_spoken in enumerate(mask):
            if is_spoken:
                ends = t + 1 == len(mask) or not mask[t + 1]
                rewards.append(values.pop(0) if ends else 0.0)
        early.append(rewards)
    return [0.0] * len(scores), early


@pytest.mark.parametrize("by_turn", [False, True], ids=["whole", "turns"])
@pytest.mark.parametrize(("critic", "packing"), [*((c, True) for c in CRITICS), ("head", False)])
def test_targets_loss_and_gradients_are_those_of_the_turns_alone(critic, packing, by_turn, tmp_path, monkeypatch):
    rewards = of_each_turn if by_turn else ppo_trainers.reward
    trainer = settled(critic, tmp_path, packing=packing, rollout_func=with_tools, reward_funcs=rewards)
    inputs = whole_batch(trainer)
    counted = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
    assert counted.sum() < inputs["completion_mask"].sum()
    masks = [tools[mask.bool()].bool() for tools, mask in zip(
        inputs["tool_mask"], inputs["completion_mask"], strict=True)]  # fmt: skip
    kept = lambda rows: [row[mask] for row, mask in zip(rows, masks, strict=True)]  # noqa: E731

    with torch.no_grad():
        old_logps, old_values = (kept(reference_forward(trainer, inputs, role)) for role in ("policy", "value"))
        ref_logps = kept(old_logps_of_reference(trainer, inputs))
    scores, early = replayed(trainer, inputs, by_turn)
    if by_turn:
        assert trainer._scores.tolist() == pytest.approx([sum(row) for row in early], abs=1e-6)
        # The textbook's KL takes each token's own reward off.
        ref_logps = [ref + torch.tensor(row) / KL for ref, row in zip(ref_logps, early, strict=True)]
    advantages, returns = reference_targets(scores, old_logps, ref_logps, old_values)
    for name, theirs in [("values", old_values), ("advantages", advantages), ("returns", returns)]:
        for mine, mask, row in zip(inputs[name], counted, theirs, strict=True):
            torch.testing.assert_close(mine[mask], torch.as_tensor(row), rtol=0, atol=5 * TOLERANCE)

    loss, ours = after_a_nudge(trainer, inputs)
    new_logps, new_values = (kept(reference_forward(trainer, inputs, role)) for role in ("policy", "value"))
    expected = reference_loss(new_logps, old_logps, new_values, old_values, advantages, returns)
    expected.backward()
    assert abs(loss.item() - expected.item()) < 5 * TOLERANCE
    theirs = gradients(trainer)
    assert distance(ours, theirs) < 5 * TOLERANCE * max(1.0, max(g.abs().max().item() for g in theirs.values()))


@pytest.mark.parametrize("estimator", ["reinforce_pp", "rloo", "grpo"])
def test_without_a_critic_a_turns_reward_reaches_its_own_and_earlier_tokens(estimator, tmp_path):
    own = dict(gamma=GAMMA) if estimator == "reinforce_pp" else {}
    trainer = ppo_trainers.trainer(
        "none", tmp_path, advantage_estimator=estimator, num_generations=1 if own else 4, kl_coef=0.0,
        rollout_func=with_tools, reward_funcs=of_each_turn, per_device_train_batch_size=8,
        gradient_accumulation_steps=1, **own,
    )  # fmt: skip
    trainer.model.train()
    copies = trainer.num_generations
    inputs = trainer._generate_and_score_completions([trainer.train_dataset[i // copies] for i in range(8)])
    _, early = replayed(trainer, inputs, by_turn=True)
    if own:
        found = [[sum(GAMMA**k * r for k, r in enumerate(row[t:])) for t in range(len(row))] for row in early]
        flat = torch.tensor([a for row in found for a in row])
        found = [((torch.tensor(row) - flat.mean()) / (flat.var() + 1e-8).sqrt()).tolist() for row in found]
    else:
        totals = torch.tensor([sum(row) for row in early]).view(-1, copies)
        others = (totals.sum(1, keepdim=True) - totals) / (copies - 1)
        scaled = (totals - totals.mean(1, keepdim=True)) / (totals.std(1, keepdim=True) + 1e-6)
        found = (totals - others if estimator == "rloo" else scaled).flatten().tolist()
        found = [[one] * len(row) for one, row in zip(found, early, strict=True)]
    counted = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
    for mine, mask, row in zip(inputs["advantages"], counted, found, strict=True):
        torch.testing.assert_close(mine[mask], torch.tensor(row), rtol=0, atol=1e-5)
        assert not mine[~mask].any()


def test_another_number_of_values_than_turns_is_said(tmp_path):
    def one_too_many(completion_ids, **_):
        return [[1.0] * (num_turns(ids) + 1) for ids in completion_ids]

    trainer = ppo_trainers.trainer("head", tmp_path, rollout_func=with_tools, reward_funcs=one_too_many)
    with pytest.raises(RuleError, match=r"'one_too_many' returned \d+ values for a completion of \d+ turns"):
        trainer.train()


def test_a_turn_that_nothing_scores_leaves_the_completion_out(tmp_path):
    async def unknown(completion_ids, **_):
        return [[None, *row[1:]] if i == 0 else row for i, row in enumerate(of_each_turn(completion_ids))]

    trainer = ppo_trainers.trainer("head", tmp_path, rollout_func=with_tools, reward_funcs=unknown)
    trainer.train()
    assert trainer.state.log_history[0]["ppo/unscored_frac"] == 1 / 8


def test_grpo_refuses_rewards_per_turn(tmp_path):
    trainer = tool_task.trainer(trl_ext, tmp_path, of_each_turn)
    with pytest.raises(RuleError, match="returned rewards per turn"):
        trainer.train()


def as_printed(name):
    """A function that the page on PPO prints."""
    (block,) = [b for b in BLOCKS if b.page == "docs/ppo.md" and f"def {name}(" in b.text]
    names = {}
    exec(block.text, names)
    return names[name]


@pytest.mark.parametrize("critic", ["head", "separate"])
def test_tools_of_trls_loop_with_a_reward_for_each_turn(critic, tmp_path):
    model = tiny.model("llama", vocab_size=len(tool_task.WORDS))
    values = {"value_model": ppo_trainers.classifier(vocab_size=len(tool_task.WORDS))} if critic == "separate" else {}
    settings = dict(tiny.QUIET_ON_CPU, critic=critic, save_strategy="no", logging_steps=1, max_steps=2)
    settings |= dict(per_device_train_batch_size=8, response_length=64, learning_rate=1e-3, num_ppo_epochs=2)
    trainer = trl_ext.PPOTrainer(
        trl_ext.PPOConfig(str(tmp_path), **settings), tool_task.tokenizer(), model, reward_funcs=as_printed("by_turn"),
        train_dataset=tool_task.sums(), tools=[tool_task.add], **values,
    )  # fmt: skip
    first = (tool_task.call("add", 3, 4) + " <eos>", "9 8 7 <eos>")
    trainer._generate_single_turn = tool_task.Script(first=first, again=0.0)
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["objective/scores"] == pytest.approx(0.1 * log["tools/call_frequency"]) != 0
    assert trainer._packs


def test_the_end_of_an_earlier_turn_is_no_end_of_the_completion(tmp_path):
    def cut_off(prompts, trainer):
        output = rollout(prompts, trainer)
        eos = trainer.processing_class.eos_token_id
        output["completion_ids"] = [[5, eos, 7, 8, 9] for _ in prompts]
        return output | {"env_mask": [[1, 1, 0, 1, 1] for _ in prompts]}

    trainer = ppo_trainers.trainer("head", tmp_path, rollout_func=cut_off, missing_eos_penalty=1.0)
    inputs = whole_batch(trainer)
    assert trainer._targets.missing_eos_penalty(inputs).tolist() == [1.0] * len(inputs["completion_ids"])
