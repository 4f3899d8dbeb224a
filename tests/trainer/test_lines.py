"""A step's line on the terminal, the summary at the end, and how wide they are."""

from __future__ import annotations

import os
import pty
import re
import struct
import subprocess
import sys
import termios
from fcntl import ioctl
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.trainer.lines import STAGE, STEP, line

STEP_OF_A_RUN = {
    "reward/mean": 0.4084,
    "response_length/mean": 13.27,
    "groups/signal_share": 0.8906,
    "actor/entropy": 0.19641,
    "old_policy/kl_k3": 6.1e-6,
    "actor/grad_norm": 0.4892,
    "actor/lr": 3e-5,
    "perf/tokens_per_s": 10793.0,
    "timing_s/step": 1.08,
}
HOSTILE = {name: -abs(value) * 1e6 for name, value in STEP_OF_A_RUN.items()}


def test_a_wide_terminal_has_everything_and_one_of_80_columns_what_matters_most() -> None:
    whole = (
        "step    1  reward 0.408  length 13.3  signal 0.89  entropy 0.196  kl_old 6.1e-06  grad 0.489  lr 3.0e-05  "
        "tok/s 10,793  s 1.08"
    )
    assert line("step    1", STEP, STEP_OF_A_RUN, None) == line("step    1", STEP, STEP_OF_A_RUN, 160) == whole
    assert line("step    1", STEP, STEP_OF_A_RUN, 80) == (
        "step    1  reward 0.408  length 13.3  signal 0.89  entropy 0.196  s 1.08"
    )
    with_reference = STEP_OF_A_RUN | {"reference/kl_k3": 0.0123}
    assert "ref kl 1.2e-02" in line("step    1", STEP, with_reference, None)


@pytest.mark.parametrize("width", [*range(30, 160, 7), 80])
@pytest.mark.parametrize("metrics", [STEP_OF_A_RUN, HOSTILE])
def test_no_line_is_wider_than_the_terminal(width: int, metrics: dict[str, float]) -> None:
    assert len(line("step 1000", STEP, metrics, width)) <= width
    assert len(line("reward model step 1000", STAGE, {"reward_model/loss": -1e9, **metrics}, width + 20)) <= width + 20


def in_a_terminal(columns: int, code: str) -> str:
    """What a new process of Python says to a terminal of so many columns."""
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 30, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    ) as one:
        os.close(theirs)
        said = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # the process has ended
                break
            if not part:
                break
            said += part
    os.close(ours)
    assert one.returncode == 0, said.decode()
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said.decode()).replace("\r\n", "\n")


RUN = """
from pathlib import Path
from types import SimpleNamespace
from megatron_rl.config.schema import Config, LoggingConfig
from megatron_rl.trainer.report import Reporter
import json, sys
folder = Path({folder!r})
config = Config(run_dir=str(folder), logging=LoggingConfig(tensorboard=False, report=False))
config.trainer.minibatches = {minibatches}
main = Reporter(config, folder, SimpleNamespace(is_main=True))
main.begin("SFT", 0, 1)
with main.apart("engine start"):
    pass
main.begin("RL", 0, 25)
main.log(0, {{"eval/sums/avg@1": 0.25, "eval/sums/pass@1": 0.25, "eval/sums/stderr": 0.02}})
main.log(1, {metrics!r})
main.log(2, {{"eval/sums/avg@1": 0.5, "eval/sums/pass@1": 0.5, "eval/sums/stderr": 0.01}})
main.summary()
main.close()
"""


def said(folder: Path, columns: int | None, minibatches: int = 2, **more: Any) -> str:
    phases = {
        f"timing_s/{name}": 0.1 for name in ("generate", "update", "old_log_prob", "ref_log_prob", "sync", "reward")
    }
    code = RUN.format(folder=str(folder), metrics=STEP_OF_A_RUN | phases | more, minibatches=minibatches)
    if columns is not None:
        return in_a_terminal(columns, code)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_a_terminal_of_80_columns_breaks_no_word_and_a_file_no_line(tmp_path: Path) -> None:
    narrow = said(tmp_path / "a", 80)
    lines = [one.rpartition("\r")[2].rstrip() for one in narrow.splitlines()]
    assert "step    1  reward 0.408  length 13.3  signal 0.89  entropy 0.196  s 1.08" in lines
    assert all(len(one) <= 80 for one in lines if str(tmp_path) not in one)
    assert "old_log_prob" in narrow
    assert "ref_log_prob" in narrow
    file = said(tmp_path / "b", None)
    assert "kl_old 6.1e-06  grad 0.489  lr 3.0e-05  tok/s 10,793  s 1.08\n" in file
    assert max(len(one) for one in file.splitlines() if one.startswith("Time within")) > 80


def test_the_summary_gives_the_engine_s_start_its_own_time_and_errors_their_place(tmp_path: Path) -> None:
    text = said(tmp_path / "run", None)
    assert re.search(r"This process ran \d+ s: SFT 0 s, engine start 0 s, RL 0 s\n", text)
    assert "0.250 ± 0.020" in text
    assert "0.500 ± 0.010" in text
    assert "stderr" not in text
    assert "pass@1" not in text, "which is avg@1"


def test_the_old_policys_kl_is_left_out_where_it_is_0_by_construction(tmp_path: Path) -> None:
    assert "kl_old" not in said(tmp_path / "run", None, minibatches=1)
