"""Two processes save, resume, fail to write, have disks of their own, and meet another run."""

import json
import resource
import shutil
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from accelerate import PartialState
from datasets import Dataset
from transformers import TrainerCallback

from tests import tiny
from tests.grpo_trainers import weights
from trl_ext import GRPOConfig, GRPOTrainer, RuleSet
from trl_ext.errors import TrlExtError
from trl_ext.rewards import Call
from trl_ext.trainers.checkpoints import folder as folders
from trl_ext.trainers.checkpoints.folder import LOCK, OWNER
from trl_ext.trainers.record.recipe import packages

STEPS = 4


def length_of_text(row) -> float:
    return float(len(row.text))


class SmallDisk(TrainerCallback):
    """On rank 1, writes of more than 100 bytes fail in the save of step 2."""

    def on_step_end(self, args, state, control, **kwargs):
        fails = args.process_index == 1 and state.global_step == 2
        resource.setrlimit(resource.RLIMIT_FSIZE, (100 if fails else resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def trainer(folder, *callbacks, num_prompts=32, **changes) -> GRPOTrainer:
    settings = dict(
        **tiny.QUIET_ON_CPU,
        max_steps=STEPS,
        save_steps=1,
        logging_steps=1,
        per_device_train_batch_size=4,
        num_generations=4,
        num_iterations=2,
        max_completion_length=4,
        learning_rate=1e-3,
    )
    args = GRPOConfig(str(folder), **settings | changes)
    prompts = Dataset.from_dict({"prompt": [tiny.words(5 + i, 6) for i in range(num_prompts)]})
    rules = RuleSet([Call(length_of_text, isolate=False)], normalise=True)
    model = tiny.model("llama")
    return GRPOTrainer(model, rules, args, prompts, processing_class=tiny.tokenizer(), callbacks=list(callbacks))


def trained(folder, *callbacks, point=None, **changes) -> GRPOTrainer:
    done = trainer(folder, *callbacks, **changes)
    done.train(resume_from_checkpoint=point)
    return done


def refusal(folder, point, **changes) -> str:
    try:
        trained(folder, point=point, **changes)
    except TrlExtError as error:
        return str(error)
    return ""


@contextmanager
def holder(folder: Path):
    """Another process that holds the lock of a folder."""
    program = "import sys, filelock; lock = filelock.FileLock(sys.argv[1]); lock.acquire(); print(flush=True); input()"
    command = [sys.executable, "-c", program, folder / LOCK]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        (folder / OWNER).write_text(json.dumps(dict(host="node7", pid=4711, user="ann", since="2026-01-01")))
        yield
        process.communicate(b"\n")


def pretended_version(folder: Path, package: str, version: str) -> str:
    """Make a folder that stands on the path as if another version of the package were installed."""
    info = folder / "site" / f"{package}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    return str(info.parent)


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*"))


def train(folder: Path, of_one_process: str) -> dict:
    folders.PATIENCE_S = 0.5
    whole, facts = weights(trained(folder / "run")), {}
    state = PartialState()  # as the first trainer's arguments have made it
    rank = state.process_index
    for step in (1, 2):
        resumed = trained(folder / f"resumed-{step}", point=str(folder / "run" / f"checkpoint-{step}"))
        facts[f"resumed from {step}"] = torch.equal(weights(resumed), whole)

    # An epoch has four steps, of two generations: step 6 is in the middle of the second epoch.
    epochs = weights(trained(folder / "epochs", num_prompts=4, max_steps=8))
    resumed = trained(folder / "resumed-6", point=str(folder / "epochs" / "checkpoint-6"), num_prompts=4, max_steps=8)
    facts["resumed in the second epoch"] = torch.equal(weights(resumed), epochs)

    if rank == 0:
        shutil.copytree(folder / "run", folder / "damaged")
        (folder / "damaged" / "checkpoint-4" / "rng_state_1.pth").write_bytes(b"")
        rollouts = folder / "damaged" / "checkpoint-3" / "rollouts_1.pt"
        rollouts.write_bytes(rollouts.read_bytes()[:-1] + b"?")
    state.wait_for_everyone()
    facts["damaged"] = refusal(folder / "damaged", str(folder / "damaged" / "checkpoint-3"))
    facts["fell back"] = torch.equal(weights(trained(folder / "damaged", point=True)), whole)

    facts["of one process"] = refusal(folder / "one", of_one_process)
    facts["despite"] = trained(folder / "one", point=of_one_process, resume_despite=["processes"]).state.global_step

    done = trained(folder / "full", SmallDisk())
    facts["full disk"] = [done.state.global_step, steps(folder / "full")]

    own = folder / f"disk-{rank}"
    facts["own disks"] = refusal(own, point=None)
    facts["own disks, no saving"] = trained(own, save_strategy="no", max_steps=1).state.global_step

    with holder(folder / "run") if rank == 0 else nullcontext():
        facts["in use"] = refusal(folder / "run", point=None)

    if rank == 1:
        sys.path.insert(0, pretended_version(folder, "accelerate", "1.0.1"))
        packages.cache_clear()
    facts["other versions"] = refusal(folder / "versions", point=None)
    return facts
