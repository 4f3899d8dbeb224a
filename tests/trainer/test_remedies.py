"""The settings that are named when a phase runs out of memory."""

from __future__ import annotations

import pytest

from megatron_rl.config.schema import PHASES, Config
from megatron_rl.trainer.rank.memory_report import remedies


@pytest.mark.parametrize("phase", PHASES)
def test_every_phase_has_remedies_and_they_are_keys_of_the_recipe(phase: str) -> None:
    found = remedies(phase, Config(run_dir=""))
    assert found
    for line in found:
        keys = line.split(" (now")[0].split(":")[0]
        section, *path = keys.split(",")[0].split(".")
        if " " in section:
            continue  # a sentence about the host
        place = getattr(Config(run_dir=""), section)
        for name in path:
            place = place if name == "*" else place.get(name) if isinstance(place, dict) else getattr(place, name)
            if place is None:
                break
