"""Saving and resuming, for all three trainers."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedModel, Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, has_length

from trl_ext.compat.accelerate import begin_without_a_draw
from trl_ext.compat.swap import swapped
from trl_ext.errors import ConfigError
from trl_ext.trainers.checkpoints.fingerprint import fingerprint
from trl_ext.trainers.checkpoints.manifest import MANIFEST
from trl_ext.trainers.checkpoints.ranks import of_rank_0
from trl_ext.trainers.checkpoints.resume import check_run, find_checkpoint, position_in_stream
from trl_ext.trainers.checkpoints.save import Saver, WriteErrors, is_sharded, run_of
from trl_ext.trainers.checkpoints.secrets import guard_secrets

# Methods that write files without collectives.
_WRITERS = ("create_model_card", "save_model", "_save_optimizer_and_scheduler", "_save_scaler", "_save_rng_state")


class WholeCheckpoints(Trainer):
    """Mixed into a trainer: writes only whole checkpoints, and resumes only from whole checkpoints of the same run.

    `doing` is a sentence about the current work, for the error if a process does not answer.
    """

    memory_kind: str  # "grpo", "ppo" or "reward"
    doing = ""
    _run: dict[str, Any] | None = None
    _savers: dict[str, Saver] | None = None
    _was_evaluated = False  # before the checkpoint from which this run goes on

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        guard_secrets(vars(self.args), set())

    def _save_own_state(self, folder: str) -> None:
        """Write the state that this trainer needs to resume, in addition to the state of transformers and TRL."""

    def load_own_weights(self, folder: str) -> None:
        """Load weights that a checkpoint holds in addition to the model's weights."""

    def _check_checkpoint(self, folder: str) -> None:
        """Raise ConfigError for a checkpoint from which this trainer cannot resume, before it is compared."""

    def _checkpoint_of(self, wanted: str | bool | None, trial: Any) -> str | bool | None:
        """Return the whole checkpoint of this run to resume from; None to start afresh. A hyperparameter search
        (`trial`) gets `wanted` unchecked. Collective."""
        if trial is not None:
            self._run = None
            return wanted
        if isinstance(wanted, str) and not Path(wanted, MANIFEST).is_file():
            self._check_checkpoint(wanted)
        checkpoint = find_checkpoint(self.args, wanted)
        self._run = of_rank_0(self.args, {"id": secrets.token_hex(8)} | fingerprint(self))
        if checkpoint is not None:
            check_run(self.args, checkpoint, self._run, self._check_checkpoint)
            self._run["id"] = run_of(Path(checkpoint))
        return checkpoint

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Overrides transformers.Trainer._load_from_checkpoint: raises ConfigError if trained weights are missing."""
        with loading(self, resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Overrides transformers.Trainer._load_scaler: leaves out a scaler's file, from an fp16 run or added, if this
        run has no scaler."""
        if self.accelerator.scaler is not None:
            super()._load_scaler(checkpoint)

    def _load_best_model(self) -> None:
        """Overrides transformers.Trainer._load_best_model: raises ConfigError if trained weights are missing."""
        with loading(self, str(self.state.best_model_checkpoint)):
            super()._load_best_model()

    def _init_training_state(self, *args: Any, **options: Any) -> tuple[int, int]:
        """Overrides transformers.Trainer._init_training_state: a stream continues at its position.

        transformers takes a stream for endless, and would skip more rows than were trained since its start.
        """
        found: tuple[int, int] = super()._init_training_state(*args, **options)
        self._was_evaluated = any(name.startswith("eval_") for log in self.state.log_history for name in log)
        if not self.state.global_step or has_length(self.train_dataset):
            return found
        position = position_in_stream(args[3])
        num_batches = position.num_steps * self.args.gradient_accumulation_steps
        return position.num_passes, 0 if self.args.ignore_data_skip else num_batches

    def get_eval_dataloader(self, eval_dataset: str | Dataset | None = None) -> DataLoader:
        """Overrides transformers.Trainer.get_eval_dataloader: in a resumed run, persistent workers that evaluated
        before the checkpoint begin without a random number."""
        loader = super().get_eval_dataloader(eval_dataset)
        if self._was_evaluated:
            begin_without_a_draw(loader, self.args.seed)
        return loader

    def _run_epoch(self, *args: Any, **options: Any) -> None:
        """Overrides transformers.Trainer._run_epoch: stops a run that has taken all its steps; in a resumed run,
        persistent workers begin without a random number.

        transformers checks the number of steps after a step only: resumed at the end, it would take one too many.
        """
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        if options["resume_from_checkpoint"] is not None:
            begin_without_a_draw(options["train_dataloader"], self.args.seed)
        super()._run_epoch(*args, **options)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Overrides transformers.Trainer._save_checkpoint: writes a temporary folder and renames it when complete."""
        run_dir, best = self._get_output_dir(trial=trial), self.state.best_model_checkpoint
        self._run = self._run or of_rank_0(self.args, fingerprint(self))
        self._savers = self._savers or {}
        if run_dir not in self._savers:
            self._savers[run_dir] = Saver(self, Path(run_dir))
        saver = self._savers[run_dir]

        def write(folder: Path, errors: WriteErrors) -> None:
            writers = () if is_sharded(self) else _WRITERS
            keeping = {name: errors.keeping(getattr(self, name)) for name in writers}
            with swapped(
                self,
                _get_output_dir=lambda trial: str(folder.parent),
                _push_from_checkpoint=lambda _: None,
                **keeping,
            ):
                super(WholeCheckpoints, self)._save_checkpoint(model, trial)
            if not self.args.save_only_model:
                self._save_own_state(str(folder))
            self._name_best(run_dir, folder)

        self.doing = f"The checkpoint of step {self.state.global_step} was being written; its storage may be slow. "
        saved = saver.save(self.state.global_step, self._run, write)
        self.doing = ""
        if saved is None:
            self.state.best_model_checkpoint = best
            return
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(saved))
        saver.rotate(saved)

    def _name_best(self, run_dir: str, folder: Path) -> None:
        """Set the final path of the best checkpoint in the state, in memory and in the file."""
        best = f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
        final = os.path.join(run_dir, best)
        if not self.state.best_global_step or not (folder.name == best or os.path.isdir(final)):
            return
        self.state.best_model_checkpoint = final
        if self.args.should_save:
            self.state.save_to_json(str(folder / TRAINER_STATE_NAME))


@contextmanager
def loading(trainer: WholeCheckpoints, folder: str) -> Iterator[None]:
    """Let the trainer load a checkpoint inside the block, and raise ConfigError if it lacks trained weights.

    DeepSpeed and FSDP write and load by the model's names, and PEFT converts names itself.
    """
    model: Any = trainer.model
    is_split = trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled
    is_whole = isinstance(model, PreTrainedModel) and not is_split
    dropped = {"load_state_dict": lambda *_, **__: None} if is_whole else {}  # Trainer loads without conversion
    with nullcontext() if is_split else all_loaded(model, folder):
        with swapped(model, **dropped), swapped(trainer, _issue_warnings_after_load=lambda _: None):
            yield
        if is_whole and Path(folder).is_dir():
            load_pretrained(model, folder)
        trainer.load_own_weights(folder)


@contextmanager
def all_loaded(model: torch.nn.Module, folder: str | Path) -> Iterator[None]:
    """Raise ConfigError after the block if it has not written all trained weights of the model."""
    before = {name: weight._version for name, weight in model.named_parameters() if weight.requires_grad}
    try:
        yield
        lacking = [name for name, version in before.items() if model.get_parameter(name)._version == version]
    except KeyError as error:  # from PEFT, for a module that is trained in addition to an adapter
        lacking = [str(error)]
    if lacking:
        raise ConfigError(
            f"The checkpoint {folder} lacks {len(lacking)} of {len(before)} trained weights: {', '.join(lacking[:4])}"
            f"{', ...' if lacking[4:] else ''}. Resume from a checkpoint that holds them, or begin a new run."
        )


def load_pretrained(model: Any, folder: str | Path) -> None:
    """Load weights that `save_pretrained` wrote, by the names of the file; other weights stay as they are.

    Issue: transformers writes the hub's names, and its Trainer loads only those that the model has: 48805, 43701.
    Fixed in: no version of transformers up to 5.24; pull request 48822, for mixtures of experts, is open.
    Remove when: Trainer's `_load_from_checkpoint` and `_load_best_model` load by the names of the file.
    """
    # The model's widest type, so that no weight is rounded.
    dtype = reduce(torch.promote_types, {one.dtype for one in model.state_dict().values() if one.is_floating_point()})
    read, report = type(model).from_pretrained(folder, dtype=dtype, output_loading_info=True)
    found = {name: value for name, value in read.state_dict().items() if name not in report["missing_keys"]}
    model.load_state_dict(found, strict=False)
