"""What `samples/` holds besides texts: images of prompts."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from PIL import Image

from megatron_rl.data.images import PromptImages
from megatron_rl.data.rollout import Rollout
from megatron_rl.data.sample import Sample
from megatron_rl.evaluation.samples import write_samples


def test_images_are_kept_once_and_reduced(tmp_path: Path) -> None:
    def png(colour: str) -> bytes:
        file = io.BytesIO()
        Image.new("RGBA", (1200, 600), colour).save(file, "PNG")
        return file.getvalue()

    (tmp_path / "red.png").write_bytes(png("red"))
    reader: Any = None
    images = PromptImages(reader, (tmp_path / "red.png", png("blue")), (), (), 0)
    samples = [
        Sample("t/0", "t", "two", [1], images=images),
        Sample("t/1", "t", "one", [1], images=PromptImages(reader, images.sources[1:], (), (), 0)),
        Sample("t/2", "t", "none", [1]),
    ]
    rollouts = [Rollout.single_turn(sample, 0, [1], "stop") for sample in samples]
    write_samples(tmp_path / "samples" / "step_1.jsonl", samples, rollouts, [{}, {}, {}])
    rows = [json.loads(line) for line in (tmp_path / "samples" / "step_1.jsonl").read_text().splitlines()]
    assert rows[0]["images"][1:] == rows[1]["images"]
    assert "images" not in rows[2]
    assert sorted(path.name for path in (tmp_path / "samples" / "images").iterdir()) == sorted(rows[0]["images"])
    for name, colour in zip(rows[0]["images"], ((255, 0, 0), (0, 0, 255)), strict=True):
        with Image.open(tmp_path / "samples" / "images" / name) as image:
            assert image.size == (384, 192)
            pixel = image.convert("RGB").getpixel((9, 9))
        assert isinstance(pixel, tuple)
        assert all(abs(one - other) < 8 for one, other in zip(pixel, colour, strict=True))
