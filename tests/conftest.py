"""For every test: which may share a process when several run at a time, and how properties are searched."""

import os

import pytest
from hypothesis import settings

# Anew in every run, but with the same examples each time where CI decides by them.
settings.register_profile("ci", derandomize=True, print_blob=True)
if os.environ.get("MEGATRON_RL_CI"):
    settings.load_profile("ci")

_ONE_GROUP = {"e2e", "launch"}  # folders whose files share a run, a Slurm cluster


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`pytest -n`: a file's tests stay together, and those of a folder that shares what takes long to make."""
    for item in items:
        folder = item.path.parent.name
        item.add_marker(pytest.mark.xdist_group(folder if folder in _ONE_GROUP else str(item.path)))
