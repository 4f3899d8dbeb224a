"""How the properties are searched, and what no test may leave to the next one: a process group."""

import os
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

# Searched anew in every run, but with the same examples each time where CI decides by them.
settings.register_profile("ci", derandomize=True, print_blob=True)
if os.environ.get("MEGATRON_RL_CI"):
    settings.load_profile("ci")


@pytest.fixture(scope="module", autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """Set up before a file's other fixtures, so checked after they are torn down."""
    yield
    distributed = sys.modules.get("torch.distributed")  # most files need no torch
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()
        pytest.fail("a test of this file left torch's process group open")
