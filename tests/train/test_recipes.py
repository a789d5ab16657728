"""Every shipped recipe, and every preset's, is one that its script accepts."""

import re
import shlex
from importlib import import_module

import pytest
import yaml

from tests.embeddings import save_model
from trl_ext import resources
from trl_ext.cli.check import recipe as check_recipe
from trl_ext.cli.check.memory import run_of_recipe
from trl_ext.cli.check.models import shape_of
from trl_ext.cli.main import shipped_recipes
from trl_ext.memory.cards import parse_gpus
from trl_ext.memory.planner.folder import write_plan
from trl_ext.memory.planner.presets import PRESETS
from trl_ext.memory.units import gib
from trl_ext.scripts.rewards import build_rules

MODULES = {recipe.name: f"trl_ext.scripts.{recipe.trainer}" for recipe in shipped_recipes()}
PATHS = {path.stem: path for path in resources.recipes()}


def parse(name, path, output_dir):
    argv = ["--config", str(path), "--output_dir", str(output_dir), "--bf16", "false"]
    return import_module(MODULES[name]).make_parser().parse(argv)


@pytest.mark.parametrize("name", PATHS)
def test_every_shipped_recipe_parses_and_its_rules_build(name, tmp_path, monkeypatch):
    if name == PROSE:
        monkeypatch.chdir(prose_desk(tmp_path))
    script_args, *_ = parse(name, PATHS[name], tmp_path)
    assert script_args.rules is None or build_rules(script_args.rules).rules


PROSE = "prose-grpo-1x4090"


def prose_desk(folder):
    """A folder with a model of sentence-transformers under the name that the recipe uses."""
    for package in ("harper", "sentence_transformers"):
        pytest.importorskip(package)
    save_model(folder / "sentence-transformers" / "all-MiniLM-L6-v2")
    return folder


def test_the_recipe_for_prose_pays_an_answer_more_than_what_games_one_rule(tmp_path, monkeypatch):
    monkeypatch.chdir(prose_desk(tmp_path))
    rules = build_rules(parse(PROSE, PATHS[PROSE], tmp_path)[0].rules)
    prompt = "Why do volcanoes erupt?"
    good = "Hot rock melts deep below the crust. Gas makes it light, so it rises. " + (
        "When the pressure grows too high, the ground breaks, and lava and gas come out. This can last for weeks, and "
        "the rock that cools outside builds a mountain."
    )
    bad = {
        "mistakes": good.replace("melts", "melt").replace("it rises", "they rises").replace("the ground", "an ground"),
        "another subject": "Yeast feeds on the sugar in flour and makes the dough grow. When the oven is hot, the "
        "bread sets and turns brown. It should cool for an hour before it is cut, since the crumb still dries, and it "
        "keeps for several days in a box.",
        "the prompt": prompt,
        "a loop": "Hot rock melts deep below the crust. " * 7,
        "a refusal": good.replace("Hot", "As an AI, I think that hot"),
        "one sentence": "Hot rock melts deep below the crust.",
    }
    totals = rules([[{"role": "user", "content": prompt}]] * (1 + len(bad)), [good, *bad.values()])
    rules.close()
    assert all(totals[0] > total for total in totals[1:]), dict(zip(bad, totals[1:], strict=True)) | {
        "good": totals[0]
    }


def test_what_the_reward_recipe_suggests_in_comments_parses(tmp_path):
    # Lines such as `# use_peft: true` and the list below `# rules:`.
    text = re.sub(r"^# (?=\w+: *(true|[\d.e-]+|\[.*\])$|rules:$|  - \{)", "", PATHS["reward"].read_text(), flags=re.M)
    text = text.replace("\nlearning_rate: 1.0e-5", "")
    (tmp_path / "recipe.yaml").write_text(text)
    script_args, training_args, model_args, _ = parse("reward", tmp_path / "recipe.yaml", tmp_path)
    assert script_args.margin_from_rules and build_rules(script_args.rules).columns
    lora = (model_args.use_peft, model_args.lora_target_modules)
    assert (*lora, training_args.learning_rate) == (True, "all-linear", 1e-4)


PLANNED = [recipe for recipe in shipped_recipes() if "# Memory:" in recipe.path.read_text()]
HEADROOM = 0.05


@pytest.mark.parametrize("recipe", PLANNED, ids=lambda recipe: recipe.name)
def test_a_recipe_fits_its_machine_with_headroom_as_its_head_says(recipe, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "")  # the recipe sets it
    text, words = recipe.path.read_text(), shlex.split(recipe.launch)
    hardware = parse_gpus(recipe.machine)
    num_processes = int(words[words.index("--num_processes") + 1])
    num_servers = int(words[words.index("--vllm_servers") + 1]) if "--vllm_servers" in words else 0
    assert hardware.num_gpus == num_processes + num_servers  # of a card each
    parsed = check_recipe.parse(str(recipe.path), recipe.trainer, [], num_processes)
    launch = check_recipe.read_launch(None, recipe.name)
    assert launch.is_known
    said = re.search(r"# Memory: ([\d.]+) of ([\d.]+) GiB(?: with prompts of up to (\d+) tokens)? \(estimated", text)
    prompt_tokens = None if recipe.trainer == "reward" else int(said[3])
    run = run_of_recipe(parsed, shape_of(parsed), num_processes, launch, (prompt_tokens, None), num_servers)
    plans = run.plans(hardware)
    assert plans.plans, plans.reasons
    need_gib = gib(plans.best.estimate.need_bytes)
    assert need_gib < (1 - HEADROOM) * hardware.card.usable_gib
    assert float(said[2]) == pytest.approx(hardware.card.usable_gib, abs=0.1)
    assert float(said[1]) == pytest.approx(need_gib, rel=0.03)  # 3 %: changes of the formulas that move no recipe


@pytest.mark.parametrize("name", PRESETS)
def test_a_presets_recipe_is_accepted_and_plans_what_the_preset_does(name, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "")  # a config with `memory` sets it for good
    found = PRESETS[name].plan()
    write_plan(found, tmp_path / "plan")
    words = ["--output_dir", str(tmp_path / "out")]
    file, num_gpus = str(tmp_path / "plan" / "recipe.yaml"), found.estimate.hardware.num_gpus
    parsed = check_recipe.parse(file, found.job.trainer, words, num_gpus)
    assert parsed.training_args.memory_setting.job == found.job
    launch = yaml.safe_load((tmp_path / "plan" / "accelerate.yaml").read_text())
    assert (launch["distributed_type"] == "NO") is (launch["num_processes"] == 1 and not found.job.zero_stage)
