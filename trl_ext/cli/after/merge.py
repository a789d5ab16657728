"""`trl-ext merge`: merge a run's adapter into its base model, as a folder that any library loads.

torch is imported when the arguments are right, so that help answers at once.
"""

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trl_ext.cli.parser import CommandParser
from trl_ext.errors import ConfigError

DTYPES = ("auto", "bfloat16", "float16", "float32")
DESCRIPTION = """\
Merge the LoRA adapter of a run into the weights that it was trained on. Also writes the tokenizer, the generation
config and the score head of a reward model. Runs on the CPU, and needs host memory for the weights once."""
EXAMPLES = """\
examples:
  trl-ext merge out
  trl-ext merge out/checkpoint-200 --output merged --dtype bfloat16
  vllm serve merged"""
_PROBE_TOKENS = 32


def merge(argv: Sequence[str]) -> int:
    """Run the command, and return the exit code."""
    parser = CommandParser("trl-ext merge", description=DESCRIPTION, epilog=EXAMPLES)
    parser.add_argument("run", metavar="RUN", help="the run's --output_dir, or one of its checkpoints")
    parser.add_argument("--output", metavar="DIR", help="folder to write, new or empty (default RUN/merged)")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="dtype to save in (default: the base model's)")
    purpose = "run Python code that comes with the base model"
    parser.add_argument("--trust_remote_code", action="store_true", help=purpose)
    arguments = parser.parse_args(list(argv))
    from trl_ext.cli.after.finished import find_run
    from trl_ext.scripts.exit import refusals

    run = find_run(arguments.run)
    if run.adapter is None:
        raise ConfigError(f"{run.folder} holds whole weights and no adapter. Use the folder as it is.")
    name = "merged" if run.folder == run.root else f"merged-{run.folder.name}"
    target = Path(arguments.output or run.root / name)
    if target.exists() and not target.is_dir():
        raise ConfigError(f"{target} is a file. Give another --output.")
    if target.is_dir() and any(target.iterdir()):
        raise ConfigError(f"The folder {target} is not empty. Remove it, or give another --output.")
    with refusals(f"{run.folder} cannot be merged"):
        merged = merge_run(run, target, arguments.dtype, arguments.trust_remote_code)
    print(merged)
    return 0


@dataclass(frozen=True, slots=True)
class MergedModel:
    """The result of a merge, as text for the user.

    Args:
        source, folder: The run, and the folder that was written.
        kind: "LoRA" or another method, with its rank.
        base: The model below the adapter.
        size_bytes, num_tensors: Size of the weights on disk.
        drift: Largest change of a log-probability, or of a score, on random tokens.
        notes: Sentences about parts that were left out or differ.
    """

    source: Path
    folder: Path
    kind: str
    base: str
    size_bytes: int
    num_tensors: int
    dtype: str
    drift: float
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [
            f"{self.kind} of {self.source} merged into {self.base}: {self.folder}",
            f"{self.num_tensors} tensors, {self.size_bytes / 2**30:.2f} GiB, {self.dtype}; on {_PROBE_TOKENS} random "
            f"tokens no output differs from the adapter's by more than {self.drift:.2g}",
            *self.notes,
        ]
        return "\n".join(lines)


def merge_run(run: Any, target: Path, dtype: str = "auto", trust_remote_code: bool = False) -> MergedModel:
    """Merge and save; the folder appears only when it is complete.

    `target` is a new or empty folder; `dtype` "auto" keeps the base model's.
    """
    import torch
    from safetensors import safe_open

    from trl_ext.cli.after.finished import weight_files
    from trl_ext.trainers.forward.reward_input import RECORD_FILE

    model = run.load_model(dtype, device_map="cpu", trust_remote_code=trust_remote_code)
    tokenizer = run.load_tokenizer(trust_remote_code)
    config = model.active_peft_config
    with torch.no_grad():
        before = probe(model)
        whole = merged_weights(model)
        drift = (probe(whole) - before).abs().max().item()
    if run.is_reward_model:  # decides which token is scored
        whole.config.get_text_config().pad_token_id = tokenizer.pad_token_id

    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        scratch.chmod(0o755)  # mkdtemp denies access to other users
        whole.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        if (run.folder / RECORD_FILE).is_file():
            shutil.copy(run.folder / RECORD_FILE, scratch)
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    files, shown_dtype = weight_files(target), str(whole.dtype).removeprefix("torch.")
    rank = f", rank {config.r}" if getattr(config, "r", None) else ""
    return MergedModel(
        source=run.folder,
        folder=target,
        kind=f"{config.peft_type.value}{rank},",
        base=run.weights,
        size_bytes=sum(file.stat().st_size for file in files),
        num_tensors=sum(len(safe_open(file, framework="numpy").keys()) for file in files),
        dtype=shown_dtype,
        drift=drift,
        notes=tuple(_notes(run, shown_dtype)),
    )


def merged_weights(model: Any) -> Any:
    """Merge a PeftModel's adapter, and return the model without PEFT's wrapper.

    Tied head and embedding stay one tensor, unless the adapter changes only one of them: then they are separated, and
    the config records it.
    """
    import torch
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    below = model.get_base_model()
    text_config = below.config.get_text_config()
    ends = [below.get_input_embeddings(), below.get_output_embeddings()]
    is_adapted = any(isinstance(end, (BaseTunerLayer, AuxiliaryTrainingWrapper)) for end in ends)
    divides = bool(text_config.tie_word_embeddings) and is_adapted and ends[1] is not None
    if divides:
        head = ends[1]
        while hasattr(head, "base_layer") or hasattr(head, "original_module"):
            head = head.base_layer if hasattr(head, "base_layer") else head.original_module
        head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        _set_tied(below, tied=False)  # PEFT would warn
    whole = model.merge_and_unload(safe_merge=True)
    if divides and torch.equal(whole.get_input_embeddings().weight, whole.get_output_embeddings().weight):
        _set_tied(whole, tied=True)
        whole.tie_weights()
    return whole


def _set_tied(model: Any, tied: bool) -> None:
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = tied


def probe(model: Any) -> Any:
    """Return log-probabilities, or a reward model's score, for a row of random tokens, in float32."""
    import torch

    size = model.config.get_text_config().vocab_size
    ids = torch.randint(size, (1, _PROBE_TOKENS), generator=torch.Generator().manual_seed(0))
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.float()
    return logits if logits.shape[-1] == 1 else logits.log_softmax(-1)


def _notes(run: Any, dtype: str) -> Iterator[str]:
    if run.has_critic:
        yield f"The critic stays in {run.folder / 'critic'}: only training uses it."
    if run.recipe.get("load_in_4bit") or run.recipe.get("load_in_8bit"):
        yield (
            f"The run trained on quantised weights; these are {dtype}. Evaluate the merged model before you serve it."
        )
