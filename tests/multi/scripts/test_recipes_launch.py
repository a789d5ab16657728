"""Every shipped recipe is launched by the line that it prints, and trains.

Beside the model, made tiny, only sizes change: processes, batches, lengths. The rows are made up and have the columns
of the data that the recipe names; the CPU computes. vLLM needs a GPU: servers are stand-ins, and elsewhere it is off.
"""

import json
import os
import shlex

import pytest
import yaml

from tests import fake_servers, tiny
from tests.embeddings import save_model
from tests.multi.launching import PROGRAMS, succeeded
from tests.multi.warm import warm_python
from tests.preferences import reward_model
from tests.reward_trainers import chat_tokenizer
from trl_ext.cli.main import shipped_recipes

RECIPES = {recipe.name: recipe for recipe in shipped_recipes()}
# Columns of the data sets, as their cards on the hub have them.
ROWS = {
    "openai/gsm8k": {"question": "Ann has 9 apples and eats 2. How many are left?", "answer": "9 - 2 = 7.\n#### 7"},
    "zwhe99/DeepMath-103K": {
        "question": "Evaluate the limit.",
        "final_answer": "\\frac{1}{2}",
        "difficulty": 5.0,
        "topic": "Mathematics -> Calculus",
        "r1_solution_1": "a",
        "r1_solution_2": "b",
        "r1_solution_3": "c",
    },
    "trl-lib/ultrafeedback_binarized": {
        side: [{"content": "Hello", "role": "user"}, {"content": answer, "role": "assistant"}]
        for side, answer in (("chosen", "Good day"), ("rejected", "No"))
    }
    | {"score_chosen": 8.0, "score_rejected": 2.0},
    "trl-lib/ultrafeedback-prompt": {"prompt": [{"content": "Hello", "role": "user"}]},
}
# The quickstart's.
OWN = {"prompt": [{"role": "user", "content": "Calculate: 4 + 3 = ?"}], "answer": "7"}
# In the recipe's own data; two processes where DDP or ZeRO shall have something to do, once each.
TWO = ("rm-ultrafeedback-6x4090", "gsm8k-ppo-4xa40", "gsm8k-grpo-4x-ahead")
SIZES = {"num_processes": 1, "gradient_accumulation_steps": 1, "per_device_train_batch_size": 2}
SIZES_OF = {
    "grpo": {"max_steps": 1, "num_generations": 2, "max_completion_length": 4, "use_vllm": "false"},
    "ppo": {
        "num_generations": 2,
        "total_episodes": 1,
        "response_length": 4,
        "num_mini_batches": 1,
        "num_ppo_epochs": 1,
        "critic_warmup_steps": 0,
        "per_device_eval_batch_size": 2,
    },
    "reward": {"max_steps": 1},
}
ON_CPU = {"use_cpu": "true", "bf16": "false"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with tiny models, and a folder of rows for each data set."""
    folder = tmp_path_factory.mktemp("recipes")
    tiny.model("llama").save_pretrained(folder / "model")
    reward_model(folder / "rm").save_pretrained(folder / "rm")
    for name in ("model", "rm"):
        chat_tokenizer().save_pretrained(folder / name)
    for name, row in {**ROWS, "own": OWN}.items():
        data = folder / "data" / name
        data.mkdir(parents=True)
        for split, count in (("train", 8), ("test", 2)):
            (data / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(count)))
    return folder


def command_of(recipe, folder):
    """The printed line's words, with the model, the data and the sizes of the test behind them."""
    line = recipe.launch.replace("\\\n", " ").splitlines()[-1]  # a line before it makes the quickstart's assets
    program, *words = shlex.split(line)
    assert program == "trl-ext"
    settings = yaml.safe_load(recipe.path.read_text())
    data = settings.get("dataset_name", "own")
    if recipe.name == "reward":
        data = "trl-lib/ultrafeedback_binarized"
    given = {
        "model_name_or_path": folder / "model",
        "dataset_name": folder / "data" / data,
        "output_dir": folder / recipe.name,
        **SIZES,
        **SIZES_OF[recipe.trainer],
        **ON_CPU,
    }
    if "--vllm_servers" in words:  # two blocks of samples, and a reward that brings the client's side of the stand-in
        given |= {"max_steps": 2, "reward_funcs": "tests.fake_servers.length"}
        del given["use_vllm"]
    if "dataset_config" in settings:
        given["dataset_config"] = ""  # files here have none
    if recipe.name in TWO:
        given["num_processes"] = 2
    if "--reward_model" in words or "reward_model" in settings:
        given["reward_model"] = folder / "rm"
    return [*words, *(str(word) for key, value in given.items() for word in (f"--{key}", value))]


# The others name the same launch files and keys, which tests/train/test_recipes.py reads.
DAILY = ("quickstart", *TWO)


@pytest.mark.parametrize(
    "name", [name if name in DAILY else pytest.param(name, marks=pytest.mark.nightly) for name in RECIPES]
)
def test_a_recipe_is_launched_by_its_printed_line_and_trains(name, folder):
    words = command_of(RECIPES[name], folder)
    if "relevance" in RECIPES[name].path.read_text():
        for package in ("harper", "sentence_transformers"):
            pytest.importorskip(package)
        save_model(folder / "sentence-transformers" / "all-MiniLM-L6-v2")
    named = [words[words.index("--config_file") + 1]] if "--config_file" in words else []
    if any("zero" in file for file in (*named, yaml.safe_load(RECIPES[name].path.read_text()).get("config_file", ""))):
        pytest.importorskip("deepspeed")
    program, where = [str(PROGRAMS / "command.py")], folder
    variables = {"HF_HOME": folder / "hub", "COLUMNS": 200}
    if "--vllm_servers" in words:
        program, where = ["-m", "trl_ext.cli.main"], folder / "bin"  # an empty vLLM lies there
        variables |= fake_servers.put_on_path(where) | {"FAKE_TRL_CLIENT": "1"}
    succeeded([warm_python(), *program, *words, "--main_process_port", 0], where, **variables)
    num_steps = 2 if "--vllm_servers" in words else 1
    assert json.loads((folder / name / "trainer_state.json").read_text())["global_step"] == num_steps
    assert not os.path.exists(where / "out")
