"""Weights with LoRA on their way to vLLM under ZeRO-3, one layer at a time.

TRL gathers the whole model on every card, merges all adapters, sends the weights and takes the adapters out again.
Here each layer is gathered, merged, sent and put back by itself, so that a card holds one layer beside its own part.
"""

from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch import nn


def push_by_layers(vllm_generation: Any) -> None:
    """Let TRL's vLLM get merged weights layer by layer, where the model has adapters and ZeRO-3 divides it.

    Args:
        vllm_generation: TRL's VLLMGeneration, made.
    """
    model = vllm_generation.model
    if isinstance(model, PeftModel) and vllm_generation._dist.is_zero3:
        vllm_generation._iter_named_params = MethodType(merged_layers, vllm_generation)


def merged_layers(vllm_generation: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each weight under vLLM's name, merged with its adapter. Collective: every process has to take all.

    Replaces trl.generation.vllm_generation.VLLMGeneration._iter_named_params.
    """
    model, seen = vllm_generation.model, set()
    for path, layer in _layers(model):
        module: Any = layer
        is_tuned = isinstance(module, BaseTunerLayer)
        parameters = dict(module.named_parameters(recurse=is_tuned))
        if not parameters:
            continue
        with vllm_generation._dist.gather_params(list(parameters.values())):
            if is_tuned:
                module.merge()
            for name, parameter in parameters.items():
                whole = f"{path}.{name}".removeprefix("base_model.model.").replace(".base_layer", "")
                if model.prefix in whole or id(parameter) in seen:  # an adapter's, or a tied weight's second name
                    continue
                seen.add(id(parameter))
                whole = vllm_generation._fix_param_name_to_vllm(whole, extra_prefixes=["modules_to_save.default."])
                # What is sent may be collected first: a merged weight changes again before that.
                yield whole, parameter.data.clone() if is_tuned else parameter.data
            if is_tuned:
                module.unmerge()


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules with their paths: one with adapters for all that is in it, and no original of a module that PEFT
    trains as a copy."""
    inside: tuple[str, ...] = ()
    for path, module in model.named_modules():
        if inside and f"{path}.".startswith(inside):
            continue
        if isinstance(module, BaseTunerLayer):
            inside = (*inside, f"{path}.")
        elif isinstance(module, ModulesToSaveWrapper):
            inside = (*inside, f"{path}.original_module.")
        yield path, module
