"""Adapters in the Megatron model are PEFT's: log-probs, gradients and merged weights, at every layout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tolerance import LOG_PROB

from .layouts import distance
from .lora import ALPHA, ByHand, Layout, in_files, in_transformers, make, peft_scores, peft_update, run, with_peft
from .processes import spawn

pytestmark = pytest.mark.ranks
TOLERANCE = 1e-5  # relative, fp32
SOME = ("q_proj", "v_proj", "down_proj")
FULL = {"recompute": "full"}
DROPS: dict[str, Any] = {"targets": ("q_proj", "v_proj", "up_proj"), "dropout": 0.5}  # whose inputs are whole at any TP
ONE = [
    Layout("alone"),
    Layout("alone some", targets=SOME),
    Layout("alone experts", variant="qwen3_moe", experts=True),
    Layout("recompute full", actor=FULL),
    Layout("alone images", images="qwen2_5_vl"),
    Layout("alone dropout", **DROPS),
    Layout("recompute full dropout", actor=FULL, **DROPS),
]
TWO = [
    Layout("TP 2", tensor=2),
    Layout("TP 2 some", tensor=2, targets=SOME),
    Layout("TP 2 sequence", tensor=2, sequence=True, begins_again=True),
    Layout("TP 2 sequence recompute full", tensor=2, sequence=True, actor=FULL),
    Layout("TP 2 tied", variant="qwen2-tied", tensor=2),
    Layout("PP 2", pipeline=2),
    Layout("PP 2 virtual 2 tied", variant="qwen2-tied", pipeline=2, virtual=2),
    Layout("DP 2"),
    Layout("DP 2 plain optimizer", distributed=False),
    Layout("CP 2", context=2),
    Layout("TP 2 sequence recompute full images", images="qwen2_5_vl", tensor=2, sequence=True, actor=FULL),
    Layout("EP 2", variant="qwen3_moe", expert=2),
    Layout("EP 2 experts", variant="qwen3_moe", expert=2, experts=True),
    Layout("TP 2 EP 2 experts", variant="qwen3_moe", tensor=2, sequence=True, expert=2, experts=True),
    Layout("TP 2 dropout", tensor=2, **DROPS),
    Layout("PP 2 recompute full dropout", pipeline=2, actor=FULL, **DROPS),
    Layout("TP 2 whole experts", variant="qwen3_moe", tensor=2, sequence=True, experts=True),
    Layout("TP 2 sequence latents", variant="deepseek_v3", tensor=2, sequence=True, begins_again=True),
    Layout("EP 2 shared experts", variant="glm4_moe", expert=2),
    Layout("TP 2 sequence sinks", variant="gpt_oss", tensor=2, sequence=True, scale=1.5e-3),
    Layout("TP 2 gated delta", variant="qwen3_5", tensor=2, scale=3e-3),
    Layout("CP 2 gated delta", variant="qwen3_5", context=2, scale=3e-3),
    Layout("TP 2 sequence gated delta experts", variant="qwen3_5_moe", tensor=2, sequence=True, scale=3e-3),
    Layout("TP 2 deepstack", images="qwen3_vl", tensor=2),
]


OF_FAMILIES = (
    "TP 2 sequence latents",
    "EP 2 shared experts",
    "TP 2 sequence sinks",
    "TP 2 gated delta",
    "TP 2 deepstack",
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("lora")
    for layout in ONE + TWO:
        make(root, layout)
    spawn(run, 1, str(root), ONE)
    spawn(run, 2, str(root), TWO)
    return root


@pytest.fixture(scope="module")
def references(root: Path) -> dict[str, dict[str, Any]]:
    """By model: what PEFT makes of the same adapters; for experts, where it loads none, transformers with merged weights;
    with dropout, where PEFT draws other numbers, the actor on one process."""
    found = {}
    for layout in ONE + TWO:
        if layout.model in found:
            continue
        if layout.dropout:
            found[layout.model] = _result(root, "alone dropout")
            continue
        begin = root / layout.model / "begin"
        shutil.copy(root / layout.name / "adapter" / "adapter_config.json", begin)
        model = ByHand(root / layout.model, begin) if layout.experts else with_peft(root / layout.model, begin)
        batch = layout.batch(root)
        with model.disable_adapter():
            base = peft_scores(model, batch)
        before = peft_scores(model, batch)
        peft_update(model, batch, layout.scale)
        after = peft_scores(model, batch)
        adapters = {
            name.replace(".default", ""): value for name, value in model.named_parameters() if value.requires_grad
        }
        merged = _per_expert(in_files(model.merge_and_unload().state_dict(), layout.images))
        found[layout.model] = {
            "fresh": base,
            "reference": base,
            "before": before,
            "after": after,
            "adapters": adapters,
            "merged": merged,
        }
    return found


def _per_expert(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts under the names of files, which transformers has in two tensors a layer."""
    found = {}
    for name, value in weights.items():
        layer, experts, fused = name.rpartition(".experts.")
        if not experts:
            found[name] = value
            continue
        matrices = ["down_proj"] if fused == "down_proj" else ["gate_proj", "up_proj"]
        for number, expert in enumerate(value):
            parts = zip(matrices, expert.chunk(len(matrices)), strict=True)
            found |= {f"{layer}.experts.{number}.{matrix}.weight": part for matrix, part in parts}
    return found


def _result(root: Path, name: str) -> dict[str, Any]:
    return torch.load(root / name / "result.pt", weights_only=True)


@pytest.mark.parametrize("layout", ONE + TWO, ids=lambda layout: layout.name)
def test_adapters_learn_what_pefts_learn(root: Path, references: dict[str, Any], layout: Layout) -> None:
    own, want = _result(root, layout.name), references[layout.model]
    for when in ("fresh", "before", "reference", "after"):
        assert own[when].keys() == want[when].keys()
        for row, scores in want[when].items():
            # After the update the adapters' own errors add to a score's, as shares of what the update moves.
            moved = float((scores - want["before"][row]).detach().abs().max()) if when == "after" else 0.0
            allowed = LOG_PROB + 2 * TOLERANCE * moved
            error = (own[when][row] - scores.detach()).abs() - TOLERANCE * scores.detach().abs()
            assert float(error.max()) < allowed, (when, row)
    begin = _tensors(root / layout.model / "begin")
    assert own["adapters"].keys() == want["adapters"].keys() == begin.keys()
    for name, value in want["adapters"].items():
        assert distance(value.detach(), begin[name]) > 100 * TOLERANCE, name
        change = value.detach() - begin[name]
        rounding = float(2**-23 * begin[name].norm() / change.norm())  # of the weights, as a share of their change
        assert distance(own["adapters"][name] - begin[name], change) < TOLERANCE + rounding, name
    merged = {name: value for name, value in own["merged"].items() if layout.experts or ".experts." not in name}
    assert merged.keys() <= want["merged"].keys()
    for name, value in merged.items():
        assert distance(value, want["merged"][name]) < TOLERANCE, name


def test_the_reference_policy_is_the_model_without_adapters(root: Path) -> None:
    for layout in ONE + TWO:
        own = _result(root, layout.name)
        for row, scores in own["fresh"].items():  # B is zero
            assert torch.equal(scores, own["reference"][row])
            assert not torch.equal(scores, own["before"][row])


def test_training_begins_with_the_adapters_of_an_earlier_run(root: Path) -> None:
    own = _result(root, "TP 2 sequence")
    assert own["continued"].keys() == own["after"].keys()
    for row, scores in own["after"].items():
        assert torch.equal(own["continued"][row], scores)


def test_dropout_leaves_out_inputs_of_updates_and_of_nothing_else(root: Path) -> None:
    own = _result(root, "alone dropout")
    passes = own["passes"]
    assert torch.equal(passes["first"], passes["again"])
    assert distance(passes["first"], passes["every"]) > 0.5
    assert distance(passes["first"], passes["second"]) > 0.5
    assert distance(passes["mean"], passes["every"]) < 0.1  # 0.05 of 400 passes, were each as far off as what it adds
    assert own["update"]["old_policy/kl_k3"] > 1e-4  # the old policy dropped nothing: 0 where the update computes it


def test_both_exports_are_the_trained_model(root: Path, references: dict[str, Any]) -> None:
    for name in ("alone", "TP 2", "EP 2", "alone images", *OF_FAMILIES):
        layout = next(each for each in ONE + TWO if each.name == name)
        about = json.loads((root / name / "adapter" / "adapter_config.json").read_text())
        assert (about["r"], about["lora_alpha"], about["base_model_name_or_path"]) == (
            4,
            ALPHA,
            str(root / layout.model),
        )
        loaded = [with_peft(root / layout.model, root / name / "adapter")]
        loaded.append(in_transformers(root / name / "merged"))
        trained = _result(root, name)["after"]
        for model in loaded:
            for row, scores in peft_scores(model, layout.batch(root)).items():
                torch.testing.assert_close(trained[row], scores.detach().to(trained[row]), rtol=1e-5, atol=1e-4)


def _tensors(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")
