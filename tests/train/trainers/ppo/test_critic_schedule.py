"""The critic's own course: a warm-up in which the actor stands still, its own schedule, decay and clip norm."""

from itertools import pairwise

import pytest
import torch
from transformers import TrainerCallback

from tests import ppo_trainers
from tests.ppo_trainers import CRITICS, distance, resumed_as_whole, stir
from trl_ext.errors import ConfigError
from trl_ext.trainers.ppo.critic.critics import SeparateCritic

torch.set_num_threads(1)


def gradients_of(weights):
    return [p.grad for p in weights if p.grad is not None]


def mean_of_one_step(state):
    """What exp_avg is after one step: (1 - beta1) g, where exp_avg_sq is (1 - beta2) g^2."""
    return 0.1 * (state["exp_avg_sq"] / 1e-3).sqrt() * state["exp_avg"].sign()


def parts(trainer):
    """Trained weights of the actor and of the critic."""
    of_critic = {id(p) for p in trainer._critic.parameters()}
    actor = {n: p for n, p in trainer.model.named_parameters() if p.requires_grad and id(p) not in of_critic}
    critic = dict(enumerate(trainer._critic.parameters()))
    return [{name: p.detach().clone() for name, p in part.items()} for part in (actor, critic)]


@pytest.mark.parametrize("critic", CRITICS)
def test_the_actor_stands_still_while_the_critic_warms_up_and_its_adam_starts_then(critic, tmp_path):
    """Its moments are those of one step, and its gradients took nothing of the clip norm away from the critic's."""
    settings = dict(critic_warmup_steps=2, max_steps=3, weight_decay=0.1, max_grad_norm=1e-2)
    trainer = stir(ppo_trainers.trainer(critic, tmp_path, **settings))
    norms, course = [], [parts(trainer)]

    class Note(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            course.append(parts(trainer))

        def on_pre_optimizer_step(self, *args, **kwargs):
            critic = {id(p): p for p in trainer._critic.parameters()}
            actor = [p for p in trainer.model.parameters() if id(p) not in critic]
            norms.append([torch.nn.utils.get_total_norm(gradients_of(part)) for part in (actor, critic.values())])

    trainer.add_callback(Note())
    trainer.train()
    actors, critics = zip(*course, strict=True)
    assert distance(actors[0], actors[2]) == 0.0
    assert distance(actors[2], actors[3]) > 1e-5
    assert all(distance(*pair) > 1e-5 for pair in pairwise(critics))
    assert [actor for actor, _ in norms[:2]] == [0.0, 0.0] and norms[2][0] > 1e-4
    if critic != "separate":  # whose gradients have been used by then
        assert [float(own) for _, own in norms[:2]] == pytest.approx([1e-2] * 2, rel=1e-3)
    optimizer, of_critic = trainer.optimizer.optimizer, {id(p) for p in trainer._critic.parameters()}
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer.state[p]
            assert float(state["step"]) == (3 if id(p) in of_critic else 1)
            if id(p) not in of_critic:
                torch.testing.assert_close(state["exp_avg"], mean_of_one_step(state), rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("critic", ["adapter", "separate"])
def test_a_run_that_stops_in_the_warm_up_goes_on_as_if_it_had_not(critic, tmp_path):
    settings = dict(
        critic_warmup_steps=3, value_lr_scheduler_type="linear", lr_scheduler_type="cosine", max_steps=5,
        save_strategy="steps", save_steps=2, rollout_func=None,
    )  # fmt: skip
    resumed_as_whole(lambda out: stir(ppo_trainers.trainer(critic, out, **settings)), tmp_path, 2)


@pytest.mark.parametrize("critic", CRITICS)
def test_actor_and_critic_follow_schedules_of_their_own(critic, tmp_path):
    trainer = ppo_trainers.trainer(
        critic, tmp_path, max_steps=4, learning_rate=1e-3, value_learning_rate=4e-3, value_lr_scheduler_type="linear"
    )
    rates = []

    class Note(TrainerCallback):
        def on_pre_optimizer_step(self, *args, **kwargs):
            own = trainer._critic.optimizer if isinstance(trainer._critic, SeparateCritic) else trainer.optimizer
            groups = own.param_groups
            of_critic = {id(p) for p in trainer._critic.parameters()}
            critics = {g["lr"] for g in groups if any(id(p) in of_critic for p in g["params"])}
            rates.append((trainer.optimizer.param_groups[0]["lr"], *critics))

    trainer.add_callback(Note())
    trainer.train()
    assert [actor for actor, _ in rates] == [1e-3] * 4
    assert [critic for _, critic in rates] == pytest.approx([4e-3, 3e-3, 2e-3, 1e-3])


def test_the_critics_gradients_are_clipped_at_their_own_norm(tmp_path):
    norms = {}

    class Note(TrainerCallback):
        def __init__(self, trainer, key):
            self.trainer, self.key = trainer, key

        def on_pre_optimizer_step(self, *args, **kwargs):
            own = [p.grad.norm() for p in self.trainer._critic.parameters()]
            norms[self.key] = torch.stack(own).norm().item()

    for norm in (None, 1e-3):
        trainer = stir(
            ppo_trainers.trainer("adapter", tmp_path, max_steps=1, value_max_grad_norm=norm, max_grad_norm=1e6)
        )
        trainer.add_callback(Note(trainer, norm))
        trainer.train()
    assert norms[None] > 1e-2
    assert norms[1e-3] == pytest.approx(1e-3, rel=1e-3)
    assert "ppo/value_grad_norm" in trainer.state.log_history[0]


@pytest.mark.parametrize("critic", ["adapter", "head"])
def test_a_norm_of_the_critics_own_is_refused_where_nothing_is_clipped(critic, tmp_path):
    with pytest.raises(ConfigError, match=r"value_max_grad_norm=0.5 has no effect .* max_grad_norm=0,"):
        ppo_trainers.trainer(critic, tmp_path, value_max_grad_norm=0.5, max_grad_norm=0)
    ppo_trainers.trainer("separate", tmp_path, value_max_grad_norm=0.5, max_grad_norm=0)


def test_a_warm_up_as_long_as_the_run_is_refused_where_the_data_say_how_long_that_is(tmp_path):
    trainer = ppo_trainers.trainer("head", tmp_path, critic_warmup_steps=2, max_steps=-1, num_train_epochs=1)
    with pytest.raises(ConfigError, match="leaves the actor no step of the run's 2"):
        trainer.train()


def test_a_schedule_that_follows_a_metric_is_refused_beside_a_warm_up(tmp_path):
    trainer = ppo_trainers.trainer(
        "head", tmp_path, critic_warmup_steps=1, lr_scheduler_type="reduce_lr_on_plateau", eval_strategy="steps",
        eval_steps=1, eval_dataset=ppo_trainers.prompts(4), per_device_eval_batch_size=4,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="follows a metric"):
        trainer.train()
