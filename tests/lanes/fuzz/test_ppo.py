"""PPO with settings drawn at random against a replay in plain torch, and each estimator with each policy loss and KL.

    FUZZ_SEED=1000 FUZZ_DRAWS=200 pytest -s tests/lanes/fuzz/test_ppo.py

Each draw prints its seed, its settings, how far the run moved, how far it ends from the replay, and how far the replay
ends from itself in double precision: that is rounding, which training amplifies. A deviation beyond three times that,
and beyond four steps of float32 at 1, which norms' weights are near, is an error.

Each third draw runs in half precision. There the replay forwards in the same precision, row by row without padding;
what follows the logits is in float32. Its gradients and ours are held against those of the replay in float32.
"""

import os
import random
from dataclasses import asdict, fields, replace

import pytest
import torch
from peft import LoraConfig

from tests import ppo_replay, ppo_trainers
from tests.half_precision import PRECISIONS, cast, error, moved_weights, wide_classifier, wide_model
from tests.lanes.fuzz.draws import check_mean_in_half, note_errors, precision_of, show, summary
from tests.ppo_replay import OF_GROUPS, Settings
from tests.ppo_trainers import Gradients, distance, trained_weights
from tests.rollouts import rollout
from tests.train.trainers.ppo.test_ppo_loss_modes import EVERY_CASE, check_replay
from tests.train.trainers.ppo.test_ppo_without_critic import greedy_score
from trl_ext.packing import step_plan

torch.set_num_threads(1)

FIRST, DRAWS = int(os.environ.get("FUZZ_SEED", "0")), int(os.environ.get("FUZZ_DRAWS", "60"))
FLOOR, TIMES_NOISE = 5e-7, 3.0
NUM_ROWS = 8
LOSSES = {
    "clip": dict(cliprange=0.004),
    "clip-higher": dict(cliprange=0.004, epsilon_high=0.02),
    "dual clip": dict(cliprange=0.004, delta=1.005),
    "grpo": dict(loss_type="grpo", cliprange=0.01),
    "dr_grpo": dict(loss_type="dr_grpo"),
    "bnpo": dict(loss_type="bnpo"),
    "cispo": dict(loss_type="cispo", epsilon_high=1.002),
    "sapo": dict(loss_type="sapo"),
    "vespo": dict(loss_type="vespo"),
}
BY_SEQUENCE = {
    "gspo": dict(loss_type="grpo", importance_sampling_level="sequence", cliprange=0.004),
    "luspo": dict(loss_type="luspo", importance_sampling_level="sequence", cliprange=0.004),
}
KLS = [
    dict(kl_coef=0.0),
    *(dict(kl_estimator=kind, kl_term="reward") for kind in ("k1", "k2", "k3")),
    *(dict(kl_estimator=kind, kl_term="loss") for kind in ("k2", "k3")),
]


# Scores --------------------------------------------------------------------------------------------------------------


def by_sum(prompts, completion_ids, **_):
    return ppo_trainers.reward(completion_ids)


def tied(prompts, completion_ids, **_):
    """As of a rule; groups of long prompts tie."""
    return [float(len(p.split()) > 5 or sum(ids) % 2) for p, ids in zip(prompts, completion_ids, strict=True)]


def equal(prompts, completion_ids, **_):
    return [1.0] * len(prompts)


def with_unscored(reward):
    """The same, and nothing for some completions of three tokens or more."""

    def some(prompts, completion_ids, **_):
        scores = reward(prompts=prompts, completion_ids=completion_ids)
        return [
            None if len(ids) > 2 and sum(ids) % 7 == 0 else s for s, ids in zip(scores, completion_ids, strict=True)
        ]

    return some


def with_other_words(prompts, trainer):
    """Fixed completions in which an environment has spoken: tokens that do not count."""
    output = rollout(prompts, trainer)
    masks = [
        [int(j == 0 or (i + j) % 4 > 0) for j in range(len(ids))] for i, ids in enumerate(output["completion_ids"])
    ]
    return output | {"env_mask": masks}


# Draws ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def tell(request):
    yield
    show(request, summary("ppo"))


@pytest.fixture(autouse=True)
def cheap_calls(monkeypatch):
    """Prompts are kept wherever a group is cut: what a call costs is of models that are larger than these."""
    monkeypatch.setattr(step_plan, "CALL_COST", 0)


def drawn(seed):
    """Settings of the replay, and what of the run the replay need not know."""
    draw = random.Random(seed)
    estimator = draw.choice(["gae"] * 4 + ["reinforce_pp", "rloo", "rloo", "grpo", "grpo", "remax"])
    in_groups, has_critic = estimator in OF_GROUPS, estimator == "gae"
    loss = draw.choice([*LOSSES, *(BY_SEQUENCE if in_groups else ())])
    own = dict((LOSSES | BY_SEQUENCE)[loss], **draw.choice(KLS))
    if own.get("kl_coef") is None:
        own["kl_coef"] = draw.choice([0.05, 0.3])
        if draw.random() < 0.25:
            own |= dict(kl_target=0.5, kl_horizon=100.0)
    epochs, mini_batches, accumulation = draw.choice([1, 2, 3]), draw.choice([1, 2]), draw.choice([1, 2])
    steps = epochs * mini_batches * draw.choice([1, 2])
    if has_critic or estimator == "reinforce_pp":
        own |= dict(gamma=draw.choice([1.0, 0.9]), whiten_rewards=draw.random() < 0.3)
    run = dict(critic="none", max_steps=steps)
    if has_critic:
        run["critic"] = draw.choice(ppo_trainers.CRITICS)
        own |= dict(
            lam=draw.choice([0.9, 1.0]),
            value_normalisation=draw.random() < 0.5,
            cliprange_value=draw.choice([None, 0.02, 0.2]),
            value_learning_rate=draw.choice([None, 3e-3]),
            critic_warmup_steps=draw.choice([0, 0, min(1, steps - 1), min(2, steps - 1)]),
        )
    own |= dict(
        advantage_estimator=estimator,
        num_generations=draw.choice([2, 4]) if in_groups else draw.choice([1, 2]),
        num_ppo_epochs=epochs,
        num_mini_batches=mini_batches,
        temperature=draw.choice([1.0, 0.7]),
        learning_rate=draw.choice([1e-3, 3e-3]),
        weight_decay=draw.choice([0.0, 0.1]),
        max_grad_norm=draw.choice([1.0, 0.05]),
    )
    scores = draw.choice([by_sum, tied, tied, equal])
    packing = draw.random() < 0.7
    run |= dict(
        reward_funcs=with_unscored(scores) if draw.random() < 0.25 else scores,
        rollout_func=None if estimator == "remax" else with_other_words if draw.random() < 0.25 else rollout,
        per_device_train_batch_size=NUM_ROWS // mini_batches // accumulation,
        gradient_accumulation_steps=accumulation,
        packing=packing,
        max_tokens_per_forward=draw.choice([None, 40]) if packing and loss != "bnpo" else None,
        shuffle_dataset=False,
    )
    is_lora = run["critic"] == "adapter" or (run["critic"] == "none" and draw.random() < 0.2)
    return Settings(**own), run, is_lora, draw.random() < 0.5


def trainer_of(settings, run, is_lora, is_decided, folder, precision=None):
    """The trainer; only what differs from PPOConfig's defaults, or has an effect, is given to it.

    With a `precision` its models are wide ones.
    """
    given = {name: value for name, value in asdict(settings).items() if name not in _unread(settings)}
    if is_lora:
        given["peft_config"] = LoraConfig(**ppo_trainers.LORA)
    elif settings.kl_coef:
        given["ref_model"] = ppo_trainers.actor(seed=3)
    model = ppo_trainers.decided_actor() if is_decided else ppo_trainers.actor()
    if precision:
        dtype, given["bf16"] = PRECISIONS[precision]
        model = cast(wide_model("llama"), dtype)
        if "ref_model" in given:
            given["ref_model"] = cast(moved_weights(model), dtype)
        if run["critic"] == "separate":
            given["value_model"] = cast(wide_classifier(folder / "critic", "llama", seed=5), dtype)
    return ppo_trainers.stir(ppo_trainers.trainer(folder=folder, model=model, **(given | run)))


def _unread(s):
    """Settings at the replay's own default, which PPOConfig would refuse beside these."""
    return {f.name for f in fields(s) if getattr(s, f.name) == f.default} - {"cliprange_value"} | (
        {"cliprange_value"} if s.advantage_estimator != "gae" else set()
    )


def check_in_half(seed, precision, folder):
    """Hold the gradients of a draw against the replay's: the actor's, and those of a critic's own weights."""
    has_critic = drawn(seed)[1]["critic"] != "none"
    for part in ("actor", "critic") if has_critic else ("actor",):
        note_errors("ppo", seed, lambda part=part, **changes: errors_of(seed, precision, folder, part, **changes))


def errors_of(seed, precision, folder, part, **changes):
    """The replay's error and ours. Not of ReMax: rounding decides its greedy completions."""
    settings, run, *how = drawn(seed)
    if settings.advantage_estimator == "remax":
        settings, run["rollout_func"] = replace(settings, advantage_estimator="reinforce_pp"), rollout
    # Nothing is clipped, so that the gradients can be compared.
    own = dict(max_grad_norm=1e9, learning_rate=1e-4, value_learning_rate=None)
    settings = replace(settings, **own | changes)
    trainer = trainer_of(settings, run, *how, folder, precision)
    trainer.add_callback(gradients := Gradients(trainer))
    print(f"ppo seed {seed}: {precision}, {settings}, {run}, {how}")
    updates, state = ppo_replay.recorded(trainer)
    replayed = [
        ppo_replay.replay(trainer, settings, updates, state, half=half).gradients
        for half in (PRECISIONS[precision], None)
    ]
    assert trainer._packs == run["packing"]
    ours, theirs, truth = (
        [_flat(step, of_critic=part == "critic") for step in steps] for steps in (gradients.steps, *replayed)
    )
    return [error(theirs, truth)], error(ours, truth)


def _flat(gradients, *, of_critic):
    """The gradients of the critic's own weights, or of all others, in the order of their names."""
    own = ("value_head", ".critic.", "value_model.")
    names = [name for name in sorted(gradients) if any(one in name for one in own) == of_critic]
    return torch.cat([gradients[name].flatten() for name in names])


@pytest.mark.parametrize("seed", range(FIRST, FIRST + DRAWS))
def test_a_run_of_drawn_settings_is_the_replays(seed, tmp_path):
    if precision := precision_of(seed):
        check_in_half(seed, precision, tmp_path)
        return
    settings, run, *how = drawn(seed)
    trainer = trainer_of(settings, run, *how, tmp_path)
    before = trained_weights(trainer)
    updates, state = ppo_replay.recorded(trainer)
    ours = trained_weights(trainer)
    greedy = (lambda row: greedy_score(trainer, row, run["reward_funcs"])) if trainer._critic.name == "none" else None
    greedy = greedy if settings.advantage_estimator == "remax" else None
    again = ppo_replay.replay(trainer, settings, updates, state, greedy).weights
    double = ppo_replay.replay(trainer, settings, updates, state, greedy, torch.float64).weights
    moved, off, noise = distance(before, again), distance(ours, again), distance(again, double)
    changed = {f.name: getattr(settings, f.name) for f in fields(settings) if getattr(settings, f.name) != f.default}
    shown = run | {name: getattr(run[name], "__qualname__", None) for name in ("reward_funcs", "rollout_func")}
    print(f"\nseed {seed}: moved {moved:.1e}, off {off:.1e}, rounding {noise:.1e}; {changed} {shown} {how}")
    assert off <= max(FLOOR, TIMES_NOISE * noise)


def test_the_draws_in_half_precision_are_as_near_to_float32_as_the_replays():
    check_mean_in_half("ppo")


@pytest.mark.parametrize("estimator, mode, kl", EVERY_CASE)
def test_each_estimator_with_each_loss_and_kl_is_the_replays(estimator, mode, kl, tmp_path):
    check_replay(estimator, mode, kl, tmp_path)
