from __future__ import annotations

import pytest

from megatron_rl.actor.build import learning_rate
from megatron_rl.config.actor import OptimizerConfig


def rates(steps: int, **changes: object) -> list[float]:
    config = OptimizerConfig(lr=1.0, min_lr=0.1, **changes)
    return [learning_rate(config, step, steps) for step in range(steps)]


def test_warm_up_reaches_the_full_rate_and_its_first_step_is_not_lost() -> None:
    assert rates(6, warmup_steps=4) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])


def test_linear_and_cosine_fall_from_the_rate_towards_the_least_one() -> None:
    assert rates(5, schedule="linear") == pytest.approx([1.0, 0.82, 0.64, 0.46, 0.28])
    config = OptimizerConfig(lr=1.0, min_lr=0.1, schedule="cosine", warmup_steps=2)
    assert learning_rate(config, 2, 12) == pytest.approx(1.0)
    assert learning_rate(config, 7, 12) == pytest.approx(0.55)  # half-way
    assert learning_rate(config, 12, 12) == pytest.approx(0.1)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_past_its_end_the_schedule_stays_at_the_least_rate(schedule: str) -> None:
    assert learning_rate(OptimizerConfig(lr=1.0, min_lr=0.1, schedule=schedule), 50, 10) == pytest.approx(0.1)


def test_a_warm_up_longer_than_the_run_divides_by_nothing() -> None:
    assert rates(2, warmup_steps=4, schedule="cosine") == pytest.approx([0.25, 0.5])
