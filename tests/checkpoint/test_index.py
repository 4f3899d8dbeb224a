"""The index of a distributed checkpoint, read into stand-ins: torch's own objects come out, and no class is changed."""

from __future__ import annotations

import pickle
from collections import OrderedDict, deque
from pathlib import Path, PosixPath

import pytest
import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from megatron_rl.checkpoint import index, unpickle


def torchs_index(tensors: int = 2, chunks: int = 2) -> dcp.Metadata:
    """As torch writes it, with an object, a scalar, and a planner's part."""
    metadata = dcp.Metadata({}, storage_data={}, storage_meta=dcp.StorageMeta(PosixPath("/a"), "b"))
    offset = 0
    for number in range(tensors):
        name = f"layers.{number}.weight"
        parts = [dcp.ChunkStorageMetadata(torch.Size([8 * i, 0]), torch.Size([8, 4])) for i in range(chunks)]
        properties = dcp.TensorProperties(dtype=torch.bfloat16)
        metadata.state_dict_metadata[name] = dcp.TensorStorageMetadata(properties, torch.Size([8 * chunks, 4]), parts)
        for i, part in enumerate(parts):
            metadata.storage_data[dcp.MetadataIndex(name, part.offsets, i)] = _StorageInfo("__0_0.distcp", offset, 64)
            offset += 64
    metadata.state_dict_metadata["object"] = dcp.BytesStorageMetadata()
    metadata.storage_data[dcp.MetadataIndex("object")] = _StorageInfo("__0_0.distcp", offset, 64)
    item = WriteItem(dcp.MetadataIndex("object"), WriteItemType.BYTE_IO)
    metadata.planner_data = {"plan": SavePlan([item]), "names": {("a", 0), "b"}, "order": OrderedDict(a=1)}
    metadata.mcore_data = {"layers.0.weight": {"nd_reformulated_orig_global_shape": (16, 4)}}  # type: ignore[attr-defined]
    return metadata


def text(value: str) -> bytes:
    """Its code in a pickle of protocol 2."""
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


def write(folder: Path, data: bytes) -> Path:
    (folder / index.METADATA).write_bytes(data)
    return folder


def test_torchs_objects_come_out(tmp_path: Path) -> None:
    written = torchs_index()
    read = index.read_metadata(write(tmp_path, pickle.dumps(written)))
    assert type(read) is dcp.Metadata
    assert read.state_dict_metadata == written.state_dict_metadata
    assert read.storage_data == written.storage_data
    assert read.mcore_data == written.mcore_data  # type: ignore[attr-defined]
    assert type(read.state_dict_metadata["layers.0.weight"].size) is torch.Size
    tensors = index.read_tensors(tmp_path)
    assert tensors["layers.1.weight"].dtype == "bfloat16"
    assert [chunk.start for chunk in tensors["layers.1.weight"].chunks] == [(0, 0), (8, 0)]


NAMES = sorted({*index._KNOWN, *index._PLAIN, ("torch", "float32")})
STATES = [
    b"N}" + text("__truediv__") + b"Ns\x86",  # of slots, which are set one by one
    b"}" + text("__doc__") + b"Ns",
    b"N}" + text("__setstate__") + b"Ns\x86",
]


@pytest.mark.parametrize("state", STATES, ids=["slot", "dict", "setstate"])
@pytest.mark.parametrize(("module", "name"), NAMES, ids=[".".join(name) for name in NAMES])
def test_no_class_or_function_is_changed(module: str, name: str, state: bytes, tmp_path: Path) -> None:
    """Pickle's BUILD in front of a sound index."""
    gadget = f"c{module}\n{name}\n".encode() + state + b"b0"
    sound = pickle.dumps(torchs_index(), 2)
    write(tmp_path, sound[:2] + gadget + sound[2:])
    before = {kind: dict(vars(kind)) for kind in (PosixPath, index.Record)}
    for reader in (index.read_metadata, index.read_tensors):
        with pytest.raises(index.UnpickleError, match="cannot be read"):
            reader(tmp_path)
    assert {kind: dict(vars(kind)) for kind in before} == before


def test_what_a_call_has_made_keeps_its_state(tmp_path: Path) -> None:
    """A member of an enumeration is one for the whole process."""
    member = b"ctorch.distributed.checkpoint.planner\nWriteItemType\n" + b"(K\x02t" + b"R"
    sound = pickle.dumps(torchs_index(), 2)
    write(tmp_path, sound[:2] + member + b"}" + text("_value_") + b"K\x01" + b"sb0" + sound[2:])
    with pytest.raises(index.UnpickleError, match="what a call has made"):
        index.read_metadata(tmp_path)
    assert WriteItemType(2).value == 2


@pytest.mark.parametrize(
    "names",
    [
        *[("torch._utils", "_rebuild_tensor_v2"), ("collections", "deque"), ("collections", "OrderedDict")],
        ("transformer_engine.common.recipe", "DelayedScaling"),
    ],
    ids=lambda names: names[1],
)
def test_nor_by_the_state_of_a_layer(names: tuple[str, str]) -> None:
    """Transformer Engine unpickles it freely afterwards."""
    if names[0].startswith("transformer_engine"):
        pytest.importorskip("transformer_engine")
    data = b"\x80\x02" + f"c{names[0]}\n{names[1]}\n".encode() + b"N}" + text("__defaults__") + b"Ns\x86b."
    state = {"layer._extra_state": torch.frombuffer(bytearray(data), dtype=torch.uint8)}
    with pytest.raises(index.UnpickleError, match=r"layer\._extra_state cannot be read"):
        unpickle._check_extra_states(state, "model")
    sound = pickle.dumps({"history": deque([OrderedDict(a=1.0)], 4)})
    state = {"layer._extra_state": torch.frombuffer(bytearray(sound), dtype=torch.uint8)}
    unpickle._check_extra_states(state, "model")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (text("__0_0.distcp"), text("../0_0.distcp")),
        (text("bfloat16"), text("Tensor")),
        (b"K@", text("x")),
        (b"K@", b"G\x00\x00\x00\x00\x00\x00\x00\x00"),
    ],
    ids=["path", "dtype", "text", "float"],
)
def test_values_are_checked_before_torch_has_them(old: bytes, new: bytes, tmp_path: Path) -> None:
    chunk = index.Stored((0,), (4,), "__0_0.distcp", 64, 64)
    index.write(tmp_path, {"w": index.GlobalTensor((4,), "bfloat16", [chunk])}, {})
    data = pickle.dumps(pickle.loads((tmp_path / index.METADATA).read_bytes()), 2)
    data = data.replace(b"ctorch\nbfloat16\n", text("bfloat16"))
    write(tmp_path, data)
    assert index.read_metadata(tmp_path).state_dict_metadata["w"].properties.dtype == torch.bfloat16
    write(tmp_path, data.replace(old, new))
    for reader in (index.read_metadata, index.read_tensors):
        with pytest.raises(index.UnpickleError):
            reader(tmp_path)


@pytest.mark.parametrize("index_of", [0, 1])
def test_a_chunk_that_lies_nowhere_is_not_left_as_it_is(index_of: int, tmp_path: Path) -> None:
    damaged = torchs_index()
    del damaged.storage_data[dcp.MetadataIndex("layers.1.weight", torch.Size([8 * index_of, 0]))]
    write(tmp_path, pickle.dumps(damaged))
    for reader in (index.read_metadata, index.read_tensors):
        with pytest.raises(index.UnpickleError, match=r"where the chunk at .* of layers.1.weight lies"):
            reader(tmp_path)


def test_a_key_that_would_take_years_to_hash_is_refused(tmp_path: Path) -> None:
    """Each of forty tuples holds the one before twice."""
    nested = b"(t" + b"2\x86" * 40
    for key in (nested, b"(" * 100_000 + b"t" * 100_000):  # or 100,000 of them each the next: C's stack would overflow
        write(tmp_path, b"\x80\x02}" + key + b"Ns.")
        for reader in (index.read_metadata, index.read_tensors):
            with pytest.raises(index.UnpickleError, match="a key is a tuple of tuples"):
                reader(tmp_path)
