"""What TRL computes where our own code computes it again: examples by hand, so that a change of it is found."""

import ast
from types import SimpleNamespace

import pytest
import torch
import trl
from trl.trainer.utils import RepeatSampler

from tests import grpo_trainers, reward_trainers
from tests.conftest import ROOT
from tests.rollouts import rollout
from trl_ext.compat.seams import SEAMS
from trl_ext.trainers.generation.groups import total_rewards
from trl_ext.trainers.grpo.log_probs import importance_ratio
from trl_ext.trainers.grpo.rollout_state import EpochSampler
from trl_ext.trainers.step.rows import counted_tokens, weights

GRPO, ROLLOUTS = "trl.trainer.grpo_trainer:GRPOTrainer", "_generate_and_score_completions"
BELIEFS, TEMPERATURE = -5.2, 0.7
REWARDS = torch.tensor([[0.1, 1.0], [0.9, torch.nan], [0.3, 0.4], [0.3, 0.4]])
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
EXAMPLES = {}


def example_of(where, *keys):
    """Register an example under its seam."""

    def register(example):
        EXAMPLES[where, keys] = example
        return example

    return register


def with_tools(prompts, trainer):
    """Rollouts in which every third token is a tool's and the sampler knows nothing of the second one."""
    output = rollout(prompts, trainer)
    ids = output["completion_ids"]
    beliefs = [[BELIEFS if i != 1 else None for i in range(len(row))] for row in ids]
    return output | {"logprobs": beliefs, "env_mask": [[int(i % 3 != 1) for i in range(len(row))] for row in ids]}


def trls(folder, **changes):
    """TRL's trainer, which believes in a vLLM, with two reward functions."""

    def reward(place):
        return lambda completions, **_: [None if value.isnan() else value.item() for value in REWARDS[:, place]]

    settings = dict(num_generations=2, temperature=TEMPERATURE, reward_weights=[1.0, 0.5], rollout_func=with_tools)
    rewards = changes.pop("rewards", [reward(0), reward(1)])
    subject = grpo_trainers.trainer(folder, trl, rewards=rewards, **settings | changes)
    subject.use_vllm, subject._last_loaded_step = True, -1
    subject.vllm_generation = SimpleNamespace(sync_weights=lambda: None, temperature=TEMPERATURE)
    subject.model.train()
    subject.current_gradient_accumulation_steps = 1
    return subject


def rollouts_of(subject):
    rows = subject.train_dataset.select([0, 0, 1, 1])
    return subject._generate_and_score_completions(list(rows))


def logps_by_hand(subject, row, rollouts):
    """Log-probabilities and entropies of a row's tokens, padding left out."""
    prompt = rollouts["prompt_ids"][row][rollouts["prompt_mask"][row].bool()]
    # TRL masks tools' tokens in `tool_mask`; `completion_mask` counts them.
    completion = rollouts["completion_ids"][row][rollouts["completion_mask"][row].bool()]
    with torch.no_grad():
        logits = subject.model(torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
    given = (logits / TEMPERATURE).log_softmax(-1)
    return given.gather(1, completion[:, None])[:, 0], -(given.exp() * given).sum(-1)


@example_of(f"{GRPO}.{ROLLOUTS}", "old_per_token_logps", "sampling_per_token_logps", "importance_sampling_ratio")
def the_ratio_is_of_two_log_probabilities(folder):
    for mode in MODES:
        subject = trls(folder, vllm_importance_sampling_mode=mode, vllm_importance_sampling_clip_max=1.3)
        rollouts = rollouts_of(subject)
        old, mask = rollouts["old_per_token_logps"], counted_tokens(rollouts)
        for row in range(4):
            mine, _ = logps_by_hand(subject, row, rollouts)
            torch.testing.assert_close(old[row, : len(mine)], mine)
            sampled = rollouts["sampling_per_token_logps"][row, : len(mine)]
            assert all(one.isnan() if i == 1 else one == BELIEFS for i, one in enumerate(sampled))
        ratio = importance_ratio(old - rollouts["sampling_per_token_logps"], mask, mode, None, 1.3)
        assert (ratio - 1).abs().max() > 0.1
        torch.testing.assert_close(rollouts["importance_sampling_ratio"], ratio)


@example_of(f"{GRPO}._get_per_token_logps_and_entropies")
def log_probabilities_are_at_the_temperature_and_of_each_row_alone(folder):
    subject = trls(folder)
    rollouts = rollouts_of(subject)
    ids, mask = (
        torch.cat([rollouts[f"{part}_{name}"] for part in ("prompt", "completion")], 1) for name in ("ids", "mask")
    )
    width = rollouts["completion_ids"].size(1)
    logps, entropies, _ = subject._get_per_token_logps_and_entropies(
        subject.model, ids, mask, width, compute_entropy=True
    )
    for row in range(4):
        mine, entropy = logps_by_hand(subject, row, rollouts)
        torch.testing.assert_close(logps[row, : len(mine)], mine)
        torch.testing.assert_close(entropies[row, : len(mine)], entropy)


@example_of(f"{GRPO}.{ROLLOUTS}", "prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
def prompts_end_and_completions_begin_in_one_column(folder):
    subject = trls(folder)
    rollouts, given = (
        rollouts_of(subject),
        rollout([row["prompt"] for row in subject.train_dataset.select([0, 0, 1, 1])], subject),
    )
    for part, own in (("prompt", slice(None, None, -1)), ("completion", slice(None))):
        for ids, mask, tokens in zip(
            rollouts[f"{part}_ids"], rollouts[f"{part}_mask"], given[f"{part}_ids"], strict=True
        ):
            assert ids[mask.bool()].tolist() == tokens
            assert mask.tolist()[own] == [1] * len(tokens) + [0] * (len(mask) - len(tokens))


@example_of(f"{GRPO}.{ROLLOUTS}", "num_items_in_batch")
def items_are_the_sampled_tokens_of_all_rows(folder):
    rollouts = rollouts_of(trls(folder))
    lengths = rollouts["completion_mask"].sum(dim=1)
    assert rollouts["num_items_in_batch"] == sum(sum(i % 3 != 1 for i in range(n)) for n in lengths.tolist())


@example_of(f"{GRPO}.{ROLLOUTS}", "advantages")
def advantages_are_of_weighted_totals_within_groups(folder):
    subject = trls(folder)
    groups = total_rewards(REWARDS, torch.tensor([1.0, 0.5])).view(2, 2)
    by_hand = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    torch.testing.assert_close(rollouts_of(subject)["advantages"], by_hand.flatten())


@example_of(f"{GRPO}.{ROLLOUTS}", "frac_reward_zero_std")
def a_group_has_no_variance_where_its_deviation_is_below_1e_minus_8(folder):
    for apart, share in ((0.0, 0.5), (1e-9, 0.5), (1e-7, 0.0)):
        totals = torch.tensor([apart, 0.0, 1.0, 0.5])
        subject = trls(folder, rewards=[lambda completions, totals=totals, **_: totals.tolist()], reward_weights=None)
        rollouts_of(subject)
        assert subject._metrics["train"]["frac_reward_zero_std"] == [share]


@example_of(f"{GRPO}._compute_loss")
def losses_of_parts_add_up_by_our_weights(folder):
    for loss_type in grpo_trainers.LOSS_TYPES:
        subject = trls(
            folder, loss_type=loss_type, vllm_importance_sampling_mode="token_truncate", steps_per_generation=1
        )
        rollouts = rollouts_of(subject)
        weigh, whole = weights(loss_type, 4, rollouts), subject._compute_loss(subject.model, rollouts)
        parts = [{k: v[a:b] if v.ndim else v for k, v in rollouts.items()} for a, b in ((0, 1), (1, 4))]
        losses = [subject._compute_loss(subject.model, part) * weigh(len(part["advantages"]), part) for part in parts]
        assert losses[0].abs() > 1e-4
        torch.testing.assert_close(sum(losses), whole)


@example_of("trl.trainer.reward_trainer:RewardTrainer.compute_loss")
def the_loss_of_pairs_is_their_mean_with_margin_and_centering(folder):
    pairs = [{**pair, "margin": 0.3 * i} for i, pair in enumerate(reward_trainers.PAIRS.select(range(4)))]
    subject = reward_trainers.trainer(folder, pairs, trl, center_rewards_coefficient=0.1)
    batch = next(iter(subject.get_train_dataloader()))
    loss, outputs = subject.compute_loss(subject.model, batch, return_outputs=True)
    chosen, rejected = outputs.logits.squeeze(-1).chunk(2)
    gaps = chosen - rejected - torch.as_tensor(batch["margin"])
    by_hand = torch.nn.functional.softplus(-gaps).mean() + 0.1 * ((chosen + rejected) ** 2).mean()
    torch.testing.assert_close(loss, by_hand)


@example_of("trl.trainer.utils:RepeatSampler.__init__")
def a_sampler_draws_one_permutation_an_epoch(folder):
    def made():
        return RepeatSampler(range(7), mini_repeat_count=2, batch_size=3, repeat_count=2, shuffle=True, seed=5)

    one, put = made(), EpochSampler(made())
    order = torch.randperm(7, generator=torch.Generator().manual_seed(5)).tolist()
    assert list(one) == [
        row for first in (0, 3) for _ in range(2) for row in order[first : first + 3] for _ in range(2)
    ]
    put.set_epoch(1)
    assert list(one) == list(put)


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=lambda example: example.__name__)
def test_value_is_what_our_code_takes_it_for(example, tmp_path):
    example(tmp_path)


# What must have an example ------------------------------------------------------------------------------------------


def without_example(seams):
    """Seams whose value we compute again, and that have no example."""
    return [seam.where for seam in seams if seam.is_remade and (seam.where, seam.keys) not in EXAMPLES]


def keys_written(source):
    """Texts under which code writes into a dictionary."""
    targets = (node.targets for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Assign))
    places = [one.slice for some in targets for one in some if isinstance(one, ast.Subscript)]
    return {place.value for place in places if isinstance(place, ast.Constant)}


def test_every_value_that_we_compute_again_has_an_example_and_no_other_has():
    assert without_example(SEAMS) == []
    assert EXAMPLES.keys() <= {(seam.where, seam.keys) for seam in SEAMS if seam.is_remade}
    planted = next(seam for seam in SEAMS if not seam.is_remade)
    assert without_example([type(planted)(planted.where, (), (), "", is_remade=True)]) == [planted.where]


def test_every_key_of_trls_rollouts_that_we_write_is_marked():
    of_rollouts = [seam for seam in SEAMS if seam.where == f"{GRPO}.{ROLLOUTS}"]
    unmarked = {key for seam in of_rollouts if not seam.is_remade for key in seam.keys}
    unmarked.remove("pixel_values")  # by rows and in order; what they hold stays
    assert "ref_per_token_logps" in unmarked
    trainers = ROOT / "trl_ext" / "trainers"
    files = [path for room in ("grpo", "ppo", "forward") for path in sorted((trainers / room).rglob("*.py"))]
    written = {key for path in files for key in keys_written(path.read_text())}
    assert "importance_sampling_ratio" in written and not written & unmarked
    assert keys_written("rollouts['ref_per_token_logps'] = 0") == {"ref_per_token_logps"}
