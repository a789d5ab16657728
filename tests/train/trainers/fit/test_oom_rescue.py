"""A forward that runs out of memory is taken again in chunks, with the gradients of the whole."""

import weakref
from functools import cache
from tempfile import mkdtemp

import pytest
import torch
from peft import LoraConfig

from tests import grpo_trainers, ppo_trainers, reward_trainers, tiny
from tests.grpo_trainers import LOSS_TYPES, WEIGHT_TOLERANCE, steps_of, weights
from tests.nightly import daily, nightly
from tests.out_of_memory import SENTENCE, Limit, fail_in_backward
from tests.ppo_trainers import CRITICS, distance, stir, trained_weights
from tests.preferences import pairs
from tests.reward_trainers import warnings_of
from trl_ext.compat.peft import base_model
from trl_ext.errors import OutOfMemoryError

LORA = LoraConfig(r=4, target_modules="all-linear", exclude_modules=["lm_head"], init_lora_weights=False)


def grpo(folder, peft_config=None, **changes):
    # What Adam and clipping hide, a gradient that is twice too large, is a step twice too large with these.
    settings = dict(optim="sgd", learning_rate=1e-2, max_grad_norm=0.0, gradient_accumulation_steps=2) | changes
    torch.manual_seed(3)  # LoRA's weights
    return grpo_trainers.trainer(folder, peft_config=peft_config, **settings)


@cache
def whole(has_lora: bool = False, **changes) -> tuple[torch.Tensor, list[dict]]:
    """Weights and logs of a run that has memory enough."""
    subject = grpo(mkdtemp(), LORA if has_lora else None, **changes)
    before = weights(subject)
    subject.train()
    assert (weights(subject) - before).abs().max() > 100 * WEIGHT_TOLERANCE
    return weights(subject), steps_of(subject)


def check_same(folder, has_lora: bool = False, limit=None, **changes):
    """Train with a limit, against the run without one; the trainer and its limit."""
    # First: a trainer seeds, as it is made, what its training draws.
    expected, _ = whole(has_lora, **changes)
    subject = grpo(folder, LORA if has_lora else None, **changes)
    limit = Limit(base_model(subject.model), **(limit or dict(tokens=40)))
    subject.train()
    assert limit.failed > 0
    assert (weights(subject) - expected).abs().max().item() <= WEIGHT_TOLERANCE
    return subject, limit


def check_alike(limited, expected, *names, difference=lambda a, b: distance(trained_weights(a), trained_weights(b))):
    """Train both, the limited one last: they end with the same weights and log the same figures of these names."""
    for subject in (expected, limited):
        # A trainer seeds, as it is made, what its training draws; here it matters which rows meet.
        torch.manual_seed(0)
        subject.train()
    assert difference(limited, expected) <= WEIGHT_TOLERANCE
    for ours, theirs in zip(steps_of(limited), steps_of(expected), strict=True):
        assert {name: ours[name] for name in names} == pytest.approx({name: theirs[name] for name in names}, abs=1e-5)


# Same gradients ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_type", daily(LOSS_TYPES, "dapo", "bnpo"))
def test_grpo_learns_in_chunks_what_it_learns_whole(loss_type, tmp_path):
    check_same(tmp_path, loss_type=loss_type)


@pytest.mark.parametrize(
    ("has_lora", "changes"),
    [
        (False, dict(packing=False)),
        nightly(False, dict(packing=False, loss_type="bnpo")),
        (False, dict(importance_sampling_level="sequence", loss_type="grpo", num_iterations=2)),
        nightly(False, dict(gradient_checkpointing=True)),
        (False, dict(share_prompt=False, max_tokens_per_forward=60)),
        (True, dict(beta=0.05)),
    ],
    ids=["padded", "padded-bnpo", "sequence-level", "checkpointing", "budget", "lora-with-kl"],
)
def test_so_it_does_in_every_way_to_forward(has_lora, changes, tmp_path):
    # With a budget no forward is large; the second one fails.
    limit = dict(at={1}) if "max_tokens_per_forward" in changes else None
    check_same(tmp_path, has_lora, limit, **changes)


def test_chunks_are_halved_until_one_row_is_left_and_three_rows_are_cut_in_two_and_one(tmp_path):
    # One padded row has 21 tokens or less, two have more.
    subject, limit = check_same(tmp_path, limit=dict(tokens=21), packing=False)
    assert limit.failed == 2
    assert subject.forward_loop.halving.level["actor"] == 2
    changes = dict(per_device_train_batch_size=3, gradient_accumulation_steps=4, loss_type="grpo")
    check_same(tmp_path, limit=dict(at={0}), **changes)


@pytest.mark.parametrize(
    "changes",
    [nightly({}), {"packing": False}, nightly({"max_tokens_per_forward": 300}), {"center_rewards_coefficient": 0.1}],
    ids=["packed", "padded", "budget", "centred"],
)
def test_a_reward_model_learns_in_chunks_what_it_learns_whole(changes, tmp_path):
    settings = dict(max_steps=3, gradient_accumulation_steps=2, logging_steps=1, max_grad_norm=0.0) | changes
    expected, limited = (reward_trainers.trainer(tmp_path, pairs(24, margin=True), **settings) for _ in range(2))
    limit = Limit(limited.model, at={1, 6})
    names = ("loss", "accuracy", "margin", "min_reward", "mean_reward", "max_reward", "num_tokens")
    check_alike(limited, expected, *names, difference=lambda a, b: (weights(a) - weights(b)).abs().max())
    assert limit.failed == 2


LOSSES = ("loss", "loss/policy_avg", "loss/value_avg")


@pytest.mark.parametrize(
    ("critic", "packing", "changes"),
    [
        *((critic, True, dict(num_ppo_epochs=2)) for critic in CRITICS),
        *(nightly(critic, False, dict(num_ppo_epochs=2)) for critic in CRITICS),
        # Shares of the policy loss are not those of the value loss.
        nightly("head", True, dict(loss_type="bnpo")),
    ],
)
def test_ppo_learns_in_chunks_what_it_learns_whole(critic, packing, changes, tmp_path):
    settings = dict(packing=packing, max_grad_norm=0.0) | changes
    expected, limited = (stir(ppo_trainers.trainer(critic, tmp_path, **settings)) for _ in range(2))
    limit = Limit(base_model(limited.model), at={2})
    check_alike(limited, expected, *LOSSES)
    assert limit.failed == 1


@pytest.mark.parametrize("critic", ["adapter", "separate"])
def test_ppo_does_so_when_the_critic_alone_runs_out(critic, tmp_path):
    expected, limited = (stir(ppo_trainers.trainer(critic, tmp_path, max_grad_norm=0.0)) for _ in range(2))
    is_apart = critic == "separate"
    # The adapter's forward comes second in each micro-batch, and the policy's metrics are written by then.
    limit = Limit(limited._ppo_models.value_model if is_apart else base_model(limited.model), at={1})
    check_alike(limited, expected, *LOSSES)
    assert limit.failed == 1
    assert limited.forward_loop.halving.level["actor"] == (0 if is_apart else 1)
    for ours, theirs in zip(steps_of(limited), steps_of(expected), strict=True):  # prompts are shared less
        assert ours["packing/forwarded_tokens"] == pytest.approx(theirs["packing/forwarded_tokens"], rel=0.2)


def test_the_failed_graph_is_gone_before_the_chunks_run(tmp_path):
    subject = grpo(tmp_path)
    embedded, alive = [], []

    def note(module, args, output):
        alive.extend(one() is not None for one in embedded)
        embedded.append(weakref.ref(output))

    def fail(module, args, output):
        if len(embedded) == 1:
            raise torch.OutOfMemoryError(SENTENCE)

    subject.model.get_input_embeddings().register_forward_hook(note)
    subject.model.model.layers[-1].register_forward_hook(fail)
    subject.train()
    assert len(embedded) > 1
    assert not any(alive)


# What the run says and keeps --------------------------------------------------------------------------------------


def test_the_run_keeps_the_smaller_size_and_warns_once(tmp_path, caplog):
    subject = grpo(tmp_path, max_steps=3)
    limit = Limit(subject.model, tokens=0, times=1)
    subject.train()
    sentences = [text for text in warnings_of(caplog) if "Out of memory" in text]
    assert sentences == [
        f"Out of memory in a forward of 4 rows, {limit.seen[0]} tokens; from here forwards are 2 times smaller, with "
        "the same gradients. Set per_device_train_batch_size=2 and gradient_accumulation_steps=4 for the next run."
    ]
    assert limit.failed == 1
    # Later steps are planned with half of the budget; the longest row has 21 tokens.
    assert all(tokens <= 21 for tokens in limit.seen[-5:])


def test_no_token_counts_twice_and_metrics_are_the_wholes(tmp_path):
    subject = grpo(tmp_path, packing=False)
    Limit(subject.model, tokens=0, times=1)
    subject.train()
    _, expected = whole(packing=False)
    for ours, theirs in zip(steps_of(subject), expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name in ("loss", "packing/padded_tokens", "num_tokens", "reward", "entropy"):
            assert ours[name] == pytest.approx(theirs[name], abs=1e-6), name
        # The failed forward is not counted, and halves are no wider than their own rows.
        assert ours["packing/forwarded_tokens"] <= theirs["packing/forwarded_tokens"]


# The end ----------------------------------------------------------------------------------------------------------


def ends(subject) -> OutOfMemoryError:
    with pytest.raises(OutOfMemoryError) as caught:
        subject.train()
    assert str(caught.value.__cause__) == SENTENCE
    return caught.value


def test_a_single_row_that_does_not_fit_ends_the_run(tmp_path):
    subject = grpo(tmp_path)
    limit = Limit(subject.model)
    text = str(ends(subject))
    assert limit.failed in (3, 4)  # four to eight rows, which are planned by tokens, then half as many, down to one
    assert text.startswith("Out of memory in the forward: step 1, 1 row of ")
    for words in (
        "Tried to allocate 1.96 GiB",
        "It could not be split: one row is left.",
        "`trl-ext check RECIPE` shows what would fit",
    ):
        assert words in text


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (dict(memory_on_oom="raise"), "memory_on_oom is 'raise'"),
        (dict(entropy_coef=0.1), "the entropy bonus is a mean over all tokens"),
        (dict(top_entropy_quantile=0.5), "top_entropy_quantile=0.5 is a quantile over all tokens"),
        (dict(model="qwen3_moe", router_aux_loss_coef=0.1), "the load-balancing loss counts all tokens"),
    ],
)
def test_where_nothing_may_be_tried_again_the_run_ends_with_why(changes, why, tmp_path):
    subject = grpo(tmp_path, **changes)
    limit = Limit(subject.model)
    assert why in str(ends(subject))
    assert limit.failed == 1


def test_a_users_own_batches_are_not_cut(tmp_path):
    def collator(examples):
        rows = [e["chosen_ids"] for e in examples] + [e["rejected_ids"] for e in examples]
        padded = tiny.tokenizer().pad({"input_ids": rows}, return_tensors="pt")
        return {"input_ids": padded["input_ids"], "attention_mask": padded["attention_mask"]}

    subject = reward_trainers.trainer(tmp_path, data_collator=collator)
    Limit(subject.model)
    assert "It could not be split: batches of your own data_collator are not cut." in str(ends(subject))


def test_a_backward_is_not_taken_again(tmp_path):
    subject = grpo(tmp_path)
    fail_in_backward(subject.model)
    text = str(ends(subject))
    assert text.startswith("Out of memory in the backward: step 1, 4 rows of ")
    assert "It could not be split: in the backward" in text


def test_generation_and_optimizer_step_are_named(tmp_path):
    def fail(*_, **__):
        raise torch.OutOfMemoryError(SENTENCE)

    generating = grpo(tmp_path)
    generating.rollout_func = fail
    assert str(ends(generating)).startswith("Out of memory while generating: step 1. ")
    stepping = grpo(tmp_path)
    stepping.create_optimizer()
    stepping.optimizer.step = fail
    text = str(ends(stepping))
    assert text.startswith("Out of memory at the optimizer step: step 1. ")
    assert "ZeRO-2" in text
