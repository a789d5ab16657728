"""FSDP2 in the planner: what it counts, which file launches it, and what it refuses."""

from dataclasses import replace

import pytest
import yaml

from tests.twin.simulation import simulation_of, why_not
from trl_ext import resources
from trl_ext.errors import ConfigError
from trl_ext.memory.cards import parse_gpus
from trl_ext.memory.files.launch import engine_fields, launched_with, read_accelerate
from trl_ext.memory.formulas.estimate import estimate
from trl_ext.memory.formulas.peak import Setup, resident
from trl_ext.memory.job import Job
from trl_ext.memory.models.find import find_shape
from trl_ext.memory.planner.folder import read_plan, write_plan
from trl_ext.memory.planner.planner import plan

SHAPE, CARDS = find_shape("8B"), parse_gpus("8xA100-80GB")
KINDS = {
    "reward": Job("reward", zero_stage=3, fsdp=True),
    "grpo": Job("grpo", zero_stage=3, fsdp=True, beta=0.04),
    "ppo": Job("ppo", zero_stage=3, fsdp=True, critic="head", num_generations=1),
    "lora": Job("grpo", zero_stage=3, fsdp=True, method="lora"),
}


@pytest.mark.parametrize("kind", ["reward", "ppo"])
def test_between_two_steps_it_holds_as_much_as_zero3_without_buckets(kind):
    """16 bytes for each trained weight over all cards, in either: DeepSpeed's are 2 + 12 + 2, FSDP2's 4 + 8 + 4."""
    job = KINDS[kind]
    ours, zero3 = (resident(Setup.of(SHAPE, one, CARDS)) for one in (job, replace(job, fsdp=False)))
    del zero3["buckets"]
    for terms in (ours, zero3):
        terms.pop("reference weights", None)  # whole under FSDP2 with PPO
    assert sum(ours.values()) == pytest.approx(sum(zero3.values()), rel=1e-9)


@pytest.mark.parametrize("job", KINDS.values(), ids=KINDS)
def test_more_cards_and_less_to_hold_need_less(job):
    now = estimate(job, SHAPE, CARDS).need_bytes
    assert estimate(job, SHAPE, parse_gpus("16xA100-80GB")).need_bytes < now
    assert estimate(replace(job, offload="all"), SHAPE, CARDS).need_bytes < now
    assert estimate(replace(job, max_length=8192, max_completion_length=4096), SHAPE, CARDS).need_bytes > now


@pytest.mark.parametrize("offload", ["none", "all"])
@pytest.mark.parametrize("trainer", ["reward", "grpo", "ppo"])
def test_a_plan_is_written_with_the_shipped_file_and_read_back(trainer, offload, tmp_path):
    critic = {"critic": "head"} if trainer == "ppo" else {}
    best = plan(trainer, "8B", CARDS, fsdp=True, offload=offload, **critic).best
    assert best.label.startswith("FSDP2")
    write_plan(best, tmp_path)
    assert read_plan(tmp_path).label == best.label
    assert not (tmp_path / "deepspeed.json").exists()
    name = launched_with(best.job).removeprefix("--config_file ")
    shipped = yaml.safe_load(resources.accelerate_config(name).read_text())
    assert yaml.safe_load((tmp_path / "accelerate.yaml").read_text()) == {**shipped, "num_processes": 8}
    num_processes, engine = read_accelerate(str(tmp_path / "accelerate.yaml"))
    fields = engine_fields(engine, SHAPE)
    assert num_processes == 8
    assert fields == {name: getattr(best.job, name) for name in ("zero_stage", "fsdp", "offload")}
    recipe = yaml.safe_load((tmp_path / "recipe.yaml").read_text())
    assert not {"deepspeed", "ds3_gather_for_generation"} & recipe.keys()


def test_a_search_without_it_never_turns_to_it():
    assert not any(one.job.fsdp for one in plan("grpo", "8B", CARDS).plans)


@pytest.mark.parametrize("settings", [{"fsdp": True}, {"zero_stage": 3}])
def test_a_4_bit_base_is_split_and_whole_while_it_loads(settings, tmp_path):
    settings = dict(method="qlora", max_length=4096, **settings)
    best = plan("reward", "70B", parse_gpus("2xA40-48GB"), **settings).best
    write_plan(best, tmp_path)
    assert yaml.safe_load((tmp_path / "recipe.yaml").read_text())["bnb_4bit_quant_storage"] == "bfloat16"
    split, whole = (best.estimate.terms_gib(phase)["policy weights"] for phase in ("update", "load"))
    assert 0.5 < split / whole < 0.55
    small = plan("reward", "70B", parse_gpus("2x4090"), **settings)
    assert not small.plans and "while loading" in small.reasons


@pytest.mark.parametrize(("key", "value"), [("fsdp_version", 1), ("fsdp_reshard_after_forward", False)])
def test_a_file_that_splits_otherwise_is_not_planned(key, value, tmp_path):
    keys = yaml.safe_load(resources.accelerate_config("fsdp2").read_text())
    keys["fsdp_config"][key] = value
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(keys))
    with pytest.raises(ConfigError, match="only version 2 that reshards is planned"):
        read_accelerate(str(tmp_path / "own.yaml"))


def test_the_twin_refuses_it():
    assert why_not(simulation_of(KINDS["grpo"], {}, 8)).startswith("FSDP2:")


def test_where_nothing_fits_rows_are_not_shared_and_a_larger_card_is_named():
    plans = plan("grpo", "70B", "2x4090", method="qlora", fsdp=True)
    assert not plans.plans
    assert [sentence.partition(":")[0] for sentence in plans.advice] == ["--gpus 2xA40-48GB"]
