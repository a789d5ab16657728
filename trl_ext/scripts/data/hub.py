"""Data sets of the hub: whether it can be reached, and what it says that a user can act on."""

import ast
import re

PATIENCE_S = 10.0


def leave_if_unreachable() -> None:
    """Where the hub does not answer, read from the cache alone from now on, as HF_HUB_OFFLINE=1 would have it.

    huggingface_hub asks each file of a model or a data set six times, over half a minute, and prints every try.
    """
    import datasets.config
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=PATIENCE_S)
    except Exception:  # of httpx or requests, by the version of huggingface_hub: they have no base in common
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True


def unreachable(name: str) -> str:
    """Say that a data set is neither here nor to be had, and the two ways on."""
    from huggingface_hub import constants

    return (
        f"The dataset '{name}' is not on this machine, and the hub ({constants.ENDPOINT}) cannot be reached. "
        f"Copy it (elsewhere: `hf download {name} --repo-type dataset --local-dir FOLDER`; here: --dataset_name "
        "FOLDER), or name a mirror, HF_ENDPOINT=URL."
    )


def problem_of_config(error: Exception, config: str | None) -> str:
    """Say which configurations a data set has, where `datasets` misses one or does not know it; else nothing."""
    found = re.search(r"(?:available configs|Available): (\[[^]]*\])", str(error))
    if found is None:
        return ""
    names = [str(name) for name in ast.literal_eval(found[1])]
    if config is None:
        return f"it has the configurations {', '.join(names)}. Name one, dataset_config: {names[0]}"
    if names == ["default"]:
        return f"it has no configurations, and dataset_config is '{config}'. Leave dataset_config out"
    return f"it has no configuration '{config}', only {', '.join(names)}. Check dataset_config"
