"""How the properties are searched, what no test may leave to the next one (a process group), and what each folder took."""

import os
import sys
from collections import Counter
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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Seconds of every folder, fixtures included, where the tests of several were run."""
    seconds: Counter[str] = Counter()
    for report in (report for reports in terminalreporter.stats.values() for report in reports):
        if isinstance(report, pytest.TestReport):
            seconds[report.nodeid.partition("::")[0].rpartition("/")[0]] += report.duration
    if len(seconds) > 1:
        terminalreporter.section("seconds per folder")
        terminalreporter.line(", ".join(f"{folder} {taken:.0f}" for folder, taken in seconds.most_common()))
