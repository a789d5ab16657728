"""The reference model of the KL, and the preparation of frozen models."""

import copy
from typing import Any

from accelerate.utils import is_peft_model
from transformers import AutoModelForCausalLM
from transformers.integrations import is_deepspeed_zero3_enabled
from trl.models.utils import prepare_deepspeed

from trl_ext.compat.peft import add_adapter
from trl_ext.errors import ConfigError

ADAPTER = "ref"  # the name under which TRL looks for it


def choose_reference(model: Any, given: Any, is_peft: bool, args: Any) -> Any:
    """Return the reference model; None if TRL makes it, or none is needed.

    Args:
        model: The actor, or its path.
        given: The user's reference: model, path or None.
        is_peft: True if the actor is or becomes a PeftModel; its reference is then the model without the adapter.
        args: PPOConfig.
    """
    if args.beta == 0:
        return None
    has_adapters = not isinstance(model, str) and is_peft_model(model)
    if args.ref_adapter_name is not None and (given is not None or not has_adapters):
        reason = "the model has no adapters yet" if given is None else "ref_model is the reference"
        raise ConfigError(f"ref_adapter_name={args.ref_adapter_name!r} has no effect: {reason}. Leave it out.")
    if given is not None:
        options = args.model_init_kwargs or {}
        model = AutoModelForCausalLM.from_pretrained(given, **options) if isinstance(given, str) else given
        return model.eval().requires_grad_(False)
    if is_peft:
        if has_adapters:
            add_reference_adapter(model, args.ref_adapter_name)
        return None
    if isinstance(model, str):
        return None
    if is_deepspeed_zero3_enabled():
        raise ConfigError(
            "Under ZeRO-3 the weights of a loaded model are spread over the processes, so it cannot be copied. Give "
            "the model as a path, or give ref_model."
        )
    return copy.deepcopy(model).eval().requires_grad_(False)


def add_reference_adapter(model: Any, source: str | None) -> None:
    """Add a frozen copy of a PeftModel's adapter as the reference; None: the active adapter, unless untrained."""
    name = source or model.active_adapter
    if name not in model.peft_config:
        raise ConfigError(
            f"ref_adapter_name='{name}' is none of the model's adapters: {', '.join(model.peft_config)}."
        )
    products = [weight for key, weight in model.named_parameters() if f"lora_B.{name}." in key]
    is_fresh = bool(products) and not any(weight.any() for weight in products)
    if name == ADAPTER or (source is None and is_fresh):
        return
    active = model.active_adapter
    add_adapter(model, ADAPTER, copy.deepcopy(model.peft_config[name]))
    copy_adapter(model, name, ADAPTER)
    model.set_adapter(active)


def copy_adapter(model: Any, source: str, target: str) -> None:
    """Copy the weights of one adapter of a PeftModel to another of the same shape."""
    for key, weight in list(model.named_parameters()):
        if f".{source}." in key:
            model.get_parameter(key.replace(f".{source}.", f".{target}.")).data.copy_(weight.data)


def prepare_frozen(model: Any, trainer: Any) -> Any:
    """Wrap a model that is not trained, and move it to its device."""
    if trainer.is_deepspeed_enabled:
        return prepare_deepspeed(model, trainer.accelerator)
    return trainer.accelerator.prepare_model(model, evaluation_mode=True, device_placement=True)
