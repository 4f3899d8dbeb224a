"""Two hundred random layouts, and the faults that they have to see; `make fuzz` goes through others. See docs/proofs.md."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.multiprocessing import ProcessRaisedException

from tests.actor.processes import spawn
from tests.random_layouts.cases import DIVISIONS, FAMILIES, IMPOSSIBLE, Cut, divides, refusals
from tests.random_layouts.draw import TINY, draw, wanted
from tests.random_layouts.faults import FAULTS
from tests.random_layouts.prove import differences, prove, run
from tests.random_layouts.smaller import command, overridden, overrides_of, shrunk
from tests.tolerance import RELATIVE

# What takes back a mend of `megatron_rl`, and a draw that has to see it.
FAULTY = {
    "sinks": 2_000_125,
    "expert_biases": 2_000_125,
    "marks": 2_000_125,
    "gated_norm": 2_000_105,
    "convolutions": 2_000_105,
    "per_token_loss": 2_000_001,
    "router_biases": 2_000_001,
    "local_loads": 2_000_001,
    "replay": 2_000_001,
    "adam_steps": 2_000_043,
    "buckets": 2_000_043,
}
NUMBERS = sorted({*range(TINY.first, TINY.first + 200), *FAULTY.values()})


@pytest.fixture(scope="module")
def proved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, list[str]]]:
    """The folder of the draws, and what was found of each."""
    root = tmp_path_factory.mktemp("draws")
    return root, prove(map(draw, NUMBERS), root)


@pytest.mark.ranks
def test_layouts_learn_what_one_process_learns(proved: tuple[Path, dict[int, list[str]]]) -> None:
    root, found = proved
    assert {command(draw(number)): said for number, said in found.items() if said} == {}
    number, name = FAULTY["gated_norm"], "model.norm.weight"  # three times the tolerance is seen
    result = torch.load(root / str(number) / "own.pt", weights_only=True)
    start = torch.load(root / str(number) / "alone.pt", weights_only=True)["start"]
    result["end"][name] += 3 * RELATIVE * (result["end"][name] - start[name])
    torch.save(result, root / str(number) / "own.pt")  # the next test's ranks write it anew
    [said] = differences(draw(number), root / str(number))
    assert said.startswith(f"the change of {name} by 3.")


@pytest.mark.ranks
def test_every_fault_is_seen(proved: tuple[Path, dict[int, list[str]]]) -> None:
    """A wrong number, or an error that ends the ranks."""
    root, _ = proved
    assert FAULTY.keys() == FAULTS.keys()
    unseen = []
    for fault, number in FAULTY.items():
        try:
            spawn(run, draw(number).world, str(root), [draw(number)], False, fault)
        except ProcessRaisedException as error:
            if "not finite" not in str(error):
                raise
            continue
        if not differences(draw(number), root / str(number)):
            unseen.append(fault)
    assert unseen == []


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
