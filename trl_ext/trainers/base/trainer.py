"""The base of the three trainers, and the order of the contexts around a run."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch.utils.data import DataLoader

from trl_ext.compat.peft import base_model, computing_weights
from trl_ext.compat.trl import leave_fused_head_uncompiled
from trl_ext.compat.versions import check_versions
from trl_ext.memory.models.find import check_here
from trl_ext.monitor.streams import ignore_failed_writes
from trl_ext.trainers.base.packing import PackingSwitch
from trl_ext.trainers.checkpoints.folder import held
from trl_ext.trainers.checkpoints.trainer import WholeCheckpoints
from trl_ext.trainers.ending.run_end import RunEnds, ended
from trl_ext.trainers.fit.message import out_of_memory_in_words
from trl_ext.trainers.fit.rehearsal.rehearsal import watch_memory
from trl_ext.trainers.fit.rehearsal.state import random_numbers_restored
from trl_ext.trainers.fit.trainer import FittedTrainer, RehearsedTrainer
from trl_ext.trainers.forward.gradient_sync import backward_where_there_is_one
from trl_ext.trainers.record.trainer import RunRecords
from trl_ext.trainers.settings.checks import (
    check_grad_norm,
    check_launch,
    check_packed_bits,
    check_pad_token,
    check_steps,
    check_trained,
)
from trl_ext.trainers.settings.values import check_settings
from trl_ext.trainers.step.run import RunsForwards


class ExtendedTrainer(WholeCheckpoints, RunRecords, RunsForwards, PackingSwitch, RunEnds):
    """Mixin of GRPOTrainer and RewardTrainer, before TRL's trainer. Its bases may come in any order."""

    @classmethod
    def _checked(cls, args: Any, config: type, model: Any) -> Any:
        """Return the checked config; for None a default config, named after the model."""
        ignore_failed_writes()
        check_versions()
        check_here(model)
        if args is None:
            name = model if isinstance(model, str) else model.config._name_or_path
            args = config(f"{name.split('/')[-1]}-{config.__name__.removesuffix('Config')}")
        if args.torch_compile:
            leave_fused_head_uncompiled()
        check_launch(args)
        check_settings(args)
        return args

    def _watch_memory(self, *phases: str) -> None:
        """Rehearse `phases` before step 1, and on a card audit every step; called at the end of a constructor."""
        # DDP's gradients stay in the buckets that it sends: 4 bytes less per trained fp32 weight, the same gradients.
        if self.accelerator.ddp_handler is not None:
            self.accelerator.ddp_handler.gradient_as_bucket_view = True
        # FSDP2 reduces in every backward, as ZeRO-3 does. accelerate reduces only in the last of an optimizer step,
        # and until then each card holds all gradients unsharded, 2 bytes per trained weight.
        if self.accelerator.is_fsdp2:
            self.accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = True
        check_packed_bits(self.model, self.args)
        check_pad_token(self.model, self.processing_class)
        watch_memory(cast(RehearsedTrainer, self), phases)

    def weights_by_role(self) -> dict[str, list[torch.nn.Parameter]]:
        """Return the weights of each model that a run trains; each model needs some that are not frozen."""
        return {"model": computing_weights(self.model)}

    def get_train_dataloader(self) -> DataLoader:
        """Overrides transformers.Trainer.get_train_dataloader: refuses too few rows for one step."""
        check_steps(self.train_dataset, self.args)
        return super().get_train_dataloader()

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Overrides transformers.Trainer._get_grad_norm: a norm that is not finite ends the run before its step."""
        norm = super()._get_grad_norm(model, grad_norm)
        check_grad_norm(self, norm)
        return norm

    @contextmanager
    def _in_update(self) -> Iterator[None]:
        """Time the update inside the block, in which a micro-step may have no backward."""
        with self.clock.phase("update"), backward_where_there_is_one(self.accelerator, self.forward_loop):
            yield

    @random_numbers_restored()
    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Overrides transformers.Trainer.evaluate: restores training's random numbers afterwards.

        An epoch's last step is saved before the evaluation at the epoch's end, which a resumed run does not repeat.
        """
        return super().evaluate(*args, **kwargs)

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, ignore_keys_for_eval: Any = None
    ) -> Any:
        """Overrides transformers.Trainer.train: inside the contexts of a run, outermost first.

        Raises:
            ConfigError: The folder is another run's, or there is no complete checkpoint of this run.
            OutOfMemoryError: With settings that would fit.
            SystemExit: With code 75 after SIGTERM or Ctrl-C; the checkpoint is complete on all processes.
            LostProcessError: Another process does not answer, or has ended.
        """
        ignore_failed_writes()  # again: a program may have opened other streams
        check_trained(self.weights_by_role())
        is_kept = trial is None and self.leaves_record
        with ExitStack() as run:
            if is_kept:
                model = str(getattr(getattr(base_model(self.model), "config", None), "_name_or_path", ""))
                is_fresh = not resume_from_checkpoint
                run.enter_context(held(self.args, model, is_fresh=is_fresh))  # before anything there is read
            checkpoint = self._checkpoint_of(resume_from_checkpoint, trial)
            if is_kept:
                own = (self._run or {}).get("id")
                run.enter_context(self._recorded(own, is_resumed=checkpoint is not None))
            run.enter_context(out_of_memory_in_words(cast(FittedTrainer, self)))
            run.enter_context(ended(self))  # innermost: a lost process is named while the others still wait
            return super().train(checkpoint, trial, ignore_keys_for_eval)
