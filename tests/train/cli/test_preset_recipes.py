"""Every preset's recipe is one that its script accepts, on as many processes as its machine has cards."""

import pytest
import yaml

from trl_ext.cli.check.recipe import parse
from trl_ext.memory.files.plan import write_plan
from trl_ext.memory.planner.presets import PRESETS


@pytest.mark.parametrize("name", PRESETS)
def test_a_presets_recipe_is_accepted_and_plans_what_the_preset_does(name, tmp_path, monkeypatch):
    for variable in ("PYTORCH_CUDA_ALLOC_CONF",):  # a config with `memory` sets it for good
        monkeypatch.setenv(variable, "")
    found = PRESETS[name].plan()
    write_plan(found, tmp_path / "plan")
    words = ["--output_dir", str(tmp_path / "out")]
    parsed = parse(str(tmp_path / "plan" / "recipe.yaml"), found.job.trainer, words, found.estimate.hardware.num_gpus)
    assert parsed.training_args.memory_setting.job == found.job
    launch = yaml.safe_load((tmp_path / "plan" / "accelerate.yaml").read_text())
    assert (launch["distributed_type"] == "NO") is (launch["num_processes"] == 1 and not found.job.zero_stage)
