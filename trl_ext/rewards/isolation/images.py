"""Images by reference: a row that goes to a worker takes an image's path and size along, not its pixels.

A rule that runs in the trainer's process finds the image itself, which costs nothing. Copied, a photo is megabytes a
row, for each rule in a worker, whether it looks at images or not.
"""

import io
import pickle
import sys
from dataclasses import dataclass
from typing import Any

from trl_ext.errors import RuleError


@dataclass(frozen=True, slots=True)
class ImageReference:
    """An image that lies elsewhere.

    Args:
        path: Its file; empty where the image is only in the trainer's memory.
        size: Width and height in pixels.
        mode: Of its pixels, as PIL names it, such as "RGB".
    """

    path: str
    size: tuple[int, int]
    mode: str

    def open(self) -> Any:
        """The image, read from its file."""
        if not self.path:
            raise RuleError(
                "This image has no file, and rules in workers get images by reference. Set tier = 'inline' in the "
                "rule, or keep the dataset's images as files."
            )
        from PIL import Image

        return Image.open(self.path)


class _Pickler(pickle.Pickler):
    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, sys.modules["PIL.Image"].Image):
            return ImageReference, (str(getattr(thing, "filename", "") or ""), thing.size, thing.mode)
        return NotImplemented


def pickled(thing: Any) -> bytes:
    """A pickle in which each PIL image is an ImageReference."""
    if "PIL.Image" not in sys.modules:
        return pickle.dumps(thing, pickle.HIGHEST_PROTOCOL)
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(thing)
    return buffer.getvalue()
