"""The commands of docs/cluster/machines.md, as printed, on two network namespaces; and a link that is cut."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import time

import pytest
import yaml

from tests.multi import launching
from tests.multi.launching import ROOT, skip_what_cannot_run
from tests.multi.warm import warm_python

PATIENCE_S = 300  # of a run that does not end
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
    prompts = [{"prompt": f"w{i} w{i + 1}", "answer": f"w{i}"} for i in range(32)]
    pairs = [{"prompt": f"w{i} ", "chosen": f"w{10 + i} w3", "rejected": f"w{20 + i}"} for i in range(32)]
    found = {}
    own = {
        "grpo": {
            "rules": [{"rule": "length", "high": 4, "slack": 4}],
            "num_generations": 4,
            "max_completion_length": 6,
        },
        "reward": {"packing": False},
    }
    for name, rows in (("grpo", prompts), ("reward", pairs)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        settings = dict(
            model_name_or_path=str(tiny_model),
            dataset_name=str(tmp_path / f"{name}.jsonl"),
            per_device_train_batch_size=4,
            max_steps=2,
            use_cpu=True,
            bf16=False,
            report_to="none",
            eval_strategy="no",
            logging_steps=1,
        )
        found[name] = tmp_path / f"{name}.yaml"
        found[name].write_text(yaml.safe_dump(settings | own[name]))
    return found


class Launched:
    """A printed command on each of the two machines."""

    def __init__(self, printed, machines, recipes, folder, *more):
        self.logs = [folder / f"log{number}" for number in (0, 1)]
        self.processes = []
        printed = [shlex.split(line) for line in printed]
        assert len(printed) == len(self.logs)  # before anything starts
        for words, (machine, _), log in zip(printed, machines, self.logs, strict=True):
            kind = "reward" if "reward" in words else "grpo"
            launcher = "trl-ext" if words[0] == "trl-ext" else " ".join(words[:2])
            replaced = {
                "$(trl-ext launch-file zero2)": str(launching.YAMLS["zero2"]),
                "16": "2",
                "recipe.yaml": str(recipes[kind]),
                "/shared/out": str(folder / "out"),
            }
            words = [replaced.get(word, word) for word in words[len(launcher.split()) :]]
            command = ["ip", "netns", "exec", machine, warm_python(), "-m", MODULES[launcher], *words, *more]
            with log.open("w") as file:
                self.processes.append(
                    subprocess.Popen(
                        list(map(str, command)),
                        cwd=ROOT,
                        env=launching.environment(),
                        stdout=file,
                        stderr=file,
                        start_new_session=True,
                    )
                )

    @property
    def texts(self) -> list[str]:
        return [log.read_text() for log in self.logs]

    def until(self, is_so) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not is_so():
            assert time.monotonic() < deadline, "\n".join(text[-3000:] for text in self.texts)
            time.sleep(0.1)

    def codes(self) -> list[int]:
        self.until(lambda: all(process.poll() is not None for process in self.processes))
        print(*(text[-3000:] for text in self.texts), sep="\n-----\n")  # shown where the test fails
        return [process.returncode for process in self.processes]

    def end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)  # its own session, started above
                process.wait(PATIENCE_S)


@pytest.fixture
def launch(machines, recipes, tmp_path):
    begun = []

    def start(printed, *more) -> Launched:
        begun.append(Launched(printed, machines, recipes, tmp_path, *more))
        return begun[-1]

    yield start
    for one in begun:
        one.end()


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
    assert "2/2" in run.texts[0]


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
    subprocess.run(
        list(map(str, [*command, "--output_dir", tmp_path / "one"])), check=True, cwd=ROOT, env=launching.environment()
    )
    kept["one"] = launching.loaded(tmp_path / "one" / "model.safetensors")
    kept["first step"] = launching.loaded(tmp_path / "two" / "checkpoint-1" / "model.safetensors")
    far = {
        other: max((kept["two"][key] - weights[key]).abs().max().item() for key in kept["two"])
        for other, weights in kept.items()
    }
    assert far["resumed"] < 1e-6 and far["one"] < 1e-6 < far["first step"], far


def test_a_cut_link_ends_both_machines_which_name_each_other(launch, machines):
    run = launch(COMMANDS[2:], "--max_steps", 100_000, "--ddp_timeout", 5)
    run.until(lambda: "\nstep 2/" in run.texts[0])
    for machine, cable in machines[:1]:
        ip("-n", machine, "link", "set", cable, "down")
    try:
        assert all(run.codes())
    finally:
        for machine, cable in machines[:1]:
            ip("-n", machine, "link", "set", cable, "up")
    for rank, text in enumerate(run.texts):
        assert f"Process {1 - rank} (machine" in text and "does not answer" in text
