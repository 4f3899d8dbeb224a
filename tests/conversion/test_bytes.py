"""What conversion does with bytes: reads each once, and writes what torch's own loader reads."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from models import tiny

from megatron_rl.checkpoint import manifest, unpickle
from megatron_rl.checkpoint.convert import archive
from megatron_rl.checkpoint.convert.layout import Layout
from megatron_rl.seams.torch_archive import around

from .convert import tensors, to_hf, to_megatron


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("bytes") / "hf", "qwen3", num_hidden_layers=2, dtype="bfloat16")


@pytest.mark.parametrize("layout", [Layout(), Layout(tensor=2, pipeline=2)])
def test_every_byte_of_a_tensor_is_read_once(
    hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: Layout
) -> None:
    total = sum(value.nbytes for value in tensors(hf).values())
    padding = (layout.tensor > 1) * 2 * 32 * 2  # a row of embedding and output layer, which the way back reads
    read, preadv = list[int](), os.preadv

    def counting(file: int, buffers: Sequence[memoryview], offset: int) -> int:
        read.append(preadv(file, buffers, offset))
        return read[-1]

    monkeypatch.setattr(os, "preadv", counting)
    to_megatron(hf, tmp_path / "megatron", layout)
    assert sum(read) == total
    read.clear()
    to_hf(tmp_path / "megatron", tmp_path / "first", any_padding=True)
    assert sum(read) == total + padding
    read.clear()
    to_megatron(tmp_path / "first", tmp_path / "again", layout)  # a folder with checksums
    assert sum(read) == total


def test_torch_reads_what_is_written(hf: Path, tmp_path: Path) -> None:
    to_megatron(hf, tmp_path / "megatron", Layout(2))
    dtypes = set()
    for piece in manifest.read_tensors(tmp_path / "megatron")[1]:
        data = (tmp_path / "megatron" / piece.file).read_bytes()[piece.offset : piece.offset + piece.length]
        for weights_only in (True, False):
            value = torch.load(io.BytesIO(data), weights_only=weights_only)
        dtypes.add(value.dtype if isinstance(value, torch.Tensor) else None)
    assert dtypes == {torch.bfloat16, None}
    for tensor in unpickle.read_metadata(tmp_path / "megatron").state_dict_metadata.values():  # by torch's classes
        if hasattr(tensor, "chunks"):
            assert sum(chunk.sizes.numel() for chunk in tensor.chunks) == tensor.size.numel()


def test_a_tensor_beyond_4_gib(tmp_path: Path) -> None:
    """A plain zip has 32 bits for sizes; the file has a hole in place of most values."""
    size = (2**30 + 3, 2)
    head, tail = around("bfloat16", size)
    with (tmp_path / "a").open("wb") as file:
        file.write(head)
        file.seek(size[0] * 4 - 4, os.SEEK_CUR)
        file.write(b"\x80\x3f\x00\x40" + tail)
    values = torch.load(tmp_path / "a", mmap=True)
    assert values.shape == size
    assert values[-1].tolist() == [1.0, 2.0]
    with (tmp_path / "a").open("rb") as file:
        assert archive.read(file).nbytes == size[0] * 4


@pytest.mark.parametrize(
    "values", [torch.arange(24.0).view(4, 6).t(), torch.arange(24.0)[3:9], torch.ones(1).expand(5)]
)
def test_a_tensor_that_is_not_all_of_its_storage(values: torch.Tensor) -> None:
    file = io.BytesIO()
    torch.save(values, file)
    saved = archive.read(file)
    saved.check(len(file.getvalue()), 4)
    stored = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)[saved.offset : saved.offset + saved.nbytes]
    found = saved.strided(stored.view(torch.uint32).numpy())
    assert torch.equal(torch.from_numpy(found).view(torch.float32).view(saved.size), values)


def test_a_checkpoint_is_read_without_torch(hf: Path, tmp_path: Path) -> None:
    to_megatron(hf, tmp_path / "m", Layout(2))
    code = (
        "import sys\nfrom megatron_rl.cli import main\n"
        f"assert main(['convert', 'to-hf', '--megatron', {str(tmp_path / 'm')!r}, '--hf', {str(tmp_path / 'h')!r}]) == 0\n"
        "assert not {'torch', 'megatron'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
