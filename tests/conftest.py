"""How the properties are searched, what no test may leave to the next one (a process group, a plugin), and what each folder
took."""

import gc
import os
import sys
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

# As for ranks on a CPU (`runtime.attempts.rank_environment`), before torch is imported: Megatron-Core's functions would be
# compiled otherwise, which no run on a CPU does, and inductor makes no valid C++ of some where a CPU lacks AVX2.
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")

pytest_plugins = ["tests.shared_memory"]

# Searched anew in every run, but with the same examples each time where CI decides by them.
settings.register_profile("ci", derandomize=True, print_blob=True)
if os.environ.get("MEGATRON_RL_CI"):
    settings.load_profile("ci")


# `make test` runs four folders at a time, on two cores: a folder's tests share worlds and engines, so they stay in one
# process, which now and then waits, the Slurm tests for most of their time. The long folders come first, and the short ones
# fill up at the end: one that is begun late leaves a core idle.
_FIRST = ("launch", "e2e", "rewards", "planning", "recipes", "te", "actor", "checkpoint", "conversion", "agents", "cli")


def _folder(nodeid: str) -> str:
    return nodeid.split("/")[1]


class _ByFolder(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return _folder(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    return _ByFolder(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Of the whole suite: nothing that is imported is garbage, and it need not be searched by any test's collection."""
    if not hasattr(session.config, "workerinput"):
        return (yield)
    from megatron_rl.seams import torch_compile

    gc.disable()
    torch_compile.leave_out()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        order = {folder: place for place, folder in enumerate(_FIRST)}
        items.sort(key=lambda item: order.get(_folder(item.nodeid), len(order)))


@pytest.fixture(scope="module", autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """Set up before a file's other fixtures, so checked after they are torn down."""
    yield
    distributed = sys.modules.get("torch.distributed")  # most files need no torch
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()
        pytest.fail("a test of this file left torch's process group open")


@pytest.fixture(scope="module", autouse=True)
def no_plugin_is_left() -> Iterator[None]:
    """Methods that a file's recipes registered are unknown to the next; a recipe that names them there loads them anew."""
    catalogue = sys.modules.get("megatron_rl.methods.catalogue")
    before = set() if catalogue is None else {*catalogue.CATALOGUE}
    yield
    if (catalogue := sys.modules.get("megatron_rl.methods.catalogue")) is None:
        return
    for key in catalogue.CATALOGUE.keys() - before:
        module = catalogue.CATALOGUE[key].function.__module__
        if not module.startswith("megatron_rl."):
            del catalogue.CATALOGUE[key]
            sys.modules.pop(module, None)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Seconds of every folder, fixtures included, where the tests of several were run."""
    seconds: Counter[str] = Counter()
    for report in (report for reports in terminalreporter.stats.values() for report in reports):
        if isinstance(report, pytest.TestReport):
            seconds[report.nodeid.partition("::")[0].rpartition("/")[0]] += report.duration
    if len(seconds) > 1:
        terminalreporter.section("seconds per folder")
        terminalreporter.line(", ".join(f"{folder} {taken:.0f}" for folder, taken in seconds.most_common()))
