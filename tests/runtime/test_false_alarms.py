"""An hour of faults that are no hang, on simulated clocks: no rank and no launcher raises an alarm. A hang is still found."""

from __future__ import annotations

import pytest

from megatron_rl.runtime.heartbeat import AwakeClock
from tests.fuzz.alarms import GRACE, HOUR, LIMIT, hour_and_hang, machine

SEEDS = range(7, 15)  # tests.fuzz.alarms goes through any others


def test_alarms_come_where_a_rank_is_past_its_deadline_and_nowhere_else() -> None:
    """Faults that add up to more than a deadline are a hang; without one, the hang that follows is found."""
    quiet = [not hour_and_hang(seed).alarms for seed in SEEDS]
    assert 2 <= sum(quiet) < len(SEEDS), "hours without an alarm, and hours with a right one"


def test_an_alarm_that_is_false_or_does_not_come_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what is counted apart: a clock that counts all of a halt is found, and one that counts nothing."""
    for gap in (1000.0, 0.5):
        monkeypatch.setattr("tests.fuzz.alarms.AwakeClock", lambda longest, source, gap=gap: AwakeClock(gap, source))
        with pytest.raises(AssertionError):
            [hour_and_hang(seed) for seed in SEEDS]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_rank_that_stays_stopped_is_named_by_the_launcher(seed: int) -> None:
    with machine(seed) as made:
        made.run(HOUR // 12, faults=True)
        assert made.alarms == []  # five minutes are less than a deadline
        made.ranks[0].stopped = made.launcher_stopped = 0
        made.ranks[1].stopped = 10**9
        made.run(int(LIMIT + GRACE) + 30, faults=False)
        [report] = made.alarms
        assert made.mistakes == []
    assert report.startswith("rank 1 (node ")
    assert "is behind: in `update` of RL step 0" in report
    assert "rank 0" not in report


def test_a_gap_counts_as_much_as_the_longest_allowed_and_no_more() -> None:
    now = [100.0]
    clock = AwakeClock(10.0, lambda: now[0])
    now[0] += 4
    assert (clock.read(), clock.tick()) == (4.0, 4.0)
    now[0] += 9000
    assert (clock.read(), clock.read()) == (14.0, 14.0)
    assert clock.tick() == 14.0
    now[0] += 1
    assert clock.read() == 15.0
