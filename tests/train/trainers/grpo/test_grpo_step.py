"""One optimizer step of trl_ext.GRPOTrainer is one of trl.GRPOTrainer on the same completions."""

from inspect import signature

import pytest
import torch
import trl
from transformers.generation import ContinuousBatchingConfig

import trl_ext
from tests import tiny
from tests.grpo_trainers import (
    LOSS_TYPES,
    WEIGHT_TOLERANCE,
    learned,
    prompts,
    steps_of,
    trained,
    trainer,
    weights,
    weights_after,
)
from tests.nightly import nightly
from trl_ext.compat.generate import prompts_forked
from trl_ext.errors import SupportError

MIXTURE = dict(family="qwen3_moe", router_aux_loss_coef=0.0)
CASES = [
    *(dict(loss_type=name) for name in LOSS_TYPES),
    dict(importance_sampling_level="sequence", loss_type="grpo"),
    dict(num_iterations=2, steps=2),
    dict(steps_per_generation=4, steps=3),
    nightly(dict(temperature=0.7)),
    dict(entropy_coef=0.01),
    dict(top_entropy_quantile=0.5),
    dict(mask_truncated_completions=True),
    dict(delta=1.5, epsilon_high=0.28),
    dict(gradient_checkpointing=True),
    dict(scale_rewards="batch"),
    dict(cache_implementation="static", rollout_func=None, top_p=0.9),
    nightly(dict(max_grad_norm=0.01)),
    dict(beta=0.1, steps=2),
    MIXTURE | dict(router_aux_loss_coef=0.1),
    *(dict(max_tokens_per_forward=24, loss_type=name) for name in ("dapo", "grpo", "dr_grpo")),
    MIXTURE | dict(max_tokens_per_forward=24),
    # Generations that begin within a step.
    nightly(dict(gradient_accumulation_steps=6, steps_per_generation=4, steps=2)),
    nightly(dict(gradient_accumulation_steps=3, steps_per_generation=2, steps=2)),
    dict(gradient_accumulation_steps=3, steps_per_generation=2, num_iterations=2, steps=3),
    dict(gradient_accumulation_steps=2, steps_per_generation=3, steps=2),
    nightly(dict(gradient_accumulation_steps=4, steps_per_generation=2, num_iterations=2, steps=2)),
]


@pytest.mark.parametrize("changes", CASES, ids=lambda changes: ",".join(f"{k}={v}" for k, v in changes.items()))
def test_a_step_is_trls(changes, tmp_path):
    ours = weights_after(trl_ext, tmp_path, **changes)
    theirs = weights_after(trl, tmp_path, **{k: v for k, v in changes.items() if k != "max_tokens_per_forward"})
    assert (ours - theirs).abs().max() <= WEIGHT_TOLERANCE


def test_a_row_of_a_stream_that_is_longer_than_the_budget_gets_a_forward_of_its_own(tmp_path):
    def run(library, **changes):
        return trained(tmp_path, library, data=prompts().to_iterable_dataset(), shuffle_dataset=False, **changes)

    ours, theirs = run(trl_ext, packing=True, max_tokens_per_forward=18), run(trl)
    assert (learned(ours) - learned(theirs)).abs().max() <= WEIGHT_TOLERANCE
    assert ours._packs


# By default the cache takes half of the memory that is free, and filling that takes a minute.
PAGE = "page_size" if "page_size" in signature(ContinuousBatchingConfig).parameters else "block_size"
SMALL_CACHE = {"num_blocks": 8, "max_batch_tokens": 64, PAGE: 32}
CONTINUOUS = dict(use_transformers_continuous_batching=True, transformers_continuous_batching_config=SMALL_CACHE)


def test_what_continuous_batching_generates_is_trained_packed_and_as_trl_trains_it(tmp_path):
    """TRL casts the model for generation and leaves it so, which small updates under bf16 do not survive."""
    options = dict(max_completion_length=6, rollout_func=None, **CONTINUOUS)
    ours, theirs = trained(tmp_path, **options), trainer(tmp_path, trl, **options)
    theirs.before = weights(theirs)
    with prompts_forked(theirs.model):  # so that the same tokens are drawn
        theirs.train()
    assert ours._packs and ours.model.config._attn_implementation == "sdpa"
    assert (learned(ours) - learned(theirs)).abs().max() <= WEIGHT_TOLERANCE
    cast = trained(tmp_path, bf16=True, **options).model
    assert {one.dtype for one in [*cast.parameters(), *cast.buffers()]} == {torch.float32}


DENSE = dict(num_local_experts=0, num_experts_per_tok=0)


@pytest.mark.parametrize(
    ("family", "changes", "has_experts"),
    [("phimoe_window", {}, True), ("granite4", {}, True), ("granite4", DENSE, False)],
    ids=["phimoe", "granite", "dense granite"],
)
def test_families_that_count_their_experts_otherwise_train_with_the_auxiliary_loss(
    family, changes, has_experts, tmp_path
):
    model = tiny.model(family, **changes)
    if has_experts and "router_logits" not in model._can_record_outputs:  # as Granite 4 under transformers 5.17
        with pytest.raises(SupportError, match="no router logits"):
            trained(tmp_path, model=model, max_steps=1)
        return
    ours = trained(tmp_path, model=model, max_steps=1)
    learned(ours)
    assert ("aux_loss" in steps_of(ours)[0]) == has_experts
    assert "num_experts" not in ours.model.config.to_dict()


def test_a_mixture_without_router_logits_is_refused_in_a_sentence(tmp_path, monkeypatch):
    """As Granite 4 under transformers 5.17: transformers' own loss is then the number 0."""
    monkeypatch.setattr("transformers.models.mixtral.modeling_mixtral.load_balancing_loss_func", lambda *_: 0)
    with pytest.raises(SupportError, match=r"no router logits.* router_aux_loss_coef to 0"):
        trained(tmp_path, model=tiny.model("granite4"), max_steps=1)
