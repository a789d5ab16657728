"""Parameters of a model without a formula, counted on transformers' class on the meta device, without weights."""

from collections.abc import Mapping
from typing import Any

from trl_ext.errors import SupportError


def count_params(config: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """Count the parameters of a config.json's model. Imports torch and transformers, which takes seconds.

    Returns:
        Number of parameters, with tied weights once and with vision towers; and the language model's full config.

    Raises:
        SupportError: The installed transformers does not know the model, or cannot build it from this config.
    """
    import torch
    import transformers
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    kind = str(config.get("model_type"))
    if kind not in CONFIG_MAPPING:
        raise SupportError(f"transformers {transformers.__version__} does not know '{kind}'.")
    keys = {key: value for key, value in config.items() if key not in ("quantization_config", "auto_map")}
    try:
        made = CONFIG_MAPPING[kind].from_dict(keys)
        named = getattr(transformers, (config.get("architectures") or [""])[0] or "", None)
        with torch.device("meta"):
            model = named(made) if named else AutoModelForCausalLM.from_config(made)
    # transformers' classes may raise any of these for a foreign config.
    except (AttributeError, ImportError, KeyError, RuntimeError, TypeError, ValueError, StrictDataclassError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise SupportError(f"transformers cannot make a '{kind}' of its config: {reason}.") from error
    return sum(weight.numel() for weight in model.parameters()), made.get_text_config().to_dict()
