"""A TRL that nobody has tested: it trains after one warning, or is refused by the name of what it lacks."""

import os
import shutil
import subprocess
import sys
from importlib.metadata import distribution

import pytest

from tests import recipes
from tests.conftest import ROOT
from trl_ext.monitor.record import read_log_history

RULES = [{"rule": "pattern", "pattern": "[0-4]$", "mode": "search"}]
RECIPE = dict(rules=RULES, max_steps=1, beta=0.1, logging_steps=1, num_generations=2, max_completion_length=4)
RECIPE |= dict(model_name_or_path="model", dataset_name="prompts.jsonl", output_dir="out")
LACKING = "error: trl_ext builds on trl.trainer.grpo_trainer:GRPOTrainer._calculate_rewards, which is not there"


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """Run Python with a copy of TRL that calls itself 1.99, some names changed; return the exit code and stderr."""
    folder = tmp_path_factory.mktemp("assets")
    recipes.save(folder / "model")
    recipes.write_rows(folder / "prompts.jsonl", [{"prompt": f"w{i} w3"} for i in range(8)])
    recipes.recipe(folder, **recipes.SMALL | RECIPE)

    def run(words, **renamed):
        site = folder / "-".join(["site", *renamed])
        if not site.exists():
            installed = distribution("trl")
            shutil.copytree(installed.locate_file("trl"), site / "trl")
            (site / "trl-1.99.0.dist-info").mkdir()
            metadata = installed.read_text("METADATA").replace(f"\nVersion: {installed.version}", "\nVersion: 1.99.0")
            (site / "trl-1.99.0.dist-info" / "METADATA").write_text(metadata)
            for name in ("grpo_trainer.py", "utils.py"):
                path = site / "trl" / "trainer" / name
                text = path.read_text()
                for old, new in renamed.items():
                    text = text.replace(old, new)
                path.write_text(text)
        paths = os.pathsep.join([str(site), str(ROOT)])
        env = os.environ | {"PYTHONPATH": paths, "TORCH_EXTENSIONS_DIR": str(folder / "helpers")}
        done = subprocess.run([sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True)
        return done.returncode, done.stderr

    run.folder = folder
    return run


SCRIPT = ("-m", "trl_ext.scripts.grpo", "--config", "recipe.yaml")


def test_a_script_refuses_a_missing_method_by_its_name(python):
    code, said = python(SCRIPT, _calculate_rewards="_rewards_of")
    assert code == 2 and LACKING in said and "Traceback" not in said, said[-2000:]
    assert "trl 1.99.0 (tested: up to 1.16). Run: pip install 'trl==1.16.*'" in said


@pytest.mark.nightly
def test_an_import_refuses_a_missing_function_by_its_name(python):
    code, said = python(("-c", "from trl_ext import GRPOTrainer"), use_adapter="with_adapter")
    sentence = "trl_ext.errors.SupportError: trl_ext builds on trl.trainer.utils:use_adapter, which is not there"
    assert code == 1 and said.strip().splitlines()[-1].startswith(sentence), said


def test_one_with_all_seams_warns_once_trains_and_packs(python):
    code, said = python(SCRIPT)
    assert code == 0, said[-2000:]
    assert said.count("warning: Newer than what trl_ext was tested with: trl 1.99.0 (tested: up to 1.16)") == 1
    (step,) = [entry for entry in read_log_history(python.folder / "out") if "loss" in entry]
    assert step["packing/forwarded_over_raw"] < 1.1
    assert len((python.folder / "helpers" / "trl_ext_seams").read_text().split()) == 1
