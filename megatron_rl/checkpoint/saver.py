"""Asynchronous checkpoint writing: one at a time, in a thread of each rank, renamed into place when complete."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from megatron_rl.checkpoint import snapshot as snapshots
from megatron_rl.checkpoint.snapshot import Snapshot, Snapshotter
from megatron_rl.runtime.disk import make_inside, size_text, sync
from megatron_rl.runtime.distributed import ProcessGrid
from megatron_rl.seams.megatron import Chunk, Optimizer

# Dead ranks are the launcher's business; a slow disk is no reason to give up a checkpoint.
_PATIENCE = timedelta(hours=24)


@dataclass(frozen=True)
class SaveOutcome:
    """How one save went.

    Attributes:
        error: why there is no checkpoint; None where there is.
        blocked: seconds that training waited for it.
        seconds: from the start of writing until it was current (or given up).
        num_bytes: tensors of all ranks.
    """

    step: int
    error: str | None
    blocked: float
    seconds: float
    num_bytes: int


class Saver:
    """Saves of one run.

    The writers of all ranks talk over a process group of their own, so they never get between the collectives of training,
    and a checkpoint becomes current (or is given up) without waiting for a step to end.

    Args:
        run_dir: has to be there; a save to a run folder that is gone fails, and does not bring it back.
        root: its folder of checkpoints; created if missing.
        asynchronous: whether `submit` returns before the checkpoint is written.
        after: called by rank 0's writer after each complete checkpoint; for removing old ones.
    """

    def __init__(
        self, run_dir: Path, root: Path, grid: ProcessGrid, asynchronous: bool, after: Callable[[], None]
    ) -> None:
        self.run_dir = run_dir
        self.root, self._grid, self._asynchronous, self._after = root, grid, asynchronous, after
        self._writers = ProcessGrid(**{**vars(grid), "host_group": dist.new_group(backend="gloo", timeout=_PATIENCE)})
        self._snapshotter = Snapshotter(grid, copied=asynchronous)
        self._thread: threading.Thread | None = None
        self._outcomes: list[SaveOutcome] = []
        self._blocked = 0.0
        self.last_step: int | None = None  # of the newest save that succeeded or is under way

    def busy(self) -> bool:
        """Whether any rank still writes; every rank calls it."""
        return any(self._grid.all_gather(self._thread is not None and self._thread.is_alive()))

    def take(self, chunks: Sequence[Chunk], optimizer: Optimizer) -> Snapshot:
        """Copies what is to be saved to host memory; every rank calls it. Waits for the previous save."""
        begin = time.perf_counter()
        self.drain()
        taken = self._snapshotter.take(chunks, optimizer)
        self._blocked = time.perf_counter() - begin
        return taken

    def submit(self, step: int, snapshot: Snapshot, about: Mapping[str, object], files: dict[str, bytes]) -> None:
        """Starts writing `root/step_<step>`; every rank calls it.

        Args:
            snapshot: the last one that `take` gave.
            about: for the manifest; JSON-serialisable, the same on every rank.
            files: further files for the checkpoint, name -> content; rank 0's count.
        """
        self.last_step = step
        work = threading.Thread(
            target=self._write, args=(step, snapshot, about, files), name=f"saving step {step}", daemon=True
        )
        self._thread = work
        work.start()
        if not self._asynchronous:
            self.drain()

    def drain(self) -> None:
        """Returns when nothing is being written any more."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """Ends the writers' process group; every rank calls it, and saves nothing after that."""
        self.drain()
        dist.destroy_process_group(self._writers.host_group)

    def outcomes(self) -> list[SaveOutcome]:
        """The saves that have ended since this was last asked, oldest first; the same on every rank, sooner or later."""
        ended = []
        while self._outcomes:  # the writer may add to it meanwhile
            ended.append(self._outcomes.pop(0))
        return ended

    def _write(self, step: int, snapshot: Snapshot, about: Mapping[str, object], files: dict[str, bytes]) -> None:
        begin = time.perf_counter()
        num_bytes = 0
        try:
            num_bytes, error = self._try(step, snapshot, about, files)
        except Exception as failure:  # whatever it is, it must reach the run, which goes on
            error = f"{type(failure).__name__}: {failure}"
        if error is not None and self.last_step == step:
            self.last_step = None
        seconds = time.perf_counter() - begin
        blocked = self._blocked if self._asynchronous else self._blocked + seconds
        self._outcomes.append(SaveOutcome(step, error, blocked, seconds, num_bytes))

    def _try(
        self, step: int, snapshot: Snapshot, about: Mapping[str, object], files: dict[str, bytes]
    ) -> tuple[int, str | None]:
        """Bytes of all ranks, and what went wrong; the same on every rank.

        Every rank learns what another could not do before any of them waits for it in the next thing that all do together.
        """
        grid, temporary = self._writers, self.root / f".step_{step}.writing"
        num_bytes = sum(grid.all_gather(snapshot.num_bytes))
        error = grid.broadcast(self._prepare(temporary, num_bytes) if grid.is_main else None)
        if error is not None:
            return num_bytes, error
        written, error = [], None
        try:
            written = snapshots.write_share(snapshot, temporary, grid.rank)
        except Exception as failure:  # whatever it is: the others wait for this rank's word
            error = self._reason(failure)
        shares = grid.gather((written, error))
        if grid.is_main:
            error = next((e for _, e in shares if e is not None), None)
            if error is None:
                error = self._finish(step, temporary, snapshot, [share for share, _ in shares], about, files)
            if error is not None:
                shutil.rmtree(temporary, ignore_errors=True)
        return num_bytes, grid.broadcast(error)

    def _prepare(self, temporary: Path, num_bytes: int) -> str | None:
        """Rank 0: an empty folder, if there is room. Returns what went wrong."""
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            make_inside(self.run_dir, temporary)
            free = shutil.disk_usage(self.root).free
        except OSError as failure:
            return str(failure)
        if num_bytes > free:
            shutil.rmtree(temporary, ignore_errors=True)
            return f"it needs {size_text(num_bytes)} and {self.root} has {size_text(free)} free"
        return None

    def _finish(
        self,
        step: int,
        temporary: Path,
        snapshot: Snapshot,
        shares: list[list[snapshots.Written]],
        about: Mapping[str, object],
        files: dict[str, bytes],
    ) -> str | None:
        """Rank 0: what is left to write, and the rename that makes it current. Returns what went wrong."""
        try:
            for name, content in files.items():
                make_inside(temporary, (temporary / name).parent)
                (temporary / name).write_bytes(content)
            snapshots.finish(snapshot, temporary, shares, about)
            _replace(temporary, self.root / f"step_{step}")
            self._after()
        except Exception as failure:  # as above
            return self._reason(failure)
        return None

    def _reason(self, failure: Exception) -> str:
        try:
            room = f"{size_text(shutil.disk_usage(self.root).free)} free"
        except OSError as gone:
            room = f"no answer about its room: {gone.strerror}"
        return f"writing failed with {type(failure).__name__}: {failure} ({self.root} has {room})"


def _replace(temporary: Path, final: Path) -> None:
    """Makes the folder current; one of the same name is out of the way only for as long as two renames take."""
    if final.exists():
        old = final.with_name(f".{final.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    temporary.rename(final)
    sync(final.parent)
    shutil.rmtree(final.with_name(f".{final.name}.old"), ignore_errors=True)
