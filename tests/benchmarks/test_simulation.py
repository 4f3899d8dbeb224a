"""The benchmark that fits an engine's speed to recorded runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.simulation import Recorded, fit
from megatron_rl.planning.time.lengths import LogNormal


def test_the_speed_behind_the_times_is_found() -> None:
    rng = np.random.default_rng(0)
    lengths = [LogNormal(30, 0.6, 60).draw(rng, 32, 4)[0] for _ in range(5)]
    runs = [Recorded(Path("run"), lengths, np.zeros(5), 2, concurrent, 10.0) for concurrent in (16, 512)]
    timed = [replace(run, seconds=run.simulated(0.006, 7e-5)) for run in runs]
    assert fit(timed) == pytest.approx((0.006, 7e-5), rel=0.02)
