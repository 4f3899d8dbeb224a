"""Transformer Engine's modules and optimizer compute on a CPU what torch's do."""

from __future__ import annotations

import pytest

from tests.te import inside
from tests.te.processes import spawn

pytestmark = pytest.mark.ranks


def test_norm_and_linear_in_one() -> None:
    spawn(inside.layer_norm_linear, 1)
