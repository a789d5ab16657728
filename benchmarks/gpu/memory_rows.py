"""The configurations of the memory benchmark, as data: who is trained how, on how many ranks, and on which card it is
tried. The models are shapes from the package's table with random weights.

Every trainer (PPO with each kind of critic), all weights and LoRA, without DeepSpeed and under ZeRO-1, 2 and 3.
Adapters as critic need LoRA, and refuse ZeRO-3. Cards and micro-batches were chosen by the formulas: by them many
rows barely fit or barely do not.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from trl_ext.memory import Job, find_card, find_shape
from trl_ext.memory.cards import Hardware
from trl_ext.memory.models.find import MODELS
from trl_ext.memory.models.shapes import ModelShape

NAMES = {
    "0.5B": "Qwen/Qwen2.5-0.5B",
    "1B": "meta-llama/Llama-3.2-1B",
    "1.5B": "Qwen/Qwen2.5-1.5B",
    "3B": "Qwen/Qwen2.5-3B",
    "7B": "Qwen/Qwen2.5-7B",
    "8B": "meta-llama/Llama-3.1-8B",
    "14B": "Qwen/Qwen2.5-14B",
}
TINY = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256}


@dataclass(frozen=True, slots=True)
class Row:
    """One run.

    Args:
        name: "grpo/lora/zero2/14B".
        config: The model's config.json.
        job: What is trained and how.
        num_gpus: Ranks; the first of them is run.
        card: Whose memory is imitated, by the planner's name.
    """

    name: str
    config: Mapping[str, Any]
    job: Job
    num_gpus: int
    card: str

    @property
    def shape(self) -> ModelShape:
        return find_shape(self.config)

    @property
    def hardware(self) -> Hardware:
        return Hardware(self.num_gpus, find_card(self.card))

    def as_dict(self) -> dict[str, Any]:
        """For JSON: enough to predict the row again. Of the job what is not its default."""
        plain = Job(self.job.trainer)
        own = {f.name: getattr(self.job, f.name) for f in fields(Job)}
        own = {name: value for name, value in own.items() if name == "trainer" or value != getattr(plain, name)}
        return {
            "row": self.name,
            "config": dict(self.config),
            "job": own,
            "num_gpus": self.num_gpus,
            "card": self.card,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Row":
        """The row of a JSON, whatever the table says today."""
        return cls(values["row"], values["config"], Job(**values["job"]), values["num_gpus"], values["card"])


# trainer, critic, method, ZeRO stage, model, ranks, samples in a micro-batch, card
_TABLE = (
    ("reward", "", "full", 0, "1.5B", 1, 4, "RTX5090-32GB"),
    ("grpo", "", "full", 0, "0.5B", 1, 32, "L4-24GB"),
    ("ppo", "head", "full", 0, "1B", 1, 8, "RTX5090-32GB"),
    ("ppo", "separate", "full", 0, "0.5B", 1, 16, "A10-24GB"),
    ("reward", "", "lora", 0, "8B", 1, 2, "L4-24GB"),
    ("grpo", "", "lora", 0, "7B", 1, 16, "RTX4090-24GB"),
    ("ppo", "head", "lora", 0, "7B", 1, 8, "A10-24GB"),
    ("ppo", "adapter", "lora", 0, "8B", 1, 8, "RTX3090-24GB"),
    ("ppo", "separate", "lora", 0, "3B", 1, 16, "A100-40GB"),
    ("reward", "", "full", 1, "3B", 4, 1, "RTX4090-24GB"),
    ("grpo", "", "full", 1, "1.5B", 4, 32, "L4-24GB"),
    ("ppo", "head", "full", 1, "1B", 4, 32, "A10-24GB"),
    ("ppo", "separate", "full", 1, "1.5B", 8, 4, "RTX3090-24GB"),
    ("reward", "", "lora", 1, "7B", 4, 4, "L4-24GB"),
    ("grpo", "", "lora", 1, "3B", 4, 16, "A10-24GB"),
    ("ppo", "head", "lora", 1, "1B", 2, 32, "L4-24GB"),
    ("ppo", "adapter", "lora", 1, "7B", 4, 8, "A10-24GB"),
    ("ppo", "separate", "lora", 1, "1.5B", 2, 16, "L4-24GB"),
    ("reward", "", "full", 2, "8B", 8, 8, "A6000-48GB"),
    ("grpo", "", "full", 2, "7B", 8, 1, "RTX5090-32GB"),
    ("ppo", "head", "full", 2, "3B", 4, 16, "RTX5090-32GB"),
    ("ppo", "separate", "full", 2, "7B", 8, 1, "A6000-48GB"),
    ("reward", "", "lora", 2, "8B", 6, 2, "A10-24GB"),
    ("grpo", "", "lora", 2, "14B", 8, 4, "RTX5090-32GB"),
    ("ppo", "head", "lora", 2, "8B", 4, 8, "L4-24GB"),
    ("ppo", "adapter", "lora", 2, "14B", 4, 8, "A100-40GB"),
    ("ppo", "separate", "lora", 2, "7B", 4, 1, "A100-80GB"),
    ("reward", "", "full", 3, "14B", 8, 16, "A100-80GB"),
    ("grpo", "", "full", 3, "8B", 8, 2, "RTX4090-24GB"),
    ("ppo", "head", "full", 3, "7B", 8, 2, "RTX3090-24GB"),
    ("ppo", "separate", "full", 3, "3B", 4, 1, "RTX5090-32GB"),
    ("reward", "", "lora", 3, "14B", 4, 8, "RTX5090-32GB"),
    ("grpo", "", "lora", 3, "7B", 4, 16, "A10-24GB"),
    ("ppo", "head", "lora", 3, "3B", 2, 16, "RTX4090-24GB"),
    ("ppo", "separate", "lora", 3, "1.5B", 4, 32, "L4-24GB"),
)


def _row(
    trainer: str, critic: str, method: str, stage: int, model: str, num_gpus: int, samples: int, card: str
) -> Row:
    """A row of the table. Two micro-batches a step: gradients are there when the second begins."""
    settings: dict[str, Any] = {
        "method": method,
        "zero_stage": stage,
        # As the planner chooses: float32 where it is the only master copy.
        "dtype": "float32" if method == "full" and not stage else "bfloat16",
        "per_device_train_batch_size": samples,
        "global_batch": 2 * samples * num_gpus,
        "max_length": 2048,
        "max_prompt_length": 512,
        "max_completion_length": 512,
        "num_generations": {"grpo": 2, "ppo": 1}.get(trainer, 8),
    }
    settings |= {"critic": critic, "beta": 0.05} if critic else {}
    kind = f"{trainer}-{critic}" if critic else trainer
    name = f"{kind}/{method}/zero{stage}/{model}"
    return Row(name, MODELS[NAMES[model]][1], Job(trainer, **settings), num_gpus, card)


def _by_ignorance(row: Row) -> tuple[int, bool]:
    """First what the formulas know least of: ZeRO-3, whose slack is a guess, separate critics, native segments."""
    kinds = ("/zero3/" in row.name, "ppo-separate" in row.name, "native" in row.name, "qlora" in row.name)
    return next((place for place, is_so in enumerate(kinds) if is_so), len(kinds)), row.job.uses_lora


_ROWS = [_row(*values) for values in _TABLE]
_LARGEST = next(row for row in _ROWS if row.name == "reward/full/zero3/14B")
# The slack of PyTorch's native allocator, whose segments do not expand; and a base in 4 bits.
_NATIVE = replace(_LARGEST, name="native/reward/full/14B", job=replace(_LARGEST.job, expandable_segments=False))
_QLORA = replace(_row("grpo", "", "qlora", 0, "7B", 1, 8, "RTX4090-24GB"), name="qlora/grpo/zero0/7B")
ROWS = tuple(sorted((*_ROWS, _NATIVE, _QLORA), key=_by_ignorance))


def tiny(row: Row) -> Row:
    """The same run of a toy: for trying the benchmark itself."""
    kept = {key: value for key, value in row.config.items() if key not in ("rope_scaling", "layer_types")}
    lengths = {"max_length": 48, "max_prompt_length": 24, "max_completion_length": 24, "lora_r": 4}
    buckets = {"reduce_bucket_size": 20_000, "stage3_max_live_parameters": 20_000}
    buckets |= {"stage3_prefetch_bucket_size": 10_000, "sub_group_size": 50_000}
    return replace(row, config={**kept, **TINY}, job=replace(row.job, **lengths, **buckets))
