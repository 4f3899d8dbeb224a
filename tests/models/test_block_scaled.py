"""Published block-wise FP8: what is read is each value times its block's scale, rounded to bf16, in whatever slices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_rl.checkpoint.convert import jobs
from megatron_rl.checkpoint.convert.layout import Layout
from megatron_rl.checkpoint.convert.to_hf import ToHF
from megatron_rl.checkpoint.convert.to_megatron import ToMegatron
from megatron_rl.checkpoint.convert.verify import compare
from megatron_rl.models import family_for, model_of, read_hf_config
from megatron_rl.models.rules import shard_slices
from megatron_rl.weights.block_scaled import Unscaled
from megatron_rl.weights.files import SafetensorsFolder, as_bits
from megatron_rl.weights.gather import iter_hf_weights
from megatron_rl.weights.load_hf import load_hf_weights
from megatron_rl.weights.parallel import ParallelGroups
from megatron_rl.weights.stacked import opened

from . import tiny
from .megatron import build, spawn, start, stop
from .read_in_bf16 import check_is_read_as_by_transformers

FP8: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
}
# Edges of 64 and 8 numbers; halves of 520 begin inside the third block.
SIZES = {"hidden_size": 192, "intermediate_size": 520, "num_hidden_layers": 2, "dtype": "bfloat16"}
VARIANTS = {"qwen3_moe": {"moe_intermediate_size": 520, "num_experts": 3, "num_experts_per_tok": 2}, "deepseek_v3": {}}
SCALE = "_scale_inv"


def quantised(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values and scales of a matrix, and what they stand for, by float64."""
    rows, columns = weight.shape
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-rows // 128), -(-columns // 128))
    meant = torch.empty(weight.shape, dtype=torch.bfloat16)
    for row in range(0, rows, 128):
        for column in range(0, columns, 128):
            block = weight[row : row + 128, column : column + 128]
            scale = (block.double().abs().max() / 448).float()
            stored = (block.double() / scale).float().to(torch.float8_e4m3fn)
            values[row : row + 128, column : column + 128] = stored
            scales[row // 128, column // 128] = scale
            meant[row : row + 128, column : column + 128] = (stored.double() * scale.double()).to(torch.bfloat16)
    return values, scales, meant


def in_fp8(folder: Path, variant: str, **sizes: Any) -> dict[str, Tensor]:
    """Writes a folder as it is published, its first layer's attention in bf16, and returns the weights that it stands for."""
    tiny.write(folder, variant, **{**SIZES, **VARIANTS.get(variant, {}), **sizes})
    stored, meant = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if "_proj" in name and name.endswith(".weight") and "layers.0.self_attn" not in name:
            stored[name], stored[name + SCALE], meant[name] = quantised(weight)
        else:
            stored[name] = meant[name] = weight
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {**FP8, "modules_to_not_convert": ["lm_head", "model.layers.0.self_attn"]}
    (folder / "config.json").write_text(json.dumps(config))
    return meant


def changed(folder: Path, name: str, value: Tensor | None) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights[name]
    save_file(weights if value is None else {**weights, name: value}, folder / "model.safetensors", {"format": "pt"})


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Tensor]]]:
    root = tmp_path_factory.mktemp("fp8")
    meant = {variant: in_fp8(root / variant, variant) for variant in VARIANTS}
    torch.save(meant, root / "meant.pt")
    return root, meant


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("tp", [1, 2])
def test_every_rank_reads_its_slices_as_float64_has_them(
    published: tuple[Path, dict[str, dict[str, Tensor]]], variant: str, tp: int
) -> None:
    folder, expected = published[0] / variant, published[1][variant]
    model = model_of(read_hf_config(folder))
    files = opened(SafetensorsFolder(folder), model.family)
    assert files.names() == expected.keys()
    cut = 0
    for rule in model.weights():
        for piece in (piece for rank in range(tp) for piece in shard_slices(rule, model.dims, rank, tp)):
            name = rule.hf[piece.tensor].name
            found = files.read(name, rule.dim, piece.start, piece.stop)
            assert torch.equal(found, expected[name].narrow(rule.dim, piece.start, piece.length)), (name, piece)
            cut += piece.start % 128 > 0 and found.shape[rule.dim] > 128
    assert cut or tp == 1


def test_rows_and_experts_of_any_number_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_rl.weights.block_scaled._AT_ONCE", 40_000)
    each = [quantised(torch.randn(300, 136, generator=torch.Generator().manual_seed(seed))) for seed in range(4)]
    whole = {"gate_up_proj": torch.stack([values for values, _, _ in each]), "o.weight": each[0][0]}
    scales = {"gate_up_proj" + SCALE: torch.stack([scale for _, scale, _ in each]), "o.weight" + SCALE: each[0][1]}
    save_file(whole | scales, tmp_path / "model.safetensors")
    files = Unscaled(SafetensorsFolder(tmp_path))
    assert files.names() == {"gate_up_proj", "o.weight"}
    for name, expected in (("gate_up_proj", torch.stack([meant for _, _, meant in each])), ("o.weight", each[0][2])):
        assert files.dtype(name) == "BF16"
        for first, last in ((0, 1), (1, 3), (2, 4), (130, 300), (127, 129), (128, 256)):
            rows = expected[first:last]
            if len(rows):
                out = as_bits(torch.zeros_like(rows))
                files.read_into(out, name, first)
                assert (out == as_bits(rows)).all(), (name, first, last)


def check(rank: int, world: int, rendezvous: str, root: str) -> None:
    for variant, expected in torch.load(Path(root) / "meant.pt").items():
        folder = Path(root) / variant
        parallel = start(rank, world, f"{rendezvous}-{variant}", world)
        config = read_hf_config(folder)
        family = family_for(config)
        chunks = build(family, family.describe(config), parallel)
        load_hf_weights(chunks, family, config, folder, parallel)
        found = {name: value.clone() for name, value in iter_hf_weights(chunks, family, config, parallel)}
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value.to(found[name].dtype)), f"{variant}, rank {rank}: {name}"
        stop()


def test_two_ranks_load_it(tmp_path: Path, published: tuple[Path, dict[str, dict[str, Tensor]]]) -> None:
    spawn(check, 2, tmp_path, str(published[0]))


def test_it_is_loaded_as_transformers_dequantises_it_and_written_in_bf16(
    tmp_path: Path, parallel: ParallelGroups
) -> None:
    folder, export = tmp_path / "fp8", tmp_path / "export"
    in_fp8(folder, "qwen3", hidden_size=128, intermediate_size=256, head_dim=64)  # transformers wants whole blocks
    check_is_read_as_by_transformers(folder, export, parallel)


@pytest.mark.parametrize("variant", VARIANTS)
def test_it_is_converted_in_bf16(
    tmp_path: Path, published: tuple[Path, dict[str, dict[str, Tensor]]], variant: str
) -> None:
    expected, found = published[1][variant], dict[str, Tensor]()
    there, back = ToMegatron(published[0] / variant, Layout(2, 1, 1)), tmp_path / "back"
    jobs.run(there, tmp_path / "megatron", 1, lambda _: None)
    assert len(compare(there, tmp_path / "megatron", 1)) == len(there.names())
    jobs.run(ToHF(tmp_path / "megatron", tmp_path / "megatron"), back, 1, lambda _: None)
    for file in back.glob("*.safetensors"):
        found |= load_file(file)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    for folder in (tmp_path / "megatron", back):
        assert "quantization_config" not in json.loads((folder / "config.json").read_text())


NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        (NAME + SCALE, None, f"{NAME} in .* has dtype F8_E4M3, .* no {NAME}{SCALE} is beside it"),
        (NAME + SCALE, torch.ones(5, 1), r"\(520, 192\) of F8_E4M3 and .* \(5, 1\) of F32: block-wise FP8 has"),
        (NAME + SCALE, torch.ones(5, 2).bfloat16(), r"\(5, 2\) of BF16: block-wise FP8 has"),
        (NAME, torch.ones(520, 192), r"is \(520, 192\) of F32 and .* block-wise FP8 has"),
        (NAME, None, f"lacks {NAME}"),
    ],
)
def test_scales_that_do_not_fit_are_refused(tmp_path: Path, name: str, value: Tensor | None, problem: str) -> None:
    in_fp8(tmp_path / "fp8", "qwen3")
    changed(tmp_path / "fp8", name, value)
    with pytest.raises(ValueError, match=problem):
        ToMegatron(tmp_path / "fp8", Layout(1, 1, 1)).files()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("quant_method", "awq"),
        ("quant_method", "mxfp4"),
        ("fmt", "e5m2"),
        ("weight_block_size", None),
        ("weight_block_size", [64, 64]),
        ("activation_scheme", "static"),
        ("bits", 8),
    ],
)
@pytest.mark.parametrize("variant", ["qwen3", "deepseek_v3"])
def test_another_quantisation_is_refused_by_name(tmp_path: Path, variant: str, name: str, value: Any) -> None:
    config = read_hf_config(tiny.write(tmp_path / "model", variant, num_hidden_layers=2))
    said = {**FP8, "scale_fmt": "ue8m0", "modules_to_not_convert": ["lm_head"]}
    assert model_of(config).description == model_of({**config, "quantization_config": said}).description
    with pytest.raises(
        ValueError, match=f"`quantization_config.{name}` = .* block-wise FP8 is read, with quant_method"
    ):
        model_of({**config, "quantization_config": {**said, name: value}})
