"""`python -m trl_ext.doctor.probe`: find out in a separate process what PyTorch can do here; prints JSON.

A broken wheel, a kernel for another card or a crash of the driver ends this process only.
"""

import json
from collections.abc import Callable
from typing import Any


def main() -> None:
    """Print one line of JSON with the fields of `Kernels`."""
    import torch

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    has_nccl = torch.version.cuda and torch.distributed.is_nccl_available()
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else ""
    answer: dict[str, Any] = {"cuda": torch.version.cuda, "num_gpus": num_gpus, "nccl": nccl, "works": {}}
    if num_gpus:
        answer["works"] = {name: _why_not(run) for name, run in BACKENDS.items()}
    print(json.dumps(answer))


def _why_not(run: Callable[[], None]) -> str:
    try:
        run()
    except (RuntimeError, ImportError, OSError, NotImplementedError, TypeError) as error:
        return str(error).strip().partition("\n")[0] or type(error).__name__
    return ""


def _heads() -> Any:
    """Return 8 tokens of one head, [T, H, D]."""
    import torch

    return torch.zeros(8, 1, 64, dtype=torch.bfloat16, device="cuda")


def _run_sdpa() -> None:
    import torch

    x = _heads().transpose(0, 1)[None]
    torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    torch.cuda.synchronize()


def _run_varlen() -> None:
    import torch

    from trl_ext.compat.torch import call_varlen_attn, has_varlen_attn

    if not has_varlen_attn(torch.device("cuda", 0)):
        raise NotImplementedError("it needs an Ampere card or a later one")
    x, ends = _heads(), torch.tensor([0, 8], dtype=torch.int32, device="cuda")
    call_varlen_attn(x, x, x, ends, ends, 8, 8, scale=None, window_left=-1)
    torch.cuda.synchronize()


def _run_flash_attn() -> None:
    import torch

    from trl_ext.compat.torch import flash_attn_function
    from trl_ext.compat.versions import is_installed

    if not is_installed("flash_attn"):
        raise ImportError("not installed")
    x, ends = _heads(), torch.tensor([0, 8], dtype=torch.int32, device="cuda")
    flash_attn_function(2)(x, x, x, ends, ends, 8, 8, causal=True)
    torch.cuda.synchronize()


BACKENDS = {"sdpa": _run_sdpa, "varlen": _run_varlen, "flash-attn": _run_flash_attn}

if __name__ == "__main__":
    main()
