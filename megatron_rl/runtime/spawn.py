"""One process per rank on this machine: all of a run (`run_ranks`), or the one that srun or torchrun asks this process to be
(`run_rank`); none survives a failure, Ctrl-C, or the launcher's death."""

from __future__ import annotations

import contextlib
import io
import math
import os
import queue
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from megatron_rl.runtime import collectives, exit_codes, leftovers, postmortem, stop, streams
from megatron_rl.runtime import memory_use as memory
from megatron_rl.runtime.attempts import ATTEMPT, END, free_port
from megatron_rl.runtime.fork_server import Adopted, ForkServer, RankWorld
from megatron_rl.runtime.heartbeat import AwakeClock, heartbeats
from megatron_rl.runtime.logs import OWN_MESSAGE, TAIL, end_of_log, last_lines
from megatron_rl.runtime.observer import Observer
from megatron_rl.runtime.process import die_with_parent
from megatron_rl.runtime.terminal import Tee

_TRIES = 3  # starts, where the chosen port turned out to be taken
# Exit codes of a process that ended because it was told to.
_STOP_CODES = (128 + signal.SIGINT, 128 + signal.SIGTERM, exit_codes.REQUEUE)
_LOOK = 5.0  # seconds between two looks at the ranks' heartbeats


@dataclass(frozen=True)
class RanksOutcome:
    """The exit code of the ranks together (a signal as 128 + its number), and a message where it is not 0."""

    code: int
    message: str = ""
    is_ranks_own: bool = False  # written by a rank, for all of them

    def said(self) -> int:
        """The code, once the message is on the terminal."""
        if self.message:
            streams.say(f"megatron-rl: {self.message}")
        return self.code


@dataclass(frozen=True)
class Graces:
    """Seconds that ranks get to end before they are killed."""

    failure: float = 10.0  # after another rank has failed
    stop: float = 30.0  # after SIGTERM
    linger: float = 60.0  # after rank 0 has ended well
    stall: float = 30.0  # past a deadline, to say so themselves


def run_ranks(
    command: Sequence[str],
    processes: int,
    log_dir: Path,
    environment: Mapping[str, str] | None = None,
    graces: Graces = Graces(),
    files: Sequence[int] = (),
    imports: str | None = None,
) -> RanksOutcome:
    """Runs `command` once per rank and waits for all of them. To be called from the main thread.

    Every rank gets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, a session of its own, and
    `log_dir/rank_<r>.log` for its output; rank 0's standard output is shown as well. It starts with `stop.SIGNALS` blocked,
    and unblocks them (`stop.StopFlag`, `stop.let_through`) once it can answer them.

    The first Ctrl-C is passed on, for a graceful stop; the second kills. SIGTERM and SIGHUP are passed on as SIGTERM.
    When a rank fails, the others are asked to end. A rank that does not within its grace is killed, with all it started.

    Args:
        environment: variables on top of this process's own.
        files: open files that the ranks inherit, under the same numbers.
        imports: a module whose `import_all` imports what takes time. Several ranks are forks of one process that has called
            it (`runtime.fork_server`), where that can be; `command` is `python -m MODULE ARGUMENTS...` then.
    """
    worlds = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
    shared = {**os.environ, **(environment or {}), "MASTER_ADDR": "127.0.0.1"}
    shared |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    for _ in range(_TRIES):
        group = _Group(command, {**shared, "MASTER_PORT": str(free_port())}, log_dir, graces, files, imports)
        outcome = group.run(worlds)
        port_was_taken = any("EADDRINUSE" in line for line in last_lines(log_dir / "rank_0.log", TAIL))
        if outcome.code == 0 or group.was_stopped or not port_was_taken:
            break
    return outcome


def run_rank(
    command: Sequence[str],
    variables: Mapping[str, str],
    log_dir: Path,
    environment: Mapping[str, str] | None = None,
    files: Sequence[int] = (),
) -> RanksOutcome:
    """Runs `command` as the one rank of a larger world that `variables` describe, with the logs of `run_ranks`.

    Signals are passed on; the process that started this one decides how long a rank may take to obey.
    """
    group = _Group(command, {**os.environ, **(environment or {}), **variables}, log_dir, Graces(stop=math.inf), files)
    return group.run([dict(variables)])


class _Group:
    """The processes of one start. Threads wait for them; the main thread decides, and takes the signals."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log_dir: Path,
        graces: Graces,
        files: Sequence[int] = (),
        imports: str | None = None,
    ) -> None:
        self._command, self._environment = list(command), {**environment, ATTEMPT: str(log_dir.absolute())}
        self._log_dir, self._graces, self._files, self._imports = log_dir, graces, tuple(files), imports
        self._events: queue.SimpleQueue[tuple[str, int, int]] = queue.SimpleQueue()  # safe to use in a signal handler
        self._ranks: dict[int, subprocess.Popen[bytes] | Adopted] = {}
        self._running: set[int] = set()
        self._reaping = threading.Lock()  # no signal goes to a number that was just given back
        self._deadline = math.inf  # when to kill what still runs
        self._killed = False
        self._signal: int | None = None  # the first signal that asked us to stop
        self._asked: int | None = None  # the last one that was passed on
        self._failed: tuple[int, int] | None = None  # rank and code of the first that failed
        self._stalled: str | None = None  # the hung ranks, where none of them could end the run itself
        self._observer = Observer(log_dir, graces.stall, AwakeClock(2 * _LOOK))
        self._oom_kills = memory.oom_kills()

    @property
    def was_stopped(self) -> bool:
        return self._signal is not None

    def run(self, worlds: Sequence[Mapping[str, str]]) -> RanksOutcome:
        """Starts one rank for each of `worlds`: RANK, LOCAL_RANK and what else tells it from the others."""
        leftovers.remove_abandoned()  # segments of a killed run may fill the shared memory that this one needs
        with contextlib.ExitStack() as stack:
            tee = Tee(stack.enter_context(self._log_file(0))) if any(int(w["RANK"]) == 0 for w in worlds) else None
            stack.enter_context(self._taking_signals(tee))
            try:
                if self._imports is None or len(worlds) == 1 or not self._fork(self._imports, worlds, tee):
                    for world in worlds:
                        self._start(world, tee)
                if tee is not None:
                    tee.start()
                for rank in list(self._running):
                    threading.Thread(target=self._wait, args=(rank,), daemon=True).start()
                if self._killed:
                    self._kill_all()
                elif self._asked is not None:  # the process that forked may have ended without noticing
                    self._ask(self._asked)
                while self._running:
                    self._step()
            finally:
                self._kill_all()
                for process in self._ranks.values():
                    process.wait()
                leftovers.remove_abandoned()
                if tee is not None:
                    tee.join(5.0)
        return self._outcome()

    # ------------------------------------------------------------------------------------------------ starting, waiting
    def _log_file(self, rank: int) -> io.FileIO:
        return io.FileIO(self._log_dir / f"rank_{rank}.log", "a")

    def _start(self, world: Mapping[str, str], tee: Tee | None) -> None:
        rank = int(world["RANK"])
        # What is sent to a rank that has no handlers yet waits until it has.
        with self._log_file(rank) as log, stop.held_back():
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=tee.child_end if tee is not None and rank == 0 else log,
                stderr=log,
                env={**self._environment, **world},
                pass_fds=self._files,
                start_new_session=True,  # Ctrl-C reaches the ranks through us only, and each is a group of its own
                preexec_fn=die_with_parent(os.getpid()),
            )
        self._ranks[rank] = process
        self._running.add(rank)

    def _fork(self, imports: str, worlds: Sequence[Mapping[str, str]], tee: Tee | None) -> bool:
        """Starts the ranks as forks of one process; False, and says why, where they cannot be.

        While it imports, that process stands for the first of them: its failure is that rank's, and a signal ends it at once.
        """
        with contextlib.ExitStack() as stack:
            each = []
            for world in worlds:
                log = stack.enter_context(self._log_file(int(world["RANK"]))).fileno()
                each.append(RankWorld(world, tee.child_end if tee is not None and world["RANK"] == "0" else log, log))
            with stop.held_back():
                server = ForkServer(self._command, imports, each, self._environment, self._files)
            stack.callback(server.close)
            first = int(worlds[0]["RANK"])
            self._ranks, self._running = {first: server.process}, {first}
            answers: list[list[int] | str] = []

            def wait() -> None:
                answer = server.answer()
                os.waitid(os.P_PID, server.process.pid, os.WEXITED | os.WNOWAIT)
                with self._reaping:
                    code = server.process.wait()
                answers.extend([] if answer is None else [answer])
                self._events.put(("exit" if answer is None else "forked", first, code))

            threading.Thread(target=wait, daemon=True).start()
            while self._running:
                self._step()
            if isinstance(answer := next(iter(answers), None), list):
                self._ranks = {int(world["RANK"]): Adopted(pid) for world, pid in zip(worlds, answer, strict=True)}
                self._running = set(self._ranks)
                server.let_go()
        if isinstance(answer, str):
            streams.say(f"each rank imports for itself, which takes longer: {answer}")
        return not isinstance(answer, str)

    def _wait(self, rank: int) -> None:
        process = self._ranks[rank]
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with self._reaping:
            _kill_group(process.pid)  # what the rank has started; its pid stays reserved until `wait`
            code = process.wait()
        self._events.put(("exit", rank, code))

    def _taking_signals(self, tee: Tee | None) -> contextlib.AbstractContextManager[None]:
        def take(number: int, frame: FrameType | None) -> None:
            self._events.put(("signal", number, 0))

        handlers: dict[int, Callable[[int, FrameType | None], object]] = dict.fromkeys(stop.SIGNALS, take)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
            handlers[signal.SIGHUP] = take
        if tee is not None:
            handlers[signal.SIGWINCH] = lambda number, frame: tee.resize()
        return stop.handling(handlers)

    # --------------------------------------------------------------------------------------------------------- deciding
    def _step(self) -> None:
        try:
            kind, number, code = self._events.get(timeout=max(0.0, min(_LOOK, self._deadline - time.monotonic())))
        except queue.Empty:
            if time.monotonic() >= self._deadline:
                self._kill()
            else:
                self._look_for_stall()
            return
        if kind == "signal":
            self._on_signal(number)
        elif kind == "forked":
            self._running.discard(number)
        else:
            self._on_exit(number, code)

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGUSR1:  # there is time
            if self._signal is None:
                self._ask(signal.SIGUSR1)
        elif number != signal.SIGINT:
            self._limit(self._graces.stop)
            if self._signal is None:
                self._ask(signal.SIGTERM)
        elif self._signal is None:
            self._ask(signal.SIGINT)
            streams.say("\nstopping after this step; press Ctrl-C again to stop at once")
        else:
            self._kill()
        self._signal = self._signal or number

    def _on_exit(self, rank: int, code: int) -> None:
        self._running.discard(rank)
        if code == 0:
            if rank == 0:
                self._limit(self._graces.linger)
            return
        told_to = code == exit_codes.REQUEUE or (
            self._signal is not None and code in (*(-number for number in stop.SIGNALS), *_STOP_CODES)
        )
        if not self._killed:
            _record_end(self._log_dir, rank, self._meaning(rank, code))
        if self._failed is None and not told_to and not (self._killed and code == -signal.SIGKILL):
            self._failed = (rank, code)
        if not self._killed:
            self._ask(signal.SIGTERM)
            self._limit(min(self._graces.failure, 3.0) if code == exit_codes.STALLED else self._graces.failure)

    def _look_for_stall(self) -> None:
        """Ends ranks that are past their deadline and do not end themselves."""
        self._stalled = self._observer.look(self._running)
        if self._stalled is not None:
            for rank in self._running:
                _record_end(self._log_dir, rank, exit_codes.STALLED)
            self._kill()

    def _limit(self, seconds: float) -> None:
        self._deadline = min(self._deadline, time.monotonic() + seconds)

    def _ask(self, number: int) -> None:
        self._asked = number
        with self._reaping:
            for rank in self._running:
                if self._ranks[rank].returncode is None:
                    os.kill(self._ranks[rank].pid, number)

    def _kill(self) -> None:
        for rank in sorted(self._running)[:1]:  # unless a rank has recorded how the attempt ended
            _record_end(self._log_dir, rank, exit_codes.FAILED if self._signal is None else 128 + self._signal)
        self._killed, self._deadline = True, math.inf
        self._kill_all()

    def _kill_all(self) -> None:
        with self._reaping:
            for process in self._ranks.values():
                if process.returncode is None:
                    _kill_group(process.pid)

    # -------------------------------------------------------------------------------------------------------- reporting
    def _outcome(self) -> RanksOutcome:
        if self._failed is not None:
            rank, code = self._failed
            meaning = self._meaning(rank, code)
            if meaning == exit_codes.OUT_OF_MEMORY and code < 0:
                doing = self._doing(rank) or " before its first heartbeat"
                why = f"was killed by the system because host memory ran out,{doing} (docs/out-of-memory.md)"
                return RanksOutcome(meaning, f"rank {rank} {why}")
            own = self._own_words(rank, code)
            return RanksOutcome(meaning, self._describe(rank, code) if own is None else own, own is not None)
        if self._stalled is not None:
            return RanksOutcome(exit_codes.STALLED, f"the run hung: {self._stalled}")
        codes = {process.returncode for process in self._ranks.values()}
        if exit_codes.REQUEUE in codes:
            return RanksOutcome(exit_codes.REQUEUE)  # rank 0 has said why, and how to continue
        if self._signal is not None and not (self._signal == signal.SIGUSR1 and codes == {0}):
            how = "killed" if self._killed else "stopped"
            code = exit_codes.REQUEUE if self._signal == signal.SIGUSR1 else 128 + self._signal
            return RanksOutcome(code, f"{how} by {signal.Signals(self._signal).name}")
        if self._killed and codes != {0}:
            late = [str(rank) for rank, process in self._ranks.items() if process.returncode]
            return RanksOutcome(
                1, f"rank {', '.join(late)} did not end after rank 0 had, and was killed; see {self._log_dir}"
            )
        return RanksOutcome(0)

    def _meaning(self, rank: int, code: int) -> int:
        """The exit code that says why a rank ended, also where a signal ended it; a signal as 128 + its number."""
        if code == -signal.SIGKILL and memory.oom_kills() > self._oom_kills:
            return exit_codes.OUT_OF_MEMORY
        if code == -signal.SIGABRT:  # how torch ends a process whose NCCL collective is past its own deadline
            log = last_lines(self._log_dir / f"rank_{rank}.log", 5 * TAIL)
            if any(map(collectives.gave_up, log)):
                return exit_codes.STALLED
        return code if code >= 0 else 128 - code

    def _describe(self, rank: int, code: int) -> str:
        first = " first," if len(self._ranks) > 1 else ""
        how = f"with exit code {code}"
        if code < 0:  # a rank that was killed left no message, but a heartbeat
            how = f"killed by {signal.Signals(-code).name}{self._doing(rank)}"
            how += ", often a sign that memory ran out" if code == -signal.SIGKILL else ""
        path = self._log_dir / f"rank_{rank}.log"
        return "\n    ".join([f"rank {rank} failed{first} {how}; the end of {path}:", *end_of_log(path)])

    def _own_words(self, rank: int, code: int) -> str | None:
        """A rank's message about a stall or a pre-flight, which speaks for all of them; None without one.

        The report of a pre-flight is rank 0's, whichever rank ends first."""
        tellers = {exit_codes.STALLED: [rank], exit_codes.PREFLIGHT: [0, rank]}.get(code, [])
        for path in (self._log_dir / f"rank_{teller}.log" for teller in tellers):
            end = end_of_log(path) if path.is_file() else []
            if end and end[0].startswith(OWN_MESSAGE):
                return "\n".join(end).removeprefix(OWN_MESSAGE)
        return None

    def _doing(self, rank: int) -> str:
        """Phase and step of a rank's last heartbeat, with a space before it."""
        beat = heartbeats(postmortem.heartbeat_folder(self._log_dir)).get(rank)
        return "" if beat is None else f" {postmortem.place(beat)}"


def _record_end(log_dir: Path, rank: int, code: int) -> None:
    """The first rank, on any node, to write this file decides how the attempt ended; later ends are consequences."""
    with contextlib.suppress(FileExistsError), (log_dir / END).open("x", encoding="utf-8") as file:
        file.write(f"{code} rank {rank} on {socket.gethostname()}\n")


def _kill_group(leader: int) -> None:
    for kill in (os.killpg, os.kill):  # a fork becomes its group's leader some time after it exists
        with contextlib.suppress(ProcessLookupError):
            kill(leader, signal.SIGKILL)
