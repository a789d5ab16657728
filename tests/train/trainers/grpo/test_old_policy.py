"""On-policy with vLLM the old policy is not forwarded: ratios, weights and metrics are those of TRL, which does."""

import random
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import trl

import trl_ext
from tests.grpo_trainers import WEIGHT_TOLERANCE, learned, prompts, trainer, weights
from tests.rollouts import rollout
from trl_ext.errors import DataError
from trl_ext.trainers.grpo import log_probs

SAMPLING = ("sampling/sampling_logp_difference/", "sampling/importance_sampling_ratio/")


def sampled(prompts, trainer) -> dict:
    """Rollouts with what the sampler believed: off by half a nat, and unknown for some tokens (None, vLLM's NaN)."""
    output, draw = rollout(prompts, trainer), random.Random(1)
    output["logprobs"] = [
        [None if draw.random() < 0.1 else -5.3 + draw.uniform(-0.6, 0.6) for _ in ids]
        for ids in output["completion_ids"]
    ]
    return output


def with_tools(prompts, trainer) -> dict:
    """Rollouts of which every third token is a tool's."""
    output = sampled(prompts, trainer)
    return output | {"env_mask": [[int(i % 3 != 1) for i in range(len(ids))] for ids in output["completion_ids"]]}


def believing(folder, library=trl_ext, **changes):
    """A trainer that believes in a vLLM."""
    settings = dict(
        max_steps=1, gradient_accumulation_steps=2, rollout_func=sampled, eval_dataset=prompts().select([0, 1])
    )
    with patch("trl_ext.trainers.settings.values._check_without_effect"):  # of a vLLM that is not there yet
        subject = trainer(folder, library, **settings | changes)
    subject.use_vllm, subject._last_loaded_step = True, -1
    subject.vllm_generation = SimpleNamespace(sync_weights=lambda: None, temperature=1.0)
    subject.before = weights(subject)
    return subject


def num_forwards(trainer, monkeypatch) -> list[bool]:
    """Whether each forward from here on keeps its graph, as they come."""
    seen, forward = [], trainer.model.forward

    def counted(*args, **kwargs):
        seen.append(torch.is_grad_enabled())
        return forward(*args, **kwargs)

    monkeypatch.setattr(trainer.model, "forward", counted)
    return seen


def check_same(ours, theirs) -> None:
    """Train both: they end with the same weights."""
    for subject in (ours, theirs):
        subject.train()
    assert (learned(ours) - learned(theirs)).abs().max() <= WEIGHT_TOLERANCE


@pytest.mark.parametrize(
    "changes",
    [
        dict(vllm_importance_sampling_mode="token_truncate"),
        dict(vllm_importance_sampling_mode="token_mask", vllm_importance_sampling_clip_min=0.8),
        dict(vllm_importance_sampling_mode="sequence_truncate", off_policy_mask_threshold=0.01),
        dict(vllm_importance_sampling_mode="sequence_mask", rollout_func=with_tools),
        dict(vllm_importance_sampling_mode="token_truncate", loss_type="vespo", packing=False),
        dict(rollout_func=with_tools, mask_truncated_completions=True, loss_type="grpo"),
        dict(num_iterations=2, steps_per_generation=2, gradient_accumulation_steps=4),
    ],
    ids=lambda changes: ",".join(f"{k}={getattr(v, '__name__', v)}" for k, v in changes.items()),
)
def test_weights_and_metrics_are_trls(changes, tmp_path):
    ours = believing(tmp_path, **changes)
    theirs = believing(tmp_path, trl, **{name: value for name, value in changes.items() if name != "packing"})
    check_same(ours, theirs)
    mine, other = ours.state.log_history[0], theirs.state.log_history[0]
    names = {name for name in other if name.startswith(SAMPLING)}
    assert len(names) == 5 and names <= mine.keys()
    if "mask_truncated_completions" in changes:  # TRL counts a ratio of 1 for a sequence of which nothing counts
        names.remove("sampling/importance_sampling_ratio/mean")
    assert {name: mine[name] for name in names} == pytest.approx({name: other[name] for name in names}, rel=1e-4)


def test_the_update_is_the_only_forward_of_the_policy(tmp_path, monkeypatch):
    ours, theirs = (believing(tmp_path, library, beta=0.1, max_steps=2) for library in (trl_ext, trl))
    seen = num_forwards(ours, monkeypatch)
    check_same(ours, theirs)
    assert seen == [True] * len(seen)


def test_where_the_policy_changes_in_between_its_first_numbers_are_kept(tmp_path, monkeypatch):
    ours, theirs = (believing(tmp_path, library, num_iterations=2, max_steps=2) for library in (trl_ext, trl))
    seen = num_forwards(ours, monkeypatch)
    check_same(ours, theirs)
    assert False in seen


def test_an_evaluation_compares_its_own_rows(tmp_path):
    ours, theirs = (believing(tmp_path, library).evaluate() for library in (trl_ext, trl))
    names = {f"eval_{name}" for name in ours if name.startswith(SAMPLING)} | {
        name for name in theirs if name.startswith(tuple(f"eval_{prefix}" for prefix in SAMPLING))
    }
    assert len(names) == 5
    assert {name: ours[name] for name in names} == pytest.approx({name: theirs[name] for name in names}, rel=1e-4)
    assert ours["eval_loss"] == pytest.approx(theirs["eval_loss"], abs=1e-6)


@pytest.mark.parametrize("mode", ["token_mask", "sequence_mask"])
def test_a_step_whose_completions_are_all_masked_logs_0(mode, tmp_path):
    def cut_off(prompts, trainer):
        ids = [[5, 6, 7]] * len(prompts)
        return rollout(prompts, trainer) | {"completion_ids": ids, "logprobs": [[-5.0] * 3] * len(prompts)}

    changes = dict(rollout_func=cut_off, mask_truncated_completions=True, vllm_importance_sampling_mode=mode)
    subject = believing(tmp_path, **changes)
    subject.train()
    (entry,) = (log for log in subject.state.log_history if "loss" in log)
    found = {key: value for key, value in entry.items() if key.startswith(SAMPLING)}
    assert len(found) == 5 and not any(found.values())


def test_it_is_said_once(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(log_probs.logger, "warning", said.append)
    believing(tmp_path, max_steps=2).train()
    assert len(said) == 1 and "left out" in said[0]


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda logps: logps[2].pop(), r"Row 2 of rank 0 has \d+ sampled tokens, and \d+ log-probabilities of them"),
        (lambda logps: logps[5].append(-1.0), r"Row 5 of rank 0 has \d+ sampled tokens, and \d+ log-probabilities"),
        (lambda logps: logps.pop(), "Rank 0 got 8 completions, and log-probabilities of 7"),
    ],
    ids=["fewer", "more", "fewer rows"],
)
def test_log_probabilities_that_do_not_fit_the_tokens_are_one_sentence(damage, sentence, tmp_path):
    def damaged(prompts, trainer):
        output = sampled(prompts, trainer)
        damage(output["logprobs"])
        return output

    with pytest.raises(DataError, match=sentence):
        believing(tmp_path, rollout_func=damaged).train()


def test_no_log_probabilities_are_one_sentence(tmp_path):
    with pytest.raises(DataError, match="Rank 0 got no log-probabilities of its 8 completions"):
        believing(tmp_path, rollout_func=rollout).train()
