"""What is done to a checkpoint, and checkpoints of other runs: what a trainer has to say to each."""

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tests import tiny
from tests.faults import jobs
from tests.faults.forks import Ending
from tests.ppo_trainers import prompts, reward
from trl_ext.scripts.exit import USER_ERROR

# Of the newest checkpoint, the one before it, and one that is older still.
NEW, OLD, OLDER = 7, 6, 5  # in the middle of a round of rollouts
MANIFEST = "manifest.json"

REFUSED, OLDER_ONE, SAME, TOLD = "refused", "older one", "same", "told"


@dataclass(frozen=True)
class Case:
    """A checkpoint that is damaged or of another run, and how a run has to end that is told to resume.

    Args:
        name: Of the case.
        ends: REFUSED: in one sentence, with the exit code of a user's error. OLDER_ONE: it says why it passes the
            newest checkpoint over, and ends as the run that nobody damaged. SAME: it ends so without a word. TOLD: it
            says something and goes on as told.
        says: A regular expression that the sentence or the log matches.
        damage: Of the output folder.
        settings: Changes to the trainer that resumes.
        wanted: What it is told to resume: True for the newest, or a folder.
    """

    name: str
    ends: str
    says: str = ""
    damage: Callable[[Path], None] = lambda out: None
    settings: Callable[[], dict[str, Any]] = field(default=dict)
    wanted: str | bool = True

    def fault(self, ending: Ending, whole: dict[str, Any]) -> str:
        """Return what is wrong with how the run ended; empty if nothing is.

        Args:
            ending: Of the run that resumed.
            whole: Outcome of the run that nobody damaged.
        """
        if "Traceback" in ending.log or ending.code not in (0, USER_ERROR):
            return f"exit code {ending.code}: {(ending.log.strip().splitlines() or [''])[-1]}"
        if self.ends == REFUSED:
            if ending.code == 0:
                return "silent: it went on"
            return "" if re.search(self.says, ending.error) else f"{self.says!r} not in: {ending.error}"
        if ending.result is None:
            return f"refused: {ending.error}"
        different = jobs.differences(whole, ending.result)
        if self.ends != TOLD and different:
            return f"silent: it differs in {different}"
        said = re.search(self.says, ending.log)
        return "" if said else f"silent: no {self.says!r} in what it printed"


# Files ------------------------------------------------------------------------------------------------------------


def missing(path: Path) -> None:
    path.unlink()


def half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def flipped(path: Path) -> None:
    """Flip one bit in the last quarter, where weights are."""
    content = bytearray(path.read_bytes())
    content[len(content) * 3 // 4] ^= 16
    path.write_bytes(content)


def of_an_older_step(path: Path) -> None:
    """Put the same file of an older checkpoint in its place."""
    older = Path(str(path).replace(f"checkpoint-{NEW}", f"checkpoint-{OLDER}"))
    shutil.copy(older, path)


DAMAGES = (missing, half, empty, flipped, of_an_older_step)


def files(names: list[str], equal: set[str]) -> list[Case]:
    """Return a case for each file and damage: with an older whole checkpoint, and without one.

    Args:
        names: Of a checkpoint's files.
        equal: Those that all checkpoints of a run have equal.
    """
    cases = []
    for i, name in enumerate(names):
        for j, damage in enumerate(DAMAGES):
            if damage is of_an_older_step and name in equal:
                continue
            has_older = (i + j) % 3 != 0
            case = partial(
                Case,
                f"{name} {damage.__name__.replace('_', ' ')}",
                says=f"checkpoint-{NEW}.*{re.escape(name)}",
                damage=partial(_damaged_file, damage, name, has_older),
            )
            cases.append(case(OLDER_ONE) if has_older else case(REFUSED))
    return cases


def _damaged_file(damage: Callable[[Path], None], name: str, has_older: bool, out: Path) -> None:
    damage(out / f"checkpoint-{NEW}" / name)
    _keep(out, has_older)


def _keep(out: Path, has_older: bool) -> None:
    """Remove all checkpoints but the newest and, if wanted, the one before it."""
    kept = {NEW, OLD} if has_older else {NEW}
    for folder in out.glob("checkpoint-*"):
        if int(folder.name.rpartition("-")[2]) not in kept:
            shutil.rmtree(folder)


# Folders ----------------------------------------------------------------------------------------------------------


def folders(others: dict[tuple[str, str], Path]) -> list[Case]:
    """Return cases of whole folders.

    Args:
        others: Checkpoints of other trainers, by their name and what has to be said of them.
    """
    newest = f"checkpoint-{NEW}"
    cases = [
        Case("folder empty", OLDER_ONE, f"{newest}.*{MANIFEST}", partial(_emptied, True)),
        Case("folder empty, the only one", REFUSED, f"{newest}.*{MANIFEST}", partial(_emptied, False)),
        Case("manifest edited", OLDER_ONE, f"{newest}.*{MANIFEST}", partial(_edited, True)),
        Case("manifest edited, the only one", REFUSED, f"{newest}.*{MANIFEST}", partial(_edited, False)),
        Case("manifest of an older step", OLDER_ONE, newest, _with_older_manifest),
        Case("a file in the folder's place", SAME, damage=_file_instead),
        Case("half of a checkpoint being written", SAME, damage=_unfinished),
        Case("nothing damaged", SAME, damage=partial(_keep, has_older=True)),
        Case("the newest has another name", SAME, damage=_renamed),
        Case("an older one by name", SAME, wanted=f"out/checkpoint-{OLD}"),
        Case("one by name that is not there", REFUSED, "checkpoint-33", wanted="out/checkpoint-33"),
        Case(
            "a damaged one by name",
            REFUSED,
            f"{newest}.*optimizer.pt.*checkpoint-{OLD} is whole",
            partial(_damaged_file, half, "optimizer.pt", True),
            wanted=f"out/{newest}",
        ),
    ]
    return cases + [
        Case(f"checkpoint of {name}", REFUSED, says, partial(_replaced, path)) for (name, says), path in others.items()
    ]


def _emptied(has_older: bool, out: Path) -> None:
    shutil.rmtree(out / f"checkpoint-{NEW}")
    (out / f"checkpoint-{NEW}").mkdir()
    _keep(out, has_older)


def _edited(has_older: bool, out: Path) -> None:
    path = out / f"checkpoint-{NEW}" / MANIFEST
    content = json.loads(path.read_text())
    content["files"].pop("optimizer.pt")
    path.write_text(json.dumps(content))
    _keep(out, has_older)


def _with_older_manifest(out: Path) -> None:
    of_an_older_step(out / f"checkpoint-{NEW}" / MANIFEST)
    _keep(out, has_older=True)


def _file_instead(out: Path) -> None:
    shutil.rmtree(out / f"checkpoint-{NEW}")
    (out / f"checkpoint-{NEW}").write_text("")
    shutil.rmtree(out / f"checkpoint-{OLDER}")


def _unfinished(out: Path) -> None:
    _keep(out, has_older=True)
    shutil.copytree(out / f"checkpoint-{NEW}", out / "_unfinished" / "checkpoint-9")
    half(out / "_unfinished" / "checkpoint-9" / "optimizer.pt")


def _renamed(out: Path) -> None:
    _keep(out, has_older=True)
    os.rename(out / f"checkpoint-{NEW}", out / "checkpoint-best")


def _replaced(other: Path, out: Path) -> None:
    shutil.rmtree(out)
    shutil.copytree(other, out / other.name)  # a step that its folder does not name would be the first complaint


# Other runs -------------------------------------------------------------------------------------------------------


def other_runs(kind: str) -> list[Case]:
    """Return cases of a trainer that is told to resume what it did not begin."""
    same_kind = [
        Case("another seed", REFUSED, "seed", settings=lambda: dict(seed=7)),
        Case("another data_seed", REFUSED, "data_seed", settings=lambda: dict(data_seed=7)),
        Case("another gradient norm", REFUSED, "max_grad_norm", settings=lambda: dict(max_grad_norm=0.1)),
        Case("another batch", REFUSED, "per_device_train_batch_size", settings=_batch),
        Case("another learning rate", TOLD, "learning_rate", settings=lambda: dict(learning_rate=1e-3)),
        Case("other logging and saving", SAME, "", settings=lambda: dict(save_steps=2, save_total_limit=1)),
        Case("another seed, despite", TOLD, "", settings=lambda: dict(seed=7, resume_despite=["seed"])),
        Case("an unknown name", REFUSED, "resume_despite.*speed", settings=lambda: dict(resume_despite=["speed"])),
        Case("another model's shape", REFUSED, "hidden_size", settings=partial(_other_shape, kind)),
    ]
    if kind == "reward":
        return [
            *same_kind,
            Case("other data", REFUSED, "data", settings=lambda: dict(rows=jobs.pairs(1))),
            # The checkpoint's weights come over them, and there is no reference.
            Case("other weights of the start", SAME, settings=lambda: dict(model=jobs.classifier(4))),
        ]
    own = [
        Case("other data", REFUSED, "data", settings=lambda: dict(rows=prompts(24))),
        Case("a longer answer", REFUSED, "max_completion_length", settings=partial(_longer, kind)),
        Case("other weights of the start", REFUSED, "reference|frozen", settings=partial(_other_weights, kind)),
        Case("other words", REFUSED, "tokenizer", settings=lambda: dict(processing_class=_other_words())),
    ]
    if kind != "grpo":
        return [
            *same_kind,
            *own,
            Case("no rules", REFUSED, "rewards", settings=lambda: dict(rules=[])),
            Case("another reward model", REFUSED, "reward", settings=lambda: dict(reward_model=jobs.classifier(8))),
            Case("another discount", REFUSED, "gamma", settings=lambda: dict(gamma=0.9)),
        ]
    return [
        *same_kind,
        *own,
        Case("another rule", REFUSED, "rules", settings=lambda: dict(rules=[jobs.length_rules(high=2), reward])),
        Case("no normalising", REFUSED, "normalise", settings=_not_normalised),
        Case("one rule less", REFUSED, "rules", settings=lambda: dict(rules=[jobs.length_rules()])),
        Case("num_generations", REFUSED, "num_generations", settings=lambda: dict(num_generations=2)),
        Case("num_iterations", REFUSED, "num_iterations", settings=lambda: dict(num_iterations=1)),
        Case("another beta", REFUSED, "beta", settings=lambda: dict(beta=0.1)),
    ]


def _other_words() -> Any:
    """A tokenizer for which two words have changed places."""
    content = json.loads(tiny.tokenizer().backend_tokenizer.to_str())
    vocab = content["model"]["vocab"]
    vocab["w5"], vocab["w6"] = vocab["w6"], vocab["w5"]
    tokenizer = tiny.tokenizer()
    tokenizer._tokenizer = type(tokenizer.backend_tokenizer).from_str(json.dumps(content))
    return tokenizer


def _batch() -> dict[str, Any]:
    return dict(per_device_train_batch_size=8)


def _longer(kind: str) -> dict[str, Any]:
    return {"max_completion_length" if kind == "grpo" else "response_length": 8}


def _not_normalised() -> dict[str, Any]:
    return dict(rules=[jobs.length_rules(normalise=False), reward])


def _other_shape(kind: str) -> dict[str, Any]:
    changes = dict(hidden_size=24)
    if kind == "reward":
        return dict(model=jobs.classifier(3, **changes))
    return dict(model=jobs.saved_actor("wide", **changes) if kind == "grpo" else jobs.actor(**changes))


def _other_weights(kind: str) -> dict[str, Any]:
    return dict(model=jobs.saved_actor("other", seed=1) if kind == "grpo" else jobs.actor(seed=1))
