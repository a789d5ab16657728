"""A plan as files: read back it is the same plan, and each file keeps the conventions of the shipped ones."""

import json

import pytest
import yaml

from tests.conftest import ROOT
from trl_ext.errors import ConfigError
from trl_ext.memory.cards import parse_gpus
from trl_ext.memory.files import settings
from trl_ext.memory.files.settings import MEANINGS
from trl_ext.memory.job import Job
from trl_ext.memory.planner.folder import read_plan, write_plan
from trl_ext.memory.planner.planner import plan
from trl_ext.memory.planner.presets import PRESETS


@pytest.fixture
def written(tmp_path):
    best = plan("grpo", "7B", "8xA100-40GB", max_prompt_length=1024, max_completion_length=1024, zero_stage=3).best
    write_plan(best, tmp_path / "plan", "Qwen/Qwen2.5-7B")
    return best, tmp_path / "plan"


def test_a_plan_read_back_is_the_plan(written, tmp_path):
    best, folder = written
    assert read_plan(folder) == read_plan(folder / "plan.json") == best
    mixture = plan("grpo", "Qwen/Qwen3-30B-A3B", parse_gpus("4xfoo", gpu_memory_gib=200)).best
    for one in (mixture, *(preset.plan() for preset in PRESETS.values())):
        write_plan(one, tmp_path)
        assert read_plan(tmp_path) == one


def test_the_written_files_keep_the_batch_the_conventions_of_the_shipped_ones_and_say_how_to_launch(written):
    best, folder = written
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    assert recipe["per_device_train_batch_size"] * recipe["gradient_accumulation_steps"] * 8 == best.job.global_batch
    # A run is held against its plan, and knows the prompts that it was made for: TRL's trainers have no key for them.
    names = ("memory", "deepspeed", "memory_prompt_length")
    assert [recipe[name] for name in names] == ["plan.json", "deepspeed.json", 1024]
    mine = json.loads((folder / "deepspeed.json").read_text())
    zero = mine["zero_optimization"]  # the block in which DeepSpeed reads its sizes
    assert zero["stage"] == 3
    assert {"reduce_bucket_size", "stage3_max_live_parameters", "stage3_prefetch_bucket_size"} <= zero.keys()
    shipped = json.loads((ROOT / "deepspeed_configs" / "zero3.json").read_text())
    assert {**mine, "zero_optimization": None} == {**shipped, "zero_optimization": None}
    assert "(estimated)" in (folder / "recipe.yaml").read_text()
    assert f"--config {folder}/recipe.yaml" in (folder / "accelerate.yaml").read_text()
    assert settings.launch_lines(best.job, "x", best.estimate.hardware)[0].startswith(
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True "
    )


def test_the_launch_file_is_the_shipped_one_with_its_number_of_processes():
    for num_gpus, name in ((1, "single_gpu"), (4, "multi_gpu")):
        shipped = yaml.safe_load((ROOT / "accelerate_configs" / f"{name}.yaml").read_text())
        assert settings.accelerate(Job("reward"), num_gpus) == {**shipped, "num_processes": num_gpus}


def test_without_deepspeed_there_is_no_file_for_it_nor_that_of_an_earlier_plan(written, tmp_path):
    names = {file.name for file in write_plan(PRESETS["ppo-8b-4xa40-48gb"].plan(), written[1])}
    assert "deepspeed.json" not in names and not (written[1] / "deepspeed.json").exists()
    assert "deepspeed" not in yaml.safe_load((written[1] / "recipe.yaml").read_text())


def test_a_file_that_is_no_plan_of_this_version_is_a_sentence(written, tmp_path):
    file = tmp_path / "plan.json"
    stored = json.loads((written[1] / "plan.json").read_text())
    del stored["job"]["trainer"]
    texts = {"There is no plan": None, "cannot be read": "{", "version 99": '{"schema": 99}', "version None": "[]"}
    for words, text in {**texts, "damaged": json.dumps(stored)}.items():
        if text is not None:
            file.write_text(text)
        with pytest.raises(ConfigError, match=words):
            read_plan(tmp_path)


def test_qlora_asks_for_4_bits_a_reward_models_adapter_is_for_classification_and_one_gpu_gets_its_rank(tmp_path):
    recipe = settings.recipe(plan("grpo", "7B", "1x4090", method="qlora").best.job, "7B", 1)
    assert recipe["load_in_4bit"] and recipe["use_bnb_nested_quant"]
    job = plan("reward", "7B", "1xA100-80GB", method="lora").best.job
    assert settings.recipe(job, "7B", 1)["lora_task_type"] == "SEQ_CLS"
    # Without the rank, DeepSpeed asks MPI for it.
    write_plan(plan("reward", "7B", "1xA100-80GB", zero_stage=2, offload="optimizer").best, tmp_path)
    launch = yaml.safe_load((tmp_path / "accelerate.yaml").read_text())
    assert (launch["distributed_type"], launch["num_processes"]) == ("MULTI_GPU", 1)


def test_a_recipe_switches_off_what_a_run_does_by_default_and_the_plan_does_not_count():
    names = ("packing", "layer_kernels")
    for name in names:
        best = plan("grpo", "7B", "4xA100-80GB", **{name: False}).best
        recipe = settings.recipe(best.job, "7B", 4)
        assert {key: recipe[key] for key in names if key in recipe} == {name: False}
    assert not {*names} & settings.recipe(plan("grpo", "7B", "4xA100-80GB").best.job, "7B", 4).keys()


def test_the_written_folder_must_be_one_that_can_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="Give another folder"):
        write_plan(PRESETS["ppo-8b-4xa40-48gb"].plan(), tmp_path / "file" / "plan")


def test_the_launch_line_names_what_the_plan_counted_and_the_launch_file_says_what_it_is(tmp_path):
    for words, asked in {
        "--reward_adapter ADAPTER": {"critic": "adapter", "reward_model": "adapter"},
        "--reward_model REWARD_MODEL": {"reward_model": "copy"},
        "--reward_model REWARD_MODEL REWARD_MODEL --output_dir": {"reward_model": "copy", "num_reward_models": 2},
        "--rules RULES.yaml": {"reward_model": "none"},
    }.items():
        write_plan(plan("ppo", "Qwen/Qwen2.5-0.5B", "1xH200", **asked).best, tmp_path)
        text = (tmp_path / "accelerate.yaml").read_text()
        assert words in text
        for word in (words.split()[1], "DATASET", "OUT"):
            assert f"# {word}: {MEANINGS[word]}" in text


# A server, and several machines -------------------------------------------------------------------------------------


def test_a_plan_with_a_server_launches_it_and_trains_on_the_other_cards(tmp_path):
    one = plan("grpo", "7B", "8xH100", vllm_servers=1, vllm_tensor_parallel_size=2, global_batch=48).best
    (line,) = settings.launch_lines(one.job, "x", one.estimate.hardware)
    assert " --vllm_servers 1 " in line
    write_plan(one, tmp_path)
    assert yaml.safe_load((tmp_path / "accelerate.yaml").read_text())["num_processes"] == 6
    recipe = yaml.safe_load((tmp_path / "recipe.yaml").read_text())
    assert (recipe["use_vllm"], recipe["vllm_mode"]) == (True, "server")
    assert (recipe["vllm_tensor_parallel_size"], recipe["vllm_gpu_memory_utilization"]) == (2, 0.9)
    assert recipe["vllm_max_model_length"] == one.job.sequence_tokens
    assert read_plan(tmp_path) == one


def test_a_plan_for_two_machines_has_a_line_for_each(tmp_path):
    one = plan("reward", "8B", "2x8xH100", headroom="8%").best
    lines = settings.launch_lines(one.job, "x", one.estimate.hardware)
    assert len(lines) == 2
    assert all(f"--machine_rank {rank} --main_process_ip ADDRESS" in line for rank, line in enumerate(lines))
    assert all("--num_machines 2 --num_processes 16" in line for line in lines)
    write_plan(one, tmp_path)
    assert "# ADDRESS: " in (tmp_path / "accelerate.yaml").read_text()
    assert read_plan(tmp_path).estimate.hardware == one.estimate.hardware
