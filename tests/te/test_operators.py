"""Transformer Engine's modules and optimizer compute on a CPU what torch's functions do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.te import inside
from tests.te.processes import spawn


@pytest.mark.ranks
@pytest.mark.parametrize(
    "check", [inside.layer_norm_linear, inside.fused_adam, inside.permutation, inside.router], ids=lambda f: f.__name__
)
def test_an_operator(check: Callable[[], None]) -> None:
    spawn(check, 1)


@pytest.mark.ranks
def test_the_selftests_comparisons(tmp_path: Path) -> None:
    spawn(inside.selftest, 1, tmp_path)
