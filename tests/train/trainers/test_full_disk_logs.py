"""A disk that is full while a run logs does not end training."""

import sys

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback

from tests import tiny
from trl_ext import GRPOConfig, GRPOTrainer
from trl_ext.trainers.ending import run_end

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's")
torch.set_num_threads(1)


class WritesToFull(TrainerCallback):
    """Logs to a disk that is full, as a progress file would."""

    def on_log(self, args, state, control, **kwargs):
        with open("/dev/full", "w") as file:
            file.write("full")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Trains two steps; the trainer, and what it warned of."""
    said: list[str] = []
    monkeypatch.setattr(run_end.logger, "warning", said.append)

    def train(*callbacks, **changes):
        settings = dict(
            use_cpu=True, bf16=False, report_to="none", disable_tqdm=True, max_steps=2, save_strategy="no",
            max_completion_length=2, per_device_train_batch_size=4, num_generations=2, logging_steps=1, packing=False,
        )  # fmt: skip
        trainer = GRPOTrainer(
            tiny.model("llama"),
            lambda completions, **_: [float(len(text)) for text in completions],
            GRPOConfig(str(tmp_path), **settings | changes),
            Dataset.from_dict({"prompt": [tiny.words(5, 6)] * 4}),
            processing_class=tiny.tokenizer(),
            callbacks=list(callbacks),
        )
        trainer.train()
        return trainer, said

    return train


def test_tables_of_completions_that_do_not_fit(run, tmp_path):
    (tmp_path / "completions").mkdir()
    for step in (1, 2):
        (tmp_path / "completions" / f"completions_{step:05d}.parquet").symlink_to("/dev/full")
    trainer, said = run(log_completions=True)
    assert trainer.state.global_step == 2
    assert [text.partition(":")[0] for text in said] == ["Step 1", "Step 2"]
    assert all("No space left" in text for text in said)


def test_a_callback_that_cannot_write(run):
    trainer, said = run(WritesToFull())
    assert [text.partition(":")[0] for text in said] == ["Step 1", "Step 2"]
    assert not trainer._metrics["train"]
    assert [entry["step"] for entry in trainer.state.log_history] == [1, 2, 2]


def test_other_errors_of_callbacks_end_training(run):
    class Absent(TrainerCallback):
        def on_log(self, args, state, control, **kwargs):
            open("/no/such/file")

    with pytest.raises(FileNotFoundError):
        run(Absent())
