"""Mutation testing: changes one operator, constant or argument of the package, and asks whether a test fails.

mutmut makes the mutants, all in one copy of the package; this runs a sample of them, each in a process forked after pytest
has imported and collected the tests, against the tests that call its function.

    python -m tests.mutation make algorithms rewards
    python -m tests.mutation run --mutants rewards/maths_forms.py --count 100 --tests tests/rewards/test_strict_maths.py

On 2026-11-22 (5785d69, 71f9de5, 2f7a3a1) 269 of 2,310 mutants survived, and 247 more were in functions that no test called;
on 2026-11-23 (a7557de) 12 of 60. Tests answered them, or they make no difference.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pickle
import random
import re
import signal
import sys
import time
from collections import defaultdict
from pathlib import Path

FOLDER = Path("mutants")
PER_FUNCTION = 3  # a sample of many functions says more than all mutants of a few
_MESSAGE = re.compile(r"raise \w+\(|print\(|\bnote\(|report\.phase\(")


def make(packages: list[str]) -> None:
    """Writes mutants/: the whole tree, with every mutant of the packages in it."""
    from mutmut.__main__ import create_mutants
    from mutmut.configuration import config
    from mutmut.utils.file_utils import copy_also_copy_files, copy_src_dir

    FOLDER.mkdir()
    config().only_mutate = [f"megatron_rl/{package}/*.py" for package in packages]
    copy_src_dir()
    copy_also_copy_files()
    print(create_mutants(2))


def _changed(name: str) -> tuple[str, str]:
    from mutmut.mutation.diff_apply import get_diff_for_mutant

    with contextlib.chdir(".."):
        lines = [line for line in get_diff_for_mutant(name).splitlines() if not line.startswith(("+++", "---"))]
    removed, added = (" ".join(line[1:].strip() for line in lines if line[:1] == sign) for sign in "-+")
    return removed, added


def _says_the_same(removed: str, added: str) -> bool:
    """Only words of a message changed, or a `strict=` that guards what is equal."""
    return (
        removed.lower() == added.lower().replace("xx", "")
        or _MESSAGE.search(removed) is not None
        or removed.replace("strict=True", "") == re.sub("strict=(None|False)", "", added)
    )


def pick(prefixes: list[str], reached: set[str], count: int, seed: int, anywhere: bool) -> list[tuple[str, str, str]]:
    """Mutants of functions that the tests reach (of any, with `anywhere`), at most PER_FUNCTION of each: name, removed and
    added code."""
    names = []
    for prefix in prefixes:
        for meta in sorted(Path("megatron_rl").glob(f"{prefix}/**/*.meta" if "." not in prefix else f"{prefix}.meta")):
            names += json.loads(meta.read_text())["exit_code_by_key"]
    functions = {name.rsplit("__mutmut_", 1)[0] for name in names}
    print(f"{len(names)} mutants of {len(functions)} functions; the tests reach {len(functions & reached)} of these")
    random.Random(seed).shuffle(names)
    taken: dict[str, int] = defaultdict(int)
    picked = []
    for name in names:
        function = name.rsplit("__mutmut_", 1)[0]
        if len(picked) == count or not (anywhere or function in reached) or taken[function] == PER_FUNCTION:
            continue
        removed, added = _changed(name)
        if not _says_the_same(removed, added):
            taken[function] += 1
            picked.append((name, removed, added))
    return picked


class Mutants:
    """A pytest plugin: in place of one run of the tests, one for each mutant."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options

    def pytest_runtestloop(self, session: object) -> bool:
        if session.testsfailed:  # type: ignore[attr-defined]
            return False  # pytest says which file could not be collected
        items = session.items  # type: ignore[attr-defined]
        reached, seconds, failed = self._reach(items)
        if failed:
            print(f"the unchanged tree fails: {failed}")
            return True
        functions = set().union(*reached.values())
        mutants = (
            [(name, *_changed(name)) for name in self.options.names]
            if self.options.names
            else pick(self.options.mutants, functions, self.options.count, self.options.seed, self.options.anywhere)
        )
        results: dict[str, int] = defaultdict(int)
        start = time.monotonic()
        for name, removed, added in mutants:
            function = name.rsplit("__mutmut_", 1)[0]
            own = sorted(
                (item for item in items if function in reached[item.nodeid]), key=lambda item: seconds[item.nodeid]
            )
            # called only in processes that tests start: all of them are tried
            verdict = _forked(own or items, name, self.options.timeout)
            results[verdict] += 1
            if verdict != "killed":
                print(f"{verdict} {name}\n    - {removed}\n    + {added}", flush=True)
        print(f"{len(mutants)} mutants, {dict(results)}, {time.monotonic() - start:.0f} s")
        return True

    def _reach(self, items: list) -> tuple[dict[str, set[str]], dict[str, float], str]:  # type: ignore[type-arg]
        """Which functions each test calls in this process, and how long it takes, on the unchanged code."""
        read, write = os.pipe()
        child = os.fork()
        if not child:
            from mutmut.mutation import trampoline

            os.setsid()
            hits: set[str] = set()
            trampoline.record_trampoline_hit = lambda name, caller=None: hits.add(name)
            trampoline._mutant_under_test = "stats"
            reached, seconds, failed = {}, {}, ""
            for index, item in enumerate(items):
                hits.clear()
                start = time.monotonic()
                failed = failed or ("" if _passes(item, items[index + 1 : index + 2]) else item.nodeid)
                reached[item.nodeid], seconds[item.nodeid] = set(hits), time.monotonic() - start
            with os.fdopen(write, "wb") as pipe:
                pickle.dump((reached, seconds, failed), pipe)
            os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            answer = pickle.load(pipe)
        os.waitpid(child, 0)
        return answer  # type: ignore[no-any-return]


def _passes(item: object, following: list) -> bool:  # type: ignore[type-arg]
    from _pytest.runner import runtestprotocol

    reports = runtestprotocol(item, log=False, nextitem=following[0] if following else None)  # type: ignore[arg-type]
    return not any(report.failed for report in reports)


def _forked(items: list, name: str, timeout: float) -> str:  # type: ignore[type-arg]
    """killed: a test fails. survived: none does. timeout: neither in time (an endless loop, mostly)."""
    child = os.fork()
    if not child:
        os.setsid()
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        os.environ["MUTANT_UNDER_TEST"] = name
        try:
            passed = all(_passes(item, items[index + 1 : index + 2]) for index, item in enumerate(items))
        except BaseException:
            passed = False
        os._exit(0 if passed else 1)
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            _end(child)
            return "survived" if status == 0 else "killed"
        time.sleep(0.02)
    _end(child)
    os.waitpid(child, 0)
    return "timeout"


def _end(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


def run(options: argparse.Namespace) -> None:
    import hypothesis
    import pytest

    # The first failing example is enough: none is made smaller.
    phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
    hypothesis.settings.register_profile("mutants", phases=phases, derandomize=True, database=None)
    hypothesis.settings.load_profile("mutants")
    os.chdir(FOLDER)
    sys.path.insert(0, os.getcwd())
    os.environ["PYTHONPATH"] = os.getcwd()
    pytest.main(["-q", "-s", "-o", "addopts=", "-p", "no:cacheprovider", *options.tests], plugins=[Mutants(options)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    making = commands.add_parser("make")
    making.add_argument("packages", nargs="+")
    making.set_defaults(do=lambda options: make(options.packages))
    running = commands.add_parser("run")
    running.add_argument("--mutants", nargs="+", default=[], help="actor, or actor/packing.py")
    running.add_argument("--names", nargs="+", default=[], help="these mutants, as a run printed them")
    running.add_argument("--tests", nargs="+", required=True)
    running.add_argument("--count", type=int, default=100)
    running.add_argument("--seed", type=int, default=0)
    running.add_argument("--anywhere", action="store_true", help="also of functions called only in other processes")
    running.add_argument("--timeout", type=float, default=60, help="seconds per mutant")
    running.set_defaults(do=run)
    options = parser.parse_args()
    options.do(options)


if __name__ == "__main__":
    main()
