"""The commands of docs/cluster/machines.md, as printed, on two network namespaces; and a link that is cut."""

import json
import os
import re
import shlex
import shutil
import subprocess

import pytest

from tests.multi import launching
from tests.multi.launching import ROOT, skip_what_cannot_run
from tests.multi.recipes import write_recipe
from tests.multi.warm import warm_python

ADDRESSES = ("10.0.0.1", "10.0.0.2")
# The two commands of each block of the page stand for the two machines.
PAGE = ROOT / "docs" / "cluster" / "machines.md"
COMMANDS = re.findall(r"```bash\n((?:accelerate|trl-ext) .*--machine_rank .*)\n```", PAGE.read_text())
MODULES = {"accelerate launch": "accelerate.commands.launch", "trl-ext": "trl_ext.cli.main"}


def ip(*words) -> None:
    subprocess.run(["ip", *map(str, words)], check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def machines():
    """Names of two network namespaces that a cable connects."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("needs iproute2 and root")
    names = [f"trl{os.getpid()}_{number}" for number in (0, 1)]
    cables = [f"t{os.getpid()}_{number}" for number in (0, 1)]
    try:
        ip("netns", "add", names[0])
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
    try:
        ip("netns", "add", names[1])
        ip("link", "add", cables[0], "netns", names[0], "type", "veth", "peer", "name", cables[1], "netns", names[1])
        for name, cable, address in zip(names, cables, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", cable)
            ip("-n", name, "link", "set", cable, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield list(zip(names, cables, strict=True))
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.fixture
def recipes(tiny_model, tmp_path):
    """Recipes by script that train the tiny model on the CPU."""
    return {
        "grpo": write_recipe("grpo", tiny_model, tmp_path, max_steps=2),
        "reward": write_recipe("reward", tiny_model, tmp_path, max_steps=2, packing=False),
    }


class Launched:
    """A printed command on each of the two machines."""

    def __init__(self, printed, machines, recipes, folder, *more):
        printed = [shlex.split(line) for line in printed]
        assert len(printed) == len(machines)  # before anything starts
        self.runs = []
        for number, (words, (machine, _)) in enumerate(zip(printed, machines, strict=True)):
            launcher = "trl-ext" if words[0] == "trl-ext" else " ".join(words[:2])
            replaced = {
                "$(trl-ext launch-file zero2)": str(launching.YAMLS["zero2"]),
                "16": "2",
                "recipe.yaml": recipes["reward" if "reward" in words else "grpo"],
                "/shared/out": str(folder / "out"),
            }
            words = [replaced.get(word, word) for word in words[len(launcher.split()) :]]
            command = ["ip", "netns", "exec", machine, warm_python(), "-m", MODULES[launcher], *words, *more]
            self.runs.append(launching.Started(command, folder / f"log{number}"))

    def codes(self) -> list[int]:
        return [run.code() for run in self.runs]


@pytest.fixture
def launch(machines, recipes, tmp_path):
    begun = []

    def start(printed, *more) -> Launched:
        begun.append(Launched(printed, machines, recipes, tmp_path, *more))
        return begun[-1]

    yield start
    for run in (run for one in begun for run in one.runs):
        run.end()


def test_the_page_prints_a_command_for_each_of_two_machines():
    assert len(COMMANDS) == 4 and all(f"--machine_rank {i % 2} " in words for i, words in enumerate(COMMANDS))


@pytest.mark.parametrize("first", [0, 2], ids=["accelerate launch", "trl-ext"])
def test_the_printed_commands_train_on_two_machines(first, launch, tmp_path):
    if "zero" in COMMANDS[first]:
        skip_what_cannot_run("zero2")
    run = launch(COMMANDS[first : first + 2])
    assert run.codes() == [0, 0]
    state = json.loads((tmp_path / "out" / "trainer_state.json").read_text())
    assert state["global_step"] == 2
    assert "2/2" in run.runs[0].text


@pytest.mark.skipif(not os.environ.get("TRL_EXT_THOROUGH"), reason="three launches each: TRL_EXT_THOROUGH=1")
@pytest.mark.parametrize("first", [0, 2], ids=["grpo", "reward"])
def test_a_run_resumed_on_two_machines_reaches_the_weights_of_one(first, launch, recipes, tmp_path):
    kept = {}
    script = "reward" if first else "grpo"
    same = ["--save_steps", 1, "--learning_rate", 1e-3, "--max_steps"]
    whole = launch(COMMANDS[first : first + 2], *same, 2)
    assert whole.codes() == [0, 0]
    kept["two"] = launching.loaded((tmp_path / "out").rename(tmp_path / "two") / "model.safetensors")
    resume = ["--resume_from_checkpoint", tmp_path / "two" / "checkpoint-1"]
    assert launch(COMMANDS[first : first + 2], *same, 2, *resume).codes() == [0, 0]
    kept["resumed"] = launching.loaded(tmp_path / "out" / "model.safetensors")
    name = "multi_gpu" if first else "zero2"
    command = [*launching.launched(name, 2), "-m", f"trl_ext.scripts.{script}", "--config", recipes[script], *same, 2]
    launching.succeeded([*command, "--output_dir", tmp_path / "one"])
    kept["one"] = launching.loaded(tmp_path / "one" / "model.safetensors")
    kept["first step"] = launching.loaded(tmp_path / "two" / "checkpoint-1" / "model.safetensors")
    far = {other: launching.distance(kept["two"], weights) for other, weights in kept.items()}
    assert far["resumed"] < 1e-6 and far["one"] < 1e-6 < far["first step"], far


def test_a_cut_link_ends_both_machines_which_name_each_other(launch, machines):
    run = launch(COMMANDS[2:], "--max_steps", 100_000, "--ddp_timeout", 5)
    run.runs[0].until(lambda: "\nstep 2/" in run.runs[0].text)
    for machine, cable in machines[:1]:
        ip("-n", machine, "link", "set", cable, "down")
    try:
        assert all(run.codes())
    finally:
        for machine, cable in machines[:1]:
            ip("-n", machine, "link", "set", cable, "up")
    for rank, one in enumerate(run.runs):
        assert f"Process {1 - rank} (machine" in one.text and "does not answer" in one.text
