"""Liger's fused kernels for norms, rotary positions and gated MLPs: put into a model, and removed again."""

import sys
from typing import Any

from transformers.utils import is_liger_kernel_available

# TRL's head is fused already, and a reward model has no head over the vocabulary.
HEADS = ("fused_linear_cross_entropy", "cross_entropy")
_MISSING = object()


class LayerKernels:
    """Fused kernels in the layers of one model.

    Liger replaces methods of modules and functions of their file, and cannot undo it, so the changes are recorded
    here. The model is transformers', without PEFT's wrapper.
    """

    def __init__(self, model: Any):
        self._model = model
        files = {type(module).__module__: sys.modules[type(module).__module__] for module in model.modules()}
        self._before = [(vars(thing), dict(vars(thing))) for thing in (*model.modules(), *files.values())]
        self._changed: list[tuple[dict[str, Any], str, Any]] = []

    def put_in(self, options: dict[str, Any]) -> str:
        """Replace layers that Liger has kernels for, except the head; return why nothing was replaced, or ""."""
        if getattr(self._model, "hf_quantizer", None) is not None:
            return "the weights are quantized"
        if getattr(self._model, "use_kernels", False):
            return "the model has kernels from the hub (use_kernels)"
        if not is_liger_kernel_available():
            return "liger-kernel is not installed"
        from transformers.integrations.liger import apply_liger_kernel  # Here, as it imports torch.

        try:
            apply_liger_kernel(self._model, options | dict.fromkeys(HEADS, False))
        except (TypeError, ValueError, LookupError, AttributeError, RuntimeError, OSError, ImportError) as error:
            # Liger may expect another version of the model's file.
            return f"liger-kernel stopped with {type(error).__name__}: {error}"
        finally:
            self._changed = [
                (now, name, then.get(name, _MISSING))
                for now, then in self._before
                for name in now
                if now[name] is not then.get(name, _MISSING)
            ]
        return "" if self._changed else f"liger-kernel has none for {self._model.config.model_type}"

    def take_out(self) -> None:
        """Restore the layers as they were before `put_in`."""
        for now, name, then in self._changed:
            if then is _MISSING:
                now.pop(name, None)
            else:
                now[name] = then
        self._changed.clear()
