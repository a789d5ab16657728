"""`make drills`: under Ray one of two workers is killed at a random step; the run ends with the weights of one
that was left alone, bit for bit. Ten trials, over the trainers, under DDP and ZeRO-2."""

import random
import re
from functools import cache

import pytest

from tests.multi.conftest import tiny_model as tiny_model
from tests.multi.launching import skip_what_cannot_run
from tests.multi.raying import under_accelerate, under_ray
from tests.multi.recipes import write_recipe

pytest.importorskip("ray")
RANDOM = random.Random(2026)
KINDS = [(trainer, launch_file) for trainer in ("grpo", "reward", "ppo") for launch_file in ("cpu", "zero2")]
TRIALS = [(*kind, RANDOM.randrange(1, 8), RANDOM.randrange(2)) for kind in (KINDS * 2)[:10]]


@pytest.fixture(scope="module")
def undisturbed(tiny_model, tmp_path_factory):
    @cache
    def run(trainer, launch_file):
        folder = tmp_path_factory.mktemp(f"{trainer}_{launch_file}")
        recipe = write_recipe(trainer, tiny_model, folder)
        return recipe, under_accelerate(trainer, launch_file, recipe, folder / "alone")

    return run


def recovery_s(folder) -> float:
    """Seconds from the mark of the death to the first checkpoint after it, some steps after the run went on."""
    died = (folder / "killed.died").stat().st_mtime
    written = [path.stat().st_mtime for path in (folder / "killed").glob("checkpoint-*/trainer_state.json")]
    return min(time for time in written if time > died) - died


@pytest.mark.parametrize("trainer, launch_file, step, rank", TRIALS)
def test_weights_are_bit_identical(trainer, launch_file, step, rank, undisturbed, tmp_path):
    skip_what_cannot_run(launch_file)
    recipe, alone = undisturbed(trainer, launch_file)
    killed = under_ray(trainer, launch_file, recipe, tmp_path / "killed", step, rank)
    assert alone.keys() == killed.keys()
    assert max((alone[name] - killed[name]).abs().max().item() for name in alone) == 0.0
    print("from the death to the end of a step after it:", round(recovery_s(tmp_path), 1), "s")
    assert len(re.findall("Started training worker group", (tmp_path / "killed.log").read_text())) == 2
