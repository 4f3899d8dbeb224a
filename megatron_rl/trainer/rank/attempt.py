"""One attempt of a run on this rank: its watchdog, its hold on the run folder, and its final message."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import textwrap
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatron_rl.agents.failures import AgentsFailed
from megatron_rl.checkpoint import store
from megatron_rl.checkpoint.store import CheckpointError
from megatron_rl.config import Config, to_yaml
from megatron_rl.config.actor_checks import parameters_in_fp8
from megatron_rl.rewards import RewardError
from megatron_rl.rollout import environment
from megatron_rl.rollout.engine import EngineError
from megatron_rl.runtime import collectives, disk, distributed, exit_codes, owner, postmortem, provenance
from megatron_rl.runtime import memory_use as memory
from megatron_rl.runtime.attempts import ATTEMPT, new_attempt
from megatron_rl.runtime.distributed import ProcessGrid
from megatron_rl.runtime.heartbeat import HEARTBEAT, Deadlines, RankFacts
from megatron_rl.runtime.owner import OwnedError, Ownership
from megatron_rl.runtime.stop import StopFlag, StopRequested, stop_code
from megatron_rl.runtime.watchdog import Watchdog, stacks
from megatron_rl.trainer.rank.memory_report import memory_parts, remedies
from megatron_rl.weights.transfer import SyncError

if TYPE_CHECKING:
    from megatron_rl.trainer.generator import GeneratorRun
    from megatron_rl.trainer.run import Run


class Attempt:
    """A rank's life from its first line to its exit code. `run_dir`: where rank 0 writes."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        self.config, self.run_dir = config, run_dir
        self.grid: ProcessGrid | None = None
        self.ownership: Ownership | None = None  # rank 0's, of the run folder
        self.run: Run | GeneratorRun | None = None  # once it is built
        self.watchdog: Watchdog | None = None
        if folder := os.environ.get(ATTEMPT):  # the launcher's: hangs are noticed from before the ranks find each other
            self._watch(Path(folder), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))

    def join(self) -> ProcessGrid:
        """Meets the other ranks, and takes the run folder.

        Raises:
            OwnedError: on every rank, where another run writes there.
        """
        timeout = self.config.launch.timeout_minutes
        grid = distributed.initialize(
            self.config.actor.parallel,
            timeout,
            gpu_timeout_minutes(self.config),
            fp32_scales=not parameters_in_fp8(self.config),
            engine_ranks=self.config.rollout.tensor_parallel,
            generators=self.config.launch.generators or 0,
        )
        self.grid, everyone = grid, grid.everyone
        if self.watchdog is None:  # torchrun
            folder = everyone.broadcast(str(new_attempt(self.run_dir)) if everyone.is_main else "")
            self._watch(Path(folder), everyone.rank, everyone.world)
        refusal = None
        if everyone.is_main:
            self.ownership = owner.of_this_rank(self.run_dir, os.environ)
            try:
                self.ownership.take()
            except OwnedError as error:
                refusal = str(error)
        refusal = everyone.broadcast(refusal)
        if refusal is not None:
            raise OwnedError(refusal)
        assert self.watchdog is not None
        if everyone.is_main:
            environment.prepare()  # so that what it sets for vLLM is written down
            provenance.write(self.watchdog.attempt)
            disk.replace(self.watchdog.attempt / "recipe.yaml", to_yaml(self.config))
        return grid

    def _watch(self, folder: Path, rank: int, world: int) -> None:
        recipe, minute = self.config.watchdog, 60.0
        deadlines = Deadlines(
            recipe.default_minutes * minute,
            {phase: minutes * minute for phase, minutes in recipe.phases.items()},
            recipe.first_time_minutes * minute,
        )
        self.watchdog = Watchdog(folder, rank, world, deadlines if recipe.enabled else None, rank_facts)
        self.watchdog.start()

    def end_at_once_on(self, stop: StopFlag) -> None:
        """Lets a signal end an evaluation, which keeps every response as it comes, without waiting for
        other ranks."""
        stop.end_at_once(functools.partial(_end_evaluation, self.ownership))

    def stopped(self, request: StopRequested) -> int:
        """The exit code of a run that was told to stop; rank 0 says how to continue."""
        if self.grid is not None and self.grid.everyone.is_main:
            print(f"megatron-rl: {request}; {_how_to_continue(self.run_dir)}", file=sys.stderr)
        return stop_code(request.signum)

    def failed(self, error: Exception) -> int:
        """Post-mortem and final message of a rank that met an error; the exit code."""
        config, watchdog = self.config, self.watchdog
        if watchdog is None:  # torchrun's ranks have not found each other
            raise error
        if collectives.gave_up(error):
            watchdog.end_stalled(
                f"a collective gave up after launch.timeout_minutes = {config.launch.timeout_minutes:g}"
            )
        text = f"{type(error).__name__}: {error}"
        gone = not self.run_dir.is_dir() if self.ownership is None else self.ownership.is_gone()
        if gone and isinstance(error, OSError | CheckpointError):
            text = owner.gone(self.run_dir)
        out_of_memory = memory.is_out_of_memory(error)
        try:
            parts = memory_parts(self.run) if self.run is not None else {}
        except RuntimeError:  # a failed device answers no query
            parts = {}
        table = memory.table(parts, memory.in_use(), HEARTBEAT.memory_peaks())
        about = {"error": text, "versions": provenance.versions(), "memory": table.splitlines(), **rank_facts(True)}
        if not gone:  # else the folder that is there now is another run's
            with contextlib.suppress(OSError):  # the disk may be what failed
                postmortem.write_rank(watchdog.folder, about, traceback.format_exc() + "\n" + stacks())
        file = watchdog.folder / f"rank_{HEARTBEAT.rank}.txt"
        if out_of_memory:
            help_ = "\n".join(f"  {line}" for line in remedies(HEARTBEAT.phase, config))
            where = postmortem.place(HEARTBEAT.record())
            print(
                f"megatron-rl: out of memory {where}, on rank {HEARTBEAT.rank} (node {HEARTBEAT.host}): {text}\n"
                f"memory in GiB:\n{textwrap.indent(table, '  ')}\nwhat would help here, what costs least first:\n{help_}\n"
                f"(where it happened: {file}; docs/out-of-memory.md)",
                file=sys.stderr,
            )
            return exit_codes.OUT_OF_MEMORY
        # Expected failures explain themselves: a traceback would bury the explanation, so it goes to a file only.
        expected = (
            ValueError,
            OSError,
            CheckpointError,
            EngineError,
            AgentsFailed,
            RewardError,
            SyncError,
            FloatingPointError,
            OwnedError,
        )
        # numpy's LinAlgError is a ValueError, and no recipe's fault.
        if self.grid is None or not isinstance(error, expected) or isinstance(error, np.linalg.LinAlgError):
            traceback.print_exception(error)
            return exit_codes.FAILED
        print(f"megatron-rl: {text}\n(where it happened: {file})", file=sys.stderr)
        return exit_codes.BAD_INPUT if isinstance(error, ValueError) else exit_codes.FAILED

    def close(self) -> None:
        """Ends the run's threads and engine, and lets its folder go; no deadline after this."""
        if self.run is not None:
            self.run.close()
        if self.ownership is not None:
            self.ownership.release()
        if self.watchdog is not None:
            self.watchdog.stop()


def gpu_timeout_minutes(config: Config) -> float:
    """At NCCL's own deadline torch aborts the process without a message: the watchdog's must come first."""
    recipe, own = config.watchdog, config.launch.timeout_minutes
    if not recipe.enabled:
        return own
    return max(own, max(recipe.default_minutes, *recipe.phases.values()) + recipe.first_time_minutes + 10)


def rank_facts(full: bool) -> RankFacts:
    """Collectives and memory of this rank: for a heartbeat, or in full for a post-mortem."""
    recent, waiting = collectives.recent(64 if full else 1)
    facts = RankFacts(collective=recent[-1] if recent else None, pending=waiting)
    if full:
        return {**facts, "collectives": recent, "memory_gib": memory.in_use()}
    return {**facts, "host_gib": round(memory.host_in_use(), 2)}


def _end_evaluation(ownership: Ownership | None, signum: int) -> None:
    """Ends an evaluation in a signal handler: rank 0 says how to continue, and this process ends."""
    if ownership is not None:
        text = f"megatron-rl: {StopRequested(signum)}; the same command continues with the responses that are there\n"
        os.write(sys.stderr.fileno(), text.encode())
        ownership.release()
    os._exit(stop_code(signum))


def _how_to_continue(run_dir: Path) -> str:
    newest = store.newest_of_run(run_dir)
    if newest is None:
        return "there is no checkpoint to continue from (see checkpoint.every)"
    return f"the same command continues from {store.name_of(newest)}"
