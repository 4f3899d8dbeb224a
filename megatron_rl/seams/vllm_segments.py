"""Names of the shared memory that vLLM makes: they begin with the run's prefix, by which a killed run's are known.

vLLM 0.32 makes segments with `multiprocessing.shared_memory.SharedMemory`, whose own names are `psm_` and random.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
from typing import ClassVar

PREFIX = "megatron_rl-"


def run_prefix() -> str:
    """The prefix of this run's segments: ranks of one run share the port, other runs on the machine have others."""
    return f"{PREFIX}{os.environ['MASTER_PORT']}"


@contextlib.contextmanager
def named_segments(folder: Path) -> Iterator[None]:
    """While entered, `shared_memory.SharedMemory` makes segments with this run's prefix. `folder`: where they lie."""
    original, NamedSegment.folder = shared_memory.SharedMemory, folder
    shared_memory.SharedMemory = NamedSegment  # type: ignore[misc]
    try:
        yield
    finally:
        shared_memory.SharedMemory = original  # type: ignore[misc]


class NamedSegment(shared_memory.SharedMemory):
    """A segment named after its run, and free of Python's resource tracker, which warns about names that are gone.

    Raises:
        OSError: with the segment's path and size, where there is no room for it.
    """

    folder: ClassVar[Path]

    def __init__(self, name: str | None = None, create: bool = False, size: int = 0) -> None:
        if create:
            name = name or f"{run_prefix()}-{secrets.token_hex(8)}"
        try:
            super().__init__(name, create, size)
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror} ({size} bytes)", str(self.folder / str(name))) from None
        if create:
            resource_tracker.unregister(f"/{self.name}", "shared_memory")

    def unlink(self) -> None:
        (self.folder / self.name).unlink(missing_ok=True)
