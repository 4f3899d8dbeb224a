"""Benchmarks say what other programs took of the machine while they measured."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import others

SPIN = "import time\nend = time.process_time() + {}\nwhile time.process_time() < end: pass"
FOLDER = Path(others.__file__).parent


def test_a_busy_loop_elsewhere_is_what_others_took_and_own_work_is_not() -> None:
    """On a machine that has more to do: at least the loop, which is nobody's child here, and nothing of the own one."""
    shell = ["sh", "-c", f'"{sys.executable}" -c "$0" > /dev/null & echo $!', SPIN.format(1)]
    elsewhere = int(subprocess.run(shell, stdout=subprocess.PIPE, check=True).stdout)
    reading = time.perf_counter()
    begin, taken = time.perf_counter(), others.watch()
    busy, own, foreign = others._busy(), others._own(), os.times()
    between = time.perf_counter() - reading
    subprocess.run([sys.executable, "-c", SPIN.format(0.5)], check=True)
    while Path(f"/proc/{elsewhere}").exists():
        time.sleep(0.05)
    spent = sum(os.times()[:4]) - sum(foreign[:4])
    assert spent > 0.5
    assert others._own() - own == pytest.approx(spent, abs=0.1)
    reading = time.perf_counter()
    seconds = taken() * (time.perf_counter() - begin)
    assert seconds > 0.5
    after = others._busy() - busy - spent
    # The two counts read the machine's clocks one after the other: all cores may have worked between the readings.
    between += time.perf_counter() - reading
    assert seconds == pytest.approx(after, abs=0.1 + between * (os.cpu_count() or 1))


def test_it_is_told_once_and_loudly(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    for cores, is_loud in ((0.04, False), (1.3, True)):
        monkeypatch.setattr(others, "watch", lambda cores=cores: lambda: cores)
        with others.told():
            # A process of the benchmark's own.
            nested = "from benchmarks.others import told\nwith told(): pass"
            subprocess.run([sys.executable, "-c", nested], check=True, cwd=FOLDER.parent)
        told = capfd.readouterr().err
        assert told.count("others took") == 1
        assert f"others took {cores:.2f} of this machine's" in told
        assert ("NOT IDLE" in told) == is_loud


def test_every_benchmark_that_reads_a_clock_tells_it() -> None:
    clocks = re.compile(r"\b(perf_counter|process_time|monotonic)\(|timing_s/")
    scripts = [path for path in FOLDER.rglob("*.py") if "__main__" in path.read_text() + path.stem]
    silent = {path.stem for path in scripts if clocks.search(path.read_text()) and "told()" not in path.read_text()}
    # Read what earlier runs have recorded, or run within `benchmarks.peers`.
    assert silent <= {"simulation", "trl_steps", "replay"}
    assert len(scripts) > 10
