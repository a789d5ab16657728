"""`make cluster-files`: the packages of SkyPilot and Kubeflow take the files of docs/cluster, and nothing in them is
unknown to them."""

from pathlib import Path

import pytest
import sky
import yaml
from kubeflow_trainer_api import models

CLUSTER = Path(__file__).parents[3] / "docs" / "cluster"
TASKS = sorted(path.name for path in CLUSTER.glob("sky*.yaml"))
PARTS = [
    pytest.param(part, id=f"{path.stem}-{part['kind']}")
    for path in sorted(CLUSTER.glob("trainjob*.yaml"))
    for part in yaml.safe_load_all(path.read_text())
]


def test_the_files_are_there():
    assert TASKS == ["sky.yaml", "sky_vllm.yaml"] and len(PARTS) == 6


@pytest.mark.parametrize("name", TASKS)
def test_skypilot_reads_the_task(name, monkeypatch):
    monkeypatch.chdir(CLUSTER.parents[1])  # the workdir of the file
    given = yaml.safe_load((CLUSTER / name).read_text())
    task = sky.Task.from_yaml(str(CLUSTER / name))
    (resources,) = task.resources
    assert (task.num_nodes, task.run) == (given["num_nodes"], given["run"])
    assert (resources.use_spot, resources.accelerators) == (True, {"A100-80GB": 8})
    assert resources.job_recovery == {"strategy": None, **given["resources"]["job_recovery"]}


@pytest.mark.parametrize("name", TASKS)
def test_skypilot_takes_the_fast_network_that_the_file_offers(name, monkeypatch):
    monkeypatch.chdir(CLUSTER.parents[1])
    text = (CLUSTER / name).read_text()
    assert text.count("# network_tier: best") == 1
    task = sky.Task.from_yaml_config(yaml.safe_load(text.replace("# network_tier: best", "network_tier: best")))
    assert [each.network_tier.value for each in task.resources] == ["best"]


def unknown(given, kept, at: str) -> list[str]:
    """The places of what a model has left out or changed; a model drops what it does not know."""
    if isinstance(given, dict) and isinstance(kept, dict):
        return [place for key in given for place in unknown(given[key], kept.get(key), f"{at}.{key}")]
    if isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        pairs = enumerate(zip(given, kept, strict=True))
        return [place for number, pair in pairs for place in unknown(*pair, f"{at}[{number}]")]
    return [] if given == kept else [at]


def model_of(kind: str):
    """Kubeflow's model of a kind; of a StatefulSet its package has the pods alone."""
    own = {"StatefulSet": "IoK8sApiCoreV1PodTemplateSpec", "Service": "IoK8sApiCoreV1Service"}
    return getattr(models, own.get(kind, f"TrainerV1alpha1{kind}"))


@pytest.mark.parametrize("part", PARTS)
def test_kubeflow_knows_each_key(part):
    content = part["spec"]["template"] if part["kind"] == "StatefulSet" else part
    assert unknown(content, model_of(part["kind"]).from_dict(content).to_dict(), part["kind"]) == []


def test_a_key_that_kubeflow_does_not_know_is_found():
    jobs = {"spec": {"template": {"spec": {"failurePolicies": {}}}}}
    kept = model_of("TrainingRuntime").from_dict(jobs).to_dict()
    assert unknown(jobs, kept, "") == [".spec.template.spec.failurePolicies"]
