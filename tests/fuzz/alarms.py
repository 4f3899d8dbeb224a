"""Hours of faults on simulated clocks: an alarm comes where a rank has passed its deadline, and nowhere else.

    python -m tests.fuzz.alarms --seconds 600 [--seed 1]

What is right is counted here apart from the clocks of `runtime.heartbeat`, by docs/hangs.md: the seconds for which a process
has run count towards a deadline, and ten at most of each time that it was halted. A rank ends the run once that is more than
its deadline; the launcher, once the rank's heartbeat has not moved for what was left then, 30 s more, and four beats.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from megatron_rl.runtime import heartbeat, postmortem
from megatron_rl.runtime.heartbeat import AwakeClock, Deadlines, Heartbeat
from megatron_rl.runtime.observer import Observer
from tests.fuzz.loop import run

LIMIT, GRACE, LOOK, HOUR = 600.0, 30.0, 5, 3600
GAP = 10.0  # seconds between two ticks that count at most
BEATS = 4.0  # seconds for four beats


@dataclass
class Ran:
    """Seconds for which a process has run since some moment: at least, and with what its halts may count."""

    seconds: int = 0
    halts: int = 0

    @property
    def most(self) -> float:
        return self.seconds + GAP * self.halts


@dataclass
class Rank:
    """One rank: its beats, and work whose phases take up to three quarters of their deadline."""

    progress: Heartbeat
    random: random.Random
    work: float = 0.0
    stopped: int = 0  # seconds for which no instruction of it runs
    blocked: int = 0  # seconds for which its writes do not come back
    hangs: bool = False  # its main thread gets no further
    phase: Ran = field(default_factory=Ran)  # in its phase
    at_beat: Ran = field(default_factory=Ran)  # the same, when it last wrote
    silent: Ran = field(default_factory=Ran)  # how long the launcher has run since then

    def second(self) -> tuple[str, float] | None:
        """One second of its three threads; the phase that is past its deadline."""
        if self.stopped:
            self.stopped -= 1
            return None
        self.phase.seconds += 1
        self.progress.clock.tick()
        if self.blocked:
            self.blocked -= 1
        else:
            self.progress.beat()
            self._work()
            self.at_beat, self.silent = Ran(self.phase.seconds, self.phase.halts), Ran()
        return self.progress.overdue()

    def _work(self) -> None:
        self.work -= 1
        if self.work <= 0 and not self.hangs:
            self.progress.leave()
            self.progress.enter("update")
            self.work, self.phase = self.random.uniform(1, 0.75 * LIMIT), Ran()

    def may_be_late(self) -> bool:
        """By its own clock."""
        return self.phase.most > LIMIT

    def may_be_silent(self, grace: float) -> bool:
        """Past its deadline and `grace`, by the launcher's clock."""
        return self.silent.most + LOOK > LIMIT - self.at_beat.most + grace

    def is_late(self) -> bool:
        return not self.stopped and self.phase.seconds > LIMIT + 2

    def is_silent(self) -> bool:
        return self.silent.seconds > LIMIT - self.at_beat.seconds + GRACE + BEATS + 2 * LOOK


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
    mistakes: list[str] = field(default_factory=list)  # alarms that are false, and those that did not come

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
        """Until something has raised an alarm."""
        for second in range(seconds):
            self.monotonic += 1
            self.wall += 1
            if faults:
                self.fault()
            for number, rank in enumerate(self.ranks):
                late = rank.second()
                if late is not None:
                    self.alarms.append(f"rank {number} ends the run in {late[0]}")
                    if not rank.may_be_late():
                        self.mistakes.append(f"rank {number} has run {rank.phase} of {LIMIT} s")
            if self.launcher_stopped:
                self.launcher_stopped -= 1
            else:
                for rank in self.ranks:
                    rank.silent.seconds += 1
                if second % LOOK == 0:
                    self.look()
            if self.alarms:
                return
            self.mistakes += [f"{rank} is late" for rank in self.ranks if rank.is_late() or rank.is_silent()]

    def look(self) -> None:
        """The launcher's look at the heartbeats."""
        report = self.observer.look(range(2))
        if report is None:
            return
        self.alarms.append(report)
        named = [rank for number, rank in enumerate(self.ranks) if f"rank {number} (" in report]
        if not any(rank.may_be_silent(GRACE + BEATS) for rank in named):
            self.mistakes.append(f"none of these is past its deadline: {named}")
        self.mistakes += [f"{rank} is named" for rank in named if not rank.may_be_silent(0)]

    def fault(self) -> None:
        """About one a minute, often several at once."""
        chance, victim = self.random.random, self.random.choice(self.ranks)
        if chance() < 1 / 150:
            self.wall += self.random.choice([-7200, -1, 1, 7200, 10**8])  # NTP, or a person, sets the clock
        if chance() < 1 / 300:  # suspended; some hypervisors let the monotonic clock go on
            asleep = self.random.uniform(10, 50_000)
            self.wall += asleep
            self.monotonic += asleep * self.random.choice([0, 1])
            for rank in self.ranks:
                rank.phase.halts += 1
                rank.silent.halts += 1
        if chance() < 1 / 200:
            victim.stopped = self.random.randrange(1, 300)
            victim.phase.halts += 1
        if chance() < 1 / 200:
            victim.blocked = self.random.randrange(1, 100)
        if chance() < 1 / 300:
            self.launcher_stopped = self.random.randrange(1, 1000)
            for rank in self.ranks:
                rank.silent.halts += 1


@contextmanager
def machine(seed: int) -> Iterator[Machine]:
    """A machine whose ranks work."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        made = Machine(Path(folder), random.Random(seed))
        patch.setattr(heartbeat.time, "time", lambda: made.wall)
        patch.setattr(heartbeat.os, "fsync", lambda file: None)  # the simulated disk is `blocked`
        made.start()
        yield made
        for rank in made.ranks:
            rank.progress.detach()


def hour_and_hang(seed: int) -> Machine:
    """An hour of faults; where no rank has passed its deadline in it, one then hangs."""
    with machine(seed) as made:
        made.run(HOUR, faults=True)
        assert made.mistakes == []
        if not made.alarms:
            made.ranks[1].hangs = True
            made.ranks[1].blocked = made.ranks[0].stopped = made.ranks[1].stopped = 0
            made.run(int(LIMIT + 0.75 * LIMIT) + 10, faults=False)
            assert made.mistakes == []
            assert len(made.alarms) == 1  # rightly of rank 0, where the faults of the hour catch up with it first
            made.alarms = []
        return made


if __name__ == "__main__":
    run(hour_and_hang, "alarms")
