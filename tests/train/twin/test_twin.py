"""The memory twin: what it counts of two critics, and `trl-ext dryrun` around it.

The model has the widths of an 8B model, two layers and a small vocabulary:
fake tensors cost time by number, not by size. Whether formulas and twin agree is test_twin_matrix.py's.
"""

import io
import json
import shlex
from contextlib import redirect_stdout

import pytest

from tests.faults.starting import IS_THOROUGH
from tests.plans import config
from trl_ext.cli.dryrun.command import dryrun
from trl_ext.cli.plan.command import EXAMPLES, NOTHING_FITS, plan
from trl_ext.errors import ConfigError
from trl_ext.memory.job import Job
from trl_ext.memory.models.find import find_shape
from trl_ext.memory.models.shapes import scorer_params
from trl_ext.twin import run_apart, simulation_of
from trl_ext.twin.driver import last_words

CONFIG = config("llama", 32768, 4096, 14336, 2, 32, kv_heads=8, head_dim=128, max_position_embeddings=8192)
LENGTHS = {"max_length": 1024, "max_prompt_length": 512, "max_completion_length": 512}
LORA = {"method": "lora"}


def job_of(trainer, num_gpus, settings):
    """Two micro-batches where one process would have no group, else one."""
    group = 2 if trainer == "grpo" else 1
    batch = {"num_generations": group, "global_batch": max(num_gpus, group)}
    return Job(trainer, **{**batch, **LENGTHS, **settings})


def counted(twin, trainer, num_gpus, settings):
    if settings.get("zero_stage"):
        pytest.importorskip("deepspeed")
    result = twin(simulation_of(job_of(trainer, num_gpus, settings), CONFIG, num_gpus))
    assert not result.refusal, result.refusal
    return result


@pytest.mark.parametrize("zero_stage", [2, 3] if IS_THOROUGH else [2])
def test_the_adapter_critic_holds_no_checkpoints_beside_the_policys(zero_stage, twin):
    """Its gradient is there before the policy's forward. ZeRO-3 has one backward for both losses: the embeddings and
    the inputs of both layers are there twice."""
    alone = counted(twin, "ppo", 8, {**LORA, "zero_stage": zero_stage, "critic": "head"})
    both = counted(twin, "ppo", 8, {**LORA, "zero_stage": zero_stage, "critic": "adapter"})
    tokens = LENGTHS["max_prompt_length"] + LENGTHS["max_completion_length"]
    checkpoints = 2 * CONFIG["hidden_size"] * CONFIG["num_hidden_layers"] * tokens
    more = both.peaks["update"].num_bytes - alone.peaks["update"].num_bytes
    assert (more > checkpoints) == (zero_stage == 3)
    assert both.num_trained == 2 * (alone.num_trained - CONFIG["hidden_size"] - 1) + CONFIG["hidden_size"] + 1


def test_every_reward_model_of_an_ensemble_is_there(twin):
    settings = {**LORA, "critic": "head", "reward_model": "copy"}
    one, three = (counted(twin, "ppo", 1, {**settings, "num_reward_models": number}) for number in (1, 3))
    scorer = 2 * scorer_params(find_shape(CONFIG))
    assert three.peaks["update"].num_bytes - one.peaks["update"].num_bytes == pytest.approx(2 * scorer, rel=0.01)


# trl-ext dryrun ---------------------------------------------------------------------------------------------------


def write_recipe(folder):
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps({**CONFIG, "hidden_size": 1024}))
    path = folder / "recipe.yaml"
    lines = [f"model_name_or_path: {folder / 'model'}", "dtype: bfloat16", "use_peft: true"]
    lines += ["lora_target_modules: [all-linear]", "lora_dropout: 0.0", "per_device_train_batch_size: 2"]
    lines += ["gradient_accumulation_steps: 8", "num_generations: 4", "max_completion_length: 128", "beta: 0.0"]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def recipe(tmp_path):
    return write_recipe(tmp_path)


@pytest.fixture(scope="module")
def answer(tmp_path_factory):
    """What dryrun says as JSON of a recipe, with expandable segments; its simulation is a process of its own."""
    path, output = write_recipe(tmp_path_factory.mktemp("recipe")), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(output):
        patch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        assert dryrun([str(path), "--gpus", "1xRTX4090", "--max_prompt_length", "128", "--json"]) == 0
    return json.loads(output.getvalue())


def test_dryrun_puts_the_formula_beside_the_twin(answer):
    update = answer["phases"]["update"]
    assert answer["basis"] == "twin" and answer["fits"]
    assert update["twin_gib"] == pytest.approx(update["formula_gib"], rel=0.03)
    assert update["op"] and update["module"]
    assert answer["phases"]["generate"]["twin_gib"] is None


def test_dryrun_says_what_the_allocator_reserves_with_either_policy(answer):
    # Generation is more than training here, and the formulas'.
    assert answer["reserved_gib"] == answer["phases"]["generate"]["reserved_gib"]
    assert answer["expandable_segments"] and not answer["other_policy"]["expandable_segments"]
    for name in ("score", "update", "step"):
        phase = answer["phases"][name]
        assert phase["twin_gib"] <= phase["reserved_gib"] <= answer["reserved_gib"]


def test_dryrun_lets_the_formulas_answer_where_the_twin_cannot_follow(recipe, capsys):
    recipe.write_text(recipe.read_text() + "\nload_in_4bit: true\n")
    dryrun([str(recipe), "--gpus", "1xRTX4090", "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["basis"] == "formulas"
    assert answer["refusal"].startswith("Quantised weights")
    assert answer["peak_gib"] > 0
    assert answer["reserved_gib"] > answer["peak_gib"]


@pytest.mark.parametrize(("name", "basis"), [("reward_model", "twin"), ("reward_adapter", "formulas")])
def test_dryrun_counts_all_reward_models_and_adapters_that_a_recipe_names(name, basis, recipe, capsys):
    path, line = recipe.parent / "ppo.yaml", recipe.read_text().replace("num_generations: 4\n", "")
    path.write_text(f"{line}\n{name}: [first, second]")
    dryrun([str(path), "--trainer", "ppo", "--gpus", "1xRTX4090", "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["basis"] == basis and ("A third adapter" in answer["refusal"]) == (basis == "formulas")
    update = answer["phases"]["update"]
    if basis == "twin":
        assert update["twin_gib"] == pytest.approx(update["formula_gib"], rel=0.03)
    else:
        path.write_text(f"{line}\n{name}: [first]")
        dryrun([str(path), "--trainer", "ppo", "--gpus", "1xRTX4090", "--json"])
        assert json.loads(capsys.readouterr().out)["phases"]["update"]["formula_gib"] < update["formula_gib"]


def test_dryrun_refuses_a_misspelt_key(recipe):
    recipe.write_text(recipe.read_text() + "\nmax_completion_lenght: 5\n")
    with pytest.raises(ConfigError, match="max_completion_length"):
        dryrun([str(recipe), "--trainer", "grpo", "--gpus", "1xRTX4090"])


def test_a_crash_is_told_by_its_last_words():
    errors = '[rank0]:   File "stage3.py", line 9, in flatten\n[rank0]:     assert same\n[rank0]: AssertionError\n'
    assert last_words(errors) == 'AssertionError, File "stage3.py", line 9, in flatten'
    assert last_words("ValueError: the key 'x' is wrong.\n") == "ValueError: the key 'x' is wrong"


SMALL = config("llama", 512, 64, 128, 1, 2, kv_heads=2)


def test_a_fork_counts_what_a_process_of_its_own_counts_and_what_it_dies_of_is_told(twin):
    simulation, broken = (
        simulation_of(Job("reward", global_batch=1, max_length=32), SMALL | changes, 1)
        for changes in ({}, {"model_type": "nothing"})
    )
    found = twin(simulation)
    assert found.peaks == run_apart(simulation).peaks and found.peak_bytes > 0
    assert "nothing" in twin(broken).refusal


# trl-ext plan --verify -----------------------------------------------------------------------------------------------


TINY = config("llama", 4096, 1024, 2816, 2, 8, kv_heads=4, max_position_embeddings=4096)
QUESTION = "--trainer grpo --gpus 1xRTX4090".split()


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(TINY))
    return str(path.parent)


def test_the_example_of_the_help_says_both_numbers(model, capsys):
    [line] = [line for line in EXAMPLES.splitlines() if "--verify" in line]
    words = shlex.split(line)[2:]
    words[words.index("--model") + 1] = model  # made tiny
    assert plan(words) == 0
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last.startswith("verified: training peaks in the phase '") and "GiB by the twin" in last
    assert "GiB by the formulas" in last and "%" in last


def test_json_carries_both_numbers_and_their_difference(model, capsys):
    assert plan([*QUESTION, "--model", model, "--method", "lora", "--verify", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)["verify"]
    assert answer["refusal"] == "" and answer["phase"] in ("score", "update", "step")
    assert answer["twin_gib"] > 0
    assert answer["difference_frac"] == pytest.approx(answer["formula_gib"] / answer["twin_gib"] - 1, abs=0.002)
    assert abs(answer["difference_frac"]) < 0.05


def test_what_the_twin_cannot_follow_is_a_sentence_and_the_plan_stands(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_HOME", str(tmp_path))  # no model is in the hub's cache
    for words, code, reason in (
        ("--model 1B --zero_stage 2 --offload optimizer", 0, "not verified: Offloading: "),
        ("--model Qwen/Qwen3-30B-A3B --method lora --gpus 8xH100-80GB", 0, "is a mixture of experts"),
        ("--model 7B --zero_stage 0", NOTHING_FITS, "not verified: Nothing fits, so there is no plan to verify."),
    ):
        assert plan([*QUESTION, *words.split(), "--verify"]) == code
        assert reason in capsys.readouterr().out.strip().splitlines()[-1]


def test_a_list_of_presets_has_no_plan_to_verify():
    with pytest.raises(ConfigError, match="--presets lists the frozen plans and takes --json alone"):
        plan(["--presets", "--verify"])
