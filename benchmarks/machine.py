"""Where a benchmark's numbers were born."""

import platform

import torch

from trl_ext.compat.versions import installed_versions


def machine() -> dict[str, str]:
    """Card, processor, threads and versions."""
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        "card": card,
        "cpu": platform.processor() or platform.machine(),
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        **installed_versions("torch", "transformers", "trl", "accelerate"),
    }
