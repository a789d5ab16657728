"""The benchmarks for cards, on the processor, in what a machine with a card has: torch, transformers, accelerate. All
else comes as a folder of wheels. `make gpu-emulated` makes the environment and the folder."""

import os
import re
import resource
import subprocess
import time

import pytest

from benchmarks.gpu import wheels
from benchmarks.gpu.preflight import STEPS
from benchmarks.gpu.speed_rows import WAYS
from tests.conftest import ROOT

VENV = ROOT / ".venv-card"
FOLDER, PYTHON = VENV / "wheels", VENV / "bin" / "python"
LIMIT_S = 60.0
# Of all its processes together: with two cores that nobody else uses, a minute is what that comes to at most.
PROCESSOR_S = 80.0
# What such a folder has no room for.
SKIPPED = {"qlora/grpo/zero0/7B": "bitsandbytes is not installed.", "step/vllm/trl_ext": "vllm is not installed."}
SKIPPED |= {f"update/dualkv-fa{version}/trl_ext": f"flash-attn-{version} is not installed." for version in (3, 4)}
SKIPPED["attention/1024+8x512/flash_attention_4"] = "flash-attn-4 is not installed."
KINDS = {
    *("speed: update/dualkv/trl", "speed: update/dualkv/trl_ext", "speed: step/vllm"),
    *(f"speed: {step}/{library}" for step in STEPS for library in ("trl", "trl_ext")),
    *(f"speed: update/dualkv-{way}/trl_ext" for way in WAYS),
    *("speed: clock/lora", "speed: clock/full", "speed: clock/overhead", "speed: clock/generate"),
    *("memory: grpo/full/zero3", "memory: grpo/lora/zero3", "memory: ppo-separate", "memory: native", "memory: qlora"),
    *("memory: grpo/full/zero0", "memory: ppo-separate/full/zero3", "memory: ppo-adapter/lora/zero2"),
    *("exact: merged_prefixes", "exact: varlen", "speed: peers/trl-1.7B", "speed: reward/hh"),
    *("prof: prof/update/tail", "kernels: attention", "kernels: layer"),
}
pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="make gpu-emulated makes its environment")


def preflight(folder, site):
    """The command of the page, with another place for what it installs."""
    words = ["make", "gpu-preflight", f"WHEELS={folder}", f"PYTHON={PYTHON}", f"GPU_SITE={site}"]
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(words, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)


def processor_s():
    """Processor seconds of all processes that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_the_environment_has_what_such_a_machine_has_and_no_more():
    script = (
        "import torch, transformers, accelerate, importlib.util as u; print(torch.__version__, "
        "transformers.__version__, accelerate.__version__, *map(u.find_spec, ('datasets', 'pyarrow', 'trl', 'peft')))"
    )
    said = subprocess.run([PYTHON, "-c", script], capture_output=True, text=True, check=True).stdout
    assert re.fullmatch(r"2\.11\.\S+ 5\.17\.\S+ 1\.15\.\S+( None){4}\n", said), said


def test_the_wheels_can_travel():
    assert 30 < wheels.mib_of(FOLDER) <= wheels.LIMIT_MIB


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return tmp_path_factory.mktemp("installed") / "site-packages"


def test_the_first_command_runs_a_row_of_each_kind_within_a_minute(site):
    is_idle = os.getloadavg()[0] < 0.5
    begun_s, used_s = time.monotonic(), processor_s()
    done = preflight(FOLDER, site)
    took_s, used_s = time.monotonic() - begun_s, processor_s() - used_s
    assert done.returncode == 0, done.stdout + done.stderr
    ended = dict(re.findall(r"^(\w+: \S+): (\w+.*)$", done.stdout, re.MULTILINE))
    assert all(any(name.startswith(kind) for name in ended) for kind in KINDS), done.stdout
    reasons = {name: SKIPPED[name.split()[1]] for name, how in ended.items() if how != "measured"}
    assert all(ended[name] == f"skipped {reason}" for name, reason in reasons.items())
    assert used_s < PROCESSOR_S
    assert took_s < LIMIT_S or not is_idle, "what else runs takes its time, too, but nothing did when this began"


def test_the_other_tests_of_exactness_run_there(site, tmp_path):
    words = ["benchmarks.gpu.exact", "--device", "cpu", "--scale", "tiny", "--rows", "reward", "updates"]
    words += ["--output", tmp_path / "out.json"]
    variables = os.environ | {"PYTHONPATH": f"{ROOT}:{site}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([PYTHON, "-m", *words], cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "0 failed" in done.stdout, done.stdout + done.stderr


def test_a_wheel_that_is_not_in_the_folder_is_named(tmp_path):
    folder = tmp_path / "wheels"
    folder.mkdir()
    for wheel in FOLDER.glob("*.whl"):
        if not wheel.name.startswith("hjson-"):
            (folder / wheel.name).symlink_to(wheel)
    done = preflight(folder, tmp_path / "site-packages")
    assert done.returncode
    missing = re.findall(r"^missing: (\S+) \((.*)\)$", done.stdout, re.MULTILINE)
    assert [name for name, _ in missing] == ["deepspeed", "hjson"]
    assert all("hjson" in reason for _, reason in missing)
    assert "measured" not in done.stdout
