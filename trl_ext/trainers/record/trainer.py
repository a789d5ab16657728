"""Mixed into the trainers: a run records its recipe, shows one line of progress, and writes a report at its end."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback
from transformers import trainer as transformers_trainer
from transformers.utils import logging

from trl_ext.compat.transformers import old_names_unsaid
from trl_ext.errors import TrlExtError
from trl_ext.memory.planner.folder import as_dict
from trl_ext.monitor.log_keys import ERROR
from trl_ext.monitor.progress import ProgressLine
from trl_ext.monitor.record import LOG_FILE, RECIPE_FILE, LogFile, recorded_run, replace_text, write_record
from trl_ext.rewards.text.secrets import public
from trl_ext.trainers.record.recipe import data_in_words, in_words, packages, recipe_of, rules_of, versions_of

# "0" turns the report off, for programs that train often.
REPORT_VARIABLE = "TRL_EXT_REPORT"

logger = logging.get_logger(__name__)


class RunRecords(Trainer):
    """Mixed into a trainer: writes its record, log and report."""

    memory_kind: str  # "grpo", "ppo" or "reward"
    given_rewards: Sequence[Any] = ()  # as given to the trainer
    given_lora_targets: Any = None  # `target_modules` of the given LoRA config
    leaves_record = True  # False to write no record
    reports_itself = True  # False if `report` is called once the model is saved
    _log_file: LogFile | None = None

    def __init__(self, *args: Any, **kwargs: Any):
        """Overrides transformers.Trainer.__init__: shows one line of progress, unless the user has such a callback."""
        # PEFT replaces `all-linear` in the config by the modules that it found.
        self.given_lora_targets = getattr(kwargs.get("peft_config"), "target_modules", None)
        with old_names_unsaid():  # PEFT reads is_gradient_checkpointing
            super().__init__(*args, **kwargs)
        callbacks = self.callback_handler.callbacks
        kinds = (ProgressCallback, PrinterCallback, transformers_trainer.DEFAULT_PROGRESS_CALLBACK)  # a notebook's
        shown = [i for i, one in enumerate(callbacks) if isinstance(one, kinds)]
        if len(shown) == 1:  # transformers' default, which it adds last
            callbacks[shown[0]] = ProgressLine()
        elif any(isinstance(callbacks[i], ProgressLine) for i in shown[:-1]):
            del callbacks[shown[-1]]

    def add_callback(self, callback: type[TrainerCallback] | TrainerCallback) -> None:
        """Overrides transformers.Trainer.add_callback: a new ProgressLine replaces the earlier line."""
        if callback is ProgressLine or isinstance(callback, ProgressLine):
            self.pop_callback(ProgressLine)
        super().add_callback(callback)

    @contextmanager
    def _recorded(self, run: str | None, *, is_resumed: bool) -> Iterator[None]:
        """Write the record of the run with id `run` before the block, its log during it, and the report after it, also
        after an error, and unless the caller of `train` reports a complete run."""
        history: list[dict[str, Any]] = []
        is_whole = False
        if self.is_world_process_zero():
            self._record(run, is_resumed=is_resumed)
            self._log_file = LogFile(Path(str(self.args.output_dir), LOG_FILE))
            if not is_resumed:
                self._write_log(history)
        try:
            yield
            is_whole = True
        except Exception as error:
            name = "" if isinstance(error, TrlExtError) else f"{type(error).__name__}: "
            said = public(" ".join(f"{name}{error}".split()))
            history = [{ERROR: said, "step": self.state.global_step}]
            raise
        finally:
            history = self.state.log_history + history
            has_begun = self.state.max_steps > 0  # else nothing was trained, and the error came before
            if self._log_file and has_begun:
                self._write_log(history)
                if self.reports_itself or not is_whole:
                    self.report(history)
            self._log_file = None

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Overrides transformers.Trainer.log: also writes log.jsonl at once."""
        super().log(logs, start_time)
        self._write_log(self.state.log_history)

    def _write_log(self, history: Sequence[Mapping[str, Any]]) -> None:
        try:
            if self._log_file:
                self._log_file.write(history)
                self._keep_completions()
        except (OSError, ValueError) as error:  # the numbers stay in memory, and are written with the next entry
            logger.warning_once(f"{LOG_FILE} or completions could not be written: {error}. Training goes on.")

    def _keep_completions(self) -> None:
        """Keep completions for the report, in trainers that have some."""

    def create_model_card(  # type: ignore[override]  # TRL's signature
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """Overrides trl's create_model_card: adds data, rewards, trained weights and recipe."""
        data = [data_in_words(self.train_dataset)] if dataset_name is None else [dataset_name]
        # A local name would make broken links and metadata on the hub.
        is_local = dataset_name is None or Path(dataset_name).exists()
        super().create_model_card(model_name, None if is_local else dataset_name, tags)
        path = Path(str(self.args.output_dir), "README.md")
        if not self.is_world_process_zero() or not path.is_file():
            return
        recipe, _ = recipe_of(self)
        rules, _ = rules_of(self)
        lora = recipe.get("lora_r") if recipe.get("use_peft") else None
        facts = [
            ("base model", str(recipe.get("model_name_or_path") or "built in the program, without a name")),
            ("data", public(data[0])),
            ("scored by", "; ".join(in_words(one) for one in self.given_rewards)),
            ("weights trained", "all" if lora is None else f"LoRA of rank {lora}"),
        ]
        if rules is not None:
            recipe.setdefault("rules", rules)
        complete_card(path, type(self).__name__, facts, recipe, packages())

    def _record(self, run: str | None = None, *, is_resumed: bool) -> None:
        """Write the record of this run; a resumed run keeps its first record."""
        folder = str(self.args.output_dir)
        is_own = recorded_run(folder) in (None, run)
        if is_resumed and is_own and os.path.isfile(os.path.join(folder, RECIPE_FILE)):
            return
        plan = getattr(self.args, "memory_plan", None)
        versions = versions_of(self) | {"run": run}
        recipe, notes = recipe_of(self)
        rules, rules_notes = rules_of(self)
        launch = f" with:\n  {versions['launch']}\n" if versions["launch"] else ".\n"
        count = "1 process" if versions["num_processes"] == 1 else f"{versions['num_processes']} processes"
        again = "To repeat it: the same launch, with this file after --config, and another --output_dir."
        try:
            write_record(
                folder,
                recipe,
                versions,
                rules,
                None if plan is None else as_dict(plan),
                recipe_notes="\n".join([f"Launched on {count}{launch}{again}", *notes]),
                rules_notes="\n".join(rules_notes),
            )
        except OSError as error:  # a run that saves nothing may use such a folder
            logger.warning(f"The record of this run could not be written: {error}.")

    def report(self, history: Sequence[Mapping[str, Any]] | None = None) -> None:
        """Write the report of `history`, or of the whole log, on process 0.

        Print its table and verdict if the progress line was shown and the run is complete.
        """
        from trl_ext.monitor.pages.report import print_report, write_report

        if os.environ.get(REPORT_VARIABLE) == "0" or not self.is_world_process_zero():
            return
        folder, history = str(self.args.output_dir), self.state.log_history if history is None else history
        has_line = any(isinstance(one, ProgressLine) for one in self.callback_handler.callbacks)
        try:
            summary = write_report(folder, history)
            is_whole = summary.train_s is not None and ERROR not in history[-1]
            if has_line and is_whole and logging.get_verbosity() <= logging.WARNING:
                print_report(folder, history, summary)
        except (Exception, SystemExit) as error:  # none may end the run here: a program has yet to save the model
            said = f"{type(error).__name__}: {error}"
            logger.warning(f"The report could not be written ({said}). Write it again with `trl-ext report`.")


# TRL's sentences on the base model and on TRL; for a model from a folder they name "None".
_OPENING = re.compile(r"This model is a fine-tuned version of .*?\n(?=\n)", re.DOTALL)
_VERSIONS = "### Framework versions\n\n"


def complete_card(
    path: Path,
    trainer_name: str,
    facts: Sequence[tuple[str, str]],
    recipe: Mapping[str, Any],
    packages: Mapping[str, str],
) -> None:
    """Complete the model card that TRL has written.

    Args:
        path: README.md, as TRL has written it.
        trainer_name: Class of the trainer.
        facts: Rows (name, value) of a table; rows without a value are left out.
        recipe: The recipe's keys and values.
        packages: Versions by name of the package.
    """
    text = path.read_text(encoding="utf-8")
    cells = {name: " ".join(value.split()).replace("|", "\\|") for name, value in facts if value}
    rows = "".join(f"| {name} | {cell} |\n" for name, cell in cells.items())
    opening = (
        f"Trained with trl_ext's `{trainer_name}`, an extension of [TRL](https://github.com/huggingface/trl).\n\n"
        f"| | |\n|---|---|\n{rows}"
    )
    text = _OPENING.sub(lambda _: opening, text, count=1)
    text = text.replace('model="None"', f'model="{path.absolute().parent.name}"')
    content = yaml.safe_dump(dict(recipe), sort_keys=False, allow_unicode=True, width=119)
    # A prompt in the recipe may hold a fence.
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", content)), default=0))
    shown = f"### Recipe\n\n{fence}yaml\n{content}{fence}\n\n"
    text = text.replace(_VERSIONS, f"{shown}{_VERSIONS}- trl_ext: {packages['trl_ext']}\n", 1)
    replace_text(path, text)
