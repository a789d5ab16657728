"""Images in flat rows: rows with the same image, the places of its tokens, and the model's inputs for it.

A row has a run of equal placeholder tokens for each image, which the model replaces by the features of its vision
tower. While a batch is planned, these tokens are negative numbers that name the image: prompts of equal text and
different images then differ, and a shared prefix never ends within an image. The model gets its placeholder token, the
images of the row in the order of their tokens, and the positions of every sequence from its `get_rope_index`. It adds
features, and DeepStack's features in later layers, at the placeholder tokens.

Legend: T tokens of a flat row, D numbers of a patch.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any, Self

import numpy as np
import torch

from trl_ext.packing.layout import PackedRow
from trl_ext.packing.plan import PlannedRow, Segment
from trl_ext.packing.ragged import Ragged

# Arguments of packed forwards that describe the flat row and not the patches of its images.
_OF_ROWS = ("segments", "state_order", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")
_MARK = "_trl_ext_sees_patches_alone"


@dataclass(frozen=True, eq=False)
class Image:
    """An image as patches [patches, D], from a processor.

    `grid` counts patches in time, height and width. `digest` is a hash: images with different digests differ.
    """

    pixels: torch.Tensor
    grid: tuple[int, int, int]
    digest: int


# The images of each row of a batch, in their order in the row.
ImageRows = Sequence[tuple[Image, ...]]


def images_of(pixels: Sequence[torch.Tensor], grids: Sequence[Sequence[int]]) -> list[Image]:
    """Return images of these patches and grids, as in `Image`."""
    digests = torch.stack([_digest(one) for one in pixels]).tolist() if len(pixels) else []
    shapes = [(int(t), int(h), int(w)) for t, h, w in grids]
    return [Image(*one) for one in zip(pixels, shapes, digests, strict=True)]


def one_of_each(rows: ImageRows) -> list[tuple[Image, ...]]:
    """Return the images of rows, with a single object for equal images."""
    known: dict[Any, list[Image]] = {}

    def first_alike(image: Image) -> Image:
        alike = known.setdefault((image.grid, image.digest), [])
        for other in alike:
            if other is image or torch.equal(other.pixels, image.pixels):
                return other
        alike.append(image)
        return image

    return [tuple(map(first_alike, row)) for row in rows]


def _digest(pixels: torch.Tensor) -> torch.Tensor:
    """Return a hash, [] int64, of the bits of all patches and their order."""
    whole = {4: torch.int32, 2: torch.int16}[pixels.element_size()]
    of_patches = pixels.detach().contiguous().view(whole).sum(dim=1, dtype=torch.int64)
    return (of_patches * torch.full_like(of_patches, 0x5851F42D4C957F2D).cumprod(dim=0)).sum()


@dataclass(frozen=True, eq=False)
class ImageReader:
    """The way a model reads images.

    Args:
        model: The transformers backbone, whose `get_rope_index` returns positions.
        token_id: The placeholder token.
        patches_per_token: Patches whose features are merged into one token.
        patch_length: D.
    """

    model: Any
    token_id: int
    patches_per_token: int
    patch_length: int

    @classmethod
    def of(cls, model: Any) -> Self:
        """Return the reader of an unwrapped transformers model.

        Raises:
            AttributeError: The model does not read images as the Qwen families do; see `why_not_packed`.
        """
        vision = model.config.vision_config
        channels = vision.in_channels if hasattr(vision, "in_channels") else vision.in_chans
        length = channels * vision.temporal_patch_size * vision.patch_size**2
        return cls(model.base_model, model.config.image_token_id, vision.spatial_merge_size**2, length)

    def num_tokens(self, images: Iterable[Image]) -> int:
        """Return the number of placeholder tokens of these images."""
        return sum(math.prod(image.grid) // self.patches_per_token for image in images)

    def problem(self, counts: Sequence[int], rows: ImageRows) -> str:
        """Return a sentence about the first row whose image token count does not match its images; "" if all do."""
        for row, (count, shown) in enumerate(zip(counts, rows, strict=True)):
            if count != (needed := self.num_tokens(shown)):
                return (
                    f"Row {row} has {count} image tokens (id {self.token_id}), and its {len(shown)} images have "
                    f"{needed}. Either its prompt was cut within an image, or the policy sampled the token: forbid it "
                    f"by generation_kwargs={{'suppress_tokens': [{self.token_id}]}}, or of vLLM by logit_bias and "
                    "vllm_importance_sampling_correction=False."
                )
        return ""

    def blank(self) -> Image:
        """Return the smallest image: black, one token."""
        side = math.isqrt(self.patches_per_token)
        pixels = torch.zeros(self.patches_per_token, self.patch_length)
        return Image(pixels, (1, side, side), 0)


def why_not_packed(model: Any) -> str:
    """Return why rows with images are not packed for an unwrapped model, after "whose images"; "" if they are."""
    base = model.base_model
    if hasattr(base, "get_rope_index") and hasattr(base, "visual"):
        try:
            ImageReader.of(model)
        except AttributeError as error:
            return f"are described by other fields of its config ({error})"
        return ""
    if "token_type_ids" in getattr(type(base).forward, "__annotations__", {}):
        return "may see their own tokens in both directions, which no segment of a flat row does"
    return "have no positions by `get_rope_index` and no `image_grid_thw`, which images of Qwen2-VL to Qwen3.5 have"


def take_images(model: Any) -> None:
    """Hide the arguments about the flat row from the vision tower, whose tokens are patches; idempotent.

    `model` is an unwrapped transformers model for which `why_not_packed` is empty.
    """
    tower = model.base_model.visual
    if not getattr(tower, _MARK, False):
        setattr(tower, _MARK, True)
        tower.register_forward_pre_hook(_without_row, with_kwargs=True)


def _without_row(_tower: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, {name: value for name, value in kwargs.items() if name not in _OF_ROWS}


@dataclass(frozen=True, eq=False)
class BatchImages:
    """The images of a batch, for its flat rows.

    Args:
        reader: The model's.
        images: The images that placeholder tokens name: -1 the first, -2 the second.
        positions: [3, tokens] of every sequence; empty if no sequence has an image.
        runs_everywhere: Whether a forward without images still calls the vision tower, because another process's
            forward may have images: the gathers of ZeRO-3 and FSDP are collectives.
    """

    reader: ImageReader
    images: Sequence[Image]
    positions: Sequence[np.ndarray]
    runs_everywhere: bool

    @classmethod
    def of(cls, sequences: Ragged, rows: ImageRows, reader: ImageReader, runs_everywhere: bool) -> tuple[Ragged, Self]:
        """Return the sequences with placeholder tokens that name images, and the images.

        Args:
            sequences: Token ids by sequence.
            rows: The images of each sequence.
            reader: The way the model reads images.
            runs_everywhere: As in the class.
        """
        images = list(dict.fromkeys(chain.from_iterable(rows)))
        if not images:
            return sequences, cls(reader, (), (), runs_everywhere)
        number = {image: -1 - i for i, image in enumerate(images)}
        lengths = [reader.num_tokens([image]) for row in rows for image in row]
        names = np.repeat([number[image] for row in rows for image in row], lengths)
        tokens, shows = sequences.tokens.copy(), np.repeat([bool(row) for row in rows], sequences.lengths)
        is_image = (tokens == reader.token_id) & shows
        assert is_image.sum() == len(names), "`ImageReader.problem` has counted the image tokens of every row."
        tokens[is_image] = names
        return Ragged(tokens, sequences.starts), cls(
            reader, images, _positions(sequences, is_image, rows, reader), runs_everywhere
        )

    def take(self, rows: Sequence[int]) -> "BatchImages":
        """Return the images for some of the sequences, whose tokens name the same images."""
        return replace(self, positions=[self.positions[i] for i in rows] if self.positions else ())

    def put_into(self, packed: PackedRow, row: PlannedRow, sequences: Ragged) -> PackedRow:
        """Return the model's input `packed`, laid out from `row`, with its images.

        The placeholder tokens of `sequences` name images.
        """
        device = packed.input_ids.device
        of_segments = [sequences[s.item][s.offset : s.num_keys] for s in row.forwarded]
        names = np.concatenate(of_segments)
        shown: list[Image] = []
        token_id = self.reader.token_id
        if (names < 0).any():
            cache = packed.table.cache
            is_filler = len(row.segments) == 1 and row.segments[0].is_prefix and not (cache and cache.num_tokens)
            # A row that counts for nothing may hold the first tokens of an image: use any token instead.
            shown, token_id = ([], 0) if is_filler else (self._shown(names[names < 0]), token_id)
            packed = replace(
                packed,
                input_ids=packed.input_ids.masked_fill(packed.input_ids < 0, token_id),
                labels=packed.labels.masked_fill(packed.labels < 0, token_id),
            )
        if self.positions:
            parts = [self.positions[s.item][:, s.offset : s.num_keys] for s in row.forwarded]
            positions = torch.from_numpy(np.concatenate(parts, axis=1)).to(device, non_blocking=True)
            packed = replace(packed, position_ids=positions[:, None])
        if not shown and self.runs_everywhere:
            shown = [self.reader.blank()]
            table = packed.table
            end = table.segments[-1].end
            segments = (*table.segments, Segment(end, end + 1, row.segments[0].item, 0, None))
            asking = None if table.asking is None else [*table.asking, len(table.segments)]
            nobody = packed.input_ids.new_full((1, 1), self.reader.token_id)
            packed = replace(
                packed,
                input_ids=torch.cat([packed.input_ids, nobody], dim=1),
                position_ids=torch.cat([packed.position_ids, torch.zeros_like(packed.position_ids[..., :1])], dim=-1),
                table=replace(table, segments=segments, asking=asking),
            )
        if not shown:
            return packed
        inputs = {
            "pixel_values": torch.cat([image.pixels.to(device, non_blocking=True) for image in shown]),
            "image_grid_thw": torch.tensor([image.grid for image in shown], device=device),
        }
        return replace(packed, inputs=inputs)

    def _shown(self, names: np.ndarray) -> list[Image]:
        """Return the images that a row's placeholder tokens name, in order, repeated as in the row."""
        edges = [0, *(np.flatnonzero(np.diff(names)) + 1).tolist(), len(names)]
        shown = []
        for start, end in pairwise(edges):
            image = self.images[-1 - names[start]]
            times, rest = divmod(end - start, self.reader.num_tokens([image]))
            assert not rest, "Images are shared whole, and rows hold whole images."
            shown += [image] * times
        return shown


def _positions(sequences: Ragged, is_image: np.ndarray, rows: ImageRows, reader: ImageReader) -> list[np.ndarray]:
    """Return [3, tokens] positions of every sequence, by the model's rule.

    Args:
        sequences: Token ids of each sequence.
        is_image: [tokens of all sequences] True at image tokens.
        rows: The images of each sequence.
        reader: Knows the model's rule.
    """
    found = []
    for i, shown in enumerate(rows):
        here = slice(sequences.starts[i], sequences.starts[i + 1])
        if not shown:
            found.append(np.arange(sequences.starts[i + 1] - sequences.starts[i])[None].repeat(3, axis=0))
            continue
        positions, _ = reader.model.get_rope_index(
            torch.from_numpy(sequences.tokens[here])[None],
            mm_token_type_ids=torch.from_numpy(is_image[here].astype(np.int64))[None],
            image_grid_thw=torch.tensor([image.grid for image in shown]),
        )
        found.append(positions[:, 0].numpy())
    return found
