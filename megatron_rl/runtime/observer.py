"""The launcher's watch over its ranks' heartbeats, for ranks that do not end a hung run themselves. Needs no torch."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path

from megatron_rl.runtime import postmortem
from megatron_rl.runtime.heartbeat import AwakeClock, Beat, beat_interval, read_heartbeat

_BEATS = 4  # in which ranks notice each other's stall and report it


class Observer:
    """Compares each rank's heartbeat with the one at the look before.

    A rank whose beat moves is alive and watches its own deadline. One whose beat does not move is late when the time that its
    last heartbeat left it, and the grace, have passed on the observer's clock. The clocks of the ranks do not matter.

    `grace`: seconds past a deadline, on top of four beats, in which ranks end the run themselves.
    """

    def __init__(self, attempt: Path, grace: float, clock: AwakeClock) -> None:
        self._attempt, self._grace, self._clock = attempt, grace, clock
        self._seen: dict[int, tuple[tuple[int, int, int], float]] = {}  # rank -> its heartbeat, and when it was new

    def look(self, ranks: Iterable[int]) -> str | None:
        """A report on ranks that are late, also written to the post-mortem with their stacks; None while all is well."""
        now = self._clock.tick()
        beats = postmortem.heartbeat_folder(self._attempt)
        late = {}
        for rank in ranks:
            beat = read_heartbeat(beats / f"rank_{rank}.json")
            if beat is not None and beat["left"] is not None:
                late[rank] = (beat, now - self._since(beat, now) - beat["left"])
        if not any(seconds > self._grace + _BEATS * beat_interval(beat["world"]) for beat, seconds in late.values()):
            return None
        return self._report([beat for beat, seconds in late.values() if seconds > 0])

    def _since(self, beat: Beat, now: float) -> float:
        """When this heartbeat was first seen."""
        mark = (beat["pid"], beat["beat"], beat["entered"])
        if self._seen.get(beat["rank"], (None,))[0] != mark:
            self._seen[beat["rank"]] = (mark, now)
        return self._seen[beat["rank"]][1]

    def _report(self, late: Sequence[Beat]) -> str:
        here = socket.gethostname()
        text = "\n    ".join(
            f"{postmortem.who(beat)} is behind: {postmortem.where(beat)}; {postmortem.state_of(beat, here)}"
            for beat in late
        )
        folder = postmortem.folder_of(self._attempt)
        with contextlib.suppress(OSError):
            postmortem.make_folder(folder)
            (folder / postmortem.REPORT).write_text(f"the run hung: {text}\n", encoding="utf-8")
            postmortem.take_stacks(folder, postmortem.heartbeat_folder(self._attempt), late)
        return text
