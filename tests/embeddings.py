"""Stand-ins for sentence-transformers models: texts are similar as far as they are about the same subjects."""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trl_ext.rewards.rules import relevance

# Volcanoes, bread, and sentences that say nothing.
SUBJECTS = (
    "volcano volcanoes magma erupt crust pressure lava rock gas chambers 火 山 岩 浆 熔 喷",
    "bread yeast oven dough bakes flour 面 包 酵 母 烤",
    "answer every aspect detail covers covered understand explain know tell say more which please nothing reason "
    "people think different matter matters",
)


def vector(word: str) -> list[float]:
    """A direction for each subject, and nothing for all other words."""
    return [float(word in subject.split()) for subject in SUBJECTS]


class Encoder:
    """What Relevance uses of a SentenceTransformer."""

    def encode(self, texts: list[str], **settings: Any) -> Any:
        import numpy as np

        rows = [
            np.sum(
                [vector(word) for word in re.findall(r"[a-z]+|[\u4e00-\u9fff]", text.lower())] or [vector("")], axis=0
            )
            for text in texts
        ]
        return np.array([row / (math.sqrt(float(row @ row)) or 1.0) for row in rows])


@pytest.fixture(scope="module")
def encoder() -> Iterator[Encoder]:
    """Relevance computes by a stand-in, without sentence-transformers."""
    stand_in = Encoder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(relevance, "encoder", lambda model, device: stand_in)
        yield stand_in


def save_model(folder: Path) -> Path:
    """Save a sentence-transformers model of few words; importorskip it first."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import StaticEmbedding
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["[UNK]", *" ".join(SUBJECTS).split()]
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    weights = torch.tensor([vector(word) for word in words])
    SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_weights=weights)], device="cpu").save(
        str(folder)
    )
    return folder
