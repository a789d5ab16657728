"""PPO and reward models on data of other columns, read whole and streamed; keys that do not fit end before a model."""

import json

import pytest
import torch
import yaml

from tests import tiny
from tests.preferences import reward_model
from tests.reward_trainers import chat_tokenizer
from trl_ext.scripts import grpo, ppo, reward

torch.set_num_threads(1)

SCRIPTS = {"grpo": grpo, "ppo": ppo, "reward": reward}
GSM8K = [{"question": tiny.words(i, i + 1), "answer": f"w5\n#### {i},000"} for i in range(3, 11)]
# The columns of UltraFeedback, binarized, as its two publishers have them.
SIDES = [
    {
        name: [{"role": "user", "content": tiny.words(i)}, {"role": "assistant", "content": answer}]
        for name, answer in (("chosen", tiny.words(i + 1)), ("rejected", "w9"))
    }
    for i in range(10, 18)
]
ULTRAFEEDBACK = [
    {"prompt": tiny.words(i), "prompt_id": "7", **sides, "score_chosen": 8.0}
    for i, sides in zip(range(10, 18), SIDES, strict=True)
]
PAIRS = [{"instruction": "w5 ", "good": tiny.words(i), "bad": tiny.words(i + 1)} for i in range(3, 11)]
PROMPT_KEYS = {"columns": {"prompt": "question"}, "answer_pattern": "#### (.+)", "system_prompt": "w7"}
RULES = [{"rule": "answer", "gold": "answer", "kind": "number"}]
RUNS = {
    "ppo": ("ppo", GSM8K, {**PROMPT_KEYS, "rules": RULES, "response_length": 4}),
    "pairs": ("reward", PAIRS, {"columns": {"prompt": "instruction", "chosen": "good", "rejected": "bad"}}),
    "pairs of messages": ("reward", ULTRAFEEDBACK, {"columns": {"prompt": None}}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A policy and a reward model with a chat template, and the policy's folder without weights."""
    folder = tmp_path_factory.mktemp("models")
    tiny.model("llama").save_pretrained(folder / "ppo")
    reward_model(folder / "reward", "llama").save_pretrained(folder / "reward")
    tiny.model("llama").config.save_pretrained(folder / "none")
    for name in ("ppo", "reward", "none"):
        chat_tokenizer().save_pretrained(folder / name)
    return folder


def write(folder, rows, **settings):
    """Write rows and a recipe; return the script's arguments."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = dict(
        output_dir=str(folder / "out"),
        dataset_name=str(folder / "rows.jsonl"),
        max_steps=1,
        per_device_train_batch_size=8,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
    )
    (folder / "recipe.yaml").write_text(yaml.safe_dump(own | settings))
    return ["--config", str(folder / "recipe.yaml")]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("name", RUNS)
def test_data_of_other_columns_reach_step_1(name, streams, models, tmp_path):
    script, rows, keys = RUNS[name]
    argv = write(tmp_path, rows, model_name_or_path=str(models / script), dataset_streaming=streams, **keys)
    SCRIPTS[script].main(argv)
    assert json.loads((tmp_path / "out" / "trainer_state.json").read_text())["global_step"] == 1


CASES = {
    "unknown column": (
        {"columns": {"prompt": "problem"}},
        "columns names 'problem', and train_dataset has the columns",
    ),
    "template": ({"prompt_template": "{question.__class__}"}, "prompt_template reads 'question.__class__', and train"),
    "pattern": ({**PROMPT_KEYS, "answer_pattern": "=> (.+)"}, "all 8 rows have no match of answer_pattern"),
    "no column": (
        {},
        "has no column 'prompt', only 'question', 'answer'. Name the one that holds the prompts: ",
    ),
    "stream": ({**PROMPT_KEYS, "dataset_streaming": True, "max_steps": -1}, "set max_steps"),
}


@pytest.mark.parametrize("script", ["grpo", "ppo"])
@pytest.mark.parametrize("name", CASES)
def test_keys_that_do_not_fit_end_a_run_before_a_model_loads(name, script, models, tmp_path, capfd):
    keys, sentence = CASES[name]
    argv = write(tmp_path, GSM8K, model_name_or_path=str(models / "none"), rules=RULES, **keys)
    assert sentence in ended(SCRIPTS[script], argv, capfd)


def test_prompts_as_text_beside_messages_end_a_reward_run_before_its_model_loads(models, tmp_path, capfd):
    argv = write(tmp_path, ULTRAFEEDBACK, model_name_or_path=str(models / "none"))
    said = ended(reward, argv, capfd)
    assert "text next to messages" in said and "columns: {prompt: null}" in said


def ended(module, argv, capfd) -> str:
    """Run a script to its one sentence, and return that."""
    with pytest.raises(SystemExit) as caught:
        module.main(argv)
    assert caught.value.code == 2
    error = capfd.readouterr().err
    assert "Traceback" not in error
    (line,) = [line for line in error.splitlines() if line.startswith("error: ")]
    return line
