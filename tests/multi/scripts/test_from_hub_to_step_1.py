"""A new user with GSM8K's columns, on a CPU: one recipe, one command, step 1."""

import json
import os

import pytest
from datasets import Dataset
from transformers import AutoTokenizer

from tests.multi.launching import succeeded
from tests.multi.warm import warm_python

# As a user writes it; only the model and the data lie elsewhere.
RECIPE = """
model_name_or_path: {model}
dataset_name: {data}
dataset_config: main
columns: {{prompt: question, answer: answer}}
answer_pattern: '#### (.+)'
{more}
rules:
  - {{rule: answer, gold: answer, kind: number}}
output_dir: out
max_steps: 1
per_device_train_batch_size: 4
num_generations: 2
max_completion_length: 4
use_cpu: true
bf16: false
report_to: none
save_strategy: "no"
log_completions: true
"""
TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}[assistant]"
CARD = "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train-*\n---\n"
# (more lines of the recipe, the messages of a row)
PROMPTS = {
    "columns": ("", [("user", "w5 w6 ?")]),
    "streamed, with a system prompt": (
        'dataset_streaming: true\nsystem_prompt: w7 w8\nprompt_template: "{question} w9"',
        [("system", "w7 w8"), ("user", "w5 w6 ? w9")],
    ),
}


@pytest.fixture(scope="module")
def model(tiny_model, tmp_path_factory):
    """The tiny model, its tokenizer with a chat template."""
    folder = tmp_path_factory.mktemp("chat_model")
    for file in tiny_model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def gsm8k(tmp_path_factory):
    """Rows of GSM8K's shape in the folder that a download of it leaves."""
    folder = tmp_path_factory.mktemp("gsm8k")
    (folder / "README.md").write_text(CARD)
    (folder / "main").mkdir()
    rows = [{"question": "w5 w6 ?", "answer": "It is <<2*500=1000>>1,000.\n#### 1,000"}] * 8
    Dataset.from_list(rows).to_parquet(folder / "main" / "train-00000-of-00001.parquet")
    return folder


@pytest.mark.parametrize("name", PROMPTS if os.environ.get("TRL_EXT_THOROUGH") == "1" else ["columns"])
def test_one_recipe_and_one_command_reach_step_1(name, model, gsm8k, tmp_path):
    import pyarrow.parquet as parquet

    more, messages = PROMPTS[name]
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(model=model, data=gsm8k, more=more))
    command = [warm_python(), "-m", "trl_ext.cli.main", "grpo", "--config", "recipe.yaml"]
    succeeded([*command, "--num_processes", 1, "--main_process_port", 0], tmp_path)
    assert json.loads((tmp_path / "out" / "trainer_state.json").read_text())["global_step"] == 1
    (table,) = (tmp_path / "out" / "completions").glob("*.parquet")
    prompts = parquet.read_table(table)["prompt"].to_pylist()
    assert [[(message["role"], message["content"]) for message in prompt] for prompt in prompts] == [messages] * 4
