"""What the three trainers share, and the order in which it surrounds a run."""

from contextlib import ExitStack
from typing import Any

from trl_ext.trainers.checkpoints.best import check_best_metric
from trl_ext.trainers.checkpoints.folder import held
from trl_ext.trainers.checkpoints.trainer import WholeCheckpoints
from trl_ext.trainers.ending.run_end import RunEnds, ended
from trl_ext.trainers.fit.oom.message import out_of_memory_in_words
from trl_ext.trainers.fit.oom.rescue import OutOfMemoryRescue
from trl_ext.trainers.packing import PackingSwitch
from trl_ext.trainers.record.trainer import RunRecords


class ExtendedTrainer(WholeCheckpoints, RunRecords, OutOfMemoryRescue, PackingSwitch, RunEnds):
    """Mixed into GRPOTrainer and RewardTrainer, in front of TRL's trainer. Its bases may come in any order."""

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, ignore_keys_for_eval: Any = None
    ) -> Any:
        """Overrides transformers.Trainer.train: surrounded by what a run needs, outermost first.

        Raises:
            ConfigError: The folder is another run's, or there is no whole checkpoint of this run.
            OutOfMemoryError: With what would fit.
            SystemExit: With code 75 after SIGTERM or Ctrl-C; the checkpoint is whole on all processes.
            LostProcessError: Another process does not answer, or has ended.
        """
        check_best_metric(self)
        is_kept = trial is None and self.leaves_record
        with ExitStack() as run:
            if is_kept:
                run.enter_context(held(self.args))  # before anything in the folder is read
            checkpoint = self._checkpoint_of(resume_from_checkpoint, trial)
            if is_kept:
                # A run that ends by a signal or an error has a record, and no report.
                run.enter_context(self._recorded(is_resumed=checkpoint is not None))
            run.enter_context(out_of_memory_in_words(self))
            run.enter_context(ended(self))  # innermost: a lost process is named while the others still wait
            return super().train(checkpoint, trial, ignore_keys_for_eval)
