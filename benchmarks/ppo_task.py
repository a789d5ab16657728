"""What both sides of the PPO benchmark train, and how both are measured. Imports neither TRL nor trl_ext."""

import json
import math
import random
import statistics
import time
import weakref
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

import torch
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

PAD, EOS, FIRST_WORD = 0, 2, 3


@dataclass(frozen=True, slots=True)
class Task:
    """A model's shape, lengths in tokens, and one update.

    Width, heads and vocabulary are those of SmolLM2-135M, which has 30 layers.

    Args:
        rows: Episodes in a micro-batch, and in a forward of the rollout.
        epochs: Passes over the episodes, one optimizer step each.
        prompt, completion, longest: Mean of the prompts and of the completions, and the longest completion.
        sigma: Of the log-normal draw of the completions' lengths; a prompt's is a quarter of it.
        updates: Measured after one that warms up.
        bf16: Autocast; otherwise everything is float32.
        prompts, completions: Token ids, filled by `with_rollouts`.
    """

    layers: int = 6
    width: int = 576
    hidden: int = 1536
    heads: int = 9
    kv_heads: int = 3
    vocab: int = 49152
    episodes: int = 8
    rows: int = 4
    epochs: int = 4
    prompt: int = 128
    completion: int = 96
    longest: int = 256
    sigma: float = 0.8
    updates: int = 1
    bf16: bool = False
    prompts: list[list[int]] = field(default_factory=list)
    completions: list[list[int]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Of all episodes."""
        return sum(map(len, self.prompts)) + sum(map(len, self.completions))

    @property
    def padded_tokens(self) -> int:
        """Of all episodes as one batch of prompts padded left and completions padded right."""
        return len(self.prompts) * (max(map(len, self.prompts)) + max(map(len, self.completions)))


QUICK = Task(layers=2, width=64, hidden=128, heads=4, kv_heads=2, vocab=512, prompt=12, completion=10, longest=24)


@dataclass(frozen=True, slots=True)
class Job:
    """A task, and which models of it are trained how.

    Args:
        critic: trl_ext's kind of critic; TRL 1.12 has one kind, a model of its own that is trained fully.
        lora: Adapters on the policy, instead of training it fully.
    """

    task: Task
    critic: str
    lora: bool

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> "Job":
        values = json.loads(path.read_text())
        return cls(**values | {"task": Task(**values["task"])})


def with_rollouts(task: Task, seed: int = 0) -> Task:
    """The task with distinct prompts and ragged completions, of which those below the longest end with EOS."""
    draw = random.Random(seed)

    def ids(count: int) -> list[int]:
        return [draw.randrange(FIRST_WORD, task.vocab) for _ in range(count)]

    prompts = [ids(n) for n in _lengths(draw, task.episodes, task.prompt, 2 * task.prompt, task.sigma / 4)]
    lengths = _lengths(draw, task.episodes, task.completion, task.longest, task.sigma)
    completions = [ids(n) if n == task.longest else [*ids(n - 1), EOS] for n in lengths]
    return replace(task, prompts=prompts, completions=completions)


def _lengths(draw: random.Random, count: int, mean: int, longest: int, sigma: float) -> list[int]:
    """Log-normal lengths, scaled to the mean before they are cut at the longest."""
    drawn = [math.exp(draw.gauss(0, sigma)) for _ in range(count)]
    scale = mean / statistics.mean(drawn)
    return [max(2, min(longest, round(x * scale))) for x in drawn]


def text(ids: list[int]) -> str:
    return " ".join(f"w{i}" for i in ids)


def tokenizer(task: Task) -> PreTrainedTokenizerFast:
    """One token per word: `w0` (padding), `w1`, `w2` (end), `w3`, ..."""
    words = {f"w{i}": i for i in range(task.vocab)}
    fast = Tokenizer(models.WordLevel(words, unk_token="w3"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=fast, pad_token=f"w{PAD}", eos_token=f"w{EOS}", padding_side="left"
    )


def causal_model(task: Task) -> LlamaForCausalLM:
    """Random weights, the same in every call: policy and reference start equal."""
    torch.manual_seed(0)
    return LlamaForCausalLM(_config(task))


def policy_adapter(job: Job) -> LoraConfig | None:
    if not job.lora:
        return None
    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def scoring_model(task: Task, seed: int) -> LlamaForSequenceClassification:
    """One number per sequence, or per token: a critic or a reward model."""
    torch.manual_seed(seed)
    return LlamaForSequenceClassification(_config(task))


def _config(task: Task) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=task.vocab,
        hidden_size=task.width,
        intermediate_size=task.hidden,
        num_hidden_layers=task.layers,
        num_attention_heads=task.heads,
        num_key_value_heads=task.kv_heads,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=1,
        eos_token_id=EOS,
        num_labels=1,
    )


class LiveBytes(TorchDispatchMode):
    """Bytes of all tensors that are alive, and their highest sum, of tensors made while it is active.

    It sees what operators return, not what they need inside. A gauge for the processor, where the allocator keeps no
    account; the profiler's sum of allocations agrees to the byte on a small transformer, and takes far longer.
    """

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self._known: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in tree_iter(out):
            if isinstance(value, torch.Tensor) and value.device.type != "meta":
                self._note(value.untyped_storage())
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self.live += size
        self.peak = max(self.peak, self.live)
        self._known[key] = weakref.ref(storage, lambda _: self._drop(key, size))

    def _drop(self, key: int, size: int) -> None:
        del self._known[key]
        self.live -= size


class Meter:
    """Seconds of each update but the first, and the highest memory of the first.

    The first update warms up and is watched: it holds the optimizer's state from its first epoch on, so that its peak
    is that of any other. On a card the allocator watches, on a processor `LiveBytes`. Use as a context around the
    making of the models and the training.
    """

    def __init__(self):
        self.seconds: list[float] = []
        self.peak_bytes = 0
        self._watch = None if torch.cuda.is_available() else LiveBytes()
        self._before = _resident_bytes("VmRSS")

    def __enter__(self) -> "Meter":
        if self._watch:
            self._watch.__enter__()
        return self

    def __exit__(self, *error) -> None:
        if not self.peak_bytes:
            self._end_watch()

    def begin(self) -> None:
        """The rollout is there; the update begins."""
        _wait()
        if not self.peak_bytes:
            self._forget_peak()
        self._start = time.perf_counter()

    def end(self) -> None:
        _wait()
        seconds = time.perf_counter() - self._start
        if self.peak_bytes:
            self.seconds.append(seconds)
        else:
            self._end_watch()

    def _forget_peak(self) -> None:
        """What came before the update, such as a trainer's checks of its models, is not its peak."""
        if self._watch:
            self._watch.peak = self._watch.live
        else:
            torch.cuda.reset_peak_memory_stats()

    def _end_watch(self) -> None:
        if self._watch:
            self._watch.__exit__(None, None, None)
            self.peak_bytes = self._watch.peak
        else:
            self.peak_bytes = torch.cuda.max_memory_allocated()

    def report(self, *packages: str) -> None:
        """Print the figures as the last line of the output, with the versions of these packages."""
        figures = {
            "seconds": self.seconds,
            "peak_bytes": self.peak_bytes,
            "resident_bytes": _resident_bytes("VmHWM") - self._before,
            "versions": {package: version(package) for package in packages},
        }
        print(json.dumps(figures))


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _resident_bytes(key: str) -> int:
    """A line of /proc/self/status; 0 where there is none."""
    # Not getrusage: its maximum is handed down from the process that started this one.
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{key}:")), 0)
