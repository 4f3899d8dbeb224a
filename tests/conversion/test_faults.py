"""What is damaged, misnamed or of another model is refused, with its tensor, file or field named."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from models import tiny
from safetensors.torch import load_file, save_file

from megatron_rl.checkpoint import manifest, unpickle
from megatron_rl.checkpoint.contents import contents
from megatron_rl.checkpoint.convert import jobs, source, verify
from megatron_rl.checkpoint.convert.layout import Layout
from megatron_rl.checkpoint.convert.source import config_folder, megatron_folder
from megatron_rl.checkpoint.convert.to_hf import ToHF
from megatron_rl.checkpoint.convert.to_megatron import ToMegatron
from megatron_rl.checkpoint.convert.verify import compare
from megatron_rl.weights.files import INDEX
from tests.checkpoint.hostile import HIDING_PLACES, Command

from .convert import to_hf, to_megatron

DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`hf` in several files and with checksums, `megatron` in several files; from the same model."""
    root = tmp_path_factory.mktemp("originals")
    tiny.write(root / "source", "qwen3", num_hidden_layers=2)
    to_megatron(root / "source", root / "megatron", Layout(2), file_bytes=20_000)
    to_hf(root / "megatron", root / "hf", file_bytes=20_000)
    return root


@pytest.fixture
def hf(originals: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals / "hf", tmp_path / "hf"))


@pytest.fixture
def megatron(originals: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals / "megatron", tmp_path / "megatron"))


def shard_of(folder: Path, name: str) -> Path:
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][name]


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def set_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def refused(task: ToMegatron | ToHF, target: Path, *patterns: str) -> None:
    """The task fails with a message that matches every pattern, and leaves nothing."""
    partial = target.with_name(f".{target.name}.converting")
    others = partial.exists()  # another process's
    with pytest.raises(ValueError, match=patterns[0]) as error:
        jobs.run(task, target, 1, lambda _: None)
    for pattern in patterns:
        assert re.search(pattern, str(error.value)), f"{pattern!r} is not in: {error.value}"
    assert not target.exists()
    assert partial.exists() == others


# ------------------------------------------------------------------------------------------------ Hugging Face as source
def test_a_truncated_shard(hf: Path, tmp_path: Path) -> None:
    path = shard_of(hf, DOWN)
    os.truncate(path, path.stat().st_size - 100)
    refused(ToMegatron(hf, Layout()), tmp_path / "out", re.escape(path.name), r"model\.[\w.]+ should have \d+ bytes")


def test_a_missing_shard(hf: Path, tmp_path: Path) -> None:
    path = shard_of(hf, DOWN)
    path.unlink()
    refused(ToMegatron(hf, Layout()), tmp_path / "out", f"{path.name} is missing", r"it holds model\.")


def test_a_flipped_byte_where_the_folder_has_checksums(hf: Path, tmp_path: Path) -> None:
    piece = next(piece for piece in manifest.read_tensors(hf)[1] if piece.name == DOWN)
    flip(hf / piece.file, piece.offset + piece.length // 2)
    refused(ToMegatron(hf, Layout()), tmp_path / "out", f"{piece.file} is damaged in tensor {re.escape(DOWN)}")


@pytest.mark.parametrize(("dtype", "pattern"), [(torch.float16, "F16"), (torch.float8_e4m3fn, "F8_E4M3")])
def test_a_tensor_of_another_dtype(hf: Path, tmp_path: Path, dtype: torch.dtype, pattern: str) -> None:
    path = shard_of(hf, DOWN)
    held = load_file(path)
    held[DOWN] = held[DOWN].to(dtype)
    save_file(held, path)
    refused(ToMegatron(hf, Layout()), tmp_path / "out", re.escape(DOWN), pattern, re.escape(path.name))


def test_a_lone_dtype_that_the_config_does_not_know(hf: Path, tmp_path: Path) -> None:
    path = shard_of(hf, "lm_head.weight")
    held = load_file(path)
    held["lm_head.weight"] = held["lm_head.weight"].half()
    save_file(held, path)
    refused(ToMegatron(hf, Layout()), tmp_path / "out", r"lm_head\.weight in .* has dtype F16, but config\.json says")


def test_a_renamed_tensor(hf: Path, tmp_path: Path) -> None:
    path, index = shard_of(hf, DOWN), hf / INDEX
    held = load_file(path)
    held["model.layers.1.mlp.down.weight"] = held.pop(DOWN)
    save_file(held, path)
    refused(ToMegatron(hf, Layout()), tmp_path / "out", f"{path.name} does not hold {re.escape(DOWN)}")
    index.write_text(index.read_text().replace(DOWN, "model.layers.1.mlp.down.weight"))
    refused(ToMegatron(hf, Layout()), tmp_path / "out", f"lacks {re.escape(DOWN)}")


# --------------------------------------------------------------------------------------------------- Megatron as source
def test_a_truncated_file(megatron: Path, tmp_path: Path) -> None:
    os.truncate(megatron / "__1_0.distcp", 5000)
    refused(ToHF(megatron, megatron), tmp_path / "out", r"__1_0\.distcp", r"it held tensor \w+\.")
    (megatron / manifest.TENSORS).unlink()  # a plain checkpoint has no list
    refused(
        ToHF(megatron, megatron), tmp_path / "out", r"__1_0\.distcp is cut short", r"tensor \w+\.[\w.]+ ends at byte"
    )


def test_a_missing_file(megatron: Path, tmp_path: Path) -> None:
    (megatron / "__1_0.distcp").unlink()
    refused(ToHF(megatron, megatron), tmp_path / "out", r"__1_0\.distcp is missing", r"it held tensor \w+\.")
    (megatron / manifest.TENSORS).unlink()
    refused(ToHF(megatron, megatron), tmp_path / "out", r"__1_0\.distcp is missing", r"it holds tensor \w+\.")


def test_a_flipped_byte(megatron: Path, tmp_path: Path) -> None:
    piece = next(p for p in manifest.read_tensors(megatron)[1] if p.name.endswith("mlp.linear_fc2.weight"))
    flip(megatron / piece.file, piece.offset + piece.length // 2)
    refused(ToHF(megatron, megatron), tmp_path / "out", f"{piece.file} is damaged in tensor {re.escape(piece.name)}")


def test_a_renamed_tensor_of_a_plain_checkpoint(megatron: Path, tmp_path: Path) -> None:
    (megatron / manifest.TENSORS).unlink()
    path = megatron / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    name = "decoder.layers.mlp.linear_fc2.weight"
    metadata.state_dict_metadata["decoder.layers.mlp.fc2.weight"] = metadata.state_dict_metadata.pop(name)
    for index in [index for index in metadata.storage_data if index.fqn == name]:
        moved = type(index)("decoder.layers.mlp.fc2.weight", index.offset)
        metadata.storage_data[moved] = metadata.storage_data.pop(index)
    path.write_bytes(pickle.dumps(metadata))
    refused(
        ToHF(megatron, megatron), tmp_path / "out", f"lacks {name}", r"unexpected decoder\.layers\.mlp\.fc2\.weight"
    )


@pytest.mark.parametrize("place", ["metadata", "planner"])
def test_an_index_that_runs_a_command(megatron: Path, tmp_path: Path, place: str) -> None:
    """Neither conversion nor its verification nor inspection runs what the index names."""
    named = r"\.metadata names posix\.system"
    to_hf(megatron, tmp_path / "good")
    HIDING_PLACES[place](megatron, tmp_path / "ran")
    refused(ToHF(megatron, megatron), tmp_path / "out", named)
    for look in (lambda: compare(ToHF(megatron, megatron), tmp_path / "good", 1), lambda: contents(megatron)):
        with pytest.raises(ValueError, match=named):
            look()
    assert not (tmp_path / "ran").exists()


def test_an_index_that_points_outside(megatron: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes((megatron / "__0_0.distcp").read_bytes())
    path = megatron / ".metadata"
    path.write_bytes(path.read_bytes().replace(b"__0_0.distcp", b"../elsewhere"))
    (megatron / manifest.TENSORS).unlink()
    refused(ToHF(megatron, megatron), tmp_path / "out", r"points at a file outside the checkpoint: '\.\./elsewhere'")


# ------------------------------------------------------------------------------------------------ another model's config
FIELDS = {
    "hidden_size": 64,
    "num_key_value_heads": 4,
    "num_attention_heads": 8,
    "intermediate_size": 64,
    "vocab_size": 59,
    "num_hidden_layers": 1,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize(("name", "value"), FIELDS.items(), ids=FIELDS)
def test_a_config_that_does_not_fit_its_weights(
    hf: Path, megatron: Path, tmp_path: Path, name: str, value: Any
) -> None:
    for folder in (hf, megatron):
        set_config(folder, **{name: value})
    (megatron / manifest.TENSORS).unlink()  # else the changed config.json itself is what is found
    refused(ToMegatron(hf, Layout()), tmp_path / "out", name)
    refused(ToHF(megatron, megatron), tmp_path / "out", name)


def test_a_config_with_other_experts(tmp_path: Path) -> None:
    source = tiny.write(tmp_path / "source", "qwen3_moe", num_hidden_layers=1)
    to_megatron(source, tmp_path / "megatron")
    set_config(source, num_experts=4, num_local_experts=4)
    refused(ToMegatron(source, Layout()), tmp_path / "out", "num_experts = 4")
    refused(ToHF(tmp_path / "megatron", source), tmp_path / "out", "num_experts = 4")


@pytest.mark.parametrize(
    ("variant", "field", "count"), [("glm4_moe", "n_routed_experts", 8), ("gpt_oss", "num_local_experts", 4)]
)
def test_what_config_json_calls_the_number_of_experts(tmp_path: Path, variant: str, field: str, count: int) -> None:
    source = tiny.write(tmp_path / "source", variant)
    to_megatron(source, tmp_path / "megatron")
    set_config(source, **{field: count})
    refused(ToMegatron(source, Layout()), tmp_path / "out", f"{field} = {count}")
    refused(ToHF(tmp_path / "megatron", source), tmp_path / "out", f"{field} = {count}")


def test_more_experts_per_token_than_experts(tmp_path: Path) -> None:
    source = tiny.write(tmp_path / "source", "qwen3_moe", num_hidden_layers=1)
    refused(ToMegatron(source, Layout(expert_tensor=5)), tmp_path / "out", "--expert-tensor 5: moe_intermediate_size")
    set_config(source, num_experts_per_tok=9)
    refused(ToMegatron(source, Layout()), tmp_path / "out", "num_experts_per_tok = 9: the model has 8 experts")


def test_an_unknown_family(hf: Path, tmp_path: Path) -> None:
    set_config(hf, architectures=["GemmaForCausalLM"])
    refused(ToMegatron(hf, Layout()), tmp_path / "out", "GemmaForCausalLM")


# ---------------------------------------------------------------------------------------------------- layout and folders
@pytest.mark.parametrize(
    ("layout", "pattern"),
    [
        (Layout(pipeline=3), r"--pipeline 3: num_hidden_layers = 2: 2 layers cannot"),
        (Layout(expert=2), r"--expert 2: the model has no experts"),
        (Layout(tensor=3), r"--tensor 3: num_key_value_heads = 2"),
        (Layout(tensor=8), r"--tensor 8: num_attention_heads = 4"),
        (Layout(tensor=0), r"--tensor 0: must be at least 1"),
        (Layout(expert_tensor=0), r"--expert-tensor 0: must be at least 1"),
        (Layout(expert_tensor=2), r"--expert-tensor 2: the model has no experts"),
    ],
)
def test_a_layout_that_the_model_cannot_have(hf: Path, tmp_path: Path, layout: Layout, pattern: str) -> None:
    refused(ToMegatron(hf, layout), tmp_path / "out", pattern)


def test_a_target_that_is_something_else(hf: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="exists and is not the result of this conversion"):
        jobs.run(ToMegatron(hf, Layout()), tmp_path / "out", 1, lambda _: None)
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"


def test_two_conversions_into_one_folder(hf: Path, tmp_path: Path) -> None:
    partial = tmp_path / ".out.converting"
    partial.mkdir()
    with jobs._only_writer(partial, tmp_path / "out"):
        refused(ToMegatron(hf, Layout()), tmp_path / "out", "another process is converting into .*out")


def test_verification_names_a_tensor_that_differs(hf: Path, megatron: Path, tmp_path: Path) -> None:
    task = to_hf(megatron, tmp_path / "out")
    piece = next(piece for piece in manifest.read_tensors(tmp_path / "out")[1] if piece.name == DOWN)
    flip(tmp_path / "out" / piece.file, piece.offset)
    with pytest.raises(ValueError, match=rf"{re.escape(DOWN)} in .*{piece.file} is not what the source holds"):
        compare(task, tmp_path / "out", 1)


@pytest.mark.parametrize("place", ["first", "last"])
def test_every_block_of_a_tensor_is_compared(
    megatron: Path, tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "_BLOCK", 1000)  # a few rows
    task = to_hf(megatron, tmp_path / "out")
    piece = next(piece for piece in manifest.read_tensors(tmp_path / "out")[1] if piece.name == DOWN)
    compared = {one.name: one for one in compare(task, tmp_path / "out", 1)}
    assert list(compared) == task.names()
    assert compared[DOWN] == verify.Compared(DOWN, piece.length, piece.digest, piece.digest)
    flip(tmp_path / "out" / piece.file, piece.offset + (0 if place == "first" else piece.length - 1))
    with pytest.raises(ValueError, match=rf"{re.escape(DOWN)} .* is not what the source holds"):
        compare(task, tmp_path / "out", 1)


def test_the_ends_of_a_source_tell_whether_it_is_the_same(
    hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where size and time of change are."""
    monkeypatch.setattr(source, "_SAMPLE", 8)
    path, before = hf / "tokenizer.json", ("*.safetensors", INDEX)
    path.write_text("{}")
    first = source.fingerprint(hf, before)
    names = [row[0] for row in first]
    assert {"config.json", "tokenizer.json", INDEX} < set(names)
    assert names == sorted(names)
    for changed in (path, hf / "config.json", shard_of(hf, DOWN)):
        time, size = changed.stat().st_mtime_ns, changed.stat().st_size
        for offset in {0, min(7, size - 1), max(0, size - 8), size - 1}:
            flip(changed, offset)
            os.utime(changed, ns=(time, time))
            found = source.fingerprint(hf, before)
            assert [row[0] for row, old in zip(found, first, strict=True) if row != old] == [changed.name]
            flip(changed, offset)
            os.utime(changed, ns=(time, time))
        assert source.fingerprint(hf, before) == first
        os.utime(changed, ns=(time, time + 1))
        assert source.fingerprint(hf, before) != first
        os.utime(changed, ns=(time, time))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_fp8_cannot_hold_is_refused_by_name(hf: Path, tmp_path: Path, value: float) -> None:
    path = shard_of(hf, DOWN)
    held = load_file(path)
    held[DOWN][-1, -1] = value
    save_file(held, path)
    (hf / manifest.TENSORS).unlink()
    to_megatron(hf, tmp_path / "megatron")
    task = ToHF(tmp_path / "megatron", tmp_path / "megatron", dtype="fp8")
    refused(task, tmp_path / "out", rf"{re.escape(DOWN)} in .*distcp cannot be stored in FP8: .* not finite")


def test_rows_that_hold_values_are_no_padding(originals: Path, tmp_path: Path) -> None:
    """A config whose vocabulary is smaller than the checkpoint's would cut tokens off."""
    config = tmp_path / "config"
    shutil.copytree(originals / "hf", config)
    set_config(config, vocab_size=tiny.VOCAB - 1)
    task = ToHF(originals / "megatron", config)
    refused(task, tmp_path / "out", r"word_embeddings.* vocab_size = 60 of config\.json on are not zero")
    jobs.run(ToHF(originals / "megatron", config, any_padding=True), tmp_path / "out", 1, lambda _: None)


def test_where_a_checkpoint_and_its_config_are_looked_for(megatron: Path, originals: Path, tmp_path: Path) -> None:
    run = tmp_path / "iterations"
    shutil.copytree(megatron, run / "iter_0000010")
    (run / "latest_checkpointed_iteration.txt").write_text("10")
    assert megatron_folder(run) == run / "iter_0000010"
    (run / "latest_checkpointed_iteration.txt").unlink()
    with pytest.raises(ValueError, match="holds the checkpoints iter_0000010: name one"):
        megatron_folder(run)
    with pytest.raises(ValueError, match="does not exist"):
        megatron_folder(tmp_path / "nowhere")
    step = tmp_path / "run" / "checkpoints" / "step_3"
    shutil.copytree(megatron, step)
    assert config_folder(step, None) == step
    (step / "config.json").unlink()
    with pytest.raises(ValueError, match="--config"):
        config_folder(step, None)
    (tmp_path / "run" / "recipe.yaml").write_text(f"model: {{path: {originals / 'hf'}}}")
    assert config_folder(step, None) == originals / "hf"


def test_the_state_of_a_layer_is_looked_at_before_transformer_engine_unpickles_it(tmp_path: Path) -> None:
    """Transformer Engine keeps an FP8 layer's state as pickled bytes in a tensor, and unpickles whatever is there."""

    def state(content: Any) -> dict[str, Any]:
        data = torch.frombuffer(bytearray(pickle.dumps(content)), dtype=torch.uint8)
        return {"decoder": {"layers.0._extra_state": data}, 0: {}, "layers.1._extra_state": torch.empty(0)}

    unpickle._check_extra_states(state({"scale": torch.ones(2), "history": [1.0], "more": (None, True)}), "a")
    for hidden in (Command(tmp_path / "ran"), {"scale": [torch.ones(2), Command(tmp_path / "ran")]}):
        with pytest.raises(ValueError, match=r"^a\.layers\.0\._extra_state names posix\.system"):
            unpickle._check_extra_states(state(hidden), "a")
    with pytest.raises(ValueError, match=r"^a\.layers\.0\._extra_state names posix\.system"):
        unpickle._check_extra_states(state(Storage(Command(tmp_path / "ran"))), "a")
    good, bad = io.BytesIO(), io.BytesIO()  # as older versions keep it
    torch.save({"scale": torch.ones(2)}, good)
    torch.save(Command(tmp_path / "ran"), bad)
    unpickle._check_extra_states({"b._extra_state": good}, "a")
    with pytest.raises(ValueError, match=r"^a\.b\._extra_state names posix\.system"):
        unpickle._check_extra_states({"b._extra_state": bad}, "a")
    assert not (tmp_path / "ran").exists()


class Storage:
    """Pickled as the storage of a tensor is, a call of torch's own loader; but with something else inside."""

    def __init__(self, content: Any) -> None:
        buffer = io.BytesIO()
        torch.save(content, buffer)
        self._data = buffer.getvalue()

    def __reduce__(self) -> tuple[Any, tuple[bytes]]:
        return torch.storage._load_from_bytes, (self._data,)
