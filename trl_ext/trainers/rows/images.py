"""Images of rollouts: from TRL's arguments to the images of each row, and with rows that change ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from typing import Any

import torch
from accelerate.utils import DistributedType, broadcast_object_list, gather_object
from datasets import Dataset, List
from datasets import Image as ImageFeature
from trl.trainer.utils import split_pixel_values_by_grid

from trl_ext.errors import DataError
from trl_ext.packing.families.images import Image, ImageReader, ImageRows, images_of, one_of_each

# What TRL hands to a forward for the images of its rows.
KEYS = ("pixel_values", "image_grid_thw", "num_images", "mm_token_type_ids")


@dataclass(frozen=True, eq=False)
class GivenImages:
    """The images of the rows of a batch.

    Args:
        rows: Of each row, in the order in which it shows them.
        reader: Of the model.
        runs_everywhere: As in `BatchImages`.
    """

    rows: ImageRows
    reader: ImageReader
    runs_everywhere: bool = False

    def of_all(self, accelerator: Any) -> "GivenImages":
        """Return the same with what decides whether the vision tower runs in all forwards. Collective.

        In one process, and under DDP while no rank has an image, it runs where there are images, as in TRL: a tower
        without gradients stays as it is. DeepSpeed would take the last gradient of a tower that has none again.
        """
        is_sharded = accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.FSDP)
        is_alone = accelerator.num_processes == 1
        return replace(self, runs_everywhere=is_sharded or (not is_alone and is_any_shown(self.rows, accelerator)))


def image_rows(given: Mapping[str, Any], num_rows: int) -> ImageRows:
    """Return the images of each row.

    Args:
        given: TRL's arguments by name, or ours: images by rows as `pixel_values`.
        num_rows: Rows of the batch.
    """
    pixels, counts = given.get("pixel_values"), given.get("num_images")
    if isinstance(pixels, list):
        return pixels
    if pixels is None or counts is None:
        return [()] * num_rows
    split = split_pixel_values_by_grid({name: given[name] for name in KEYS[:3]})
    # Of a row's patches, those of each of its images.
    grids = [grid for of_row in split["image_grid_thw"] for grid in of_row.tolist()]
    patches = [
        one
        for of_row, of_grids in zip(split["pixel_values"], split["image_grid_thw"], strict=True)
        for one in of_row.split(of_grids.prod(-1).tolist())
    ]
    images = iter(images_of(patches, grids))
    return one_of_each([tuple(next(images) for _ in range(count)) for count in counts])


def by_rows(rollouts: Mapping[str, Any]) -> dict[str, Any]:
    """Return rollouts with their images by rows, as `pixel_values`, instead of TRL's arguments for them."""
    rows = image_rows(rollouts, len(rollouts["completion_ids"]))
    return {**{k: v for k, v in rollouts.items() if k not in KEYS}, "pixel_values": rows}


def is_any_shown(rows: ImageRows, accelerator: Any) -> bool:
    """Return whether a row of any rank shows an image. Collective."""
    return any(gather_object([any(rows)]) if accelerator.num_processes > 1 else [any(rows)])


def check_images(rollouts: Mapping[str, Any], reader: ImageReader, accelerator: Any) -> None:
    """Raise DataError on all ranks where a row's image tokens are not those of its images. Collective.

    Where no row of any rank shows an image, its token is text, as in TRL.

    Args:
        rollouts: TRL's, just generated, whose rows stand in the order of their prompts.
        reader: Of the model.
        accelerator: accelerate's.
    """
    mask = torch.cat([rollouts["prompt_mask"], rollouts["completion_mask"]], dim=1)
    ids = torch.cat([rollouts["prompt_ids"], rollouts["completion_ids"]], dim=1)
    counts = ((ids == reader.token_id) & (mask > 0)).sum(dim=1).tolist()
    rows = image_rows(rollouts, len(counts))
    mine = any(rows), reader.problem(counts, rows)
    found = gather_object([mine]) if accelerator.num_processes > 1 else [mine]
    for rank, (_, problem) in enumerate(found):
        if problem and any(is_shown for is_shown, _ in found):
            raise DataError(f"On rank {rank}: {problem}" if len(found) > 1 else problem)


def deal_images(rows: ImageRows, rows_of_ranks: Sequence[Sequence[int]], accelerator: Any) -> ImageRows:
    """Give every rank the images of the rows that it is to have, as `deal` gives it rows. Collective.

    One rank's images cross at a time, each once, and of them only those of rows that leave it.
    """
    mine, size = list(dict.fromkeys(image for row in rows for image in row)), len(rows)
    number = {image: i for i, image in enumerate(mine)}
    shown = gather_object([[number[image] for image in row] for row in rows])  # of all ranks' rows, in order
    here: dict[tuple[int, int], Image] = {(accelerator.process_index, i): image for i, image in enumerate(mine)}
    wanted = [{(i // size, k) for i in of_rank for k in shown[i]} for of_rank in rows_of_ranks]
    for rank in range(accelerator.num_processes):
        leaving = sorted({one[1] for r, of_rank in enumerate(wanted) for one in of_rank if one[0] == rank != r})
        if not leaving:
            continue
        is_mine = rank == accelerator.process_index
        sent: list[Any] = [{k: replace(mine[k], pixels=mine[k].pixels.cpu()) for k in leaving} if is_mine else None]
        broadcast_object_list(sent, from_process=rank)
        if not is_mine:
            come = {k: one for k, one in sent[0].items() if (rank, k) in wanted[accelerator.process_index]}
            here |= {(rank, k): replace(one, pixels=one.pixels.to(accelerator.device)) for k, one in come.items()}
    # A group may come from several ranks: its images are one again.
    rows_here = rows_of_ranks[accelerator.process_index]
    return one_of_each([tuple(here[i // size, k] for k in shown[i]) for i in rows_here])


def digest_of_rows(rows: ImageRows, device: torch.device) -> torch.Tensor:
    """[B] int64 numbers of the images of rows, in their order."""
    numbers = []
    for row in rows:
        total = 0
        for image in row:
            total = (total * 0x2545F4914F6CDD1D + image.digest) % 2**63
        numbers.append(total)
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def unreadable(dataset: Dataset) -> dict[str, list[int]]:
    """Return the rows with an image that cannot be opened or whose file is damaged, by what is wrong.

    Pixels are not decoded, which would take minutes: a JPEG that is cut off after its head is not found.
    """
    found: dict[str, list[int]] = {}
    for column in {"image", "images"} & set(dataset.column_names):
        feature = dataset.features[column]
        is_list = not isinstance(feature, ImageFeature)
        if is_list and not isinstance(getattr(feature, "feature", None), ImageFeature):
            continue  # of another type: TRL says what it makes of it
        as_files = ImageFeature(decode=False)
        files = dataset.select_columns([column]).cast_column(column, List(as_files) if is_list else as_files)
        for row, value in enumerate(files[column]):
            for file in (value or []) if is_list else [value]:
                if file is not None and (problem := _problem_of_file(file)):
                    found.setdefault(f"an image that cannot be read ({problem})", []).append(row)
    return found


def _problem_of_file(file: Mapping[str, Any]) -> str:
    import PIL.Image  # not there where nobody trains on images

    try:
        with PIL.Image.open(BytesIO(file["bytes"]) if file["bytes"] is not None else file["path"]) as image:
            image.verify()
    except PIL.UnidentifiedImageError:
        return "no image file"
    except (OSError, SyntaxError, ValueError) as error:  # PIL raises SyntaxError for a broken PNG
        return str(error)
    return ""
