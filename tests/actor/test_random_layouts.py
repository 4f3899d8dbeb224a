"""A fixed handful of random layouts; `make fuzz` goes through others. See docs/proofs.md."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.random_layouts.cases import DIVISIONS, FAMILIES, IMPOSSIBLE, Cut, divides, refusals
from tests.random_layouts.draw import draw, wanted
from tests.random_layouts.prove import differences, prove
from tests.random_layouts.smaller import command, overridden, overrides_of, shrunk
from tests.tolerance import RELATIVE

# Latents with a checkpoint to another layout; gated-delta layers over tensor-parallel ranks.
NUMBERS = (220, 365)


@pytest.mark.ranks
def test_layouts_learn_what_one_process_learns(tmp_path: Path) -> None:
    found = prove(map(draw, NUMBERS), tmp_path)
    assert {command(draw(number)): said for number, said in found.items() if said} == {}
    result = torch.load(tmp_path / "365" / "own.pt", weights_only=True)
    name, start = "model.norm.weight", torch.load(tmp_path / "365" / "alone.pt", weights_only=True)["start"]
    result["end"][name] += 3 * RELATIVE * (result["end"][name] - start[name])
    torch.save(result, tmp_path / "365" / "own.pt")
    [said] = differences(draw(365), tmp_path / "365")
    assert said.startswith(f"the change of {name} by 3.")


def test_every_family_comes_with_every_division_that_no_check_refuses() -> None:
    possible = [(family, name) for family in FAMILIES for name in DIVISIONS if (family, name) not in IMPOSSIBLE]
    assert sorted(map(wanted, range(len(possible)))) == sorted(possible)
    for number, (family, division) in enumerate(map(wanted, range(10))):
        case = draw(number)
        assert case.family == family
        assert divides(case, division)
        assert refusals(case) == []
        assert draw(number) == case


def test_a_case_is_told_by_its_number_and_what_was_changed() -> None:
    case = draw(0)
    assert command(case) == "python -m tests.random_layouts 0"
    for changed in (
        replace(case, world=1, cut=Cut(), then=Cut(tensor=2)),
        replace(case, actor={}, sizes={**case.sizes, "num_hidden_layers": 1}),
        replace(case, then=None, aggregation="token-mean", lora=0),
    ):
        assert overridden(case, overrides_of(changed)) == changed


def test_a_case_that_fails_is_made_smaller() -> None:
    """As far as it takes the fault, here one of pipelines with two layers or more."""
    assert draw(16).cut == Cut(2, False, 2, 2)
    small = shrunk(draw(16), lambda case: case.cut.pipeline > 1 and case.sizes["num_hidden_layers"] >= 2)
    assert (small.cut, small.world) == (Cut(pipeline=2), 2)
    assert (small.sizes["num_hidden_layers"], small.actor, small.lora, small.groups) == (2, {}, 0, 2)
