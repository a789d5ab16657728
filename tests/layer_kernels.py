"""A stand-in for the package liger-kernel on the CPU: it replaces norms, rotary positions and MLPs as Liger does."""

import sys
from pathlib import Path
from typing import Any

from transformers.utils import is_liger_kernel_available

# What `_apply_liger_kernel_to_instance` is given, and what is wrong with the kernels.
_SOURCE = """
from types import MethodType
import torch
from torch.nn import functional as F

CALLS, FAULT, NUM_FORWARDS = [], {fault!r}, [0]

def norm(self, x):
    NUM_FORWARDS[0] += 1
    if FAULT == "raises":
        raise RuntimeError("no kernel image is available")
    if FAULT == "leaks":
        x = x + 1e-2 * x.mean(dim=-2, keepdim=True)
    weight = self.weight * (1.1 if FAULT == "wrong" else 1.0)
    return F.rms_norm(x, x.shape[-1:], weight, self.variance_epsilon)

def mlp(self, x):
    return self.down_proj(F.silu(self.gate_proj(x)).mul_(self.up_proj(x)))

def rope(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    turned = [torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1) for x in (q, k)]
    return tuple(torch.addcmul(x * cos, y, sin) for x, y in zip((q, k), turned))

def _apply_liger_kernel_to_instance(model, **options):
    CALLS.append(options)
    assert options.get("fused_linear_cross_entropy") is False, "the head is TRL's"
    if model.config.model_type != "llama":
        return
    from transformers.models.llama import modeling_llama
    modeling_llama.apply_rotary_pos_emb = rope
    for module in model.modules():
        for kind, forward in (("LlamaRMSNorm", norm), ("LlamaMLP", mlp)):
            if type(module).__name__ == kind:
                module.forward = MethodType(forward, module)
                module.offset = 0.0
"""


def install(folder: Path, monkeypatch: Any, fault: str = "") -> Any:
    """Install it for a test, of which the family is Llama; return its module.

    Args:
        folder: Where the package lies.
        fault: "wrong": norms are 10 % too large, packed and alone. "leaks": a token's norm depends on its neighbours.
            "raises": as on a card that it is not built for. "": none.
    """
    package = folder / "site" / "liger_kernel"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "transformers.py").write_text(_SOURCE.format(fault=fault))
    about = package.parent / "liger_kernel-0.8.5.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: liger_kernel\nVersion: 0.8.5\n")
    monkeypatch.syspath_prepend(package.parent)
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, None)  # forgotten after the test
        del sys.modules[name]
    from transformers.models.llama import modeling_llama

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", modeling_llama.apply_rotary_pos_emb)  # put back
    is_liger_kernel_available.cache_clear()
    from liger_kernel import transformers as kernels

    return kernels
