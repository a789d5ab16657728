"""Images of rollouts: the images of each row from TRL's arguments, and their transfer between ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import chain
from typing import Any

import torch
from accelerate.utils import DistributedType, broadcast_object_list, gather_object
from datasets import Dataset, List
from datasets import Image as ImageFeature
from trl.trainer.utils import split_pixel_values_by_grid

from trl_ext.errors import DataError
from trl_ext.packing.families.images import Image, ImageReader, ImageRows, images_of, one_of_each

# TRL's arguments of a forward for the images of its rows.
KEYS = ("pixel_values", "image_grid_thw", "num_images", "mm_token_type_ids")
_COLUMNS, _ADDRESSES = ("image", "images"), ("image", "url", "path", "base64")  # of a row; of a part of a message
_MOST_ASPECT = 200  # the limit of Qwen's processors


@dataclass(frozen=True, eq=False)
class GivenImages:
    """The images of the rows of a batch."""

    rows: ImageRows  # images of each row, in the order of their placeholders
    reader: ImageReader
    runs_everywhere: bool = False  # as in `BatchImages`

    @classmethod
    def of(
        cls, given: Mapping[str, Any], num_rows: int, reader: ImageReader | None, accelerator: Any
    ) -> "GivenImages | None":
        """Return the images of a batch's rows; None if the model reads none. Collective if it reads some.

        In one process, and under DDP while no rank has an image, the vision tower runs only on images, as in TRL: a
        tower without gradients is not updated. DeepSpeed would apply the previous gradient again.

        Args:
            given: As in `image_rows`.
            num_rows: Rows of the batch.
            reader: Reads the images for the model; None if rows have none.
            accelerator: The trainer's accelerator.
        """
        if reader is None:
            return None
        rows = image_rows(given, num_rows)
        is_sharded = accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.FSDP)
        is_alone = accelerator.num_processes == 1
        return cls(rows, reader, is_sharded or (not is_alone and any(gather_object([any(rows)]))))


def image_rows(given: Mapping[str, Any], num_rows: int) -> ImageRows:
    """Return the images of each row from TRL's arguments by name, or from `pixel_values` made by `by_rows`."""
    pixels, counts = given.get("pixel_values"), given.get("num_images")
    if isinstance(pixels, list):
        return pixels
    if pixels is None or counts is None:
        return [()] * num_rows
    split = split_pixel_values_by_grid({name: given[name] for name in KEYS[:3]})
    # Split each row's patches by image.
    grids = [grid for of_row in split["image_grid_thw"] for grid in of_row.tolist()]
    patches = [
        one
        for of_row, of_grids in zip(split["pixel_values"], split["image_grid_thw"], strict=True)
        for one in of_row.split(of_grids.prod(-1).tolist())
    ]
    images = iter(images_of(patches, grids))
    found: list[tuple[Image, ...]] = []
    for count in counts:
        found.append(tuple(next(images) for _ in range(count)))
    return one_of_each(found)


def by_rows(rollouts: Mapping[str, Any]) -> dict[str, Any]:
    """Return rollouts with images by rows, as `pixel_values`, instead of TRL's arguments."""
    rows = image_rows(rollouts, len(rollouts["completion_ids"]))
    return {**{k: v for k, v in rollouts.items() if k not in KEYS}, "pixel_values": rows}


def whole_rows(rollouts: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and mask of prompts with their completions, [B, P + C] each."""
    ids, mask = (torch.cat([rollouts[f"prompt_{one}"], rollouts[f"completion_{one}"]], 1) for one in ("ids", "mask"))
    return ids, mask


def check_images(rollouts: Mapping[str, Any], reader: ImageReader | None) -> None:
    """Raise DataError on all ranks if the image tokens of a row do not match its images. Collective.

    If no row of any rank has an image, the image token is text, as in TRL. Without `reader`, nothing is checked.
    """
    if reader is None:
        return
    ids, mask = whole_rows(rollouts)
    counts = ((ids == reader.token_id) & (mask > 0)).sum(dim=1).tolist()
    rows = image_rows(rollouts, len(counts))
    mine = any(rows), reader.problem(counts, rows)
    found = gather_object([mine])
    for rank, (_, problem) in enumerate(found):
        if problem and any(is_shown for is_shown, _ in found):
            raise DataError(f"On rank {rank}: {problem}" if len(found) > 1 else problem)


_ImageId = tuple[int, int]  # the rank that has an image, and the image's number there


def redistribute_images(rows: ImageRows, rows_of_ranks: Sequence[Sequence[int]], accelerator: Any) -> ImageRows:
    """Send every rank the images of its new rows, as `redistribute` sends the rows. Collective.

    One rank sends at a time: each image once, and only images of rows that leave it.
    """
    me, mine = accelerator.process_index, list(dict.fromkeys(chain.from_iterable(rows)))
    ids = _ids_of_rows(rows, mine)
    wanted = [set(chain.from_iterable(map(ids.__getitem__, of_rank))) for of_rank in rows_of_ranks]
    here: dict[_ImageId, Image] = {(me, k): image for k, image in enumerate(mine)}
    for rank in range(accelerator.num_processes):
        of_others = set().union(*wanted[:rank], *wanted[rank + 1 :])
        leaving = sorted(k for owner, k in of_others if owner == rank)
        if leaving:
            sent = _broadcast(mine, leaving, rank, accelerator)
            here |= {(rank, k): _move(one, accelerator.device) for k, one in sent.items() if (rank, k) in wanted[me]}
    # Rows of a group may come from several ranks: store their equal images once.
    return one_of_each([tuple(map(here.__getitem__, ids[i])) for i in rows_of_ranks[me]])


def _ids_of_rows(rows: ImageRows, mine: Sequence[Image]) -> list[list[_ImageId]]:
    """Return the ids of the images of each row of all ranks, in rank order; `mine` are this rank's. Collective."""
    number = {image: k for k, image in enumerate(mine)}
    numbers = gather_object([list(map(number.__getitem__, row)) for row in rows])
    found = []
    for i, of_row in enumerate(numbers):
        found.append([(i // len(rows), k) for k in of_row])
    return found


def _broadcast(mine: Sequence[Image], leaving: Sequence[int], rank: int, accelerator: Any) -> dict[int, Image]:
    """Return the images of one rank that others want, by number; none on the rank itself. Collective.

    Args:
        mine: This rank's images.
        leaving: Numbers of the images that the rank sends.
        rank: The rank that sends.
        accelerator: The trainer's accelerator.
    """
    if rank == accelerator.process_index:
        broadcast_object_list([{k: _move(mine[k], "cpu") for k in leaving}], from_process=rank)
        return {}
    received: list[Any] = [None]
    broadcast_object_list(received, from_process=rank)
    return received[0]


def _move(image: Image, device: torch.device | str) -> Image:
    return replace(image, pixels=image.pixels.to(device))


def digest_of_rows(rows: ImageRows, device: torch.device) -> torch.Tensor:
    """Return [B] int64 hashes of the images of each row, in their order."""
    numbers = []
    for row in rows:
        total = 0
        for image in row:
            total = (total * 0x2545F4914F6CDD1D + image.digest) % 2**63
        numbers.append(total)
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def without_nulls(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a batch with an empty list of images instead of null, which TRL cannot read."""
    if not any(row.get(name, "") is None for row in rows for name in _COLUMNS):
        return rows
    return [{**row, "images": row.get("images") or _only_image_of(row)} for row in rows]


def _only_image_of(row: Mapping[str, Any]) -> list[Any]:
    image = row.get("image")
    return [] if image is None else [image]


def unreadable(dataset: Dataset, image_token: str) -> dict[str, list[int]]:
    """Return the numbers of rows by problem, see `problem_of_row`.

    Pixels are not decoded, which would take minutes: a JPEG that is cut off after its header is not found.
    """
    found: dict[str, list[int]] = {}
    for number, row in enumerate(_files_of(dataset)):
        if problem := problem_of_row(row, image_token):
            found.setdefault(problem, []).append(number)
    return found


def _files_of(dataset: Dataset) -> Dataset:
    """Return the columns with prompts and images; images are files, not pixels."""
    files = dataset.select_columns([name for name in ("prompt", *_COLUMNS) if name in dataset.column_names])
    for column in set(_COLUMNS) & set(dataset.column_names):
        feature, as_file = dataset.features[column], ImageFeature(decode=False)
        if isinstance(feature, ImageFeature):
            files = files.cast_column(column, as_file)
        elif isinstance(getattr(feature, "feature", None), ImageFeature):
            files = files.cast_column(column, List(as_file))
    return files.with_format(None)


def check_padded(dataset: Any, args: Any) -> None:
    """Raise DataError if a padded micro-batch may have no image, while others have: transformers cannot forward it."""
    columns = set(_COLUMNS) & set(getattr(dataset, "column_names", None) or ())
    if not isinstance(dataset, Dataset) or not columns:
        return
    shown = _files_of(dataset).select_columns(list(columns))
    without = sum(not any(row.values()) for row in shown)
    if 0 < without < len(dataset) and without * args.num_generations >= args.per_device_train_batch_size:
        raise DataError(
            f"train_dataset has {without} of {len(dataset)} rows without an image, and rows are padded: a micro-batch "
            "without any image cannot be forwarded. Leave packing unset, if the model can be packed, or train on rows "
            "with images only: dataset.filter(...)."
        )


def problem_of_row(row: Mapping[str, Any], image_token: str) -> str:
    """Return the problem with the images of a row, in words that follow "row 7 has"; empty if there is none.

    Images may be decoded or not. `image_token` is the placeholder of an image in a rendered prompt, "" if not known.
    """
    prompt, images = row.get("prompt"), row.get("images", [row["image"]] if "image" in row else [])
    if isinstance(prompt, str):
        return ""
    messages = prompt if isinstance(prompt, list) else ()
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    parts = [part for content in contents for part in (content if isinstance(content, list) else [{"text": content}])]
    parts = [part for part in parts if isinstance(part, Mapping)]
    if image_token and any(image_token in str(part.get("text")) for part in parts):
        return f"the text {image_token}, the placeholder of an image"
    given = [part[key] for part in parts for key in _ADDRESSES if part.get(key) is not None]
    return next(filter(None, map(_problem_of_image, [*given, *(images or ())])), "")


def _problem_of_image(image: Any) -> str:
    import PIL.Image  # not installed if nobody trains on images

    if isinstance(image, str):  # an address, which transformers would open or fetch
        is_data = image.startswith("data:image/")
        return "" if is_data else "the address of an image, and none is opened but in a column of datasets' Image()"
    try:
        if isinstance(image, Mapping):
            with PIL.Image.open(BytesIO(image["bytes"]) if image["bytes"] is not None else image["path"]) as opened:
                opened.verify()
                image = opened
        if isinstance(image, PIL.Image.Image) and max(image.size) > _MOST_ASPECT * min(image.size):
            return f"an image of {image.width} x {image.height} pixels, beyond {_MOST_ASPECT} : 1"
    except PIL.UnidentifiedImageError:
        return "an image that cannot be read (no image file)"
    # PIL raises SyntaxError for a broken PNG.
    except (OSError, SyntaxError, ValueError, PIL.Image.DecompressionBombError) as error:
        return f"an image that cannot be read ({error})"
    return ""
