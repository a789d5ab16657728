"""Groups without variance are replaced by spares: the update is TRL's on the groups that were kept."""

from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
import trl
from datasets import Dataset

import trl_ext
from tests import tiny
from tests.rollouts import rollout
from tests.train.trainers.grpo.test_grpo_step import WEIGHT_TOLERANCE
from trl_ext.errors import ConfigError
from trl_ext.trainers.grpo import oversampling, update
from trl_ext.trainers.grpo.oversampling import choose

torch.set_num_threads(1)

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


def made(library, folder, numbers=range(12), function=reward, rollouts=rollout, data=None, **changes):
    settings = dict(
        output_dir=str(folder),
        **tiny.QUIET_ON_CPU,
        max_steps=2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        num_generations=SIZE,
        max_completion_length=12,
        shuffle_dataset=False,
        learning_rate=1e-3,
        adam_epsilon=1e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
    )
    return library.GRPOTrainer(
        tiny.model("llama"),
        function,
        library.GRPOConfig(**settings | changes),
        prompts(numbers) if data is None else data,
        prompts([0, 1]),
        processing_class=tiny.tokenizer(),
        rollout_func=rollouts,
    )


def weights(trainer, **options) -> torch.Tensor:
    trainer.train(**options)
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose rewards and completions are on record."""
    scored = []

    def counted(prompts, completion_ids, **columns):
        scored.extend(prompts)
        return reward(prompts, completion_ids, **columns)

    folder = tmp_path_factory.mktemp("run")
    trainer = made(trl_ext, folder, function=counted, oversample=1.5, log_completions=True)
    return SimpleNamespace(trainer=trainer, after=weights(trainer), scored=scored, folder=folder)


def test_the_update_is_trls_on_the_kept_groups(run, tmp_path):
    start = torch.cat([p.detach().flatten() for p in tiny.model("llama").parameters()])
    theirs = weights(made(trl, tmp_path, KEPT))
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
    trainer = made(trl_ext, tmp_path, function=noting, oversample=1.5, **epoch)
    trainer.args.shuffle_dataset = True
    weights(trainer)
    assert trainer.state.global_step == 4  # two generations, each trained on twice
    assert sorted(seen) == sorted(prompt(number) for number in range(12))


def test_a_stream_is_read_alike(run, tmp_path):
    stream = prompts().to_iterable_dataset()
    assert torch.equal(weights(made(trl_ext, tmp_path, data=stream, oversample=1.5)), run.after)


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path):
    """Stopped between two updates of a generation, in the second epoch."""
    options = dict(
        oversample=1.5,
        gradient_accumulation_steps=2,
        steps_per_generation=4,
        shuffle_dataset=True,
        max_steps=4,
        save_strategy="steps",
        save_steps=3,
        numbers=range(6),
    )
    whole = weights(made(trl_ext, tmp_path / "whole", **options))
    resumed = made(trl_ext, tmp_path / "resumed", **options)
    assert torch.equal(weights(resumed, resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3")), whole)


def test_all_groups_without_variance_are_said_once(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(update.logger, "warning", said.append)
    trainer = made(trl_ext, tmp_path, function=lambda completion_ids, **_: [0.5] * len(completion_ids), oversample=1.5)
    weights(trainer)
    assert len(said) == 1 and said[0].startswith("No completion of this step has an advantage")
    assert trainer.state.log_history[0]["oversample/groups_without_variance_kept"] == 4


@pytest.mark.parametrize(
    ("has_variance", "kept"),
    [
        ("1111 11", (0, 1, 2, 3)),
        ("0101 11", (4, 1, 5, 3)),
        ("0001 10", (4, 1, 2, 3)),
        ("0000 00", (0, 1, 2, 3)),
        ("1001", (0, 1, 2, 3)),
    ],
)
def test_spares_replace_in_the_order_of_sampling(has_variance, kept):
    flags = [flag == "1" for flag in has_variance.replace(" ", "")]
    choice = choose(flags, 4)
    assert choice.kept == kept
    assert choice.num_replaced == len(set(kept) - {0, 1, 2, 3})
    assert choice.num_without_variance == sum(not flags[group] for group in kept)


def config(folder, **changes):
    settings = dict(per_device_train_batch_size=4, gradient_accumulation_steps=3, num_generations=4, max_steps=1)
    return trl_ext.GRPOConfig(str(folder), **tiny.QUIET_ON_CPU, **settings | changes)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (dict(oversample=0.5), "oversample=0.5 .*at least 1"),
        (dict(oversample=1.5), "gives 4.5 groups .* where an update has 3, .* Set it to 1.333 or 1.667"),
        (dict(oversample=1.01), "gives 3.03 groups .* Set it to 1.333"),
        (dict(oversample=2, scale_rewards="batch"), "scale_rewards='batch' cannot work together"),
        (
            dict(oversample=2, multi_objective_aggregation="normalize_then_sum"),
            "multi_objective_aggregation='normalize_then_sum' cannot work together",
        ),
    ],
)
def test_values_that_cannot_work_are_refused(changes, sentence, tmp_path):
    with pytest.raises(ConfigError, match=sentence):
        config(tmp_path, **changes)


def test_the_values_that_are_named_are_accepted(tmp_path):
    for value, groups in ((1.333, 4), (1.667, 5), (2, 6)):
        assert oversampling.num_sampled_groups(config(tmp_path, oversample=value)) == groups


def test_ranks_share_the_rows_of_the_groups_equally():
    """Four completions of a group cannot be dealt to three ranks; those of three groups can."""
    args = SimpleNamespace(
        **dict(oversample=1.5, generation_batch_size=24, num_generations=4, world_size=3),
        **dict(scale_rewards="group", multi_objective_aggregation="sum_then_normalize"),
    )
    assert oversampling.num_sampled_groups(args) == 9
    with pytest.raises(ConfigError, match=r"by 3 processes in equal shares\. Set it to 1\.5"):
        oversampling.check_oversample(SimpleNamespace(**{**vars(args), "oversample": 1.333}))


def test_ppo_has_no_groups_to_replace(tmp_path):
    with pytest.raises(ConfigError, match=r"oversample=1\.5 has no effect in PPO: the critic takes the place"):
        trl_ext.PPOConfig(str(tmp_path), **tiny.QUIET_ON_CPU, oversample=1.5)
