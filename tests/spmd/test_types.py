"""A second proof of gradients over tensor- and context-parallel ranks, independent of any number: the actor's passes have
types, in which a gradient that nobody sums, or that is summed twice, cannot be written (`spmd_types`, which found upstream's
bugs)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.actor.processes import spawn
from tests.models import seeing, tiny

from .faults import FAULTS
from .inside import Case, run

SOUND = [Case(variant, sequence) for variant in ("qwen2", "qwen3", "llama", "qwen3_5") for sequence in (False, True)]
# Experts, whole on both ranks, half of them on each, and each cut over both; latents that both ranks compute.
SOUND += [Case("gpt_oss", True), *(Case(mixture, True, expert=2) for mixture in ("gpt_oss", "qwen3_moe", "glm4_moe"))]
SOUND += [Case("deepseek_v3", True), *(Case(name, True, expert_tensor=2) for name in ("deepseek_v3", "qwen3_5_moe"))]
SOUND += [Case(variant, False, context=True) for variant in ("qwen3", "qwen3_5", "deepseek_v3")]
SOUND += [Case("qwen3_moe", False, context=True, expert=2)]
# Towers, whole on every rank, which further layers take outputs of; the two ranks have them for different image tokens.
SOUND += [Case(kind, sequence) for kind in ("qwen2_5_vl", "qwen3_vl") for sequence in (False, True)]
SOUND += [Case("qwen3_vl_moe", True, expert=2)]
# Without sequence parallelism Llama's ranks have the same gradient of every norm: there is nothing to sum.
SOUND += [Case("llama", False, "norms")]
BROKEN = {
    Case("qwen3", False, "norms"): "rms_norm",
    Case("llama", True, "norms"): "rms_norm",
    Case("qwen2", True, "norms"): "rms_norm",
    Case("qwen3_5", False, "gated norm"): "rms_norm",
    Case("qwen3", False, "head"): "einsum",
    Case("qwen3", False, "keys", context=True): "__getitem__",
    Case("qwen3_moe", True, "router"): "einsum",
    Case("deepseek_v3", True, "latents"): "linear",
    Case("qwen3_vl", True, "features"): "index_add",
    Case("gpt_oss", True, "expert biases"): "mul",
    Case("gpt_oss", True, "expert biases", expert=2): "mul",
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("types")
    cases = [*SOUND, *BROKEN]
    for variant in {case.variant for case in cases}:
        fewer = {} if variant.startswith("qwen3_5") else {"num_hidden_layers": 2}  # every fourth of it is another
        if variant in seeing.KINDS:
            seeing.write(root / variant, kind=variant, **fewer)
        else:
            tiny.write(root / variant, variant, **fewer)
    spawn(run, 2, str(root), cases)
    return root


@pytest.mark.ranks
@pytest.mark.parametrize("case", SOUND, ids=lambda case: case.name)
def test_no_gradient_is_left_unsummed_nor_summed_twice(root: Path, case: Case) -> None:
    assert (root / f"{case.name}.txt").read_text() == ""


@pytest.mark.ranks
@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case.name)
def test_a_gradient_that_is_not_summed_is_seen(root: Path, case: Case) -> None:
    found = (root / f"{case.name}.txt").read_text()
    assert "Invariant type" in found
    assert BROKEN[case] in found


def test_every_fault_is_tried() -> None:
    assert {case.fault for case in [*SOUND, *BROKEN]} == FAULTS.keys()
