"""Push weights with LoRA to vLLM, one layer at a time.

TRL merges adapters into the base, sends the weights and unmerges, which changes a base in bfloat16; under ZeRO-3 it
gathers the whole model on every card for this. Here each layer is gathered, merged in copies of its weights and sent
separately: a card holds one layer in addition to its shard, and the base is never written.
"""

from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch import nn

from trl_ext.compat.peft import adapter_layers


def push_by_layers(vllm_generation: Any) -> None:
    """Make TRL's VLLMGeneration send merged weights layer by layer, except under FSDP or with a quantized base.

    Issue: TRL merges in place, which changes a base in bfloat16 (6688).
    Fixed in: no version of TRL up to 1.16.
    Remove when: TRL merges in copies, a layer at a time.
    """
    model, dist = vllm_generation.model, vllm_generation._dist
    if isinstance(model, PeftModel) and not dist.is_fsdp and getattr(model, "hf_quantizer", None) is None:
        vllm_generation._iter_named_params = MethodType(merged_layers, vllm_generation)


def merged_layers(vllm_generation: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each weight under vLLM's name, merged with its adapter. Collective: every process has to consume all.

    Replaces trl.generation.vllm_generation.VLLMGeneration._iter_named_params.
    """
    model, seen = vllm_generation.model, set()
    for path, module in _layers(model):
        is_tuned = isinstance(module, BaseTunerLayer)
        parameters = dict(module.named_parameters(recurse=is_tuned))
        if not parameters:
            continue
        layers: list[Any] = adapter_layers(module) if is_tuned else []  # several layers of a module may be nested
        with vllm_generation._dist.gather_params(list(parameters.values())):
            own = [(parameter, parameter.data) for parameter in parameters.values() if is_tuned]
            try:
                for parameter, values in own:
                    parameter.data = values.clone()
                for layer in layers:
                    layer.merge()
                for name, parameter in parameters.items():
                    whole = f"{path}.{name}".removeprefix("base_model.model.").replace(".base_layer", "")
                    if model.prefix in whole or id(parameter) in seen:  # an adapter's, or a tied weight's second name
                        continue
                    seen.add(id(parameter))
                    whole = vllm_generation._fix_param_name_to_vllm(whole, extra_prefixes=["modules_to_save.default."])
                    yield whole, parameter.data
            finally:
                for parameter, values in own:
                    parameter.data = values
                for layer in layers:
                    layer.merged_adapters.clear()  # `unmerge` would subtract from the weights being sent


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules with their paths, without modules inside a tuned layer and without originals that PEFT copied."""
    inside: tuple[str, ...] = ()
    for path, module in model.named_modules():
        if inside and f"{path}.".startswith(inside):
            continue
        if isinstance(module, BaseTunerLayer):
            inside = (*inside, f"{path}.")
        elif isinstance(module, ModulesToSaveWrapper):
            inside = (*inside, f"{path}.original_module.")
        yield path, module
