"""The recipe geometry-grpo-cpu: a random model of images and text learns what shapes look like."""

import json

import pytest

from benchmarks import geometry
from trl_ext import resources
from trl_ext.scripts import grpo


@pytest.mark.nightly
def test_a_model_that_has_seen_nothing_learns_from_drawn_shapes(tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_EXT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(geometry, "SPLITS", {"train": 400, "test": 40})
    assets = geometry.prepare()
    assert geometry.prepare() == assets
    words = ["--config", str(resources.recipe("geometry-grpo-cpu")), "--output_dir", str(tmp_path / "out")]
    words += ["--model_name_or_path", str(assets / "model"), "--dataset_name", str(assets / "data")]
    grpo.main([*words, "--max_steps", "40", "--eval_strategy", "no", "--eval_on_start", "false"])
    log = json.loads((tmp_path / "out" / "trainer_state.json").read_text())["log_history"]
    steps = [entry for entry in log if "reward" in entry]
    first, last = ([entry["reward"] for entry in part] for part in (steps[:5], steps[-5:]))
    assert sum(last) / 5 > sum(first) / 5 + 0.15
    assert min(entry["packing/padded_over_forwarded"] for entry in steps) > 3
