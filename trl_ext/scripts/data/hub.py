"""Datasets and models of the hub: whether it can be reached, and messages that a user can act on."""

from pathlib import Path

from trl_ext.memory.models.find import nearest_models

PATIENCE_S = 10.0


def leave_if_unreachable() -> None:
    """Read only from the cache, as with HF_HUB_OFFLINE=1, if the hub does not answer.

    Otherwise huggingface_hub tries each file six times, over half a minute, and prints every try.
    """
    import datasets.config
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=PATIENCE_S)
    except Exception:  # httpx's or requests' by the version of huggingface_hub, without a common base
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True


def unreachable(name: str, what: str = "dataset") -> str:
    """Return a sentence that a dataset or model is neither here nor reachable, with two remedies."""
    from huggingface_hub import constants

    kind, flag = (" --repo-type dataset", "--dataset_name ") if what == "dataset" else ("", "")
    return (
        f"The {what} '{name}' is not on this machine, and the hub ({constants.ENDPOINT}) cannot be reached. "
        f"Copy it (elsewhere: `hf download {name}{kind} --local-dir FOLDER`; here: {flag}FOLDER), or name a "
        "mirror, HF_ENDPOINT=URL."
    )


def unloadable(name: str, error: Exception) -> str:
    """Return a sentence why a model cannot be loaded; with the nearest known name if there is no such folder."""
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    if Path(name).exists():
        return f"{name} cannot be loaded: {reason}."
    near = nearest_models(name)
    hint = f" Did you mean {near[0]}?" if near else ""
    if "connect" in reason:
        reason = unreachable(name, "model").rstrip(".")
    return f"{name} cannot be loaded, and there is no folder of this name: {reason}.{hint}"
