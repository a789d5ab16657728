"""Every launch file that we ship is accepted by the tool that reads it, and the two families tell the same story."""

import json
import os
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
YAMLS = {path.stem: path for path in sorted((ROOT / "accelerate_configs").iterdir())}
JSONS = {path.stem: path for path in sorted((ROOT / "deepspeed_configs").iterdir())}
ZERO = [name for name in YAMLS if name.startswith("zero")]

# What an accelerate file cannot say, so that only the DeepSpeed files do: ZeRO-3 in smaller pieces. The bucket sizes
# are theirs alone, too; they are "auto" until the Trainer knows the model.
ONLY_IN_JSON = {"max_live_parameters", "max_reuse_distance", "sub_group_size"}
# The Trainer's arguments decide these. The global batch follows from them and is left out: with train_batch_size in
# the file, ZeRO-3 on the CPU stops at "Check batch related parameters" while the model loads.
TRAINER_OWNED = {
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}


def read_yaml(name):
    return yaml.safe_load(YAMLS[name].read_text())


def read_json(name):
    return json.loads(JSONS[name].read_text())


def said_by_yaml(name):
    settings = read_yaml(name)["deepspeed_config"]
    return {
        "stage": settings["zero_stage"],
        "optimizer on": settings["offload_optimizer_device"],
        "parameters on": settings["offload_param_device"],
        "whole model when saved": settings.get("zero3_save_16bit_model", False),
    }


def said_by_json(name):
    zero = read_json(name)["zero_optimization"]
    return {
        "stage": zero["stage"],
        "optimizer on": zero.get("offload_optimizer", {}).get("device", "none"),
        "parameters on": zero.get("offload_param", {}).get("device", "none"),
        "whole model when saved": zero.get("stage3_gather_16bit_weights_on_model_save", False),
    }


def said_by_name(name):
    stage, offload = int(name[4]), name.endswith("_offload")
    return {
        "stage": stage,
        "optimizer on": "cpu" if offload else "none",
        "parameters on": "cpu" if offload and stage == 3 else "none",
        "whole model when saved": stage == 3,
    }


def test_the_folders_hold_one_file_for_every_documented_name():
    assert [path.suffix for path in YAMLS.values()] == [".yaml"] * len(YAMLS)
    assert [path.suffix for path in JSONS.values()] == [".json"] * len(JSONS)
    assert ZERO == list(JSONS) == ["zero1", "zero2", "zero2_offload", "zero3", "zero3_offload"]
    assert YAMLS.keys() - JSONS.keys() == {"single_gpu", "multi_gpu", "cpu"}


@pytest.mark.parametrize("name", ZERO)
def test_name_yaml_and_json_say_the_same(name):
    assert said_by_yaml(name) == said_by_json(name) == said_by_name(name)


@pytest.mark.parametrize("name", YAMLS)
def test_a_yaml_leaves_to_the_trainer_what_is_the_trainers(name):
    settings = read_yaml(name)
    assert settings["mixed_precision"] == "no"
    theirs = {"gradient_accumulation_steps", "gradient_clipping", "deepspeed_config_file"}
    assert not theirs & (settings.keys() | settings.get("deepspeed_config", {}).keys())


@pytest.mark.parametrize("name", YAMLS)
def test_only_single_gpu_knows_the_number_of_processes(name):
    assert read_yaml(name).get("num_processes") == (1 if name == "single_gpu" else None)


@pytest.mark.parametrize("name", YAMLS)
def test_a_header_launches_its_own_file(name):
    header = YAMLS[name].read_text().split("compute_environment")[0]
    assert f"--config_file accelerate_configs/{name}.yaml -m trl_ext.scripts." in header
    assert ("--num_processes N" in header) == (name != "single_gpu")


@pytest.mark.parametrize("name", ZERO)
def test_a_zero_header_names_its_json(name):
    assert f"deepspeed_configs/{name}.json" in YAMLS[name].read_text()


@pytest.mark.parametrize("name", JSONS)
def test_a_json_leaves_to_the_trainer_what_is_the_trainers(name):
    settings = read_json(name)
    del settings["zero_optimization"]
    assert settings == TRAINER_OWNED


@pytest.mark.parametrize("name", JSONS)
def test_buckets_follow_the_models_width(name):
    zero = read_json(name)["zero_optimization"]
    assert zero["reduce_bucket_size"] == "auto"
    if zero["stage"] == 3:
        assert zero["stage3_prefetch_bucket_size"] == zero["stage3_param_persistence_threshold"] == "auto"


def test_cpu_and_multi_gpu_start_the_same_launcher():
    # So that the CPU runs of tests/multi vouch for multi_gpu.yaml, too.
    assert read_yaml("cpu") == read_yaml("multi_gpu")


@pytest.mark.parametrize("name", YAMLS)
def test_accelerate_loads_every_yaml(name):
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    config = config_args.load_config_from_file(str(YAMLS[name]))
    kind = {"single_gpu": "NO", "multi_gpu": "MULTI_GPU", "cpu": "MULTI_GPU"}.get(name, "DEEPSPEED")
    assert config.distributed_type.value == kind


@pytest.mark.parametrize("name", ZERO)
def test_accelerates_launcher_knows_every_deepspeed_key(name):
    # accelerate takes over any key under deepspeed_config and reads only those it knows: a typo would do nothing.
    launch = pytest.importorskip("accelerate.commands.launch")
    known = vars(launch.launch_command_parser().parse_args(["train.py"]))
    assert read_yaml(name)["deepspeed_config"].keys() <= known.keys()


@pytest.mark.parametrize("name", YAMLS)
def test_a_forgotten_num_processes_is_an_error(name):
    launch = pytest.importorskip("accelerate.commands.launch")
    args = launch.launch_command_parser().parse_args(["--config_file", str(YAMLS[name]), "train.py"])
    if name == "single_gpu":
        assert launch._validate_launch_command(args)[0].num_processes == 1
    else:
        with pytest.raises(ValueError, match="num_processes"):
            launch._validate_launch_command(args)


@pytest.mark.parametrize("name", ZERO)
def test_deepspeed_builds_the_same_engine_from_both(name, monkeypatch):
    zero_config = pytest.importorskip("deepspeed.runtime.zero.config")
    from accelerate.utils import DeepSpeedPlugin

    for variable in [v for v in os.environ if v.startswith("ACCELERATE_")]:
        monkeypatch.delenv(variable)
    inline = DeepSpeedPlugin(**read_yaml(name)["deepspeed_config"]).deepspeed_config["zero_optimization"]
    from_yaml = zero_config.DeepSpeedZeroConfig(**inline)
    # DeepSpeed refuses unknown keys here, so this line checks every key of the JSON as well.
    from_json = zero_config.DeepSpeedZeroConfig(**read_json(name)["zero_optimization"])
    assert set(differences(from_yaml.model_dump(), from_json.model_dump())) <= ONLY_IN_JSON


def differences(left, right, prefix=""):
    for key in left:
        one, other = (on_or_none(side[key]) for side in (left, right))
        if isinstance(one, dict) and isinstance(other, dict):
            yield from differences(one, other, f"{prefix}{key}.")
        elif one != other:
            yield f"{prefix}{key}"


def on_or_none(value):
    """An offload block with device "none" means the same as no block."""
    return None if isinstance(value, dict) and value.get("device") == "none" else value
