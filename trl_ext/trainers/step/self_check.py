"""The packing self-checks: of a causal model with TRL's fused head, of a critic and of a reward model.

The same sequences are scored alone, padded and packed.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any

import numpy as np
import torch

from trl_ext.packing.check import CheckResult, Probe, check
from trl_ext.packing.families.images import Image, ImageReader
from trl_ext.packing.ragged import Ragged
from trl_ext.packing.ulysses import SequenceGroup
from trl_ext.trainers.forward.calls import calls_of, right_padded
from trl_ext.trainers.forward.pairs import pair_row
from trl_ext.trainers.forward.pooled_head import pooled_scores, scored_token, tokens_here, whole
from trl_ext.trainers.forward.roles import CRITIC
from trl_ext.trainers.rows.images import GivenImages
from trl_ext.trainers.step.score import score, score_values
from trl_ext.trainers.step.unpadded import Unpadded, plan


def check_causal_model(
    model: Any,
    config: Any,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager],
    half_precision: bool,
    share_prompt: bool,
    of_critic: bool = False,
    group: SequenceGroup | None = None,
    reader: ImageReader | None = None,
) -> CheckResult:
    """Score a few short rows alone, padded and packed; collective under ZeRO-3.

    Args:
        model: With packed attention installed, wrapped as training will call it, in evaluation mode.
        config: The config of the model's text part.
        autocast: Makes the context in which training calls the model.
        half_precision: True if weights or autocast are in bfloat16 or float16.
        of_critic: True to compare a critic's values instead of a policy's log-probabilities.
        group: Processes that share the packed rows, as in training.
        reader: Reader of images, if rows may have some: most prompts then begin with images.
    """
    images = None if reader is None else ProbeImages(reader, config.vocab_size)

    def packed(probes: list[Probe]) -> list[torch.Tensor]:
        batch = _unpadded(probes, images)
        rows = plan(batch, share_prompt)
        with autocast():
            if of_critic:
                numbers, _ = score_values(model, batch, rows, device, group=group, role=CRITIC)
            else:
                numbers = score(model, batch, rows, device, group=group).logps
        return [row[:n] for row, n in zip(numbers, batch.num_scored, strict=True)]

    def padded(probes: list[Probe]) -> list[torch.Tensor]:
        batch = _unpadded(_write_out(probes, images))
        ids, mask = right_padded([one.tolist() for one in batch.sequences], 0, device)
        options = {} if images is None else images.inputs(probes, ids)
        with autocast():
            if of_critic:
                options |= {"use_cache": False, "role": CRITIC}
                numbers = model(input_ids=ids, attention_mask=mask, **options).token_values
            else:
                labels = ids.masked_fill(mask == 0, -100)
                options |= {"labels": labels, "fused_lm_head": True}
                numbers = model(input_ids=ids, attention_mask=mask, **options).log_probs
        ends = zip(numbers, batch.sequences, batch.num_scored, strict=True)
        # The head shifts: the number of token t is at t - 1.
        return [row[len(s) - 1 - n : len(s) - 1] for row, s, n in ends]

    what = "values" if of_critic else "log-probabilities"
    return check(lambda probe: padded([probe])[0], padded, packed, config, half_precision, what)


class ProbeImages:
    """Two random images that prompts of the check begin with."""

    def __init__(self, reader: ImageReader, vocab_size: int):
        self.reader, self._vocab_size = reader, vocab_size
        dice, side = torch.Generator().manual_seed(0), math.isqrt(reader.patches_per_token)
        self._images = []
        for number, (height, width) in enumerate(((2, 3), (3, 2))):
            grid = (1, height * side, width * side)
            pixels = torch.randn(math.prod(grid), reader.patch_length, generator=dice)
            self._images.append(Image(pixels, grid, number))

    def rows(self, probes: list[Probe]) -> list[tuple[Image, ...]]:
        """Return the images of each probe, chosen by the length of its prompt: none, the first, the second or both."""
        first, second = self._images
        shown = [(), (second,), (first,), (first, second)]  # of prompts of 1, 6, 9 and 14 tokens
        return [shown[len(probe.prompt) // 4 % 4] for probe in probes]

    def written(self, probes: list[Probe]) -> list[Probe]:
        """Return the probes with image tokens only before the prompt, with a text token after each image."""
        token = self.reader.token_id
        text = (token + 1) % self._vocab_size

        def as_text(tokens: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(text if t == token else t for t in tokens)

        found = []
        for probe, images in zip(probes, self.rows(probes), strict=True):
            begin = [t for image in images for t in (*[token] * self.reader.num_tokens([image]), text)]
            found.append(Probe((*begin, *as_text(probe.prompt)), as_text(probe.completion)))
        return found

    def inputs(self, probes: list[Probe], ids: torch.Tensor) -> dict[str, Any]:
        """Return the model's arguments for the images of probes with the padded tokens `ids` [B, T]."""
        images = list(chain.from_iterable(self.rows(probes)))
        if not images:
            return {}
        return {
            "pixel_values": torch.cat([image.pixels for image in images]).to(ids.device),
            "image_grid_thw": torch.tensor([image.grid for image in images], device=ids.device),
            "mm_token_type_ids": (ids == self.reader.token_id).long(),
        }


def _write_out(probes: list[Probe], images: ProbeImages | None) -> list[Probe]:
    """Return the probes as the model reads them, with the tokens of their images."""
    return probes if images is None else images.written(probes)


def _unpadded(probes: list[Probe], images: ProbeImages | None = None) -> Unpadded:
    written = _write_out(probes, images)
    batch = Unpadded(
        sequences=Ragged.of([p.prompt + p.completion for p in written]),
        num_scored=np.array([len(p.completion) for p in written]),
        width=max(len(p.completion) for p in written),
    )
    return batch if images is None else batch.with_images(GivenImages(images.rows(probes), images.reader))


def check_reward_model(
    model: Any,
    head: torch.nn.Module,
    config: Any,
    pad_token_id: int,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager],
    half_precision: bool,
    share_prompt: bool,
    group: SequenceGroup | None = None,
) -> CheckResult:
    """Score a few short sequences alone, padded and packed as pairs, and compare. Collective under ZeRO-3.

    The head's scores and its inputs are compared, as a fresh head may be all zeros.

    Args:
        model: The model with packed attention and pooled head, wrapped as in training, in evaluation mode.
        head: Its layer `score`.
        config: The config of the model's text part.
        half_precision: True if weights or autocast are in bfloat16 or float16.
        group: Processes that share the packed rows, as in training.
    """

    def padded(probes: list[Probe]) -> list[torch.Tensor]:
        sequences = [probe.prompt + probe.completion for probe in probes]
        ids, mask = right_padded(sequences, pad_token_id, device)
        with autocast(), calls_of(head) as seen:
            scores = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        ends = [scored_token(s, pad_token_id) for s in sequences]
        (states, *_), _ = seen[-1]
        return _numbers([hidden[end] for hidden, end in zip(states, ends, strict=True)], scores)

    def packed(probes: list[Probe]) -> list[torch.Tensor]:
        sides = [list(probe.prompt + probe.completion) for probe in probes]
        pairs = [{"chosen_ids": c, "rejected_ids": r} for c, r in zip(sides[0::2], sides[1::2], strict=True)]
        row = pair_row(pairs, share_prompt, pad_token_id).to(device)
        with autocast(), calls_of(head) as seen:
            scores = pooled_scores(model, row.flat, row.pool_index, group)
        (states, *_), _ = seen[-1]
        states = whole(states, tokens_here(row.flat, row.pool_index, group), len(scores), group)
        numbers = _numbers(list(states), scores)
        # The row holds the ends of all chosen sides, then of all rejected sides.
        return [numbers[(i // 2) + (i % 2) * len(pairs)] for i in range(len(sides))]

    return check(lambda probe: padded([probe])[0], padded, packed, config, half_precision, what="scores")


def _numbers(hidden: list[torch.Tensor], scores: torch.Tensor) -> list[torch.Tensor]:
    """Return for each sequence its pooled hidden state, divided by its root mean square, and its score."""
    return [
        torch.cat([h.float() / h.float().square().mean().sqrt().clamp(min=1e-12), s.float()])
        for h, s in zip(hidden, scores, strict=True)
    ]
