"""Two runs never mix in one folder: a second one is refused, or goes on with the first, or takes its place."""

import os
import shutil
import signal
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import pytest
from transformers import TrainerCallback

from tests import ppo_trainers, recipes, reward_trainers
from tests.faults import forks
from tests.nightly import nightly
from trl_ext.errors import ConfigError
from trl_ext.monitor.record import read_record
from trl_ext.scripts import grpo
from trl_ext.trainers.checkpoints.manifest import Manifest

SAVES = dict(save_strategy="steps", save_steps=2)
KILLED_AT = 5  # after checkpoint-4


class Kills(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step + 1 == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)


class Stops(TrainerCallback):
    """Lets a run fail in its third step."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 2:
            raise RuntimeError("stopped")


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("assets")
    recipes.save(folder / "model")
    recipes.write_rows(folder / "data", recipes.PROMPTS)
    return folder


def by_trainer(folder, assets, *callbacks, resume=None, **changes):
    trainer = reward_trainers.trainer(folder / "out", **SAVES | changes)
    for callback in callbacks:
        trainer.add_callback(callback)
    trainer.train(resume_from_checkpoint=resume)


def by_script(folder, assets, *callbacks, resume=None, **changes):
    settings = dict(num_generations=2, max_completion_length=4, rules=recipes.RULES, max_steps=2)
    start = recipes.starter(partial(grpo.main, callbacks=callbacks), folder, assets, **settings | SAVES)
    start(**changes | ({"resume_from_checkpoint": "true"} if resume else {}))


def checkpoints(folder) -> dict[str, str]:
    """The checksum of each whole checkpoint with its run, by name."""
    found = {path.name: Manifest.read(path) for path in (folder / "out").glob("checkpoint-*")}
    for name, manifest in found.items():
        manifest.check_files(folder / "out" / name, manifest.files)
    return {name: manifest.checksum for name, manifest in found.items()}


def refused(run, folder, capfd, **changes) -> str:
    """Start a run that has to be refused; return the sentence."""
    with pytest.raises((ConfigError, SystemExit)) as stop:
        run(folder, **changes)
    return capfd.readouterr().err if isinstance(stop.value, SystemExit) else str(stop.value)


WAYS = list(product((by_trainer, by_script), (None, 1), (False, True)))


@pytest.mark.parametrize(
    ("run", "limit", "is_killed"),
    [way if way in (WAYS[2], WAYS[7]) else nightly(*way) for way in WAYS],
    ids=lambda one: getattr(one, "__name__", None),
)
def test_a_second_run_is_refused_or_goes_on_or_takes_the_place(run, limit, is_killed, assets, tmp_path, capfd):
    folder = tmp_path
    first = partial(run, folder, assets, *([Kills()] if is_killed else []), max_steps=6, save_total_limit=limit)
    assert forks.in_fork(folder, first).code == (-signal.SIGKILL if is_killed else 0)
    again = partial(run, assets=assets, save_total_limit=limit)
    before, newest = checkpoints(folder), f"checkpoint-{4 if is_killed else 6}"
    recipe = (folder / "out" / "recipe.yaml").read_text()
    assert newest in before and len(before) == (1 if limit else 2 if is_killed else 3)

    said = refused(again, folder, capfd, max_steps=2, seed=7)
    assert f"holds {newest} of an earlier run" in said
    assert "--resume_from_checkpoint true" in said and "overwrite: true" in said
    assert checkpoints(folder) == before and (folder / "out" / "recipe.yaml").read_text() == recipe

    again(folder, max_steps=2, seed=7, overwrite=True)
    assert set(checkpoints(folder)) == {"checkpoint-2"} and checkpoints(folder)["checkpoint-2"] not in before.values()
    assert read_record(folder / "out").recipe["seed"] == 7 and "overwrite" not in read_record(folder / "out").recipe
    again(folder, max_steps=4, seed=7, resume=True)
    assert set(checkpoints(folder)) == ({"checkpoint-4"} if limit else {"checkpoint-2", "checkpoint-4"})


def test_all_three_configs_can_overwrite_and_a_resumed_run_removes_nothing(tmp_path, assets):
    makes = {
        "grpo": partial(by_script, tmp_path / "grpo", assets),
        "reward": partial(by_trainer, tmp_path / "reward", assets),
        "ppo": lambda **changes: ppo_trainers.trainer("head", tmp_path / "ppo" / "out", **SAVES | changes).train(
            resume_from_checkpoint=changes.pop("resume", None)
        ),
    }
    for name in makes:
        (tmp_path / name).mkdir()
    by_trainer(tmp_path / "reward", assets, max_steps=2)
    before = checkpoints(tmp_path / "reward")
    by_trainer(tmp_path / "reward", assets, max_steps=4, overwrite=True, resume=True)
    assert checkpoints(tmp_path / "reward").items() >= before.items()
    for name in ("grpo", "ppo"):
        makes[name](max_steps=2)
        makes[name](max_steps=2, seed=7, overwrite=True)
        assert set(checkpoints(tmp_path / name)) == {"checkpoint-2"}


def test_the_launcher_says_it_before_it_starts_anything(tmp_path, assets, capfd):
    from trl_ext.cli.main import main

    by_script(tmp_path, assets, max_steps=2)
    words = ["grpo", "--num_processes", "1", *recipes.recipe(tmp_path, **recipes.SMALL | {"rules": recipes.RULES})]
    words += ["--model_name_or_path", str(assets / "model"), "--dataset_name", str(assets / "data")]
    said = recipes.stopped(capfd, main, [*words, "--output_dir", str(tmp_path / "out")])
    assert "holds checkpoint-2 of an earlier run" in said and "overwrite: true" in said


def test_overwriting_leaves_what_no_run_has_written_and_the_model_that_training_began_with(tmp_path, assets):
    model = recipes.save(tmp_path / "out")  # which the run trains, and writes over at its end
    (tmp_path / "out" / "notes.txt").write_text("mine")
    settings = dict(model_name_or_path=str(model), max_steps=2)
    argv = lambda **changes: recipes.recipe(  # noqa: E731
        tmp_path,
        **recipes.SMALL | SAVES | settings | changes,
        rules=recipes.RULES,
        dataset_name=str(assets / "data"),
        output_dir=str(tmp_path / "out"),
        num_generations=2,
        max_completion_length=4,
    )
    grpo.main(argv())
    with pytest.raises(RuntimeError, match="stopped"):
        grpo.main(argv(overwrite=True, max_steps=4), [Stops()])
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_the_last_model_of_the_earlier_run_is_not_left_beside_the_recipe_of_the_next(tmp_path, assets):
    by_script(tmp_path, assets, max_steps=2)
    assert (tmp_path / "out" / "model.safetensors").is_file()
    with pytest.raises(RuntimeError, match="stopped"):
        by_script(tmp_path, assets, Stops(), max_steps=4, save_steps=4, overwrite=True)
    left = {path.name for path in (tmp_path / "out").iterdir()}
    assert not left & {"model.safetensors", "config.json", "trainer_state.json"}


def test_resuming_takes_the_run_of_the_recipe_and_rotation_leaves_the_others(tmp_path, assets, caplog):
    by_trainer(tmp_path, assets, max_steps=4)
    manifest = Manifest.read(tmp_path / "out" / "checkpoint-4")
    manifest.run["id"] = "another"
    manifest.write(tmp_path / "out" / "checkpoint-4")
    other = (tmp_path / "out" / "checkpoint-4").rename(tmp_path / "out" / "checkpoint-9")
    replace(Manifest.read(shutil.copytree(other, tmp_path / "any")), step=9).write(other)
    before = checkpoints(tmp_path)
    by_trainer(tmp_path, assets, max_steps=4, save_total_limit=1, resume=True)
    said = reward_trainers.warnings_of(caplog)
    assert "Passed over checkpoint-9: it is of another run than recipe.yaml. Resuming from checkpoint-2." in said
    assert set(checkpoints(tmp_path)) == {"checkpoint-4", "checkpoint-9"}
    assert checkpoints(tmp_path)["checkpoint-9"] == before["checkpoint-9"]


def test_a_checkpoint_of_elsewhere_does_not_join_another_runs(tmp_path, assets):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        by_trainer(tmp_path / name, assets, max_steps=2)
    point = str(tmp_path / "one" / "out" / "checkpoint-2")
    with pytest.raises(ConfigError, match=r"holds checkpoint-2 of another run than \S+one"):
        by_trainer(tmp_path / "two", assets, max_steps=4, resume=point)
    (tmp_path / "three").mkdir()
    by_trainer(tmp_path / "three", assets, max_steps=4, resume=point)
    ids = {Manifest.read(Path(at)).run["id"] for at in (point, tmp_path / "three" / "out" / "checkpoint-4")}
    assert ids == {read_record(tmp_path / "three" / "out").versions["run"]}
