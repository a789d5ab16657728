"""Whether rows may hold images, told by their columns: a checkpoint with a processor is trained on text as well."""

from typing import Any

from datasets import Dataset, Value

from trl_ext.trainers.rows.sentence import parts


def may_hold_images(datasets: Any) -> bool:
    """Return False if no row of a dataset, or of a dict of them, can hold an image.

    True where types of columns are not known before the rows come: some streams', and those of a transform.
    """
    return any(_one_may(dataset) for _, dataset in parts(datasets, ""))


def _one_may(dataset: Any) -> bool:
    is_transformed = isinstance(dataset, Dataset) and dataset.format["type"] == "custom"
    if is_transformed or dataset.features is None:
        return True
    has_column = "image" in dataset.features or "images" in dataset.features
    return has_column or ("prompt" in dataset.features and _may_hold_image(dataset.features["prompt"]))


def _may_hold_image(feature: Any) -> bool:
    """Return False for text and for messages without a part called `image`."""
    if isinstance(feature, dict):
        return "image" in feature or any(map(_may_hold_image, feature.values()))
    inner = getattr(feature, "feature", None)  # of a list
    return _may_hold_image(inner) if inner is not None else not isinstance(feature, Value)
