"""A pytest plugin: TRL's tests on the stand-ins, with our classes in the place of TRL's where TRL_SUITE_ARM is "ext".

Each test leaves a line of JSON in TRL_SUITE_RECORDS: outcome, message, whether it packed, what it logged. A second run
goes on where a stopped one was; a test in which the first one died has the outcome "died".
"""

import json
import os
from pathlib import Path

STANDINS, RECORDS = Path(os.environ["TRL_SUITE_STANDINS"]), Path(os.environ["TRL_SUITE_RECORDS"])
os.environ |= {"HF_HOME": str(STANDINS / "hf"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(STANDINS / "cache")}

import datasets
import pytest
import transformers
from trl import import_utils
from trl.trainer.base_config import _BaseConfig
from trl.trainer.grpo_config import GRPOConfig

# GRPO's tests that would train three epochs take this many steps, but for these two, which count their steps.
STEPS = 3
WHOLE = ("test_prepare_input_called_with_correct_data", "test_environment_owned_data_requires_max_steps")
plain_load = datasets.load_dataset
made: list[transformers.Trainer] = []  # by the test that runs
running = ""


def load_dataset(path, name=None, split=None, streaming=False, **options):
    folder = STANDINS / "data" / path / (name or "default")
    if not folder.is_dir():
        return plain_load(path, name, split=split, streaming=streaming, **options)
    files = {file.stem: str(file) for file in sorted(folder.glob("*.parquet"), reverse=True)}
    return plain_load("parquet", data_files=files, split=split, streaming=streaming, **options)


def before(owner, name, act) -> None:
    """Let `act` see the arguments of every call of a method."""
    plain = getattr(owner, name)

    def method(self, *args, **kwargs):
        act(self)
        return plain(self, *args, **kwargs)

    setattr(owner, name, method)


def shorten(config) -> None:
    if config.num_train_epochs == 3.0 and config.max_steps < 0 and not running.endswith(WHOLE):
        config.max_steps = STEPS


def pytest_configure(config) -> None:
    datasets.load_dataset = load_dataset
    for name in ("harbor", "jmespath", "joblib", "liger_kernel", "math_verify", "mergekit", "openreward", "vllm"):
        if not hasattr(import_utils, f"is_{name}_available"):  # a checkout older than the TRL that is installed
            setattr(import_utils, f"is_{name}_available", lambda: False)
    before(GRPOConfig, "__post_init__", shorten)
    if os.environ.get("TRL_SUITE_FP32"):
        before(_BaseConfig, "__post_init__", lambda config: setattr(config, "bf16", False))
    before(transformers.Trainer, "__init__", made.append)


def ours() -> dict[str, type]:
    """Our classes by the name that TRL's tests use."""
    if os.environ["TRL_SUITE_ARM"] == "trl":
        return {}
    import trl_ext

    names = ("GRPOTrainer", "GRPOConfig", "RewardTrainer", "RewardConfig")
    return {name: getattr(trl_ext, name) for name in names}


def pytest_collection_modifyitems(items) -> None:
    lines = [json.loads(line) for line in RECORDS.read_text().splitlines()] if RECORDS.exists() else []
    ended = {line["test"] for line in lines if "outcome" in line}
    for test in {line["test"] for line in lines} - ended:
        note({"test": test, "outcome": "died", "message": "the process ended in this test"})
    items[:] = [item for item in items if item.nodeid not in {line["test"] for line in lines}]
    classes = ours()
    for module in {item.module for item in items}:
        for name in classes.keys() & vars(module).keys():
            setattr(module, name, classes[name])


def note(line: dict) -> None:
    with RECORDS.open("a") as file:
        file.write(json.dumps(line, default=str) + "\n")


def pytest_runtest_logstart(nodeid) -> None:
    global running
    running = nodeid.split("[")[0]
    made.clear()
    note({"test": nodeid})


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    line = item.__dict__.setdefault("_line", {"test": item.nodeid, "outcome": "passed", "message": ""})
    if call.when == "call":
        line["packs"] = [getattr(trainer, "_packs", None) for trainer in made]
        line["logs"] = [trainer.state.log_history for trainer in made if hasattr(trainer, "state")]
    if report.outcome != "passed" and line["outcome"] == "passed":
        line["outcome"] = "xfailed" if hasattr(report, "wasxfail") else report.outcome
        line["message"] = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)[-2000:]
    if call.when == "teardown":
        note(line)
