"""The recipes that the pages show for PPO, REINFORCE++, RLOO and GRPO start as printed, on a tiny model."""

import shlex

import pytest

from tests import recipes
from tests.documents import BLOCKS
from tests.preferences import reward_model
from trl_ext.monitor.record import read_log_history
from trl_ext.scripts import ppo

PAGES = ("docs/ppo.md", "docs/reference/migrate/from_openrlhf.md", "docs/reference/migrate/from_verl.md")
RECIPES = {
    block.text.splitlines()[0].removeprefix("# "): block.text
    for block in BLOCKS
    if block.page in PAGES and block.language == "yaml"
}
LINES = [
    line
    for block in BLOCKS
    if block.page in PAGES and block.is_shell
    for line in block.commands()
    if line.startswith("trl-ext ppo") and any(f"--config {name}" in line for name in RECIPES)
]
SMALL = (
    "--use_cpu true --bf16 false --report_to none --gradient_checkpointing false --response_length 4 --max_steps 1"
    " --per_device_train_batch_size 8 --gradient_accumulation_steps 1 --num_mini_batches 1 --logging_steps 1"
    " --save_strategy no"
)


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A folder with the recipes, and tiny models and data under the names that they use."""
    folder = tmp_path_factory.mktemp("desk")
    for name, text in RECIPES.items():
        (folder / name).write_text(text)
    recipes.save(folder / "policy")
    recipes.save(folder / "out" / "reward", reward_model(folder / "out" / "reward"))
    (folder / "Qwen").mkdir()
    for name in ("Qwen2.5-7B-Instruct", "Qwen2.5-1.5B-Instruct"):
        (folder / "Qwen" / name).symlink_to(folder / "policy")
    rows = [{"question": f"{a} + 1?", "answer": f"#### {a + 1}"} for a in range(8)]
    recipes.write_rows(folder / "openai" / "gsm8k", rows)
    return folder


def test_every_estimator_has_a_recipe_of_either_project():
    for project in ("openrlhf", "verl"):
        assert len([line for line in LINES if f"_from_{project}" in line]) == 4


@pytest.mark.parametrize("line", LINES)
def test_a_recipe_of_the_family_trains_as_printed(line, desk, tmp_path, monkeypatch):
    monkeypatch.chdir(desk)
    names = ("input", "label") if "openrlhf" in line else ("prompt", "answer")
    rows = [dict(zip(names, (f"{a} + 1 =", str(a + 1)), strict=True)) for a in range(8)]
    recipes.write_rows(desk / "my" / "problems", rows)
    words = shlex.split(line)
    words = words[words.index("--config") :]
    ppo.main([*words, *SMALL.split(), "--output_dir", str(tmp_path)])
    [log] = [log for log in read_log_history(tmp_path) if "loss/policy_avg" in log]
    has_critic = "ppo_from" in line and "reinforce" not in line
    assert ("loss/value_avg" in log) == has_critic and ("loss/kl_avg" in log) == ("--kl_term loss" in line)
