"""FP8 with Transformer Engine's own modules, quantisers and FP8 parameters: steps, weights, checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.checkpoint.ranks import contents
from tests.te import fp8, kept, quantised
from tests.te.fp8 import Case
from tests.te.processes import spawn

pytestmark = pytest.mark.ranks
HOPPER = ("tensorwise", "blockwise", "delayed")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("fp8")
    fp8.write_models(folder)
    return str(folder)


def cases(recipes: tuple[str, ...], tensor: int) -> list[Case]:
    """bf16 first; of a dense model and of a mixture of experts."""
    return [
        Case(recipe, experts, tensor=tensor, format="hybrid" if recipe == "delayed" else "e4m3")
        for experts in (False, True)
        for recipe in (None, *recipes)
    ]


@pytest.mark.parametrize("check", [quantised.known_values, quantised.precision, quantised.shards])
def test_quantisers(check: Callable[[], None]) -> None:
    spawn(check, 1)


@pytest.mark.parametrize("tensor", [1, 2])
def test_steps_of_the_recipes_of_hopper(root: str, tensor: int) -> None:
    spawn(fp8.steps, tensor, root, cases(HOPPER, tensor))


def test_steps_at_other_layouts(root: str) -> None:
    """Of the recipe that Hopper's recipes take; pipeline, experts and data parallel, parameters in FP8 with overlap."""
    layouts = [
        Case("blockwise", pipeline=2),
        Case("blockwise", experts=True, pipeline=2),
        Case("blockwise", experts=True, expert=2),
        Case("blockwise", param_gather=True, overlap=True),
        Case("blockwise", experts=True, expert=2, param_gather=True, overlap=True),
    ]
    first = dict.fromkeys(case.in_bf16 for case in layouts)
    spawn(fp8.steps, 2, root, [*first, *layouts])


@pytest.mark.parametrize("tensor", [1, 2])
def test_steps_of_mxfp8(root: str, tensor: int) -> None:
    spawn(fp8.steps, tensor, root, cases(("mxfp8",), tensor), True)


def test_a_curve(root: str) -> None:
    """Of the recipe that Hopper's recipes take."""
    spawn(fp8.curve, 1, root, [Case(None), Case("blockwise")])


def test_parameters_in_fp8(root: str) -> None:
    """The optimizer's masters are the loaded values, also of a second optimizer; export, loading and reference are exact."""
    both = [Case(recipe, experts, param_gather=True) for recipe in HOPPER[:2] for experts in (False, True)]
    spawn(fp8.parameters, 1, root, [*both, Case("blockwise", param_gather=True, overlap=True)])


@pytest.mark.parametrize("param_gather", [False, True])
def test_checkpoints(root: str, param_gather: bool) -> None:
    """Same layout: the same weights as without a break; another one: the same state, near weights."""
    case = Case("blockwise", param_gather=param_gather, tensor=2)
    spawn(fp8.checkpoints, 2, root, case, Case("blockwise", param_gather=param_gather))
    saved = Path(root) / "saved"
    name = f"blockwise-{param_gather}"
    want = contents(saved / name / "step_1")
    for tensor in (2, 1):
        own = contents(saved / f"{name}-{tensor}" / "step_1")
        assert own.keys() == want.keys()
        for key, value in want.items():
            rows = min(len(value), len(own[key]))  # the vocabulary is padded to the layout
            if param_gather and tensor == 1 and not key.startswith("optimizer"):
                # Blocks of 128 x 128 are other blocks where a weight is cut otherwise; its fp32 master is what counts.
                torch.testing.assert_close(own[key][:rows], value[:rows], rtol=0.07, atol=1e-3)
            else:
                assert torch.equal(own[key][:rows], value[:rows]), (tensor, key)


@pytest.mark.parametrize("recipe", [*HOPPER, "mxfp8"])
def test_plan_counts_what_is_kept(recipe: str) -> None:
    spawn(kept.check, 1, recipe)
