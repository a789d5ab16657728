"""What `memory` names, held against a run: the contract, the launch, and words of the user. All by formulas."""

from dataclasses import replace

import pytest

from trl_ext.errors import ConfigError
from trl_ext.memory.cards import Hardware, parse_gpus
from trl_ext.memory.files.launch import SHIPPED
from trl_ext.memory.models.find import find_shape
from trl_ext.memory.planner.choices import FREE
from trl_ext.memory.planner.folder import write_plan
from trl_ext.memory.planner.keys import job_of_run
from trl_ext.memory.planner.planner import plan
from trl_ext.memory.planner.presets import PRESETS, preset
from trl_ext.memory.planner.run import ALL, LAUNCHED, SIZES, Run, parse_memory, settle

KEYS = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 8,
    "max_length": 1024,
    "max_completion_length": 512,
    "num_generations": 8,
    "beta": 0.0,
    "optim": "adamw_torch_fused",
    "gradient_checkpointing": True,
}
LORA = {"use_peft": True, "lora_r": 16, "lora_dropout": 0.0, "lora_target_modules": ["all-linear"]}
ZERO2 = {"zero_optimization": {"stage": 2}}
ZERO3 = {"zero_optimization": {"stage": 3}}


def run(trainer="grpo", model="8B", num_processes=4, engine=None, given=(), prompt_tokens=512, **keys):
    shape = find_shape(model)
    tokens = None if trainer == "reward" else prompt_tokens
    job = job_of_run(trainer, {**KEYS, **keys}, shape, num_processes, engine, tokens)
    given = frozenset(given) | LAUNCHED | {"steps_per_generation"} | ({"method"} if keys.get("use_peft") else set())
    return Run(job, given, shape, num_processes, num_processes)


@pytest.fixture(autouse=True)
def expandable_segments(monkeypatch):
    """As a config with `memory` sets it."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


def settled(one, memory, machine=None):
    return settle(one, parse_memory(memory), lambda: machine)


# Searched ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trainer", ["reward", "grpo"])
@pytest.mark.parametrize(("engine", "stage"), [(ZERO2, 2), (ZERO3, 3)])
def test_only_what_leaves_the_optimisation_unchanged_is_turned_and_the_launch_is_a_fact(trainer, engine, stage):
    one = run(trainer, engine=engine, num_processes=8)
    job = settled(one, "8xA100-80GB").job
    kept = ALL - FREE - SIZES
    assert {name: getattr(job, name) for name in kept} == {name: getattr(one.job, name) for name in kept}
    assert job.zero_stage == stage


def test_what_the_user_gave_stays():
    one = run("reward", num_processes=8, engine=ZERO2, given={"per_device_train_batch_size", "checkpoint_every"})
    job = settled(one, "8xA100-80GB").job
    assert (job.per_device_train_batch_size, job.checkpoint_every) == (8, 1)
    job = settled(run("reward", **LORA, global_batch=96), "4xA40-48GB").job
    assert job.global_batch == 96 and job.accumulation(4) * job.per_device_train_batch_size * 4 == 96


def test_a_launch_in_which_nothing_fits_names_the_one_that_does():
    with pytest.raises(ConfigError, match=r"as launched\. DDP, all weights: .* Launch with --config_file") as told:
        settled(run(num_processes=8), "8xA100-80GB")
    assert any(f"--config_file {file}:" in str(told.value) for file in SHIPPED.values())


def test_where_no_launch_helps_a_word_does():
    one = run("reward", model="70B", num_processes=4, engine=ZERO3, given={"checkpoint_every"})
    with pytest.raises(ConfigError, match=r"files that `trl-ext plan .* --write DIR` makes"):
        settled(one, "4xA100-80GB")
    small = Hardware(4, parse_gpus("A100-80GB").card, host_gib=256.0)  # too little for an optimizer of 70B
    with pytest.raises(ConfigError, match=r"on a card with 78 GiB.* LoRA \(use_peft\): "):
        settled(one, "auto", machine=small)


def test_adapters_do_not_come_unasked():
    one = run("reward", num_processes=1)
    with pytest.raises(ConfigError, match="Nothing that keeps the optimisation fits on 1xRTX4090"):
        settled(one, "1x4090")


# The machine ------------------------------------------------------------------------------------------------------


def test_auto_takes_the_cards_of_the_machine_may_leave_some_idle_and_never_shares_one():
    assert str(settled(run("reward", **LORA), "auto", machine=parse_gpus("4xA40")).estimate.hardware) == "4xA40-48GB"
    assert settled(run("reward", **LORA, num_processes=2), "auto", machine=parse_gpus("4xA40")).estimate.fits
    with pytest.raises(ConfigError, match="4 processes were launched here, and there are 2 cards"):
        settled(run("reward", **LORA), "auto", machine=parse_gpus("2xA40"))


# Planned ----------------------------------------------------------------------------------------------------------


def engine_of(name):
    job = preset(name).plan().job
    zero = {"stage": job.zero_stage} | ({} if job.offload == "none" else {"offload_optimizer": {"device": "cpu"}})
    return {"zero_optimization": zero} if job.zero_stage else None


def preset_run(name, **changes):
    """A run whose maker heeds the preset: its model, launch, method, lengths, with a batch of his own."""
    job, given = preset(name).plan().job, ()
    lora = {**LORA, "lora_r": job.lora_r} if job.uses_lora else {}
    keys = {
        **lora,
        "max_length": job.max_length,
        "max_completion_length": job.max_completion_length,
        "num_generations": job.num_generations,
        "beta": job.beta,
        "critic": job.critic,
        "reward_adapter": job.reward_model == "adapter",
        "use_vllm": job.use_vllm,
        "vllm_gpu_memory_utilization": 0.3,
        "vllm_tensor_parallel_size": 1,
        "vllm_enable_sleep_mode": False,
    }
    num_processes = parse_gpus(preset(name).gpus).num_gpus
    keys |= {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
    return run(
        job.trainer,
        preset(name).model,
        num_processes,
        engine_of(name),
        given,
        job.max_prompt_length,
        **{**keys, **changes},
    )


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_serves_a_run_of_its_kind_and_keeps_its_batch(name):
    one = preset_run(name)
    plan = settled(one, name)
    assert plan.estimate.fits
    assert plan.job.global_batch == one.job.global_batch
    planned = preset(name).plan().job
    assert plan.job.checkpoint_every == planned.checkpoint_every
    assert plan.job.per_device_train_batch_size <= planned.per_device_train_batch_size


def test_rows_that_gpus_share_are_the_runs_as_the_plan_has_them(tmp_path):
    settings = {"global_batch": 64, "max_length": 30_000, "zero_stage": 2, "sequence_parallel": 2}
    write_plan(plan("reward", "8B", "8xH100-80GB", **settings).best, tmp_path / "plan")
    keys = {"max_length": 30_000, "num_processes": 8, "engine": ZERO2}
    one = run("reward", sequence_parallel=2, given={"sequence_parallel"}, **keys)
    assert settled(one, str(tmp_path / "plan")).job.sequence_parallel == 2
    with pytest.raises(ConfigError, match="planned with sequence_parallel=2, and this run has sequence_parallel=1"):
        settled(run("reward", **keys), str(tmp_path / "plan"))


def test_where_rows_are_too_long_sharing_them_is_named():
    with pytest.raises(ConfigError, match="sequence_parallel=2: "):
        settled(run("reward", num_processes=8, engine=ZERO3, max_length=100_000), "8xA100-40GB")


def test_a_preset_of_another_launch_trainer_or_number_of_processes_is_refused():
    one = preset_run("grpo-7b-8xa100-40gb")
    plain = replace(one, job=replace(one.job, zero_stage=0))
    with pytest.raises(ConfigError, match=r"with zero_stage=3, and this run has zero_stage=0\. .*--config_file zero3"):
        settled(plain, "grpo-7b-8xa100-40gb")
    with pytest.raises(ConfigError, match=r"with trainer=ppo, and this run has trainer=grpo\. Start a ppo run"):
        settled(run(engine=None, num_processes=4), "ppo-8b-4xa40-48gb")
    with pytest.raises(ConfigError, match=r"is for 4xA40-48GB, and 2 processes were launched.*--num_processes 4"):
        settled(run(num_processes=2), "4xA40-48GB")


def test_the_runs_own_settings_stay_beside_a_preset():
    one = preset_run("ppo-8b-4xa40-48gb", per_device_train_batch_size=2)
    plan = settled(replace(one, given=one.given | {"per_device_train_batch_size"}), "ppo-8b-4xa40-48gb")
    assert plan.job.per_device_train_batch_size == 2 and plan.job.checkpoint_every == 1


def test_a_preset_with_adapters_needs_them_and_is_held_against_the_runs_own_lengths():
    name = "grpo-7b-2xa100-40gb"
    one = replace(preset_run(name, use_peft=False), given=LAUNCHED)
    with pytest.raises(ConfigError, match=r"method=lora and .*, and this run has method=full .*use_peft"):
        settled(one, name)
    with pytest.raises(ConfigError, match=r"made for sequences of 2048 tokens .* With 30720 tokens"):
        settled(preset_run(name, max_completion_length=29696), name)


def test_a_plan_in_a_folder_does_what_the_planner_said(tmp_path):
    one = run("reward", **LORA)
    plan = settled(one, "4xA40-48GB")
    write_plan(plan, tmp_path / "plan")
    assert settled(one, str(tmp_path / "plan")).job == plan.job


def test_a_plan_serves_a_run_without_the_checkpointing_that_an_option_of_the_plan_needs(tmp_path):
    keeps = plan("reward", "0.6B", "1xA40-48GB", keep_attention=True, checkpoint_every=1, zero_stage=0).best
    write_plan(keeps, tmp_path / "plan")
    plain = run("reward", "0.6B", num_processes=1, given={"checkpoint_every"}, gradient_checkpointing=False)
    job = settled(plain, str(tmp_path / "plan")).job
    assert (job.checkpoint_every, job.keep_attention) == (0, False)
    job = settled(run("reward", "0.6B", num_processes=1), str(tmp_path / "plan")).job
    assert (job.checkpoint_every, job.keep_attention) == (1, True)


def test_a_plan_with_a_server_serves_a_run_of_the_cards_that_train(tmp_path):
    servers = {"vllm_servers": 4, "vllm_tensor_parallel_size": 1}
    planned = plan("grpo", "8B", "8xA100-80GB", **servers, zero_stage=2, max_completion_length=512).best
    write_plan(planned, tmp_path / "plan")
    server = {"use_vllm": True, "vllm_mode": "server"}
    one = run(engine=ZERO2, num_processes=4, per_device_train_batch_size=4, gradient_accumulation_steps=4, **server)
    settled_plan = settled(one, str(tmp_path / "plan"))
    assert settled_plan.estimate.fits and settled_plan.estimate.num_gpus == 4
    with pytest.raises(ConfigError, match="4 of them for vLLM servers, and 8 processes were launched"):
        settled(run(engine=ZERO2, num_processes=8, **server), str(tmp_path / "plan"))


def test_head_room_is_the_plans_and_five_per_cent_by_default(tmp_path):
    one = run("reward", **LORA)
    assert settled(one, "4xA40-48GB").estimate.hardware.headroom_frac == 0.05
    write_plan(plan("reward", "8B", "4xA40-48GB", headroom="2%", method="lora", zero_stage=1).best, tmp_path / "plan")
    folder = parse_memory(str(tmp_path / "plan"))
    found = settle(replace(one, job=replace(one.job, zero_stage=1)), folder, lambda: None)
    assert found.estimate.hardware.headroom_frac == 0.02


# Bad words --------------------------------------------------------------------------------------------------------


def test_what_names_nothing_is_a_sentence():
    for memory, sentence in {
        "4xA41-48GB": "neither auto, nor cards, nor a preset.*Nearest: A40-48GB",
        "ppo-8b": "Nearest presets: ppo-8b-4xa40-48gb",
        "2xA100": "Write one of A100-40GB, A100-80GB",
        "./no-plan": "There is no plan",
    }.items():
        with pytest.raises(ConfigError, match=sentence):
            parse_memory(memory)
