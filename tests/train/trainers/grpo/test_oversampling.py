"""Groups without variance are replaced by spares: the update is TRL's on the groups that were kept."""

from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
import trl
from datasets import Dataset

import trl_ext
from tests import grpo_trainers, tiny
from tests.grpo_trainers import WEIGHT_TOLERANCE
from tests.rollouts import rollout
from trl_ext.errors import ConfigError
from trl_ext.trainers.generation import oversampling
from trl_ext.trainers.generation.oversampling import choose
from trl_ext.trainers.step import plan

SIZE = 4  # of a group
# Prompts whose completions all score alike. An update takes four groups, a generation six.
DULL = {1, 3, 4, 8}
# What that makes of 12 prompts in two generations: 4 has no variance either, so that 3 stays.
KEPT = (0, 5, 2, 3, 6, 7, 10, 9)


def prompt(number: int) -> str:
    return tiny.words(10 + number, 50, *range(60, 60 + number % 3))


def prompts(numbers=range(12)) -> Dataset:
    return Dataset.from_dict({"prompt": [prompt(number) for number in numbers]})


def reward(prompts, completion_ids, **_) -> list[float]:
    dull = {prompt(number) for number in DULL}
    return [0.1 if text in dull else (sum(ids) % 17) / 17 for text, ids in zip(prompts, completion_ids, strict=True)]


def made(library, folder, numbers=range(12), rewards=reward, rollouts=rollout, data=None, **changes):
    settings = dict(gradient_accumulation_steps=4, shuffle_dataset=False, eval_dataset=prompts([0, 1]))
    rows = prompts(numbers) if data is None else data
    settings |= dict(rollout_func=rollouts) | changes
    return grpo_trainers.trainer(folder, library, rewards=rewards, data=rows, **settings)


def weights(trainer, **options) -> torch.Tensor:
    trainer.train(**options)
    return grpo_trainers.weights(trainer)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose rewards and completions are on record."""
    scored = []

    def counted(prompts, completion_ids, **columns):
        scored.extend(prompts)
        return reward(prompts, completion_ids, **columns)

    folder = tmp_path_factory.mktemp("run")
    trainer = made(trl_ext, folder, rewards=counted, oversample=1.5, log_completions=True)
    return SimpleNamespace(trainer=trainer, after=weights(trainer), scored=scored, folder=folder)


def test_the_update_is_trls_on_the_kept_groups(run, tmp_path):
    subject = made(trl, tmp_path, KEPT)
    start, theirs = grpo_trainers.weights(subject), weights(subject)
    assert (theirs - start).abs().max() > 1e-4, "nothing was learned, so nothing is compared"
    assert (run.after - theirs).abs().max() <= WEIGHT_TOLERANCE


@pytest.mark.parametrize(
    "changes",
    [
        dict(loss_type="grpo", gradient_accumulation_steps=2, steps_per_generation=4, num_iterations=2, max_steps=4),
        dict(loss_type="dr_grpo", scale_rewards="none", mask_truncated_completions=True, max_steps=1),
    ],
    ids=["several updates of a generation", "without scaling"],
)
def test_the_last_update_is_trls_under_other_options(changes, tmp_path):
    ours = weights(made(trl_ext, tmp_path, oversample=1.5, **changes))
    theirs = weights(made(trl, tmp_path, KEPT, **changes))
    assert (ours - theirs).abs().max() <= WEIGHT_TOLERANCE


def test_metrics_say_what_was_sampled_and_what_became_of_it(run):
    first, second = run.trainer.state.log_history[:2]
    names = ("groups_sampled", "groups_replaced", "groups_without_variance_kept")
    assert [first[f"oversample/{name}"] for name in names] == [6, 1, 1]
    assert [second[f"oversample/{name}"] for name in names] == [6, 1, 0]
    assert [first["frac_reward_zero_std"], second["frac_reward_zero_std"]] == pytest.approx([3 / 6, 1 / 6])


def test_each_sampled_completion_is_scored_once_and_stands_in_the_table(run):
    expected = [prompt(number) for number in range(12) for _ in range(SIZE)]
    assert run.scored == expected
    tables = [pd.read_parquet(path) for path in sorted(Path(run.folder, "completions").glob("*.parquet"))]
    assert [text for table in tables for text in table["prompt"]] == expected


@pytest.mark.parametrize("earned", [0.5, 0.7])
def test_groups_of_any_equal_reward_are_replaced(earned, tmp_path):
    def half(prompts, completion_ids, **_):
        dull = {prompt(number) for number in DULL}
        return [earned if p in dull else len(ids) / 12 for p, ids in zip(prompts, completion_ids, strict=True)]

    groups = dict(num_generations=8, per_device_train_batch_size=8, oversample=1.5, max_steps=1)
    trainer = made(trl_ext, tmp_path, rewards=half, **groups)
    weights(trainer)
    entry = trainer.state.log_history[0]
    assert [entry[f"oversample/groups_{name}"] for name in ("replaced", "without_variance_kept")] == [1, 1]
    assert entry["frac_reward_zero_std"] == pytest.approx(3 / 6)
    assert entry["packing/skipped_rows_frac"] == pytest.approx(1 / 4)


def test_an_evaluation_samples_what_it_always_did(run):
    before = len(run.scored)
    run.trainer.evaluate()
    assert len(run.scored) - before == 2 * SIZE
    assert not any("oversample" in name for name in run.trainer.state.log_history[-1])


def test_an_epoch_shows_every_prompt_once(tmp_path):
    seen = []

    def noting(prompts, completion_ids, **columns):
        seen.extend(prompts[::SIZE])
        return reward(prompts, completion_ids, **columns)

    epoch = dict(max_steps=-1, num_train_epochs=1, num_iterations=2)
    trainer = made(trl_ext, tmp_path, rewards=noting, oversample=1.5, **epoch)
    trainer.args.shuffle_dataset = True
    weights(trainer)
    assert trainer.state.global_step == 4  # two generations, each trained on twice
    assert sorted(seen) == sorted(prompt(number) for number in range(12))


def test_a_stream_is_read_alike(run, tmp_path):
    stream = prompts().to_iterable_dataset()
    assert torch.equal(weights(made(trl_ext, tmp_path, data=stream, oversample=1.5)), run.after)


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path):
    """Stopped between two updates of a generation, in the second epoch."""
    options = dict(oversample=1.5, gradient_accumulation_steps=2, steps_per_generation=4, shuffle_dataset=True)
    options |= dict(max_steps=4, save_strategy="steps", save_steps=3, numbers=range(6))
    whole = weights(made(trl_ext, tmp_path / "whole", **options))
    resumed = made(trl_ext, tmp_path / "resumed", **options)
    assert torch.equal(weights(resumed, resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3")), whole)


def test_all_groups_without_variance_are_said_once(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(plan.logger, "warning", said.append)
    trainer = made(trl_ext, tmp_path, rewards=lambda completion_ids, **_: [0.5] * len(completion_ids), oversample=1.5)
    weights(trainer)
    assert len(said) == 1 and said[0].startswith("No completion of this step has an advantage")
    assert trainer.state.log_history[0]["oversample/groups_without_variance_kept"] == 4


KEPT_OF = {"1111 11": (0, 1, 2, 3), "0101 11": (4, 1, 5, 3), "0001 10": (4, 1, 2, 3), "0000 00": (0, 1, 2, 3)}
KEPT_OF |= {"1001": (0, 1, 2, 3)}


def test_spares_replace_in_the_order_of_sampling():
    for has_variance, kept in KEPT_OF.items():
        flags = [flag == "1" for flag in has_variance.replace(" ", "")]
        assert choose(flags, 4) == list(kept)


def config(folder, **changes):
    settings = dict(per_device_train_batch_size=4, gradient_accumulation_steps=3, num_generations=4, max_steps=1)
    return trl_ext.GRPOConfig(str(folder), **tiny.QUIET_ON_CPU, **settings | changes)


REFUSED = [
    (dict(oversample=0.5), "oversample=0.5 .*at least 1"),
    (dict(oversample=1.01), "gives no spare group .* where an update has 3, .* Set it to 1.333 or more"),
]


def test_values_that_cannot_work_are_refused_and_those_that_are_named_accepted(subtests, tmp_path):
    for changes, sentence in REFUSED:
        with subtests.test(sentence), pytest.raises(ConfigError, match=sentence):
            config(tmp_path, **changes)
    for value, groups in ((1.333, 4), (1.5, 4), (1.667, 5), (2, 6)):
        assert oversampling.num_sampled_groups(config(tmp_path, oversample=value)) == groups


def test_ranks_share_the_rows_of_the_groups_equally():
    """Four completions of a group cannot be dealt to three ranks; those of three groups can."""
    args = SimpleNamespace(
        **dict(oversample=1.5, generation_batch_size=24, num_generations=4, world_size=3),
        **dict(scale_rewards="group", multi_objective_aggregation="sum_then_normalize"),
    )
    assert oversampling.num_sampled_groups(args) == 9
    with pytest.raises(ConfigError, match=r"3 processes sample equal shares\. Set it to 1\.5"):
        oversampling.check_oversample(SimpleNamespace(**{**vars(args), "oversample": 1.2}))
