"""A PPO step against a plain reference: padded rows one by one, loops over tokens, no code of ours."""

import math

import pytest
import torch

from tests import ppo_trainers, tiny
from tests.faults.starting import IS_THOROUGH
from tests.ppo_trainers import CRITICS, distance, stir, trained_weights
from trl_ext.compat.peft import base_model

torch.set_num_threads(1)

TOLERANCE = 1e-6
KL, GAMMA, LAM, VF, CLIP = 0.05, 0.99, 0.9, 0.5, 0.2


def whole_batch(trainer):
    """The rollouts of one update, and the trainer's loss on them with its gradients."""
    trainer.model.train()
    rows = [trainer.train_dataset[i] for i in range(8)]
    inputs = trainer._generate_and_score_completions(rows)
    trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation
    return inputs


def reference_forward(trainer, inputs, role):
    """Per row: log-probabilities or values of its completion, from the row alone and transformers' own forward."""
    results = []
    model = base_model(trainer.model)
    for prompt, p_mask, completion, c_mask in zip(
        inputs["prompt_ids"], inputs["prompt_mask"], inputs["completion_ids"], inputs["completion_mask"], strict=True
    ):
        prompt, completion = prompt[p_mask.bool()], completion[c_mask.bool()]
        ids = torch.cat([prompt, completion])[None]
        if role == "policy":
            logits = type(model).forward(model, input_ids=ids).logits[0, len(prompt) - 1 : -1]
            results.append(logits.log_softmax(-1).gather(1, completion[:, None])[:, 0])
            continue
        hidden = reference_hidden(trainer, model, ids)[0, len(prompt) - 1 : -1]
        head = model.value_head if trainer._ppo_models.value_model is None else trainer._ppo_models.value_model.score
        bias = 0.0 if head.bias is None else head.bias
        results.append(hidden @ head.weight[0] + bias)
    return results


def reference_hidden(trainer, model, ids):
    if trainer._ppo_models.value_model is not None:
        return trainer._ppo_models.value_model.model(input_ids=ids).last_hidden_state
    if trainer._critic.name == "head":
        return model.model(input_ids=ids).last_hidden_state
    trainer.model.set_adapter("critic")
    hidden = model.model(input_ids=ids).last_hidden_state
    trainer.model.set_adapter("default")
    trainer.model.set_requires_grad(["default", "critic"], True)
    return hidden


def reference_targets(scores, logps, ref_logps, values):
    """Advantages (whitened over all tokens) and returns per row, in the plainest form."""
    all_advantages, all_returns = [], []
    for score, new, ref, value in zip(scores, logps, ref_logps, values, strict=True):
        rewards = [-KL * (n - r) for n, r in zip(new.tolist(), ref.tolist(), strict=True)]
        rewards[-1] += score
        running, advantages = 0.0, []
        for t in reversed(range(len(rewards))):
            following = value[t + 1].item() if t + 1 < len(rewards) else 0.0
            running = rewards[t] + GAMMA * following - value[t].item() + GAMMA * LAM * running
            advantages.insert(0, running)
        all_advantages.append(advantages)
        all_returns.append([a + v for a, v in zip(advantages, value.tolist(), strict=True)])
    flat = [a for row in all_advantages for a in row]
    mean = sum(flat) / len(flat)
    std = math.sqrt(sum((a - mean) ** 2 for a in flat) / (len(flat) - 1) + 1e-8)
    return [[(a - mean) / std for a in row] for row in all_advantages], all_returns


def reference_loss(logps, old_logps, values, old_values, advantages, returns):
    num_tokens = sum(map(len, logps))
    policy = value = 0.0
    for new, old, v, old_v, a, r in zip(logps, old_logps, values, old_values, advantages, returns, strict=True):
        a, r = torch.tensor(a), torch.tensor(r)
        ratio = (new - old).exp()
        policy = policy - torch.minimum(ratio * a, ratio.clamp(1 - CLIP, 1 + CLIP) * a).sum()
        clipped = old_v + (v - old_v).clamp(-CLIP, CLIP)
        value = value + 0.5 * torch.maximum((v - r) ** 2, (clipped - r) ** 2).sum()
    return (policy + VF * value) / num_tokens


def settled(critic, folder, **changes):
    """A trainer that stands a few steps into an update: policy and values have moved from the old ones."""
    changes = dict(kl_coef=KL, gamma=GAMMA, lam=LAM, vf_coef=VF, per_device_train_batch_size=8) | changes
    return stir(ppo_trainers.trainer(critic, folder, gradient_accumulation_steps=1, **changes))


def moved(trainer):
    """Nudge all trained weights, so that ratios differ from 1 and values from the old ones."""
    torch.manual_seed(2)
    models = [trainer.model] + ([] if trainer._ppo_models.value_model is None else [trainer._ppo_models.value_model])
    for model in models:
        for weight in (w for w in model.parameters() if w.requires_grad):
            weight.data += 0.02 * torch.randn_like(weight)


def gradients(trainer):
    models = [trainer.model] + ([] if trainer._ppo_models.value_model is None else [trainer._ppo_models.value_model])
    return {
        f"{i}.{n}": p.grad.clone() for i, m in enumerate(models) for n, p in m.named_parameters() if p.requires_grad
    }


def clear(trainer):
    for model in (trainer.model, trainer._ppo_models.value_model):
        if model is not None:
            model.zero_grad(set_to_none=True)


def our_loss(trainer, inputs):
    """Loss of policy and critic on these rollouts, after backward."""
    loss = trainer.compute_loss(trainer.model, [trainer._update.as_one(inputs)])
    if not trainer._critic.is_trained_with_actor:
        loss = loss + trainer._value_loss(trainer._values.forwarded(trainer.model, inputs), inputs)
    loss.backward()
    return loss


def after_a_nudge(trainer, inputs, loss_of=our_loss):
    """Loss and gradients on these rollouts when the weights have moved since; the gradients are gone afterwards."""
    moved(trainer)
    loss = loss_of(trainer, inputs)
    found = gradients(trainer)
    clear(trainer)
    return loss, found


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("critic", CRITICS)
def test_targets_loss_and_gradients_are_the_references(critic, packing, tmp_path):
    trainer = settled(critic, tmp_path, packing=packing, gradient_checkpointing=packing)
    inputs = whole_batch(trainer)
    counted = inputs["completion_mask"].bool()
    rows = lambda x: [row[m] for row, m in zip(x, counted, strict=True)]  # noqa: E731

    with torch.no_grad():
        old_logps, old_values = (reference_forward(trainer, inputs, role) for role in ("policy", "value"))
        ref_logps = old_logps_of_reference(trainer, inputs)
    advantages, returns = reference_targets(trainer._scores.tolist(), old_logps, ref_logps, old_values)
    for ours, theirs in [("values", old_values), ("advantages", advantages), ("returns", returns)]:
        for mine, row in zip(rows(inputs[ours]), theirs, strict=True):
            torch.testing.assert_close(mine, torch.as_tensor(row), rtol=0, atol=TOLERANCE)

    loss, ours = after_a_nudge(trainer, inputs)
    new_logps, new_values = (reference_forward(trainer, inputs, role) for role in ("policy", "value"))
    expected = reference_loss(new_logps, old_logps, new_values, old_values, advantages, returns)
    expected.backward()
    assert abs(loss.item() - expected.item()) < TOLERANCE
    theirs = gradients(trainer)
    assert all(grad.abs().max() > 0 for grad in theirs.values())
    assert distance(ours, theirs) < TOLERANCE * max(1.0, max(g.abs().max().item() for g in theirs.values()))


def old_logps_of_reference(trainer, inputs):
    """Under the reference: the model without its adapter, or the copy."""
    if trainer.ref_model is None:
        with trainer.model.disable_adapter():
            result = reference_forward(trainer, inputs, "policy")
        trainer._critic.after_rollout()
        return result
    actor, trainer.model = trainer.model, trainer.ref_model
    try:
        return reference_forward(trainer, inputs, "policy")
    finally:
        trainer.model = actor


WHOLE = dict(per_device_train_batch_size=8, gradient_accumulation_steps=1)
WAYS = {
    "checkpointed": dict(WHOLE, packing=True, gradient_checkpointing=True),
    "budget": dict(WHOLE, packing=True, max_tokens_per_forward=24),
    "packed parts": dict(packing=True, per_device_train_batch_size=2, gradient_accumulation_steps=4),
    "padded parts": dict(packing=False, per_device_train_batch_size=1, gradient_accumulation_steps=8),
}
WAYS_OF = {
    "adapter": ("checkpointed", "packed parts"),
    "head": ("budget", "padded parts"),
    "separate": ("budget", "packed parts"),
}


@pytest.mark.parametrize("critic", CRITICS)
def test_packing_budget_and_split_change_nothing(critic, tmp_path):
    plain = trained(critic, tmp_path, packing=False, **WHOLE)
    assert distance(plain, trained(critic, tmp_path, max_steps=0)) > 1e-4
    for way in WAYS if IS_THOROUGH else WAYS_OF[critic]:
        assert distance(plain, trained(critic, tmp_path, **WAYS[way])) < TOLERANCE, way


def trained(critic, folder, max_steps=3, **changes):
    trainer = stir(ppo_trainers.trainer(critic, folder, max_steps=max(max_steps, 1), **changes))
    if max_steps:
        trainer.train()
    return trained_weights(trainer)


def test_prompts_with_several_completions_share_their_forward(tmp_path):
    trainer = ppo_trainers.trainer("head", tmp_path, num_generations=4, max_steps=1)
    trainer.train()
    log = next(log for log in trainer.state.log_history if "packing/forwarded_over_raw" in log)
    assert log["packing/forwarded_over_raw"] < 1


def critics_gradient(tmp_path, pinned: bool) -> dict:
    trainer = settled("adapter", tmp_path, gradient_checkpointing=True)
    model = base_model(trainer.model)
    inputs = whole_batch(trainer)
    enable = (
        model.gradient_checkpointing_enable if pinned else type(model).gradient_checkpointing_enable.__get__(model)
    )
    enable({"use_reentrant": False})
    our_loss(trainer, inputs)
    return {n: p.grad for n, p in trainer.model.named_parameters() if p.grad is not None}


def test_checkpointing_without_the_pin_gives_wrong_gradients_and_with_it_right_ones(tmp_path):
    trainer = settled("adapter", tmp_path, gradient_checkpointing=False)
    our_loss(trainer, whole_batch(trainer))
    right = {n: p.grad for n, p in trainer.model.named_parameters() if p.requires_grad}

    def error(grads):
        """Of the critic's first layer, relative."""
        name = next(n for n in right if ".critic." in n and "layers.0" in n)
        return ((grads[name] - right[name]).norm() / right[name].norm()).item() if name in grads else math.inf

    assert error(critics_gradient(tmp_path, pinned=True)) < 1e-5
    assert error(critics_gradient(tmp_path, pinned=False)) > 0.1


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_other_families_give_the_same_packed_and_padded(family, tmp_path):
    runs = [
        trained("head", tmp_path, model=tiny.model(family), packing=packing, max_steps=2) for packing in (True, False)
    ]
    assert distance(*runs) < TOLERANCE


# The critic's scale --------------------------------------------------------------------------------------------------


def twenty_times(completion_ids, **_):
    return [20 * score for score in ppo_trainers.reward(completion_ids)]


@pytest.mark.parametrize("critic", CRITICS if IS_THOROUGH else ["adapter", "separate"])
def test_scores_twenty_times_larger_train_the_same_weights(critic, tmp_path):
    settings = dict(kl_coef=0.0, num_ppo_epochs=2, learning_rate=1e-2)
    large, small = (
        trained(critic, tmp_path, reward_funcs=scores, value_normalisation=True, **settings)
        for scores in (twenty_times, ppo_trainers.reward)
    )
    assert distance(small, large) < 10 * TOLERANCE
    unscaled = trained(critic, tmp_path, reward_funcs=twenty_times, **settings)
    assert distance(small, unscaled) > 1e-3


def test_the_loss_on_the_critics_scale_is_the_textbooks_over_its_variance(tmp_path):
    trainer = settled("separate", tmp_path, value_normalisation=True, cliprange_value=None)
    inputs = whole_batch(trainer)
    scale, mask = trainer._scale, inputs["completion_mask"].bool()
    assert scale.std != 1.0
    outputs = trainer._values.forwarded(trainer.model, inputs)
    torch.testing.assert_close(scale.values(outputs)[mask], inputs["values"][mask], rtol=0, atol=1e-5)
    moved(trainer)
    outputs = trainer._values.forwarded(trainer.model, inputs)
    expected = (scale.values(outputs) - inputs["returns"])[mask].square().sum() / scale.std**2 / 2 / mask.sum()
    torch.testing.assert_close(trainer._value_loss(outputs, inputs), VF * expected, rtol=1e-5, atol=0)
