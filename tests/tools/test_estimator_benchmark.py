"""The benchmark's counterparts compute what they are compared with."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from megatron_rl.algorithms import make_advantage_estimator

FILE = Path(__file__).parents[2] / "benchmarks" / "estimators.py"


def test_counterparts_agree() -> None:
    spec = importlib.util.spec_from_file_location("estimator_benchmark", FILE)
    assert spec is not None
    assert spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    table = benchmark.make_table(12)
    others = benchmark.compared(table)
    assert set(others) == {"grpo", "rloo", "gdpo", "shrinkage"}
    for name, (function, _) in others.items():
        torch.testing.assert_close(function(), make_advantage_estimator(name)(table).advantages, rtol=1e-4, atol=1e-4)
    assert benchmark.seconds(lambda: sum(range(1000)), least=0.001) < 0.01
    assert benchmark.make_table(3).values.shape == (3, benchmark.ROLLOUTS, benchmark.REWARDS)
    with pytest.raises(SystemExit):
        benchmark.main(["--nothing"])
