"""The forwards of an optimizer step: group mates together, rows without gradient left out, one backward each."""

import weakref

import pytest
import torch
import trl
from transformers.utils import logging

import trl_ext
from tests import grpo_trainers
from tests.grpo_trainers import LOSS_TYPES, WEIGHT_TOLERANCE, steps_of, weights
from tests.nightly import daily, nightly
from tests.rollouts import rollout
from trl_ext import GRPOConfig
from trl_ext.trainers.step.forward import StepForward
from trl_ext.trainers.step.rows import WEIGHT, StepRows, planned, sizes_of
from trl_ext.trainers.step.settings import StepSettings, why_micro_batch_stays_whole, why_rows_stay


def rollouts() -> dict:
    """Four rows behind two prompts of one and three tokens, padded; `names` says which row it was."""
    prompt_ids = torch.tensor([[0, 0, 7], [4, 5, 6], [0, 0, 7], [4, 5, 6]])
    completion_mask = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]])
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": (prompt_ids > 0).long(),
        "completion_ids": torch.arange(16).view(4, 4) + 20,
        "completion_mask": completion_mask,
        "advantages": torch.tensor([1.0, 0.0, -1.0, 1.0]),
        "ratio": torch.tensor([[1.0], [2.0], [3.0], [4.0]]),
        "names": ["a", "b", "c", "d"],
        "num_items_in_batch": torch.tensor(6),
        "nothing": None,
    }


def step_rows(given: dict) -> StepRows:
    sizes = sizes_of(given)
    in_plan = planned(sizes, StepSettings(True, True, None, None))
    return StepRows(given, sizes, in_plan, range(len(sizes)), lambda rows, batch: rows / 4, share_prompt=True)


def test_a_row_is_measured_without_its_padding():
    sizes = sizes_of(rollouts())
    assert [(one.prompt_length, one.completion_length, one.has_gradient) for one in sizes] == [
        (1, 1, True),
        (3, 2, False),
        (1, 3, True),
        (3, 0, True),
    ]


def test_a_prompt_has_one_number_whatever_its_padding_and_no_two_have_the_same():
    draw = torch.Generator().manual_seed(0)
    given = rollouts()
    ids = torch.randint(1, 50_000, (500, 9), generator=draw)
    mask = torch.ones_like(ids)
    mask[250:, :4] = 0
    given = {"prompt_ids": ids, "prompt_mask": mask, "completion_mask": mask, "advantages": torch.ones(500)}
    numbers = [one.prompt for one in sizes_of(given)]
    assert len(set(numbers)) == 500
    wider = {**given, **{name: torch.nn.functional.pad(given[name], (5, 0)) for name in ("prompt_ids", "prompt_mask")}}
    assert [one.prompt for one in sizes_of(wider)] == numbers


def test_all_values_of_a_row_stay_together_in_the_columns_that_they_need():
    batch = step_rows(rollouts()).batch((0, 2))
    assert batch["prompt_ids"].tolist() == [[7], [7]]
    assert batch["completion_ids"].tolist() == [[20, 21, 22], [28, 29, 30]]
    assert batch["completion_mask"].tolist() == [[1, 0, 0], [1, 1, 1]]
    assert batch["advantages"].tolist() == [1.0, -1.0]
    assert batch["ratio"].tolist() == [[1.0], [3.0]]
    assert batch["names"] == ["a", "c"]
    assert batch["num_items_in_batch"] == 6
    assert batch["nothing"] is None
    assert batch[WEIGHT] == 0.5


def test_a_forward_without_rows_is_one_row_that_counts_for_nothing():
    batch = step_rows(rollouts()).batch(())
    assert batch["prompt_ids"].tolist() == [[4, 5, 6]]
    assert not any(batch[name].any() for name in ("completion_ids", "completion_mask", "advantages", "ratio"))
    assert batch[WEIGHT] == 0.0


def test_halves_are_made_on_every_rank_alike():
    forward = StepForward(step_rows(rollouts()), (0, 1, 2), most_rows=3)
    assert sorted(i for half in forward.halves() for i in half.members) == [0, 1, 2]
    assert [half.most_rows for half in forward.halves()] == [2, 2]
    assert [half.members for half in StepForward(forward.rows, (), 3).halves()] == [(), ()]
    assert [half.members for half in StepForward(forward.rows, (1,), 1).halves()] == [(1,)]


@pytest.mark.parametrize("loss_type", [name for name in LOSS_TYPES if name != "sapo"])
def test_a_loss_that_depends_on_the_split_keeps_trls(loss_type, tmp_path):
    args = GRPOConfig(str(tmp_path), loss_type=loss_type, use_cpu=True, bf16=False)

    def stays(*, has_entropy_bonus: bool = False, has_aux_loss: bool = False) -> bool:
        facts = {"has_entropy_bonus": has_entropy_bonus, "has_aux_loss": has_aux_loss}
        return bool(why_rows_stay(args, why_micro_batch_stays_whole(args, takes_images=False, **facts)))

    assert stays() is (loss_type == "bnpo")
    assert stays(has_entropy_bonus=True) and stays(has_aux_loss=True)


def subject(folder, library=trl_ext, **changes):
    return grpo_trainers.trainer(folder, library, **dict(gradient_accumulation_steps=4) | changes)


def trained(folder, library=trl_ext, **changes):
    trainer = subject(folder, library, **changes)
    trainer.train()
    return trainer


def entries(folder, library=trl_ext, **changes) -> list[dict]:
    """What a training logs of its steps."""
    return steps_of(trained(folder, library, **changes))


def of_trl(changes) -> dict:
    """The settings that TRL knows, too."""
    return {name: value for name, value in changes.items() if name not in ("packing", "skip_zero_advantage")}


def equal_for_short_prompts(prompts, completion_ids, **_):
    """Rewards without variance for most of the groups."""
    return [sum(ids) % 17 / 17 if len(p.split()) > 5 else 1.0 for p, ids in zip(prompts, completion_ids, strict=True)]


# Rows without a gradient --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_type", daily(LOSS_TYPES, "dapo", "bnpo"))
def test_rows_of_zero_advantage_leave_the_update_and_the_weights_are_trls(loss_type, tmp_path):
    changes = dict(rewards=equal_for_short_prompts, loss_type=loss_type)
    ours, theirs = (trained(tmp_path, library, **changes) for library in (trl_ext, trl))
    assert (weights(ours) - weights(theirs)).abs().max() <= WEIGHT_TOLERANCE
    first, second = steps_of(ours)[0], entries(tmp_path, skip_zero_advantage=False, **changes)[0]
    assert first["packing/skipped_rows_frac"] == pytest.approx(first["frac_reward_zero_std"])
    assert first["packing/skipped_rows_frac"] > 0
    assert first["packing/forwarded_tokens"] < second["packing/forwarded_tokens"]
    # What was left out is no saving by packing.
    assert first["packing/padded_tokens"] < second["packing/padded_tokens"]
    raw = [one["packing/forwarded_tokens"] / one["packing/forwarded_over_raw"] for one in (first, second)]
    assert raw[0] + first["packing/skipped_tokens"] == pytest.approx(raw[1])
    assert not {"packing/skipped_rows_frac", "packing/skipped_tokens"} & set(second)


@pytest.mark.parametrize(
    "changes", [dict(num_iterations=2), nightly(dict(steps_per_generation=8)), dict(packing=False), dict(beta=0.1)]
)
def test_so_they_do_off_policy_and_on_padded_batches_but_not_beside_a_penalty(changes, tmp_path):
    changes = dict(rewards=equal_for_short_prompts, **changes)
    ours, theirs = trained(tmp_path, **changes), trained(tmp_path, trl, **of_trl(changes))
    assert (weights(ours) - weights(theirs)).abs().max() <= WEIGHT_TOLERANCE
    assert ("packing/skipped_rows_frac" in steps_of(ours)[0]) == ("beta" not in changes)


def all_equal(completions, **_):
    return [1.0] * len(completions)


@pytest.mark.parametrize("loss_type", daily(("dapo", "grpo", "bnpo"), "dapo", "bnpo"))
def test_a_step_of_equal_rewards_says_so_once_and_changes_nothing(loss_type, tmp_path, caplog):
    logging.enable_propagation()
    before = subject(tmp_path, rewards=all_equal, loss_type=loss_type)
    start = weights(before)
    before.train()
    assert torch.equal(weights(before), start)
    assert [r for r in caplog.messages if "no gradient" in r] == [
        "No completion of this step has an advantage: in every group all rewards are equal, or completions were "
        "masked. The step has no gradient, which is logged only once; the metric frac_reward_zero_std counts groups "
        "of equal rewards."
    ]
    for entry in steps_of(before):
        assert entry["loss"] == entry["grad_norm"] == 0.0 and entry["frac_reward_zero_std"] == 1
        assert loss_type == "bnpo" or entry["packing/skipped_rows_frac"] == 1.0
        assert all(value == value for value in entry.values() if isinstance(value, float))
        assert entry["entropy"] > 1.0, "of the one row that is forwarded"


def test_weight_decay_goes_on_where_there_is_nothing_to_learn_as_it_does_in_trl(tmp_path):
    ours, theirs = (
        grpo_trainers.trained(tmp_path, library, rewards=all_equal, weight_decay=0.1) for library in (trl_ext, trl)
    )
    assert (weights(theirs) - theirs.before).abs().max() > 0
    assert (weights(ours) - weights(theirs)).abs().max() <= 1e-7


EVERY_LOSS = [dict(packing=False), *(dict(loss_type=name) for name in LOSS_TYPES)]


@pytest.mark.parametrize(
    "changes", daily(EVERY_LOSS, dict(packing=False), dict(loss_type="dapo"), dict(loss_type="cispo"))
)
def test_a_step_without_gradient_logs_every_key_of_trls(changes, tmp_path):
    changes = dict(rewards=all_equal, max_steps=1, **changes)
    (ours,), (theirs,) = entries(tmp_path, **changes), entries(tmp_path, trl, **of_trl(changes))
    assert set(theirs) <= set(ours)
    assert all(isinstance(ours[key], int | float) for key in theirs if isinstance(theirs[key], int | float))


def test_a_step_whose_completions_are_all_masked_logs_every_key_as_0(tmp_path):
    def cut_off(prompts, trainer):
        return {**rollout(prompts, trainer), "completion_ids": [[5, 6, 7]] * len(prompts)}

    (entry,) = entries(tmp_path, mask_truncated_completions=True, max_steps=1, beta=0.1, rollout_func=cut_off)
    assert [entry[key] for key in ("entropy", "kl", "clip_ratio/low_min", "clip_ratio/high_max")] == [0.0] * 4


# Metrics ------------------------------------------------------------------------------------------------------------


CLIPPED = dict(rewards=equal_for_short_prompts, num_iterations=2, learning_rate=0.05)
ONE_MICRO_BATCH = dict(per_device_train_batch_size=16, gradient_accumulation_steps=1)


@pytest.mark.parametrize(
    "changes", [dict(), nightly(dict(importance_sampling_level="sequence")), dict(loss_type="cispo")]
)
def test_the_metrics_of_a_step_in_one_micro_batch_are_trls(changes, tmp_path):
    changes = CLIPPED | ONE_MICRO_BATCH | dict(max_steps=3) | changes
    ours = entries(tmp_path, max_tokens_per_forward=60, skip_zero_advantage=False, **changes)
    theirs = entries(tmp_path, trl, **changes)
    keys = [key for key in theirs[0] if key.startswith(("clip", "cispo", "entropy", "loss", "grad_norm"))]
    assert len(keys) >= 4
    for one, other in zip(ours, theirs, strict=True):
        for key in keys:
            assert one[key] == pytest.approx(other[key], abs=2e-6), key
    assert any(value > 0 for one in ours for key, value in one.items() if "clip_ratio" in key)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_clipped_shares_count_the_rows_that_were_left_out(level, tmp_path):
    clipped = CLIPPED | dict(importance_sampling_level=level)
    with_all, without = (entries(tmp_path, skip_zero_advantage=skips, **clipped) for skips in (False, None))
    for one, other in zip(with_all, without, strict=True):
        for key in (key for key in one if key.startswith("clip_ratio")):
            assert one[key] == pytest.approx(other[key], abs=2e-6), key


# Forwards -----------------------------------------------------------------------------------------------------------


def forwards_of(trainer) -> list[tuple[int, int]]:
    """Tokens of every forward with gradient, and how many forwards' hidden states were alive when it began."""
    seen: list[tuple[int, int]] = []
    alive: list[weakref.ref] = []

    def note(module, args, output):
        if torch.is_grad_enabled():
            seen.append((args[0].numel(), sum(one() is not None for one in alive)))
            alive.append(weakref.ref(output))

    trainer.model.get_input_embeddings().register_forward_hook(note)
    trainer.train()
    return seen


@pytest.mark.parametrize("loss_type", ["dapo", "bnpo"])
def test_a_forward_keeps_to_the_budget_and_is_gone_when_the_next_begins(loss_type, tmp_path):
    seen = forwards_of(subject(tmp_path, max_tokens_per_forward=40, loss_type=loss_type))
    assert len(seen) >= 8
    assert all(tokens <= 40 for tokens, _ in seen)
    assert all(num_alive == 0 for _, num_alive in seen)


def test_group_mates_share_a_prompt_beyond_the_micro_batch(tmp_path):
    changes = dict(per_device_train_batch_size=1, gradient_accumulation_steps=16, max_steps=1)
    trainer = subject(tmp_path, **changes)
    seen = forwards_of(trainer)
    # Never more tokens than the longest row, and fewer forwards than micro-batches.
    assert len(seen) < 16
    assert max(tokens for tokens, _ in seen) <= 9 + 12
    assert (weights(trainer) - weights(trained(tmp_path, trl, **changes))).abs().max() <= WEIGHT_TOLERANCE


def test_metrics_tell_what_packing_saved_and_the_seconds_of_each_phase(tmp_path):
    evaluated = dict(eval_on_start=True, per_device_eval_batch_size=4, eval_dataset=grpo_trainers.prompts())
    first = entries(tmp_path, **evaluated)[0]
    assert first["packing/forwarded_over_raw"] < 1 < first["packing/padded_over_forwarded"]
    assert first["packing/padded_tokens"] > first["packing/forwarded_tokens"]
    assert {"phase/generate_s", "phase/score_s", "phase/update_s", "phase/other_s", "phase/evaluate_s"} <= set(first)
    # A loss that is free of the split shares more prompts.
    assert entries(tmp_path, loss_type="bnpo")[0]["packing/forwarded_tokens"] > first["packing/forwarded_tokens"]
    padded = entries(tmp_path, packing=False)[0]
    assert padded["packing/forwarded_over_raw"] > 1
    # Each batch is as wide as its own rows need, not as the generation was.
    assert 1 <= padded["packing/padded_over_forwarded"] < 1.1


def test_evaluation_decodes_greedily_when_asked_and_training_samples_again(tmp_path):
    settings = dict(max_completion_length=6, eval_temperature=0.0, num_generations_eval=1, rollout_func=None)
    trainer = subject(tmp_path, eval_dataset=grpo_trainers.prompts(), **settings)
    asked = ["w5 w6 w7"] * 4
    trainer.model.eval()
    greedy = {tuple(ids) for ids in trainer._generate(asked)[1]}
    trainer.model.train()
    sampled = {tuple(ids) for ids in trainer._generate(asked)[1]}
    assert len(greedy) == 1
    assert len(sampled) > 1
