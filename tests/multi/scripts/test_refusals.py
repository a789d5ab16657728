"""What stops a launched run before step 1 is said once, by whichever rank has it.

DeepSpeed's refusals stand here, too: they need a process that DeepSpeed may keep.
"""

import json

import pytest

from tests.multi.launching import PROGRAMS, ended, launched
from tests.multi.warm import warm_python

RECIPE = dict(
    rules=[{"rule": "length", "high": 4, "slack": 4}],
    max_steps=1,
    use_cpu=True,
    bf16=False,
    report_to="none",
    save_strategy="no",
    per_device_train_batch_size=4,
    num_generations=2,
    max_completion_length=4,
    output_dir="runs/out",
    dataset_name="prompts.jsonl",
)
ENGINE = {
    "zero_optimization": {"stage": 2},
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
}


@pytest.fixture
def recipe(tiny_model, tmp_path):
    """Write a GRPO recipe of the tiny model, JSON being YAML, and its prompts; return the script's arguments."""

    def write(**changes):
        (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"w{i} w3"}) + "\n" for i in range(8)))
        settings = {**RECIPE, "model_name_or_path": str(tiny_model), **changes}
        (tmp_path / "recipe.yaml").write_text(json.dumps(settings))
        return ["--config", "recipe.yaml"]

    return write


# Ranks ------------------------------------------------------------------------------------------------------------


def test_a_sentence_that_only_rank_1_has_is_printed_and_ends_the_run(tmp_path):
    done = ended([*launched("cpu", 2), PROGRAMS / "refusing.py"], tmp_path)
    assert done.returncode != 0
    assert done.stderr.count("error: Rank 1 has no rollouts. Give the whole checkpoint.") == 1
    assert "exitcode  : 2" in done.stderr  # the rank that the launcher names as the first to fail


def test_a_sentence_that_all_ranks_have_is_printed_once(recipe, tmp_path):
    script = ["-m", "trl_ext.scripts.grpo", *recipe(max_tokens_per_forward=5)]
    done = ended([*launched("cpu", 2), *script], tmp_path)
    assert done.returncode != 0
    assert done.stderr.count("error: max_tokens_per_forward=5 is smaller than the longest row") == 1


# DeepSpeed --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        (None, "an existing deepspeed config"),
        ({**ENGINE, "train_micro_batch_size_per_gpu": 7}, "train_micro_batch_size_per_gpu=7 vs hf per_device"),
        ({**ENGINE, "bf16": {"enabled": True}}, "bf16.enabled=True vs hf bf16"),
        ({**ENGINE, "zero_optimization": {"stage": 9}}, "Input should be 0, 1, 2"),
    ],
)
def test_what_deepspeed_refuses_is_a_sentence(recipe, tmp_path, engine, words):
    if engine is not None:
        pytest.importorskip("deepspeed")
        (tmp_path / "engine.json").write_text(json.dumps(engine))
    check(tmp_path, ["-m", "trl_ext.scripts.grpo", *recipe(deepspeed="engine.json")], words)


def test_deepspeed_that_is_not_installed_is_a_sentence(recipe, tmp_path):
    (tmp_path / "engine.json").write_text(json.dumps(ENGINE))
    program = PROGRAMS / "without_deepspeed.py"
    check(
        tmp_path,
        [program, *recipe(deepspeed="engine.json")],
        "'deepspeed-that-is-not-there' distribution was not found",
    )


def check(folder, script, words):
    """Run a script as the one process of a launch: it ends in a sentence."""
    address = dict(RANK=0, LOCAL_RANK=0, WORLD_SIZE=1, MASTER_ADDR="127.0.0.1", MASTER_PORT=0)
    done = ended([warm_python(), *script], folder, **address)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr[-3000:]
    assert words in done.stderr.partition("\nerror: ")[2].splitlines()[0]
