"""Packed = alone, through the real trainer: log-probabilities, entropies and every gradient."""

import pytest
import torch
import trl
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers.utils import logging
from trl.trainer.utils import add_fused_lm_head

import trl_ext
from tests import grpo_trainers, tiny
from tests.batches import RAGGED, alone, batch, forward_alone, gradient, padded
from tests.grpo_trainers import WEIGHT_TOLERANCE
from tests.nightly import daily, nightly
from trl_ext import GRPOTrainer
from trl_ext.packing import kernels, merge
from trl_ext.trainers.step import score

LOGP_TOLERANCE = 5e-6
GRADIENT_TOLERANCE = 2e-6  # relative


def trainer(model, folder, **changes) -> GRPOTrainer:
    settings = dict(data=tiny.words(5, 6), per_device_train_batch_size=8, packing=True, rollout_func=None)
    return grpo_trainers.trainer(folder, model=model, **settings | changes)


def compare(subject: GRPOTrainer, reference: torch.nn.Module, given=RAGGED, temperature: float = 1.0):
    """Largest log-prob and entropy error, and relative gradient error, of the trainer against each row alone."""
    add_fused_lm_head(reference, temperature=temperature, outputs=("log_probs", "entropy"))
    return compare_with_head(subject, reference, given)


def compare_with_head(subject: GRPOTrainer, reference: torch.nn.Module, given=RAGGED):
    expected, expected_entropy = forward_alone(reference, given)
    logps, entropies, aux = subject._get_per_token_logps_and_entropies(
        subject.model, given.input_ids, given.attention_mask, given.width, compute_entropy=True
    )
    assert aux is None
    weights = given.weights()
    ours = gradient(subject.model, (logps * weights).sum() + (entropies * weights).sum())
    theirs = gradient(reference, (expected * weights).sum() + (expected_entropy * weights).sum())
    return (
        (logps - expected).abs().max().item(),
        (entropies - expected_entropy).abs().max().item(),
        ((ours - theirs).norm() / theirs.norm()).item(),
    )


def check_exact(subject: GRPOTrainer, reference: torch.nn.Module, given=RAGGED, compared=compare, **options) -> None:
    """Fail unless rows score, and teach, what they do alone."""
    logp, entropy, grad = compared(subject, reference, given, **options)
    assert max(logp, entropy) <= LOGP_TOLERANCE
    assert grad <= GRADIENT_TOLERANCE


WAYS = [(True, True), (True, False), (False, True), (False, False)]


@pytest.mark.parametrize(
    ("family", "checkpointing", "share_prompt"),
    [
        (name, *way) if name == "llama" or way == (True, True) else nightly(name, *way)
        for name in tiny.PACKABLE
        for way in WAYS
    ],
)
def test_packed_rows_score_as_each_row_alone(family, checkpointing, share_prompt, tmp_path):
    subject = trainer(
        tiny.model(family), tmp_path, gradient_checkpointing=checkpointing, share_prompt=share_prompt, temperature=0.7
    )
    if checkpointing:
        subject.model.gradient_checkpointing_enable({"use_reentrant": False})
    check_exact(subject, tiny.model(family), temperature=0.7)


@pytest.mark.parametrize("family", tiny.STRETCHED)
def test_rows_longer_than_the_original_length_score_as_each_row_alone(family, tmp_path):
    """transformers takes the frequencies of the longest row of a forward, and dynamic NTK those of earlier ones."""
    subject = trainer(tiny.model(family), tmp_path, max_completion_length=48)
    given = batch((40, (4, 11, 1, 24)), (5, (3, 9)), (30, (25,)), order=[5, 0, 6, 1, 4, 2, 3])
    expected = [alone(tiny.model(family), padded([row]))[0][0] for row in given.rows]
    for _ in range(2):
        found, *_ = subject._get_per_token_logps_and_entropies(
            subject.model, given.input_ids, given.attention_mask, given.width
        )
        for ours, row in zip(found, expected, strict=True):
            assert (ours[: len(row)] - row).abs().max() <= LOGP_TOLERANCE
    # The whole batch padded, as TRL forwards it, is not.
    padded_batch, *_ = trl.GRPOTrainer._get_per_token_logps_and_entropies(
        trainer(tiny.model(family), tmp_path, max_completion_length=48, packing=False),
        with_head(tiny.model(family)),
        given.input_ids,
        given.attention_mask,
        given.width,
    )
    assert max((one[: len(row)] - row).abs().max() for one, row in zip(padded_batch, expected, strict=True)) > 1e-4


def with_head(model):
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    return model


@pytest.mark.parametrize(("family", "shares"), [("longrope", False), ("dynamic", False), ("llama", True)])
def test_prompts_are_shared_where_no_row_has_positions_of_its_own_length(family, shares, tmp_path, caplog):
    logging.enable_propagation()
    subject = trainer(tiny.model(family), tmp_path, max_completion_length=48)
    assert subject._packs and subject._share_prompt is shares
    assert any("without sharing prompts: its positions" in m for m in caplog.messages) is not shares
    assert trainer(tiny.model(family), tmp_path, max_completion_length=46)._share_prompt  # prompts of two tokens


@pytest.mark.parametrize("reentrant", [True, False])
def test_lora_gradients_are_those_of_each_row_alone(reentrant, tmp_path):
    lora = LoraConfig(r=4, target_modules="all-linear", exclude_modules=["lm_head"], init_lora_weights=False)
    torch.manual_seed(3)
    subject = trainer(tiny.model("llama"), tmp_path, peft_config=lora, gradient_checkpointing=True)
    subject.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    reference = get_peft_model(with_head(tiny.model("llama")), lora)
    reference.load_state_dict(subject.model.state_dict())
    check_exact(subject, reference, compared=compare_with_head)


def test_a_token_budget_and_surplus_forwards_for_other_ranks_change_nothing(tmp_path, monkeypatch):
    subject = trainer(tiny.model("llama"), tmp_path, max_tokens_per_forward=60, max_completion_length=32)
    check_exact(subject, tiny.model("llama"))
    monkeypatch.setattr(score, "agreed_num_forwards", lambda num_rows, accelerator: num_rows + 3)
    check_exact(subject, tiny.model("llama"))


def test_a_micro_batch_of_truncated_completions_stays_in_the_graph(tmp_path):
    subject = trainer(tiny.model("llama"), tmp_path)
    given = batch((4, (3, 5)))
    mask = given.attention_mask.clone()
    mask[:, -given.width :] = 0
    logps, _, _ = subject._get_per_token_logps_and_entropies(subject.model, given.input_ids, mask, given.width)
    assert logps.shape == (2, 5)
    assert gradient(subject.model, logps.sum()).abs().max() == 0


@pytest.mark.parametrize("family", daily(tiny.PACKABLE, "qwen3"))
def test_bfloat16_error_is_at_most_twice_that_of_padding(family, tmp_path):
    exact, _ = alone(tiny.model(family), RAGGED)
    errors = {}
    for packing in (True, False):
        subject = trainer(tiny.model(family).bfloat16(), tmp_path, packing=packing)
        logps, _, _ = subject._get_per_token_logps_and_entropies(
            subject.model, RAGGED.input_ids, RAGGED.attention_mask, RAGGED.width
        )
        errors[packing] = (logps - exact).square().mean().sqrt().item()
    assert errors[True] <= 2 * errors[False]


# The self-check ---------------------------------------------------------------------------------------------------


def test_a_merge_with_a_wrong_gradient_is_not_trained_with(tmp_path, monkeypatch):
    """The self-check compares forwards; gradients are compared before the kernel is used."""
    prompts = [tiny.words(*range(3 + i, 53 + i)) for i in (0, 1)] * 4

    def train(library, folder, **own):
        return grpo_trainers.trained(folder, library, data=Dataset.from_dict({"prompt": prompts}), **own)

    class Wrong(merge.CpuKernel):
        def backward(self, *given):
            return tuple(1.1 * one for one in super().backward(*given))

    said: list[str] = []
    monkeypatch.setattr(kernels, "CpuKernel", Wrong)
    monkeypatch.setattr(merge.logger, "warning", said.append)
    ours, theirs = train(trl_ext, tmp_path, packing=True), train(trl, tmp_path)
    assert ours._packs and "Keys are copied instead" in said[0]
    assert (grpo_trainers.learned(ours) - grpo_trainers.learned(theirs)).abs().max() <= WEIGHT_TOLERANCE
