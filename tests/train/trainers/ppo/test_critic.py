"""The critic's own course: where it starts, its warm-up, schedule, decay and clip norm, and its gradient's moment."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForSequenceClassification, TrainerCallback

from tests import ppo_trainers
from tests.nightly import daily
from tests.ppo_trainers import CRITICS, distance, resumed_as_whole, stir, trained_weights
from trl_ext.compat.peft import base_model
from trl_ext.errors import ConfigError
from trl_ext.trainers.forward.roles import CRITIC, REWARD
from trl_ext.trainers.ppo.critic import in_step
from trl_ext.trainers.ppo.critic.critics import SeparateCritic
from trl_ext.trainers.ppo.models import add_reference_adapter

# A critic that starts from the reward model --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reward_folder(tmp_path_factory):
    """A LoRA reward model of the actor's base, of another rank than the actor's LoRA."""
    folder = tmp_path_factory.mktemp("reward")
    ppo_trainers.actor().save_pretrained(folder / "base")
    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_pretrained(folder / "base", num_labels=1)
    lora = LoraConfig(**{**ppo_trainers.LORA, "r": 2}, task_type="SEQ_CLS", init_lora_weights=False)
    get_peft_model(model, lora).save_pretrained(folder / "adapter")
    return str(folder / "adapter")


def started(critic, folder, reward_folder=None, **changes):
    given = dict(reward_adapter=reward_folder)
    if critic != "adapter":
        given = ppo_trainers.scorer()
    settings = dict(critic_init="reward", value_normalisation=True, reward_funcs=None) | given | changes
    return ppo_trainers.trainer(critic, folder, **settings)


def test_the_adapter_critic_says_what_the_reward_adapter_says(reward_folder, tmp_path):
    trainer = started("adapter", tmp_path, reward_folder)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        critics, rewards = (trainer.model(input_ids=ids, role=role).token_values for role in (CRITIC, REWARD))
    torch.testing.assert_close(critics, rewards)
    assert rewards.abs().max() > 1e-3
    critic = [p for n, p in trainer.model.named_parameters() if f".{CRITIC}." in n]
    assert critic and all(p.requires_grad for p in critic)
    assert not any(p.requires_grad for n, p in trainer.model.named_parameters() if f".{REWARD}." in n)


def test_head_and_separate_critic_have_the_reward_models_score(tmp_path):
    reward_model = ppo_trainers.classifier(9)
    head = started("head", tmp_path, reward_model=reward_model)
    torch.testing.assert_close(base_model(head.model).value_head.weight, reward_model.score.weight)
    separate = started("separate", tmp_path, reward_model=reward_model)
    value_model = separate._ppo_models.value_model
    assert value_model is not reward_model
    assert distance(dict(value_model.state_dict()), dict(ppo_trainers.classifier(9).state_dict())) == 0.0


@pytest.mark.parametrize("critic", daily(CRITICS, "adapter", "head"))
def test_its_first_outputs_are_brought_to_the_scale_of_the_returns(critic, reward_folder, tmp_path):
    trainer = started(critic, tmp_path, reward_folder, kl_coef=0.0)
    trainer.model.train()
    inputs = ppo_trainers.completed(trainer, [trainer.train_dataset[i] for i in range(8)])
    values = inputs["values"][inputs["completion_mask"].bool()]
    scale = trainer._scale
    assert values.mean().item() == pytest.approx(scale.mean, abs=1e-4)
    # Of what varies in the returns, the share that it explains by a line, and no less than half.
    assert 0.499 * scale.std < values.std(correction=0).item() <= scale.std


def test_a_resumed_run_keeps_the_scale(reward_folder, tmp_path):
    settings = dict(max_steps=4, save_strategy="steps", save_steps=2, rollout_func=None)
    whole, again = resumed_as_whole(lambda out: started("adapter", out, reward_folder, **settings), tmp_path, 2)
    assert again._scale == whole._scale


def test_what_it_cannot_start_from_is_refused(reward_folder, tmp_path):
    of_model = ppo_trainers.scorer() | dict(value_model=ppo_trainers.classifier())
    for make, critic, changes, sentence in (
        (started, "adapter", dict(reward_funcs=ppo_trainers.reward), "from the reward_adapter, and there is none"),
        (ppo_trainers.trainer, "head", dict(critic_init="reward"), "from the reward_model, and there is none"),
        (ppo_trainers.trainer, "separate", dict(critic_init="reward", **of_model), "critic_init='reward' has no use"),
        (started, "head", dict(reward_model=ppo_trainers.classifier(9, hidden_size=32)), "another backbone"),
        (ppo_trainers.trainer, "head", dict(critic_init="base"), "critic_init='base' is unknown"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            make(critic, tmp_path, **changes)


@pytest.mark.parametrize("start", ["pissa", "olora"])
@pytest.mark.parametrize("critic", ["adapter", "head"])  # a second adapter for the critic, or for the reference
def test_a_second_adapter_leaves_the_weights_that_it_shares_with_the_actor(critic, start, tmp_path):
    model = get_peft_model(ppo_trainers.actor(), LoraConfig(**ppo_trainers.LORA, init_lora_weights=start))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.data += 0.01
    ids = torch.tensor([[5, 6, 7, 8]])
    before = model.eval()(input_ids=ids).logits
    kl_coef = 0.0 if critic == "adapter" else 0.1
    trainer = ppo_trainers.trainer(critic, tmp_path, model=model, peft_config=None, kl_coef=kl_coef)
    assert set(trainer.model.peft_config) == {"default", "critic" if critic == "adapter" else "ref"}
    torch.testing.assert_close(trainer.model.eval()(input_ids=ids).logits, before, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "own", [dict(target_modules=["q_proj", "embed_tokens"]), dict(trainable_token_indices=[4, 5])]
)
def test_adapters_of_embeddings_are_trained_and_copied(own, tmp_path):
    lora = LoraConfig(**{**ppo_trainers.LORA, "target_modules": ["q_proj"], **own})
    trainer = stir(ppo_trainers.trainer("adapter", tmp_path, peft_config=lora, learning_rate=1e-2))
    before = trained_weights(trainer)
    trainer.train()
    after = trained_weights(trainer)
    moved = {name for name in after if not torch.equal(before[name], after[name])}
    assert {name for name in after if "embed_tokens" in name and CRITIC in name} <= moved
    add_reference_adapter(trainer.model, "default")
    weights = dict(trainer.model.named_parameters())
    copies = [name for name in weights if name.endswith(".ref") and "embed_tokens" in name]
    assert copies and all(torch.equal(weights[n], weights[n.removesuffix("ref") + "default"]) for n in copies)


# Its own course, which test_ppo_exactness.py replays -----------------------------------------------------------------


@pytest.mark.parametrize("critic", daily(["adapter", "separate"], "separate"))
def test_a_run_that_stops_in_the_warm_up_goes_on_as_if_it_had_not(critic, tmp_path):
    settings = dict(critic_warmup_steps=3, value_lr_scheduler_type="linear", lr_scheduler_type="cosine")
    settings |= dict(max_steps=5, save_strategy="steps", save_steps=2, rollout_func=None)
    resumed_as_whole(lambda out: stir(ppo_trainers.trainer(critic, out, **settings)), tmp_path, 2)


@pytest.mark.parametrize("critic", daily(CRITICS, "adapter", "separate"))
def test_actor_and_critic_follow_schedules_of_their_own(critic, tmp_path):
    settings = dict(max_steps=4, value_learning_rate=4e-3, value_lr_scheduler_type="linear")
    trainer = ppo_trainers.trainer(critic, tmp_path, **settings)
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


def test_a_warm_up_as_long_as_the_data_and_a_schedule_that_follows_a_metric_are_refused(tmp_path):
    trainer = ppo_trainers.trainer("head", tmp_path, critic_warmup_steps=2, max_steps=-1, num_train_epochs=1)
    with pytest.raises(ConfigError, match="leaves the actor no step of the run's 2"):
        trainer.train()
    evaluated = dict(eval_strategy="steps", eval_dataset=ppo_trainers.prompts(4), per_device_eval_batch_size=4)
    follows = dict(critic_warmup_steps=1, lr_scheduler_type="reduce_lr_on_plateau", eval_steps=1, **evaluated)
    with pytest.raises(ConfigError, match="follows a metric"):
        ppo_trainers.trainer("head", tmp_path, **follows).train()


# Its gradient, which is computed before the policy's forward ---------------------------------------------------------


def trained(folder, **changes):
    settings = dict(gradient_checkpointing=True, num_ppo_epochs=2, kl_coef=0.1, value_normalisation=True, max_steps=4)
    trainer = stir(ppo_trainers.trainer("adapter", folder, **settings | changes))
    trainer.train()
    return trained_weights(trainer)


@pytest.mark.parametrize("packing", daily([True, False], True))
def test_a_run_is_that_of_one_backward_for_both_losses(packing, tmp_path, monkeypatch):
    before = trained_weights(stir(ppo_trainers.trainer("adapter", tmp_path)))
    apart = trained(tmp_path, packing=packing)
    asked = []
    monkeypatch.setattr(in_step, "can_settle", lambda trainer: asked.append(trainer))  # as ZeRO-3, FSDP and fp16
    joint = trained(tmp_path, packing=packing)
    assert asked
    assert max((weight - joint[name]).abs().max() for name, weight in apart.items()) < 1e-6
    assert max((weight - before[name]).abs().max() for name, weight in apart.items()) > 1e-3
