"""TRL: temporary changes to its trainers and its config."""

import copy
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

import torch

from trl_ext.compat.swap import swapped
from trl_ext.errors import SupportError

if TYPE_CHECKING:  # a config alone does not need TRL's trainers
    from trl.trainer.grpo_config import GRPOConfig

_TILE_ON_CPU = 2048  # words of the vocabulary


def head_in_cache(device_type: str) -> AbstractContextManager[Any]:
    """Let TRL's fused LM head use narrow tiles of the vocabulary in the block, which fit a processor's cache.

    TRL's tiles of 32,768 words suit a card; on two cores tiles of 2,048 take half the time.
    """
    if device_type != "cpu":
        return nullcontext()
    import trl.trainer.utils

    return swapped(trl.trainer.utils, _CHUNKED_LOGPROB_CHUNK_SIZE=_TILE_ON_CPU)


@cache
def leave_fused_head_uncompiled() -> None:
    """Exclude TRL's fused LM head from `torch.compile`; idempotent.

    Issue: its loops fix the number of tokens, so each number is compiled again, and after eight Dynamo gives up.
    Fixed in: no version of TRL up to 1.16.
    Remove when: TRL excludes it; it is matrix products, which a compiler leaves unchanged.
    """
    from trl.trainer.utils import _ChunkedLogProbFunction as Head

    Head.forward = staticmethod(torch.compiler.disable(Head.forward))  # type: ignore[method-assign]


def num_experts(config: Any) -> int:
    """Return the number of experts in a layer of the model, and let TRL find it in the config.

    Issue: TRL's auxiliary loss reads `num_experts`, which Granite, PhiMoE and others call `num_local_experts`.
    Fixed in: no version of TRL up to 1.16.
    Remove when: TRL's fused head reads either name.
    """
    if not hasattr(config, "num_experts") and hasattr(config, "num_local_experts"):
        kind = type(config)
        kind.attribute_map = {**kind.attribute_map, "num_experts": "num_local_experts"}
    return int(config.num_experts)


class SamplingTrainer(Protocol):
    """A TRL trainer that generates.

    Args:
        use_vllm, vllm_generation: Whether vLLM generates, and TRL's object for it.
        generation_config: Of transformers' way to generate.
    """

    use_vllm: bool
    vllm_generation: Any
    generation_config: Any


def sampling_temperature(trainer: SamplingTrainer, temperature: float) -> AbstractContextManager[None]:
    """Let a TRL trainer generate at another temperature in the block; 0 is greedy.

    vLLM refuses several greedy completions of a prompt in a request: each copy of a prompt is a prompt then.
    """
    if trainer.use_vllm:
        vllm = trainer.vllm_generation
        generate = partial(_each_alone, vllm.generate) if temperature == 0 else vllm.generate
        return swapped(vllm, temperature=temperature, generate=generate)
    changed = copy.deepcopy(trainer.generation_config)
    if temperature == 0:
        changed.update(do_sample=False, temperature=None, top_p=None, top_k=None, min_p=None)
    else:
        changed.update(do_sample=True, temperature=temperature)
    return swapped(trainer, generation_config=changed)


def _each_alone(generate: Callable[..., Any], **call: Any) -> Any:
    """Call TRL's `VLLMGeneration.generate` with groups of a single prompt."""
    return generate(**{**call, "num_generations": 1})


class _NoGroup(int):
    """The number 1 with `num_generations < 2` false: a critic needs no group."""

    def __lt__(self, other: object) -> bool:
        return False


def without_groups(config: "GRPOConfig") -> AbstractContextManager[None]:
    """Let TRL's GRPOConfig accept any num_generations in the block."""
    return swapped(config, num_generations=_NoGroup(1))


def async_grpo_trainer() -> type:
    """Return TRL's AsyncGRPOTrainer from where it is: experimental in 1.16, among the stable trainers from 1.18."""
    for module in ("trl", "trl.experimental.async_grpo"):
        with suppress(ImportError, AttributeError):
            found: type = import_module(module).AsyncGRPOTrainer
            return found
    raise SupportError("This TRL has no AsyncGRPOTrainer. Run: pip install 'trl>=1.16'")


def peak_flops_unknown(trainer: type) -> AbstractContextManager[None]:
    """Let the constructor of TRL's AsyncGRPOTrainer, `trainer`, work without a card in the block.

    Issue: it looks up the card's operations per second, and asks CUDA for the card's name where there is none.
    Fixed in: no version of TRL up to 1.16.
    Remove when: it works with use_cpu=True.
    """
    if torch.cuda.is_available():
        return nullcontext()
    return swapped(sys.modules[trainer.__module__], get_peak_flops_per_device=lambda accelerator, dtype: None)
