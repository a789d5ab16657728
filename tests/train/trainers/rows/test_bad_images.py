"""Rows whose images cannot be trained on are named before step 1, and nothing is opened or fetched for them."""

import base64
import io
from typing import Any

import pytest
from datasets import Dataset, List
from datasets import Image as ImageFeature
from PIL import Image

from tests import grpo_trainers, tiny_images
from tests.tiny_images import image
from trl_ext.errors import DataError


def file(width: int, height: int) -> dict[str, Any]:
    content = io.BytesIO()
    Image.new("1", (width, height)).save(content, "PNG")
    return {"bytes": content.getvalue(), "path": None}


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def shown(*images: Any, features: Any = None, **columns: Any) -> Dataset:
    """Three good rows, and one with these images."""
    rows = {"prompt": [user("w9 w10")] * 4, "images": [[image(1)], list(images), [], [image(2)]]} | columns
    made = Dataset.from_dict(rows)
    return made if features is None else made.cast_column("images", features)


def part(**value: Any) -> Dataset:
    text = dict.fromkeys(value) | {"type": "text", "text": "w9"}
    return Dataset.from_dict({"prompt": [user([{"type": "image", "text": None, **value}, text])] * 4})


FILES = List(ImageFeature())
ADDRESS = "the address of an image, and none is opened but in a column of datasets' Image()"
BAD = {
    "a long image": (shown(file(3000, 4)), "row 1 has an image of 3000 x 4 pixels"),
    "a bomb": (shown(file(20_000, 20_000)), r"row 1 has an image that cannot be read \(Image size \(400000000 pixels"),
    "texts": (shown(images=[["/etc/passwd"]] * 4), "rows 0, 1, 2 and 1 more have " + ADDRESS.replace("(", r"\(")[:30]),
    "a text": (shown(image=["http://127.0.0.1:9/a.png"] * 4).remove_columns("images"), "have the address of an image"),
    "a part": (part(image="/etc/passwd"), "have the address of an image"),
    "another key": (part(image=None, url="http://127.0.0.1:9/a.png"), "have the address of an image"),
    "an address as a file": (
        shown(images=[["http://127.0.0.1:9/a.png"], [], [], []], features=FILES),
        r"row 0 has an image that cannot be read \(.*No such file",
    ),
    "its token": (shown(prompt=[user("w9"), user("w9 <|image_pad|> w10")] * 2), "rows 1, 3 have the text <.image_pad"),
}


def trainer(folder: Any, data: Any) -> Any:
    settings = dict(processing_class=tiny_images.processor(), rollout_func=None, data=data, max_steps=1)
    settings |= dict(per_device_train_batch_size=16)
    return grpo_trainers.trainer(folder, model=tiny_images.model("qwen2_5_vl"), **settings)


def test_images_that_nothing_can_be_trained_on_are_named(tmp_path, subtests, monkeypatch):
    opened: list[Any] = []
    monkeypatch.setattr("transformers.image_utils.load_image", opened.append)
    for kind, (data, sentence) in BAD.items():
        with subtests.test(kind), pytest.raises(DataError, match=sentence):
            trainer(tmp_path, data)
    assert not opened


def test_rows_of_a_stream_are_named_when_they_come(tmp_path, subtests):
    kinds = {
        "a long image": "an image of",
        "texts": "the address",
        "its token": "the text <.im",
    }
    for kind, sentence in kinds.items():
        with subtests.test(kind), pytest.raises(DataError, match=f"a row came with {sentence}"):
            trainer(tmp_path, BAD[kind][0].to_iterable_dataset()).train()


def test_images_in_files_and_in_the_text_itself_are_trained_on_and_rows_without_any_as_text(tmp_path, subtests):
    image(7).save(tmp_path / "a.png")
    data = "data:image/png;base64," + base64.b64encode((tmp_path / "a.png").read_bytes()).decode()
    good = {
        "files": shown(images=[[str(tmp_path / "a.png")], [], [], []], features=FILES),
        "data": shown(images=[[data], [], [data], [data]]),
        "null lists": shown(images=[[image(1)], None, [], [image(2), image(3)]]),
        "null images": shown(image=[image(1), None, image(2), None]).remove_columns("images"),
        "nulls alone": shown(images=[None] * 4, features=FILES),
    }
    for kind, rows in good.items():
        with subtests.test(kind):
            made = trainer(tmp_path, rows)
            made.train()
            assert made.state.global_step == 1
