"""Images in prompts: where they stand, what is refused, and what is drawn."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from megatron_rl.config.model import CreateModelConfig, CreateVisionConfig
from megatron_rl.config.schema import ColumnsConfig, TaskConfig, TasksConfig
from megatron_rl.data.images import ImageReader, fingerprint, open_image
from megatron_rl.data.tokenizer import Tokenizer
from megatron_rl.models import model_of, read_hf_config
from megatron_rl.tasks import first_items, load_task, load_tasks
from megatron_rl.weights.create import create_model


def gif(width: int, height: int) -> bytes:
    """Of 35 bytes, whatever its size."""
    frame = b"," + struct.pack("<HHHHB", 0, 0, width, height, 0) + b"\x02\x02\x44\x01\x00;"
    return b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + bytes(6) + frame


SHAPE = CreateModelConfig(
    layers=1,
    hidden_size=32,
    heads=1,
    kv_heads=1,
    characters="0123456789+-=#rgbyFindx?",
    vision=CreateVisionConfig(1),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeing") / "model"
    create_model(folder, SHAPE, 0)
    return folder


@pytest.fixture(scope="module")
def reader(folder: Path) -> ImageReader:
    vision = model_of(read_hf_config(folder)).description.vision
    assert vision is not None
    return ImageReader(folder, vision)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def png(width: int = 40, height: int = 24, mode: str = "RGB", colour: object = 0) -> bytes:
    file = io.BytesIO()
    Image.new(mode, (width, height), colour).save(file, "PNG")
    return file.getvalue()


def task(folder: Path, *rows: dict[str, object]) -> TaskConfig:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return TaskConfig(source="jsonl", path=str(folder / "rows.jsonl"), columns=ColumnsConfig(images="images"))


def test_an_image_stands_where_its_mark_is(tmp_path: Path, reader: ImageReader, tokenizer: Tokenizer) -> None:
    (tmp_path / "a.png").write_bytes(png())
    (tmp_path / "b.png").write_bytes(png(16, 48))
    rows = {"prompt": "Find<image>x<image>?", "images": ["a.png", "b.png"]}, {"prompt": "x", "images": "b.png"}
    two, one = load_task("t", task(tmp_path, *rows, {"prompt": "x", "images": None}), tokenizer, reader)[:2]
    assert two.images is not None
    assert two.images.grid == ((1, 6, 10), (1, 12, 4))
    assert two.images.counts == [15, 12]
    assert two.images.first == (5, 5 + 15 + 3)
    assert len(two.prompt_ids) == two.images.length == 4 + 1 + 2 * 2 + 15 + 12 + 1
    assert [two.prompt_ids[at] for at in two.images.slots] == [reader.vision.image_token] * 27
    assert (
        two.images.collapsed(two.prompt_ids)
        == tokenizer(two.prompt.replace("<image>", reader.vision.image_text))["input_ids"]
    )
    assert two.images.pixels().shape == (60 + 48, 96)
    sent = pickle.loads(pickle.dumps(two.images))  # as split placement sends it to an engine
    assert sent.collapsed(two.prompt_ids) == two.images.collapsed(two.prompt_ids)
    positions = two.images.positions(len(two.prompt_ids) + 2)
    assert positions[:, :6].tolist() == [[0, 1, 2, 3, 4, 5]] * 3
    assert positions[:, 5:10].tolist() == [[5] * 5, [5] * 5, [5, 6, 7, 8, 9]]  # the first row of the first image
    assert positions[:, 20].tolist() == [10] * 3  # after the largest of its 3 rows and 5 columns
    assert one.images is not None
    assert one.images.first == (1,)  # without a mark the image comes first


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "does not exist"),
        (b"no image", "cannot be read as an image"),
        (png(256, 256)[:-40], "cannot be read as an image"),
        (png(mode="I;16"), "mode I;16"),
        (png(2000, 5), "aspect ratio"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n", "cannot be read as an image"),
        (b"DDS " + b"\x7c" + bytes(200), "cannot be read as an image"),
        (png()[:20] + b"\xff" + png()[21:], "cannot be read as an image"),
        (gif(9000, 9000), "9000 x 9000 pixels are more than"),
    ],
    ids=["missing", "no image", "cut", "16 bits", "narrow", "PostScript", "DDS", "chunk", "large"],
)
def test_a_bad_image_is_named(
    tmp_path: Path, reader: ImageReader, tokenizer: Tokenizer, content: bytes | None, said: str
) -> None:
    if content is not None:
        (tmp_path / "bad.png").write_bytes(content)
    with pytest.raises(ValueError, match=rf"t/0: .*bad\.png.*{said}"):
        load_task("t", task(tmp_path, {"prompt": "x", "images": "bad.png"}), tokenizer, reader)
    if "aspect" not in said:  # that depends on the model
        with pytest.raises(ValueError, match=rf"line 1: .*bad\.png.*{said}"):  # before anything starts
            first_items(task(tmp_path, {"prompt": "x", "images": "bad.png"}))


def test_a_pipe_is_no_image(tmp_path: Path, reader: ImageReader, tokenizer: Tokenizer) -> None:
    """Opening it would wait for ever."""
    os.mkfifo(tmp_path / "bad.png")
    with pytest.raises(ValueError, match=r"bad\.png is a pipe"):
        first_items(task(tmp_path, {"prompt": "x", "images": "bad.png"}))
    for read in (open_image, lambda source: fingerprint([source])):
        with pytest.raises(ValueError, match=r"bad\.png is a pipe"):
            read(tmp_path / "bad.png")


def test_what_does_not_fit_is_refused(
    tmp_path: Path, reader: ImageReader, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.png").write_bytes(png())
    config = task(tmp_path, {"prompt": "<image><image>", "images": "a.png"})
    with pytest.raises(ValueError, match="1 images, and its text a place for 2"):
        load_task("t", config, tokenizer, reader)
    with pytest.raises(ValueError, match="line 1: it has 1 images, and its text a place for 2"):
        first_items(config)
    with pytest.raises(ValueError, match="only a model with a vision tower"):
        load_task("t", config, tokenizer)
    config.columns.images = "pictures"
    with pytest.raises(ValueError, match=r"columns\.images: no column 'pictures'"):
        load_task("t", config, tokenizer, reader)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(ValueError, match=r"a\.png is too large"):
        load_task("t", task(tmp_path, {"prompt": "x", "images": "a.png"}), tokenizer, reader)


def test_transparent_parts_are_white() -> None:
    assert open_image(png(8, 8, "RGBA", (9, 9, 9, 0))).getpixel((0, 0)) == (255, 255, 255)


def test_other_images_make_another_prompt(tmp_path: Path, reader: ImageReader, tokenizer: Tokenizer) -> None:
    for name, colour in (("a", 0), ("b", "red"), ("c", 0)):
        (tmp_path / f"{name}.png").write_bytes(png(colour=colour))
    held = task(tmp_path, {"prompt": "x", "images": "a.png"})
    (tmp_path / "train").mkdir()
    rows = [{"prompt": "x", "images": f"../{name}.png"} for name in "abc"]
    config = task(tmp_path / "train", *rows)
    config.exclude = ["held"]
    loaded = load_tasks(TasksConfig(train={"t": config}, eval={"held": held}), tokenizer, reader)
    assert [sample.id for sample in loaded.train] == ["t/1"]  # the third image is the first one's copy


def test_bars_have_the_lengths_that_the_answer_needs(reader: ImageReader, tokenizer: Tokenizer) -> None:
    params = {"bars": 2, "longest": 5, "min_terms": 2, "max_terms": 2, "aligned": False}
    config = TaskConfig(source="bars", size=4, params=params)
    samples = load_task("t", config, tokenizer, reader)
    for sample, again in zip(samples, load_task("t", config, tokenizer, reader), strict=True):
        assert sample == again
        assert sample.images is not None
        [picture] = sample.images.pictures()
        ink = (np.asarray(picture) != 255).any(-1).reshape(2, 8, -1)[:, 4].sum(-1) // 4  # of each row, in units
        lengths = sample.metadata["lengths"]
        assert list(lengths.values()) == ink.tolist()
        assert eval(sample.prompt.rstrip("="), {}, lengths) == int(sample.answer) == eval(sample.metadata["expression"])
    config.params = {"blank": True}
    blank = load_task("t", config, tokenizer, reader)
    assert all((np.asarray(sample.images.pictures()[0]) == 255).all() for sample in blank if sample.images)
