"""Parameters of a model that has no formula: transformers' own class on the meta device, without a byte of weights."""

from collections.abc import Mapping
from typing import Any

from trl_ext.errors import SupportError


def count_params(config: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """Count the parameters of the model that this config.json is of.

    Takes as long as importing torch and transformers, which nothing else of a plan does.

    Returns:
        Parameters, tied ones once, a tower for images included; and its language model's config with all defaults.

    Raises:
        SupportError: The installed transformers does not know the model, or cannot make it of this config.
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
    # Whatever a config that is not transformers' own may lead to in its classes.
    except (AttributeError, ImportError, KeyError, RuntimeError, TypeError, ValueError, StrictDataclassError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise SupportError(f"transformers cannot make a '{kind}' of its config: {reason}.") from error
    return sum(weight.numel() for weight in model.parameters()), made.get_text_config().to_dict()
