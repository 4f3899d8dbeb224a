from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron_rl.weights.parallel import ParallelGroups

from .megatron import start, stop


@pytest.fixture(scope="module")
def parallel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ParallelGroups]:
    """Megatron's groups for this one process."""
    yield start(0, 1, str(tmp_path_factory.mktemp("rendezvous") / "file"))
    stop()
