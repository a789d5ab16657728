"""The launch files that we ship say what they should, and the two families tell the same story."""

import pytest

from tests.configs import JSONS, YAMLS, ZERO, read_json, read_yaml

# The Trainer's arguments decide these. The global batch follows from them and is left out: with train_batch_size in
# the file, ZeRO-3 on the CPU stops at "Check batch related parameters" while the model loads.
TRAINER_OWNED = {
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}


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
    assert ZERO == ["zero1", "zero2", "zero2_offload", "zero3", "zero3_offload"]
    assert JSONS.keys() - YAMLS.keys() == {"zero3_hpz"}  # an accelerate file has no key for hpZ
    assert YAMLS.keys() - JSONS.keys() == {"single_gpu", "multi_gpu", "cpu", "fsdp2", "fsdp2_offload"}


@pytest.mark.parametrize("name", ZERO)
def test_a_zero_file_says_what_its_name_and_its_json_say_and_starts_on_several_machines(name):
    assert said_by_yaml(name) == said_by_json(name) == said_by_name(name)
    assert read_yaml(name)["deepspeed_config"]["deepspeed_multinode_launcher"] == "standard"
    assert f"deepspeed_configs/{name}.json" in YAMLS[name].read_text()


@pytest.mark.parametrize("name", YAMLS)
def test_a_yaml_leaves_to_the_trainer_what_is_the_trainers_and_its_header_launches_it(name):
    settings = read_yaml(name)
    assert settings["mixed_precision"] == "no"
    theirs = {"gradient_accumulation_steps", "gradient_clipping", "deepspeed_config_file"}
    assert not theirs & (settings.keys() | settings.get("deepspeed_config", {}).keys())
    assert settings.get("num_processes") == (1 if name == "single_gpu" else None)
    header = YAMLS[name].read_text().split("compute_environment")[0]
    assert f"--config_file accelerate_configs/{name}.yaml -m trl_ext.scripts." in header
    assert ("--num_processes N" in header) == (name != "single_gpu")


@pytest.mark.parametrize("name", JSONS)
def test_a_json_leaves_to_the_trainer_what_is_the_trainers_and_its_buckets_follow_the_models_width(name):
    settings = read_json(name)
    zero = settings.pop("zero_optimization")
    assert settings == TRAINER_OWNED
    assert zero["reduce_bucket_size"] == "auto"
    # As in the planner's files, whose seconds count on it, and not left to DeepSpeed's default.
    assert all(part["pin_memory"] for name, part in zero.items() if name.startswith("offload_"))
    if zero["stage"] == 3:
        assert zero["stage3_prefetch_bucket_size"] == zero["stage3_param_persistence_threshold"] == "auto"


def test_hpz_is_zero3_with_a_second_copy_of_the_weights_in_each_machine():
    zero = read_json("zero3_hpz")["zero_optimization"]
    assert zero.pop("zero_hpz_partition_size") == 8
    assert zero == read_json("zero3")["zero_optimization"]


def test_the_fsdp_files_differ_in_where_weights_lie():
    plain, offload = read_yaml("fsdp2"), read_yaml("fsdp2_offload")
    assert plain["fsdp_config"].pop("fsdp_offload_params") is False
    assert offload["fsdp_config"].pop("fsdp_offload_params") is True
    assert plain == offload


def test_cpu_and_multi_gpu_start_the_same_launcher():
    # So that the CPU runs of tests/multi vouch for multi_gpu.yaml, too.
    assert read_yaml("cpu") == read_yaml("multi_gpu")
