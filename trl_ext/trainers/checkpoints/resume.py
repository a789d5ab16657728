"""Choice of the checkpoint to resume from: the newest whole checkpoint of the run, or the given folder.

Each process checks a part of the files, and all return the same result or raise the same error.
"""

import math
import os
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from transformers import TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from trl_ext.errors import ConfigError
from trl_ext.monitor.record import recorded_run
from trl_ext.rewards.text.secrets import public
from trl_ext.trainers.checkpoints.fingerprint import PARTS, RESTORED, differences
from trl_ext.trainers.checkpoints.manifest import MANIFEST, UNFINISHED, Damaged, Manifest, share_of
from trl_ext.trainers.checkpoints.ranks import gathered, of_rank_0
from trl_ext.trainers.checkpoints.save import is_whole, newest_first, run_of, step_of

_NAMED = 3  # differences and reasons that a message names

logger = logging.get_logger(__name__)


def no_checkpoint(output_dir: Path) -> ConfigError:
    """Return the error for a folder without a checkpoint."""
    return ConfigError(
        f"There is no checkpoint in {output_dir} to resume from. Check output_dir, or start afresh without "
        "resume_from_checkpoint."
    )


def find_checkpoint(args: TrainingArguments, wanted: str | bool | None) -> str | None:
    """Return the folder to resume from; None to start afresh. Collective.

    `wanted` is True for the newest whole checkpoint in output_dir, or a folder. Raises ConfigError if there is no
    checkpoint, or if the folder is not a whole checkpoint.
    """
    if wanted is None or wanted is False:
        return None
    run_dir = Path(str(args.output_dir))
    if not isinstance(wanted, bool):
        _check_folder(args, Path(wanted), run_dir)
        return str(wanted)
    if args.process_index == 0:
        _finish_renaming(run_dir)
    found, passed = _newest_whole(args, run_dir, of_rank_0(args, recorded_run(run_dir)))
    if found:
        for line in passed if args.process_index == 0 else ():
            logger.warning(f"Passed over {line}. Resuming from {found.name}.")
        return str(found)
    if not passed:
        raise no_checkpoint(run_dir)
    raise ConfigError(f"No checkpoint in {run_dir} is whole: {_listed(passed)}.{_flag(passed[0])}")


def _check_folder(args: TrainingArguments, folder: Path, run_dir: Path) -> None:
    """Raise ConfigError unless the folder is a whole checkpoint, and output_dir is not of another run. Collective."""
    reason = _why_not(args, folder)
    if reason:
        other, _ = _newest_whole(args, folder.parent, leave_out=folder.name)
        advice = f"{other} is whole" if other else f"No other one in {folder.parent} is whole"
        raise ConfigError(f"Cannot resume from {folder}: {reason}. {advice}.{_flag(reason)}")
    others = [path.name for path in newest_first(run_dir) if run_of(path) != run_of(folder)]
    if (foreign := of_rank_0(args, others[:1])) and folder.parent.resolve() != run_dir.resolve():
        raise ConfigError(f"output_dir {run_dir} holds {foreign[0]} of another run than {folder}. Give another.")


def _finish_renaming(run_dir: Path) -> None:
    """Move whole checkpoints to the run's folder that a kill between two renamings left in the temporary folder."""
    for staged in (run_dir / UNFINISHED).glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        final = run_dir / staged.name
        if step_of(staged) is not None and is_whole(staged) and not final.exists():
            os.rename(staged, final)


def check_run(args: TrainingArguments, checkpoint: str, run: dict[str, Any], check_own: Callable[[str], None]) -> None:
    """Raise ConfigError unless the checkpoint is of this run; warn of settings that differ but are accepted.

    Args:
        args: The run's config.
        checkpoint: The folder.
        run: Fingerprint of the run that begins.
        check_own: The trainer's check of the folder.
    """
    despite = _despite(args)
    try:
        manifest = Manifest.read(Path(checkpoint))
    except Damaged:
        if "manifest" in despite:
            check_own(checkpoint)
            return
        raise
    old = public(manifest.run)  # an earlier version may have hidden less
    if old["trainer"] != run["trainer"]:
        raise ConfigError(
            f"{checkpoint} is of {_TRAINERS.get(old['trainer'], old['trainer'])}, and this is "
            f"{_TRAINERS[run['trainer']]}. Give the folder as the model of a new run."
        )
    check_own(checkpoint)
    if manifest.save_only_model:
        raise ConfigError(
            f"{checkpoint} was saved with save_only_model: without optimizer and random state no run goes on from it. "
            "Give the folder as the model of a new run."
        )
    compared = [part for part in PARTS if part not in despite]
    found = {part: list(differences({part: old[part]}, {part: run[part]})) for part in compared}
    found = {part: lines for part, lines in found.items() if lines}
    if found:
        lines = list(chain.from_iterable(found.values()))
        raise ConfigError(
            f"{checkpoint} is of another run: {_listed(lines)}. Resume with the former values, or set resume_despite "
            f"to {' '.join(found)} to accept the differences."
        )
    before, now = old["restored"], run["restored"]
    for name in before.keys() & now.keys() if args.process_index == 0 else ():
        if before[name] != now[name] and name in RESTORED:
            logger.warning(
                f"{name} is {now[name]}, but the checkpoint's {before[name]} goes on: optimizers restore it."
            )
        elif before[name] != now[name]:
            logger.warning(f"{name} was {before[name]} and is {now[name]}: the new value counts from here on.")


class StreamPosition(NamedTuple):
    """The place of a run in its stream of rows."""

    num_passes: int  # how often it had gone through the stream
    num_steps: int  # optimizer steps since


def position_in_stream(checkpoint: str) -> StreamPosition:
    """Return where a run was in its stream at a checkpoint.

    transformers counts `max_steps` steps as one epoch of a stream, and adds an epoch whenever the stream restarts. So
    the state's epoch is the number of passes plus steps / max_steps, with at least one step.
    """
    state = TrainerState.load_from_json(str(Path(checkpoint, TRAINER_STATE_NAME)))
    epoch = state.epoch or 0.0
    times = max(math.ceil(epoch) - 1, 0)
    return StreamPosition(times, round((epoch - times) * state.max_steps))


_TRAINERS = {"grpo": "GRPOTrainer", "ppo": "PPOTrainer", "reward": "RewardTrainer"}


def _newest_whole(
    args: TrainingArguments, run_dir: Path, run: str | None = None, leave_out: str = ""
) -> tuple[Path | None, list[str]]:
    """Return the newest whole checkpoint of a run, and "<name>: <reason>" for each newer folder. Collective.

    Args:
        args: The run's config.
        run_dir: Folder of the run.
        run: Its id; None for any run.
        leave_out: Name of a checkpoint that does not count.
    """
    passed: list[str] = []
    for name in of_rank_0(args, [path.name for path in newest_first(run_dir) if path.name != leave_out]):
        reason = _why_not(args, run_dir / name)
        if not reason and run_of(run_dir / name) not in (None, run or run_of(run_dir / name)):
            reason = "it is of another run than recipe.yaml"
        if not reason:
            return run_dir / name, passed
        passed.append(f"{name}: {reason}")
    return None, passed


def _why_not(args: TrainingArguments, folder: Path) -> str:
    """Return why a folder is no checkpoint to resume from, the same on all processes; "" if it is. Collective."""
    if "manifest" in _despite(args):
        return "" if all(gathered(args, folder.is_dir())) else "not every process sees the folder"
    rank = args.process_index
    manifest, reason = None, ""
    try:
        manifest = Manifest.read(folder)
    except Damaged as error:
        reason = str(error) if folder.is_dir() else "there is no such folder"
    told = gathered(args, (reason, manifest and manifest.checksum))
    blind = [str(other) for other, (_, checksum) in enumerate(told) if checksum is None]
    if blind:
        first = next(reason for reason, _ in told if reason)
        if len(blind) == len(told):
            return first
        return f"process {', '.join(blind)} does not see it whole ({first}); output_dir must be on a shared disk"
    assert manifest is not None
    reason = ""
    try:
        group = [other for other, (_, checksum) in enumerate(told) if checksum == manifest.checksum]
        if rank == group[0]:
            manifest.check_sizes(folder)
        manifest.check_files(folder, share_of(rank, group, manifest.files))
    except Damaged as error:
        reason = str(error)
    return next((text for text in gathered(args, reason) if text), "")


def _despite(args: TrainingArguments) -> tuple[str, ...]:
    return tuple(getattr(args, "resume_despite", None) or ())


def _flag(reason: str) -> str:
    if f"has no {MANIFEST}" not in reason:
        return ""
    return (
        " TRL's own trainers write none, so that nobody knows whether the checkpoint is whole and of this run; "
        "resume_despite=manifest takes it as it is."
    )


def _listed(lines: list[str]) -> str:
    more = f"; and {len(lines) - _NAMED} more" if len(lines) > _NAMED else ""
    return "; ".join(lines[:_NAMED]) + more
