"""Files of others that are no code: whatever is in them, a message names the file, and nothing waits."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.base.messages import ConfigError
from megatron_rl.base.plugins import read_yaml
from megatron_rl.config.actor_checks import _is_same_model
from megatron_rl.report.status import read_recipe
from megatron_rl.weights.files import INDEX, SafetensorsFolder, read_header


def bomb() -> str:
    """Of aliases: 9^9 values in 300 characters."""
    rows = ["a0: &a0 [1,1,1,1,1,1,1,1,1]"]
    rows += [f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9)]
    return "\n".join(rows)


@pytest.mark.parametrize(
    "text", [bomb(), "a: &a [*a]", "[" * 5000, "a: [", "a: !!python/object:x.y {}", "2001-99-99: 1"], ids=range(6)
)
def test_a_kept_recipe_that_is_none(text: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    began = time.process_time()
    with pytest.raises(ValueError, match=r"recipe\.yaml"):
        read_yaml(path)
    with pytest.raises(ConfigError, match=r"recipe\.yaml"):
        read_recipe(path)
    assert time.process_time() - began < 30  # written out, the first would take for ever


def header(content: object) -> bytes:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    return struct.pack("<Q", len(data)) + data


@pytest.mark.parametrize(
    "content",
    [
        {"w": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}},
        {"w": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}},
        {"w": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}},
        {"w": {"dtype": "F32", "shape": [1], "data_offsets": [0.0, 4]}},
        {"w": {"dtype": "F32", "shape": [1], "data_offsets": [4]}},
        {"w": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}},
        {"w": 1},
        [1],
        b"[" * 100_000,
        b'{"w": {"dtype": "F32", "shape": [' + b"9" * 5000 + b'], "data_offsets": [0, 4]}}',
        b"\xff",
    ],
    ids=range(11),
)
def test_a_header_of_safetensors_that_is_none(content: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(header(content) + bytes(4))
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        read_header(path)


@pytest.mark.parametrize(
    "index",
    [{"weight_map": {"w": 1}}, {"weight_map": {"w": None}}, {"weight_map": {"w": []}}, [], {"weight_map": []}]
    + [{"weight_map": {"w": name}} for name in ("x" * 5000, "../model.safetensors", "/etc/passwd", "a/../x", "\0")],
    ids=range(10),
)
def test_an_index_of_safetensors_that_is_none(index: object, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(header({}))
    folder = tmp_path / "folder"
    (folder / "a").mkdir(parents=True)
    (folder / "x").write_bytes(header({}))
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=INDEX):
        SafetensorsFolder(folder)


def test_adapters_of_a_model_with_a_long_name() -> None:
    assert not _is_same_model(Path("x" * 5000), Path("y"))
    assert not _is_same_model(Path("\0"), Path("y"))
