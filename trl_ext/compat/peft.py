"""PEFT: the model below its wrapper, what a config trains, and which adapters compute in each layer."""

import copy
from typing import Any

from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer, check_target_module_exists
from torch import nn
from transformers.integrations import is_deepspeed_zero3_enabled

HEAD_NAMES = {"classifier", "score"}  # PEFT adds both to modules_to_save for task type SEQ_CLS


def base_model(model: Any) -> Any:
    """Return the model without PEFT's wrapper, if there is a wrapper."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def adds_virtual_tokens(model: Any) -> bool:
    """Return True for prompt tuning and similar methods, which put trained virtual tokens before every row."""
    return isinstance(model, PeftModel) and model.active_peft_config.is_prompt_learning


def trains_module(config: Any, name: str, *, is_linear: bool) -> bool:
    """Return True if a config's `modules_to_save` or `target_modules` cover a top-level module.

    Args:
        config: A PEFT config.
        name: The module's name in the model.
        is_linear: True if `target_modules="all-linear"` covers it.
    """
    if any(name.endswith(suffix) for suffix in getattr(config, "modules_to_save", None) or ()):
        return True
    targets = getattr(config, "target_modules", None)
    if str(targets).lower() == "all-linear":
        config = copy.copy(config)
        config.target_modules = [name] if is_linear else []
    return targets is not None and bool(check_target_module_exists(config, name))


def add_adapter(model: Any, name: str, config: Any) -> None:
    """Add a LoRA to a PeftModel in float32, as TRL does; under ZeRO-3 in the dtype that DeepSpeed can gather.

    It starts at zero by any config: other starts, such as PiSSA's, change the base weights, which all adapters share.
    """
    config = copy.copy(config)
    config.init_lora_weights = True
    model.add_adapter(name, config, autocast_adapter_dtype=not is_deepspeed_zero3_enabled())


def copy_adapter(model: Any, source: str, target: str) -> None:
    """Copy the weights of one adapter of a PeftModel to another of the same shape."""
    for key, weight in list(model.named_parameters()):
        parts = key.split(".")  # the last is the adapter's name in an embedding, where PEFT keeps bare parameters
        if source in parts:
            counterpart = ".".join(target if part == source else part for part in parts)
            model.get_parameter(counterpart).data.copy_(weight.data)


def adapter_layers(model: nn.Module) -> list[BaseTunerLayer]:
    """Return all layers of a PeftModel that hold adapters."""
    return [module for module in model.modules() if isinstance(module, BaseTunerLayer)]


def computing_weights(model: nn.Module) -> list[nn.Parameter]:
    """Return all weights of a model except the weights of inactive adapters."""
    idle = set(model.peft_config) - set(model.active_adapters) if isinstance(model, PeftModel) else set()
    return [weight for name, weight in model.named_parameters() if idle.isdisjoint(name.split("."))]


def adapter_state(layer: BaseTunerLayer) -> tuple[list[str], bool]:
    """Return the names of the adapters that compute in a layer, and whether all are switched off."""
    return list(layer.active_adapters), layer.disable_adapters


def set_adapter_state(layer: BaseTunerLayer, state: tuple[list[str], bool]) -> None:
    """Set the state that `adapter_state` returns; PEFT's setters would also change which weights are trained."""
    layer._active_adapter, layer._disable_adapters = state
