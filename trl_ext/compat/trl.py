"""TRL: its trainers and its config where they must bend for a moment."""

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch

from trl_ext.compat.swap import swapped
from trl_ext.compat.versions import is_older
from trl_ext.errors import SupportError

if TYPE_CHECKING:  # a config alone does not need TRL's trainers
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

_TILE_ON_CPU = 2048  # words


def check_fused_head(device_type: str) -> None:
    """Stop early where TRL's fused LM head, which scores every token, cannot run.

    Raises:
        SupportError: TRL 1.15 on a device without Triton.
    """
    # Issue: TRL 1.15's fused LM head needs Triton, so that nothing can be scored on a CPU.
    # Fixed in: TRL 1.16.
    # Remove when: trl>=1.16 is the lower bound.
    if device_type == "cpu" and is_older("trl", than="1.16"):
        raise SupportError(
            f"TRL {version('trl')} computes log-probabilities on GPUs only. Run: pip install 'trl>=1.16,<2'"
        )


def head_in_cache(device_type: str) -> AbstractContextManager[Any]:
    """Let TRL's fused LM head work on narrow tiles of the vocabulary, which stay in a processor's cache, in the block.

    TRL's tiles of 32,768 words suit a card; on two cores tiles of 2,048 take half the time.
    """
    if device_type != "cpu":
        return nullcontext()
    import trl.trainer.utils

    return swapped(trl.trainer.utils, _CHUNKED_LOGPROB_CHUNK_SIZE=_TILE_ON_CPU)


@cache
def leave_fused_head_uncompiled() -> None:
    """Let `torch.compile` pass over TRL's fused LM head; idempotent.

    Issue: its loops fix the number of tokens, so that each one is compiled again, and after eight Dynamo gives up.
    Fixed in: no version of TRL up to 1.16.
    Remove when: it is disabled for the compiler there; it is matrix products, which a compiler leaves as they are.
    """
    from trl.trainer.utils import _ChunkedLogProbFunction as Head

    Head.forward = staticmethod(torch.compiler.disable(Head.forward))  # type: ignore[method-assign]


def num_experts(config: Any) -> int:
    """Return how many experts a layer of the model has, and let TRL find that number in its config.

    Issue: TRL's auxiliary loss reads `num_experts`, which Granite, PhiMoE and others call `num_local_experts`.
    Fixed in: no version of TRL up to 1.16.
    Remove when: TRL's fused head reads either name.
    """
    if not hasattr(config, "num_experts") and hasattr(config, "num_local_experts"):
        kind = type(config)
        kind.attribute_map = {**kind.attribute_map, "num_experts": "num_local_experts"}
    return int(config.num_experts)


def sampling_temperature(trainer: "GRPOTrainer", temperature: float) -> AbstractContextManager[None]:
    """Let a TRL trainer generate at another temperature, 0 for greedy, within the block."""
    if trainer.use_vllm:
        return swapped(trainer.vllm_generation, temperature=temperature)
    changed = copy.deepcopy(trainer.generation_config)
    if temperature == 0:
        changed.update(do_sample=False, temperature=None, top_p=None, top_k=None, min_p=None)
    else:
        changed.update(do_sample=True, temperature=temperature)
    return swapped(trainer, generation_config=changed)


def print_samples(rows: Sequence[Mapping[str, Any]], step: int) -> None:
    """Print completions as TRL's table.

    Args:
        rows: With prompt, completion, score, decoding and `rewards/<name>`.
        step: Optimizer step.
    """
    from trl.trainer.utils import print_prompt_completions_sample

    names = [name for name in rows[0] if name == "score" or name.startswith("rewards/")] if rows else []
    rewards = {name: [row[name] for row in rows] for name in names}
    prompts, completions, decoding = ([row[name] for row in rows] for name in ("prompt", "completion", "decoding"))
    print_prompt_completions_sample(prompts, completions, rewards, None, step, extra={"decoding": decoding})


class _NoGroup(int):
    """1, of which GRPO's `num_generations < 2` is not true: a critic needs no group."""

    def __lt__(self, other: object) -> bool:
        return False


def without_groups(config: "GRPOConfig") -> AbstractContextManager[None]:
    """Let TRL's GRPOConfig accept any num_generations inside the block."""
    return swapped(config, num_generations=_NoGroup(1))
