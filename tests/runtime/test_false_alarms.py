"""An hour of faults that are no hang, on simulated clocks: no rank and no launcher raises an alarm. A hang is still found."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from megatron_rl.runtime import heartbeat, postmortem
from megatron_rl.runtime.heartbeat import AwakeClock, Deadlines, Heartbeat
from megatron_rl.runtime.observer import Observer

LIMIT, GRACE, LOOK, HOUR = 600.0, 30.0, 5, 3600
GAP = 10.0  # seconds between two ticks that count at most


@dataclass
class Rank:
    """One rank: its beats, and work whose phases take up to three quarters of their deadline."""

    progress: Heartbeat
    random: random.Random
    work: float = 0.0
    stopped: int = 0  # seconds for which no instruction of it runs
    blocked: int = 0  # seconds for which its writes do not come back
    hangs: bool = False  # its main thread gets no further

    def second(self) -> tuple[str, float] | None:
        """One second of its three threads; the phase that is past its deadline."""
        if self.stopped:
            self.stopped -= 1
            return None
        self.progress.clock.tick()
        if self.blocked:
            self.blocked -= 1
        else:
            self.progress.beat()
            self._work()
        return self.progress.overdue()

    def _work(self) -> None:
        self.work -= 1
        if self.work <= 0 and not self.hangs:
            self.progress.leave()
            self.progress.enter("update")
            self.work = self.random.uniform(1, 0.75 * LIMIT)


@dataclass
class Machine:
    """A machine with two ranks and their launcher, on clocks that only this moves."""

    folder: Path
    random: random.Random
    monotonic: float = 5000.0
    wall: float = 1.7e9
    launcher_stopped: int = 0
    ranks: list[Rank] = field(default_factory=list)
    alarms: list[str] = field(default_factory=list)

    def start(self) -> None:
        attempt = self.folder / "run" / "logs" / "attempt_1"
        for rank in range(2):
            own = Heartbeat()
            clock = AwakeClock(GAP, lambda: self.monotonic)
            own.attach(postmortem.heartbeat_folder(attempt), rank, 2, Deadlines(LIMIT, {}), clock)
            own.begin("RL", 0, 100)
            own.enter("update")
            self.ranks.append(Rank(own, self.random))
        self.observer = Observer(attempt, GRACE, AwakeClock(2 * LOOK, lambda: self.monotonic))

    def run(self, seconds: int, faults: bool) -> None:
        for second in range(seconds):
            self.monotonic += 1
            self.wall += 1
            if faults:
                self.fault()
            for number, rank in enumerate(self.ranks):
                late = rank.second()
                if late is not None:
                    self.alarms.append(f"rank {number} ends the run in {late[0]}")
            self.launcher_stopped = max(0, self.launcher_stopped - 1)
            if second % LOOK == 0 and not self.launcher_stopped:
                report = self.observer.look(range(2))
                if report is not None:
                    self.alarms.append(report)
            if self.alarms:
                return

    def fault(self) -> None:
        """About one a minute, often several at once."""
        chance, victim = self.random.random, self.random.choice(self.ranks)
        if chance() < 1 / 150:
            self.wall += self.random.choice([-7200, -1, 1, 7200, 10**8])  # NTP, or a person, sets the clock
        if chance() < 1 / 300:  # suspended; some hypervisors let the monotonic clock go on
            asleep = self.random.uniform(10, 50_000)
            self.wall += asleep
            self.monotonic += asleep * self.random.choice([0, 1])
        if chance() < 1 / 200:
            victim.stopped = self.random.randrange(1, 300)
        if chance() < 1 / 200:
            victim.blocked = self.random.randrange(1, 100)
        if chance() < 1 / 300:
            self.launcher_stopped = self.random.randrange(1, 1000)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(tmp_path, random.Random(7))
    monkeypatch.setattr(heartbeat.time, "time", lambda: machine.wall)
    monkeypatch.setattr(heartbeat.os, "fsync", lambda file: None)  # the simulated disk is `blocked`
    machine.start()
    return machine


def test_an_hour_of_faults_raises_no_alarm_and_a_hang_after_it_is_found(machine: Machine) -> None:
    machine.run(HOUR, faults=True)
    assert machine.alarms == []
    machine.ranks[1].hangs = True
    machine.ranks[1].blocked = machine.ranks[0].stopped = machine.ranks[1].stopped = 0
    machine.run(int(LIMIT + 0.75 * LIMIT) + 10, faults=False)
    assert machine.alarms == ["rank 1 ends the run in update"]


def test_a_rank_that_stays_stopped_is_named_by_the_launcher(machine: Machine) -> None:
    machine.run(HOUR // 4, faults=True)
    machine.ranks[0].stopped = machine.launcher_stopped = 0
    machine.ranks[1].stopped = 10**9
    machine.run(int(LIMIT + GRACE) + 30, faults=False)
    [report] = machine.alarms
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
