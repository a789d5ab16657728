"""`--launcher ray`: a run of two workers, one of which is killed, ends with the weights of accelerate's.

`make drills` kills at random steps of all trainers. A run on Ray itself: docs/cluster/ray.md, by test_docs_lines.
"""

import sys
from types import SimpleNamespace

import pytest
import yaml

from tests.faults.starting import IS_THOROUGH
from tests.multi.launching import YAMLS, distance, loaded
from tests.multi.raying import under_accelerate, under_ray
from tests.multi.recipes import write_recipe
from trl_ext import launch
from trl_ext.cli.main import main
from trl_ext.errors import ConfigError, SupportError
from trl_ext.launch.ray_train import (
    _check_resources,
    _resources,
    accelerate_environment,
    split,
)
from trl_ext.scripts.grpo import make_parser


@pytest.mark.skipif(not IS_THOROUGH, reason="a minute; make drills does so for all trainers")
def test_a_run_whose_worker_is_killed_ends_as_if_nothing_had_been(tiny_model, tmp_path):
    pytest.importorskip("ray")
    recipe = write_recipe("grpo", tiny_model, tmp_path)
    alone = under_accelerate("grpo", "cpu", recipe, tmp_path / "alone")
    killed = under_ray("grpo", "cpu", recipe, tmp_path / "killed", 5, 1)
    assert distance(alone, loaded(tiny_model / "model.safetensors")) > 1e-3
    assert distance(alone, killed) == 0.0


def refused(capsys, *words) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["grpo", "--launcher", *words])
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_a_launcher_that_nobody_knows_is_refused(capsys):
    assert "--launcher is slurm. There are: accelerate, ray." in refused(capsys, "slurm")


def test_what_accelerate_decides_is_refused(capsys):
    pytest.importorskip("ray")
    assert "--num_processes is accelerate's" in refused(capsys, "ray", "--num_processes", "2")


def test_no_worker_is_refused():
    pytest.importorskip("ray")
    with pytest.raises(ConfigError, match="--num_workers is 0"):
        split(["--num_workers", "0"])
    with pytest.raises(ConfigError, match="--max_failures is -1"):
        split(["--max_failures", "-1"])


def test_without_ray_the_line_that_installs_it_is_named(monkeypatch):
    monkeypatch.setattr("trl_ext.launch.ray_train.find_spec", lambda name: None)
    with pytest.raises(SupportError, match=r"pip install 'trl_ext\[ray\]'"):
        split([])


def test_a_launch_file_for_several_machines_is_refused(tmp_path):
    content = yaml.safe_load(YAMLS["zero2"].read_text()) | {"num_machines": 4}
    (tmp_path / "four.yaml").write_text(yaml.safe_dump(content))
    words = ["--config_file", str(tmp_path / "four.yaml")]
    with pytest.raises(ConfigError, match=r"is for 4 machines, and Ray places the workers"):
        accelerate_environment("trl_ext.scripts.grpo", make_parser(), words, 2)


def test_slurms_variables_are_not_rays(monkeypatch):
    monkeypatch.setenv("SLURM_NNODES", "2")  # no srun: the machines are Ray's
    assert accelerate_environment("trl_ext.scripts.grpo", make_parser(), ["--config_file", "multi_gpu"], 2)


def test_workers_get_what_the_launch_file_says():
    words = ["--config_file", "zero3_offload"]
    made = accelerate_environment("trl_ext.scripts.grpo", make_parser(), words, 2)
    assert made["ACCELERATE_USE_DEEPSPEED"] == "true"
    assert made["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "3"
    assert made["ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE"] == "cpu"
    assert not {"MASTER_ADDR", "RANK", "WORLD_SIZE"} & made.keys()


def test_resources_are_asked_for_by_name():
    assert _resources(None, on_cpu=True) == {"CPU": 1.0}
    assert _resources(None, on_cpu=False) == {"CPU": 1.0, "GPU": 1.0}
    assert _resources("{GPU: 2, CPU: 6}", on_cpu=False) == {"GPU": 2, "CPU": 6}
    with pytest.raises(ConfigError, match="--resources_per_worker is GPU"):
        _resources("GPU", on_cpu=False)


def test_more_workers_than_cards_are_refused():
    with pytest.raises(ConfigError, match=r"4 workers with 1 GPU each .* has 2 GPU\. Give fewer .* --autoscaling if"):
        _check_resources({"CPU": 1.0, "GPU": 1.0}, 4, {"CPU": 64, "GPU": 2})
    _check_resources({"CPU": 1.0, "GPU": 1.0}, 2, {"CPU": 64, "GPU": 2})


def test_servers_of_one_machine_are_refused():
    pytest.importorskip("ray")
    for words in (["--vllm_servers", "2"], ["--vllm_servers=2"]):
        with pytest.raises(ConfigError, match=r"--vllm_servers starts servers .* one machine.*--vllm_server_base_url"):
            split(words)


@pytest.mark.parametrize(
    ("words", "autoscaling"),
    [([], False), (["--autoscaling"], True), (["--autoscaling", "True"], True), (["--autoscaling", "false"], False)],
)
def test_autoscaling_is_a_flag_and_in_a_notebook_a_value(words, autoscaling):
    pytest.importorskip("ray")
    own, rest = split(words)
    assert own.autoscaling is autoscaling and not rest


def test_an_address_without_a_cluster_is_refused(capsys, tiny_model, tmp_path):
    pytest.importorskip("ray")
    words = ["--config", write_recipe("grpo", tiny_model, tmp_path), "--output_dir", str(tmp_path / "out")]
    said = refused(capsys, "ray", "--address", "127.0.0.1:1", "--config_file", "cpu", *words)
    assert "There is no Ray cluster at 127.0.0.1:1" in said


def test_a_notebook_starts_it_by_one_call(monkeypatch):
    calls = []
    stand_in = SimpleNamespace(fit=lambda *call: calls.append(call))
    monkeypatch.setitem(sys.modules, "trl_ext.launch.ray_train", stand_in)
    launch.ray("grpo", launch_file="zero2", config="quickstart", num_workers=2, resources_per_worker={"CPU": 2})
    ((module, _, argv),) = calls
    assert module == "trl_ext.scripts.grpo"
    assert argv == (
        [*"--config quickstart --num_workers 2 --resources_per_worker".split(), "{CPU: 2}", "--config_file", "zero2"]
    )
