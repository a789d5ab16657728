"""Activation checkpointing that trainers switch off and on, with options for layers that torch does not accept."""

import inspect
from contextlib import nullcontext
from functools import partial
from typing import Any

from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from trl_ext.compat.swap import swapped
from trl_ext.compat.transformers import old_names_unsaid
from trl_ext.errors import ConfigError
from trl_ext.packing.recompute import checkpoint_contexts


def check_layer_options(args: Any) -> None:
    """Raise ConfigError for keys of `gradient_checkpointing_kwargs` that nothing reads, or that do not work in this
    run."""
    options = args.gradient_checkpointing_kwargs
    known = {*inspect.signature(checkpoint).parameters, "preserve_rng_state"}
    known |= {"every_n_layers", "offload", "keep_attention"}  # transformers' and ours
    if unknown := set(options) - (known - {"function", "args", "kwargs"}):
        raise ConfigError(f"gradient_checkpointing_kwargs has {min(unknown)!r}, which torch does not know.")
    packs = args.gradient_checkpointing and getattr(args, "packing", True)
    if options.get("keep_attention") and (options.get("use_reentrant") or not packs):
        raise ConfigError(
            "keep_attention of gradient_checkpointing_kwargs needs gradient_checkpointing: true, use_reentrant: "
            "false, and packing. Leave it out."
        )


def enable_checkpointing(
    model: Any, gradient_checkpointing_kwargs: Any = None, every_n_layers: int = 1, **others: Any
) -> None:
    """Switch checkpointing on for every n-th layer.

    transformers' Trainer removes `every_n_layers` and `offload` from the arguments' options. TRL passes them all when
    it switches checkpointing on again after generation, and torch would reject them in the first step, and also our
    `keep_attention`.

    Args:
        model: A transformers model without PEFT's wrapper.
        gradient_checkpointing_kwargs: From the training arguments.
        every_n_layers, others: As for `PreTrainedModel.gradient_checkpointing_enable`.
    """
    options = dict(gradient_checkpointing_kwargs or {})
    every_n_layers = options.pop("every_n_layers", every_n_layers)
    others |= {name: options.pop(name) for name in ("offload",) if name in options}
    if options.pop("keep_attention", False):
        if options.setdefault("use_reentrant", False):
            raise ConfigError("keep_attention of gradient_checkpointing_kwargs needs use_reentrant: false. Set it so.")
        options["context_fn"] = partial(checkpoint_contexts, options.get("context_fn"))
    # transformers would add its hooks to the embeddings again after each generation, and keep the earlier ones.
    has_hooks = hasattr(model, "_require_grads_hook")
    once = swapped(model, enable_input_require_grads=lambda: None) if has_hooks else nullcontext()
    with old_names_unsaid(), once:  # every supported version has the old name
        type(model).gradient_checkpointing_enable(model, options or None, **others)
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for index, layer in enumerate(layers):
        layer.gradient_checkpointing = index % every_n_layers == 0


def is_checkpointing(model: Any) -> bool:
    """Return True if checkpointing is on."""
    with old_names_unsaid():
        return bool(model.is_gradient_checkpointing)


def keep_layer_options(model: Any, options: Any) -> None:
    """Apply all options of the training arguments whenever checkpointing is switched on again."""
    model.gradient_checkpointing_enable = partial(enable_checkpointing, model)
    if is_checkpointing(model):
        model.gradient_checkpointing_enable(options)
