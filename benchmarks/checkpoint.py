"""How much longer does saving a checkpoint take? Ours against trl.RewardTrainer's, the same model, one run.

Both save a model with AdamW's state into a temporary folder, in turns. Ours reads every file once more for its
checksum, and waits until all is on the disk. TRL leaves that to the kernel, so that its save is timed twice: as it is,
and until its files are on the disk. `--no-wait` leaves the waiting out of ours, and shows what the rest takes.
Processor seconds are those of the process, user and system; with waiting they include the kernel's work of writing.

    python benchmarks/checkpoint.py --output benchmarks/results/checkpoint_cpu.json
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import torch
import transformers
import trl
from datasets import Dataset
from machine import machine, write
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast

import trl_ext

VOCAB = 8192


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2} | {f"w{i}": i for i in range(3, VOCAB)}
    fast = Tokenizer(models.WordLevel(words, unk_token="w3"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=fast, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


def trained(library, model, folder: str):
    """A trainer that has taken one step, so that its optimizer has state."""
    rows = [{"chosen": f"w4 w{i}", "rejected": f"w5 w{i}"} for i in range(6, 10)]
    args = library.RewardConfig(
        folder,
        use_cpu=True,
        bf16=False,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        max_steps=1,
        gradient_checkpointing=False,
        per_device_train_batch_size=1,
    )
    trainer = library.RewardTrainer(model, args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer())
    trainer.train()
    return trainer


def seconds_of_save(trainer, wait_for: Path | None) -> tuple[float, float]:
    """Processor and wall seconds of one save, and of waiting for the files in a folder."""
    wall, times = time.perf_counter(), os.times()
    trainer._save_checkpoint(trainer.model, None)
    for path in sorted(wait_for.rglob("*")) if wait_for else ():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    after = os.times()
    return after.user + after.system - times.user - times.system, time.perf_counter() - wall


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--folder", help="where to write; a temporary folder of the system if not given")
    parser.add_argument("--no-wait", action="store_true", help="do not wait for the disk")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=options.layers,
        num_attention_heads=12,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        num_labels=1,
    )
    seconds: dict[str, list[tuple[float, float]]] = {"trl": [], "trl_on_disk": [], "trl_ext": []}
    no_wait = mock.patch("os.fsync", lambda _: None) if options.no_wait else nullcontext()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder, no_wait:
        trainers = {}
        for name, library in (("trl", trl), ("trl_ext", trl_ext)):
            trainers[name] = trained(library, LlamaForSequenceClassification(config), str(Path(folder, name)))
        trainers["trl_on_disk"] = trainers["trl"]
        num_parameters = sum(p.numel() for p in trainers["trl"].model.parameters())
        for i in range(options.rounds + 1):
            names = sorted(trainers)
            for name in names[i % 3 :] + names[: i % 3]:  # each is the first, in turns
                checkpoint = Path(trainers[name].args.output_dir, "checkpoint-1")
                of_save = seconds_of_save(trainers[name], checkpoint if name == "trl_on_disk" else None)
                if i:  # the first one imports and warms up
                    seconds[name].append(of_save)
                size = sum(path.stat().st_size for path in checkpoint.rglob("*"))
                shutil.rmtree(checkpoint)
                os.sync()  # none waits for what another has left to the kernel
    result = {"parameters": num_parameters, "bytes": size, "rounds": options.rounds, "waits": not options.no_wait}
    for i, kind in enumerate(("processor", "wall")):
        medians = {name: statistics.median(pair[i] for pair in pairs) for name, pairs in seconds.items()}
        ratios = {}
        for name in ("trl", "trl_on_disk"):
            pairs = zip(seconds["trl_ext"], seconds[name], strict=True)
            ratios[f"over_{name}"] = round(statistics.median(ours[i] / theirs[i] for ours, theirs in pairs), 3)
        result[kind] = {f"{name}_s": round(value, 3) for name, value in medians.items()} | ratios
    print(json.dumps(result, indent=1))
    if options.output:
        write(options.output, {"machine": machine(), **result})


if __name__ == "__main__":
    main()
