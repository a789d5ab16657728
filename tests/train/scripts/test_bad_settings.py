"""Each kind of bad setting ends each script in one sentence before step 1, and exit code 2."""

import json
import math
import os
import shutil
import traceback
from importlib.util import find_spec

import pytest

from tests import recipes, tiny
from tests.nightly import daily
from trl_ext.scripts import grpo, ppo, reward

NAN, INF = math.nan, math.inf
SCRIPTS = {"grpo": grpo, "ppo": ppo, "reward": reward}
ROLLS_OUT = ("grpo", "ppo")

ROLLOUT = dict(rules=[{"rule": "length", "high": 4, "slack": 4}], max_completion_length=4)
SETTINGS = {
    "grpo": recipes.SMALL | ROLLOUT | dict(max_steps=1, num_generations=2),
    "ppo": recipes.SMALL | ROLLOUT | dict(max_steps=1),
    "reward": recipes.SMALL | dict(max_steps=1),
}
LORA = ["--use_peft", "--lora_target_modules", "q_proj", "v_proj"]
LAUNCHED_WITH_STAGE = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}

# A setting, a value, and what the sentence must say. Ranges are tests/light/trainers/test_setting_checks.py's.
VALUES = [
    ("learning_rate", NAN, "learning_rate=nan must be a finite number"),
    ("fp16", True, "fp16=True has no effect on a CPU"),
    ("optim", "adam_torsch", "'optim' must be one of"),
    ("optim", "galore_adamw", "install `galore_torch`"),
    ("lr_scheduler_type", "cosinus", "'lr_scheduler_type' must be one of"),
    ("lr_scheduler_kwargs", {"nope": 1}, "unexpected keyword argument 'nope'"),
    ("max_steps", [1], "'max_steps' must be a whole number, not a list"),
    ("report_to", "wanddb", "wanddb is not supported"),
    ("seed", -1, "Seed must be between 0 and 2**32 - 1"),
    ("dataloader_num_workers", 10_000, "dataloader_num_workers=10000 must be at least 0 and at most"),
    ("gradient_checkpointing_kwargs", {"nonsense": 1}, "has 'nonsense', which torch does not know"),
    ("model_init_kwargs", "word", "model_init_kwargs='word' must be a mapping"),
    ("per_device_batch_size", 4, "It is 'per_device_train_batch_size' now"),
    ("memory_prompt_length", 4, "memory_prompt_length=4, memory=None: it has no effect without memory"),
    ("optim_args", "foo=bar", "optim_args='foo=bar' has no effect with optim="),
    ("max_tokens_per_forward", 1, "max_tokens_per_forward=1: a forward cannot hold a row"),
    ("log_level", "loud", "log_level='loud' is unknown. Use one of: detail, debug"),
    ("torch_compile_mode", "fast", "torch_compile_mode='fast' is unknown"),
    ("dtype", "float16", "dtype=float16 rounds an optimizer step on a CPU away"),
    ("dataset_train_split", "trian", "is one file and has no split 'trian'"),
    ("model_revision", "zzz", "model_revision=zzz has no effect on the folder"),
    ("output_dir", "a\0b", "holds a NUL character"),
    ("output_dir", "l\udcc3\udca4", "is not UTF-8. Give another"),
    ("output_dir", "x" * 300, "is too long"),
    ("parallelism_config", 7, "(AttributeError in "),
    ("resume_from_checkpoint", 7, "There is no checkpoint 7"),
    ("attn_implementation", "flahs", 'model cannot be loaded: Specified `attn_implementation="flahs"`'),
    ("dtype", "float19", "got float19"),
    ("eval_strategy", "steps", "without held-out rows set eval_strategy"),
    ("output_dir", "{assets}/file", "{assets}/file is a file"),
    ("output_dir", "{assets}/file/out", "{assets}/file is a file"),
    ("output_dir", "/proc/nothing/out", "/proc/nothing"),
    ("model_name_or_path", "{assets}/truncated", "truncated cannot be loaded"),
    ("model_name_or_path", "{assets}/empty", "empty cannot be loaded"),
    ("model_name_or_path", "{assets}/no_config", "no_config cannot be loaded"),
    ("model_name_or_path", "{assets}/no_tokenizer", "no_tokenizer cannot be loaded"),
    ("model_name_or_path", "{assets}/no_weights", "no_weights cannot be loaded"),
    ("model_name_or_path", "{assets}/other_shape", "other_shape cannot be loaded"),
    ("deepspeed", "{assets}/broken.json", "broken.json is not valid JSON"),
    ("deepspeed", "{assets}/list.json", "list.json holds no mapping"),
]
GENERATION = [
    ("reward_weights", [1.0, 2.0], "Number of reward weights (2) must match"),
    ("reward_weights", [NAN], "reward_weights: weight 1 is nan"),
    ("max_completion_length", 1_000_000, "max_completion_length=1000000 is more than the 512 tokens"),
    ("generation_kwargs", {"do_sample": False}, "all completions of a prompt are the same"),
    ("generation_kwargs", {"max_new_tokens": 1}, "Set max_completion_length instead"),
    ("generation_kwargs", {"temperature": 0.0}, "Set temperature instead"),
    ("top_entropy_quantile", 0.0, "top_entropy_quantile=0.0 must be above 0"),
    ("vllm_mode", "server", "vllm_mode='server' has no effect without use_vllm=True"),
    ("vllm_max_model_length", 512, "vllm_max_model_length=512 has no effect without use_vllm=True"),
    ("reward_funcs", ["os.system"], "The reward function system needs the argument 'command'"),
    ("reward_funcs", ["accuracy_reward"], "accuracy_reward needs the argument 'solution'"),
    ("reward_funcs", ["math.pi"], "The reward function 'math.pi' is of type float"),
]
OWN = {
    "grpo": [("num_generations", 1, "at least 2 generations")],
    "ppo": [],
    "reward": [("chat_template_path", "nowhere", "nowhere cannot be loaded")],
}
# Lines of YAML that are no value, or several, and what the sentence must say.
LINES = [
    (
        "gradient_checkpointing: false\ngradient_checkpointing_kwargs: {keep_attention: true}\n",
        "keep_attention of gradient_checkpointing_kwargs needs gradient_checkpointing: true",
    ),
    ("seed: 1\nseed: 2\n", "the key 'seed' is on line"),
    ('run_name: !!python/object/apply:os.system ["touch pwned"]\n', "could not determine a constructor for the tag"),
    ("env: {A: !!python/name:os.system }\n", "could not determine a constructor for the tag"),
    ("run_name: 2001-13-45\n", "month must be in 1..12"),
]
FLAGS = [
    (["--use_peft", "--lora_target_modules", "nothing", "at_all"], "target"),
    ([*LORA, "--lora_r", "0"], "`r` should be a positive integer"),
    ([*LORA, "--lora_dropout", "2"], "dropout probability has to be between 0 and 1"),
    (["--learnig_rate", "1"], "Did you mean --learning_rate?"),
]


def kinds(trainer):
    """Yield a name, further lines of the recipe, flags and words of the sentence."""
    values = [*VALUES, *(GENERATION if trainer in ROLLS_OUT else ()), *OWN[trainer]]
    for name, value, words in values:
        yield f"{name}={value}", {name: value}, "", [], words
    for line, words in LINES:
        yield line.partition("\n")[0], {}, line, [], words
    for flags, words in FLAGS:
        yield " ".join(flags), {}, "", flags, words


SHARED = {kind[0] for kind in kinds("grpo")} & {kind[0] for kind in kinds("reward")}
# Each kind ends one of the scripts in turn, and every one by night.
CASES = [
    pytest.param(
        trainer,
        *kind[1:],
        id=f"{trainer}: {kind[0]}",
        marks=[] if place % 3 == number or kind[0] not in SHARED else pytest.mark.nightly,
    )
    for number, trainer in enumerate(SCRIPTS)
    for place, kind in enumerate(kinds(trainer))
]


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    """A tiny model, damaged copies of it, prompts, pairs, and DeepSpeed files."""
    folder = tmp_path_factory.mktemp("assets")
    recipes.save(folder / "model")
    for name in ("truncated", "no_config", "no_tokenizer", "no_weights", "other_shape"):
        shutil.copytree(folder / "model", folder / name)
    os.truncate(folder / "truncated" / "model.safetensors", 5000)
    (folder / "no_config" / "config.json").unlink()
    (folder / "no_weights" / "model.safetensors").unlink()
    for file in (folder / "no_tokenizer").glob("token*"):
        file.unlink()
    config = json.loads((folder / "model" / "config.json").read_text())
    (folder / "other_shape" / "config.json").write_text(
        json.dumps(config | {"hidden_size": config["hidden_size"] * 2})
    )
    (folder / "empty").mkdir()
    (folder / "file").touch()
    prompts = [{"prompt": tiny.words(i, i + 1)} for i in range(3, 11)]
    pairs = [{**row, "chosen": tiny.words(3), "rejected": tiny.words(4, 5)} for row in prompts]
    for name, rows in (("prompts", prompts), ("pairs", pairs)):
        recipes.write_rows(folder / f"{name}.jsonl", rows)
    (folder / "list.json").write_text("[1]")
    (folder / "stage_2.json").write_text('{"zero_optimization": {"stage": 2}}')
    (folder / "broken.json").write_text('{"zero')
    return folder


@pytest.fixture
def run(assets, tmp_path, monkeypatch, capfd):
    """Run a script in this process: its exit code, as Python ends a program, and its stderr."""
    monkeypatch.chdir(tmp_path)

    def run(trainer, changes, line="", flags=()):
        changes = {name: in_words(value, assets) for name, value in changes.items()}
        rows = assets / ("pairs.jsonl" if trainer == "reward" else "prompts.jsonl")
        given = dict(model_name_or_path=str(assets / "model"), dataset_name=str(rows), output_dir="runs/out")
        argv = recipes.recipe(tmp_path, line, **SETTINGS[trainer] | given | changes)
        code = 0
        try:
            SCRIPTS[trainer].main([*argv, *flags])
        except SystemExit as stop:
            code = stop.code
        except Exception:
            traceback.print_exc()
            code = 1
        return code, capfd.readouterr().err

    return run


def in_words(value, assets):
    return value.replace("{assets}", str(assets)) if isinstance(value, str) else value


@pytest.mark.parametrize(("trainer", "changes", "line", "flags", "words"), CASES)
def test_a_bad_setting_is_one_sentence(run, assets, tmp_path, trainer, changes, line, flags, words):
    code, said = run(trainer, changes, line, flags)
    sentence = said.partition("\nerror: ")[2].strip()
    assert code == 2, said[-3000:]
    assert in_words(words, assets) in sentence and "\n" not in sentence
    assert "Traceback" not in said


@pytest.mark.parametrize("trainer", daily(SCRIPTS, "grpo"))
def test_a_deepspeed_file_and_another_stage_of_the_launch_contradict(run, assets, trainer, monkeypatch):
    for name, value in LAUNCHED_WITH_STAGE.items():
        monkeypatch.setenv(name, value)
    code, said = run(trainer, {"deepspeed": str(assets / "stage_2.json")})
    assert code == 2 and "has stage 2, but the run was launched with stage 3" in said


@pytest.mark.skipif(bool(find_spec("vllm")), reason="vLLM is installed")
@pytest.mark.parametrize("trainer", daily(ROLLS_OUT, "ppo"))
def test_vllm_that_is_not_installed_is_a_sentence(run, trainer):
    code, said = run(trainer, {"use_vllm": True})
    assert code == 2 and "error: The run cannot start: vLLM is not available" in said


@pytest.mark.parametrize(("trainer", "key"), [("grpo", "reward_model_name_or_path"), ("ppo", "reward_model")])
def test_a_reward_model_that_is_not_there_is_no_question_to_the_hub(run, trainer, key):
    code, said = run(trainer, {key: "out/reward" if trainer == "grpo" else ["out/reward"]})
    assert code == 2 and "out/reward cannot be loaded, and there is no folder of this name" in said


@pytest.mark.parametrize("trainer", SCRIPTS)
def test_settings_that_work_are_not_refused(run, trainer, tmp_path):
    fine = dict(learning_rate=0.0, max_grad_norm=0.0)
    rollout = dict(temperature=0.5, top_k=0, beta=0.0, epsilon=0.3, reward_weights=[0.5])
    code, said = run(trainer, {**fine, **(rollout if trainer in ROLLS_OUT else {})})
    assert code == 0, said[-3000:]
    assert (tmp_path / "runs" / "out" / "model.safetensors").is_file()
