"""Work that is done file by file, in several processes; an interrupted job resumes at the next file.

Files are written into `.<target>.converting/result` beside the target. A file that is on the disk gets a marker next to that
folder, with what was written; when every file has one, the folder is finished and renamed, so that a target either does not
exist or is whole.
"""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import progress
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn

import megatron_rl
from megatron_rl.checkpoint import manifest
from megatron_rl.checkpoint.manifest import StoredChunk
from megatron_rl.runtime import owner
from megatron_rl.runtime.disk import size_text, sync, sync_tree
from megatron_rl.runtime.process import die_with_parent

if TYPE_CHECKING:
    from multiprocessing.queues import SimpleQueue

    from torch import Tensor

    from megatron_rl.weights.files import WeightSource

_TASK, _MARKERS, _RESULT, _ENCLOSING = "task.json", "done", "result", "enclosing"
Identity = dict[str, object]
# Called with the bytes of each tensor as it is done.
Progress = Callable[[int], None]


class Conversion(ABC):
    """A conversion; pickled into every worker once, which plans for itself (the plan follows from the fields)."""

    dtype: str  # of the result, or `keep`

    @property
    def inside(self) -> str:
        """The folder within the target that holds everything that `write` and `finish` write; "" for the target itself."""
        return ""

    @abstractmethod
    def identity(self) -> Identity:
        """Everything the result depends on, JSON-serialisable: an interrupted conversion continues only if it is the same."""

    @abstractmethod
    def files(self) -> list[tuple[str, int]]:
        """Every file that has to be written: name, bytes of tensors in it."""

    @abstractmethod
    def write(self, file: str, folder: Path, progress: Progress) -> list[StoredChunk]:
        """Writes one of them."""

    @abstractmethod
    def finish(self, folder: Path, pieces: Sequence[StoredChunk]) -> None:
        """Writes the remaining files after all of `files()`; the manifest last."""

    def enclose(self, root: Path) -> None:  # noqa: B027
        """Writes what lies beside that folder, if the target is not the folder itself."""

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "_plan"}

    # ------------------------------------------------------------------------------------------------- verification
    @abstractmethod
    def names(self) -> list[str]:
        """The tensors that are compared."""

    @abstractmethod
    def expected(self, name: str, start: int, stop: int) -> Tensor:
        """The expected rows [start, stop) of one."""

    @abstractmethod
    def result(self, target: Path) -> WeightSource:
        """Reads back what was written."""


def run(task: Conversion, target: Path, workers: int, say: Callable[[str], None]) -> bool:
    """Does the task; returns False where `target` already is its whole result.

    Raises:
        ValueError: `target` exists and is something else, or cannot be replaced, or another process is writing it; whatever
            the task raises.
        OSError: no room, no permission.
    """
    identity, partial = task.identity(), target.with_name(f".{target.name}.converting")
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        whole = target / task.inside
        if _made_by(whole) == identity and manifest.missing(whole) is None:
            say(f"{target} is already the result of this conversion")
            shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed at its very end
            return False
        raise ValueError(
            f"{target} exists and is not the result of this conversion; remove it or choose another folder"
        )
    if target.is_mount():
        raise ValueError(
            f"{target} is where a disk is mounted, and the result would take its place: name a folder in it"
        )
    with _only_writer(partial, target):
        done = _taken_up(partial, identity, say)
        files = task.files()
        remaining = [name for name, _ in files if name not in done]
        needed, free = sum(size for name, size in files if name not in done), shutil.disk_usage(partial).free
        if needed > free:
            raise ValueError(f"{target} needs {size_text(needed)} more and its disk has {size_text(free)} free")
        bar = ProgressBar(files, done)
        with bar:
            workers = max(1, min(workers, len(remaining)))
            in_parallel(functools.partial(_write_one, task, partial), remaining, workers, bar.advance)
        result = partial / _RESULT
        task.finish(result, [piece for name, _ in files for piece in _read_marker(partial, name)[1]])
        if task.inside:
            enclosing = partial / _ENCLOSING
            shutil.rmtree(enclosing, ignore_errors=True)  # of a process that was killed here
            enclosing.mkdir()
            task.enclose(enclosing)
            result.rename(enclosing / task.inside)
            sync_tree(enclosing)
            result = enclosing
        if target.is_dir():
            target.rmdir()
        result.rename(target)
        sync(target.parent)
        shutil.rmtree(partial, ignore_errors=True)
    return True


def in_parallel[Item, Result](
    function: Callable[[Item, Progress], Result],
    items: Sequence[Item],
    workers: int,
    progress: Progress,
    spawn: bool = False,
) -> list[Result]:
    """`function(item, progress)` for every item, in up to `workers` processes; the results in order. The first error ends it.
    `spawn`: in a process of its own also where one would do.
    """
    if workers <= 1 and not spawn:
        return [function(item, progress) for item in items]
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    listener = threading.Thread(target=_listen, args=(queue, progress), daemon=True)
    listener.start()
    pool = ProcessPoolExecutor(workers, context, _start_worker, (function, queue, os.getpid()))
    try:
        futures = [pool.submit(_call, item) for item in items]
        wait(futures, return_when=FIRST_EXCEPTION)
        failed = next((error for f in futures if f.done() and (error := f.exception()) is not None), None)
        if isinstance(failed, BrokenProcessPool):
            raise OSError(
                "a worker process was killed (by hand, or because memory ran out: try fewer --workers)"
            ) from failed
        if failed is not None:
            raise failed
        return [future.result() for future in futures]
    finally:
        pool.shutdown(cancel_futures=True)
        queue.put(None)
        listener.join()


def made_by(task: Conversion, family: str) -> dict[str, object]:
    """A conversion's entries in the manifest of its result."""
    return {"kind": "conversion", "task": task.identity(), "version": megatron_rl.__version__, "family": family}


def _made_by(folder: Path) -> Identity | None:
    with contextlib.suppress(ValueError):
        return manifest.read(folder).get("task")
    return None


# ------------------------------------------------------------------------------------------------------------ one folder
@contextmanager
def _only_writer(partial: Path, target: Path) -> Iterator[None]:
    ownership = owner.Ownership(partial)
    try:
        ownership.take()
    except owner.OwnedError:
        raise ValueError(f"another process is converting into {target}: {owner.read(partial) or 'unknown'}") from None
    try:
        yield
    except ValueError:  # refused: nothing to continue from, unless an earlier run left whole files
        if not any((partial / _MARKERS).glob("*.json")):
            shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        ownership.release()


def _taken_up(partial: Path, identity: Identity, say: Callable[[str], None]) -> set[str]:
    """The files that an interrupted run of the same task left whole; what another task left is removed."""
    task = partial / _TASK
    before = json.loads(task.read_text()) if task.is_file() else None
    if before != json.loads(json.dumps(identity)):
        if before is not None:
            say("found an interrupted conversion of another source or with other options: starting over")
        for path in partial.iterdir():
            if path.name != owner.FILE:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        for name in (_MARKERS, _RESULT):
            (partial / name).mkdir()
        _replace(task, identity)
        return set()
    (partial / _RESULT).mkdir(exist_ok=True)
    done = set()
    for marker in sorted((partial / _MARKERS).glob("*.json")):
        path = partial / _RESULT / marker.stem
        if path.is_file() and path.stat().st_size == _read_marker(partial, marker.stem)[0]:
            done.add(marker.stem)
    say(f"continuing an interrupted conversion: {len(done)} files are written")
    return done


def _read_marker(partial: Path, file: str) -> tuple[int, list[StoredChunk]]:
    """Bytes of a written file, and what lies in it; -1 and nothing where the marker did not reach the disk whole."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        content = json.loads((partial / _MARKERS / f"{file}.json").read_text())
        return content["bytes"], [StoredChunk.of(row) for row in content["pieces"]]
    return -1, []


def _write_one(task: Conversion, partial: Path, file: str, progress: Progress) -> None:
    folder = partial / _RESULT
    try:
        pieces = task.write(file, folder, progress)
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(folder / file)) from error  # writing by descriptor names no file
    about = {"bytes": (folder / file).stat().st_size, "pieces": [piece.row() for piece in pieces]}
    _replace(partial / _MARKERS / f"{file}.json", about)


def _replace(path: Path, content: object) -> None:
    temporary = path.with_suffix(".tmp")
    manifest.write_json(temporary, content, indent=None)
    temporary.rename(path)


# --------------------------------------------------------------------------------------------------------------- workers
_function: Callable[[Any, Progress], Any]
_queue: SimpleQueue[int | None]


def _start_worker(function: Callable[[Any, Progress], Any], queue: SimpleQueue[int | None], parent: int) -> None:
    """Ends with its parent, also where that is killed; Ctrl-C is the parent's business."""
    global _function, _queue
    _function, _queue = function, queue
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(parent)()
    os.environ["OMP_NUM_THREADS"] = "1"  # for torch, where the task imports it
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def _call[Item](item: Item) -> Any:
    return _function(item, _queue.put)


def _listen(queue: SimpleQueue[int | None], progress: Progress) -> None:
    while (count := queue.get()) is not None:
        progress(count)


# -------------------------------------------------------------------------------------------------------------- progress
class ProgressBar:
    """Bytes, speed and time left of `files` (name, bytes): a bar on a terminal, a line every ten seconds elsewhere."""

    def __init__(self, files: Sequence[tuple[str, int]], done: set[str], what: str = "converting") -> None:
        console = Console(stderr=True)
        columns = (DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
        text = TextColumn("{task.description}")
        self._bar = progress.Progress(text, BarColumn(), *columns, console=console, disable=not console.is_terminal)
        written = sum(size for name, size in files if name in done)
        self._row = self._bar.add_task(what, total=sum(size for _, size in files), completed=written)
        self._shown = time.monotonic()

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._bar.stop()
        if kind is None:
            self._print()

    def advance(self, count: int) -> None:
        self._bar.advance(self._row, count)
        if time.monotonic() - self._shown > 10:
            self._print()

    def _print(self) -> None:
        if self._bar.disable:
            self._shown = time.monotonic()
            [task] = self._bar.tasks
            sizes = f"{size_text(task.completed)} of {size_text(task.total or 0)}"
            print(f"{task.description}: {sizes}, {size_text(task.speed or 0)}/s", file=sys.stderr, flush=True)
