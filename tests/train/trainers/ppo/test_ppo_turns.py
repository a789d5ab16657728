"""Several turns: a tool's tokens are no step in time, and each turn may have a reward of its own."""

import itertools

import pytest
from datasets import Dataset

import trl_ext
from tests import ppo_trainers, tiny, tool_task
from tests.documents import BLOCKS
from tests.nightly import nightly
from tests.ppo_replay import OF_GROUPS, TOLERANCE, Settings, check
from tests.ppo_trainers import stir
from tests.rollouts import rollout
from trl_ext.errors import RuleError


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


def rewards_of_turns(update):
    """Of each token that the policy spoke: its turn's reward at the turn's last one, by loops."""
    found = []
    completions = [completion.tolist() for _, completion, _ in update.tokens()]
    for ids, values, total in zip(completions, of_each_turn(completions), update.scores, strict=True):
        mask, rewards = spoken(ids), []
        for t, is_spoken in enumerate(mask):
            if is_spoken:
                ends = t + 1 == len(mask) or not mask[t + 1]
                rewards.append(values.pop(0) if ends else 0.0)
        assert sum(rewards) == pytest.approx(total, abs=1e-6)
        found.append(rewards)
    return found


WAYS = [("separate", True, "gae"), ("adapter", True, "gae"), ("none", True, "rloo"), ("none", True, "reinforce_pp")]
WAYS += [("head", True, "gae"), ("head", False, "gae"), ("none", True, "grpo")]


@pytest.mark.parametrize(
    ("critic", "packing", "estimator", "by_turn"),
    [
        # By day the first four, in turn with rewards of each turn and of the whole.
        (*way, by_turn) if number < 4 and by_turn == number % 2 else nightly(*way, by_turn)
        for number, way in enumerate(WAYS)
        for by_turn in (False, True)
    ],
)
def test_an_update_is_that_of_the_turns_alone(critic, packing, estimator, by_turn, tmp_path):
    own = dict(advantage_estimator=estimator, num_ppo_epochs=2, num_generations=4 if estimator in OF_GROUPS else 1)
    own |= {} if estimator in OF_GROUPS else dict(gamma=0.99)
    rewards = of_each_turn if by_turn else ppo_trainers.reward
    settings = dict(packing=packing, max_steps=2, rollout_func=with_tools, reward_funcs=rewards)
    trainer = stir(ppo_trainers.trainer(critic, tmp_path, **settings, **own))
    check(trainer, Settings(**own), 5 * TOLERANCE, turns=rewards_of_turns if by_turn else None)


def test_values_of_other_turns_are_said_and_a_turn_without_one_leaves_the_completion_out(tmp_path):
    def one_too_many(completion_ids, **_):
        return [[1.0] * (num_turns(ids) + 1) for ids in completion_ids]

    async def unknown(completion_ids, **_):
        return [[None, *row[1:]] if i == 0 else row for i, row in enumerate(of_each_turn(completion_ids))]

    def trainer(rewards):
        return ppo_trainers.trainer("head", tmp_path, max_steps=1, rollout_func=with_tools, reward_funcs=rewards)

    with pytest.raises(RuleError, match=r"'one_too_many' returned \d+ values for a completion of \d+ turns"):
        trainer(one_too_many).train()
    trained = trainer(unknown)
    trained.train()
    assert trained.state.log_history[0]["ppo/unscored_frac"] == 1 / 8
    with pytest.raises(RuleError, match="returned rewards per turn"):
        tool_task.trainer(trl_ext, tmp_path, of_each_turn).train()


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
    trainer.model.train()
    inputs = ppo_trainers.completed(trainer, [trainer.train_dataset[i] for i in range(8)])
    assert trainer._targets.missing_eos_penalty(inputs).tolist() == [1.0] * len(inputs["completion_ids"])


class Hundred(tool_task.Adds):
    reward = 100.0


def by_length(completion_ids, **_):
    return [len(ids) / 64 for ids in completion_ids]


def by_first_token(completion_ids, **_):
    return [ids[0] / 64 for ids in completion_ids]


@pytest.mark.parametrize("with_model", [False, True])
@pytest.mark.parametrize("rules", [[], [by_length], [by_length, by_first_token]])
def test_an_environment_scores_its_completions_next_to_rules_and_reward_models(rules, with_model, tmp_path):
    models = {}
    if with_model:
        model = ppo_trainers.classifier(1, vocab_size=len(tool_task.WORDS))
        models = dict(reward_model=model, reward_processing_classes=tool_task.tokenizer())
    args = trl_ext.PPOConfig(
        str(tmp_path),
        **tiny.QUIET_ON_CPU,
        critic="head",
        max_steps=1,
        per_device_train_batch_size=8,
        response_length=64,
        save_strategy="no",
        **(dict(score_normalisation="none") if with_model else {}),
    )
    trainer = trl_ext.PPOTrainer(
        args,
        tool_task.tokenizer(),
        tiny.model("llama", vocab_size=len(tool_task.WORDS)),
        reward_funcs=rules,
        train_dataset=Dataset.from_dict({"level": list(range(16))}),
        environment_factory=Hundred,
        **models,
    )
    trainer._generate_single_turn = tool_task.Script()
    trainer.train()
    log = trainer.state.log_history[0]
    parts = [log[f"rewards/{name}/mean"] for name in trainer.reward_func_names]
    assert len(parts) == len(rules) + 1 + with_model and log["rewards/Hundred/mean"] == 100
    assert log["objective/scores"] == pytest.approx(sum(parts), abs=1e-4)
