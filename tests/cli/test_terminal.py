from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.live import Live
from rich.text import Text

from megatron_rl.runtime.terminal import Tee, Transcript


def transcribe(*chunks: bytes) -> str:
    file = io.BytesIO()
    transcript = Transcript(file)
    for chunk in chunks:
        transcript.write(chunk)
    transcript.close()
    return file.getvalue().decode()


@given(st.lists(st.text(st.characters(blacklist_categories=("C", "Z"))), min_size=1), st.integers(1, 7))
def test_plain_lines_stay_as_they_are_however_they_are_cut(lines: list[str], size: int) -> None:
    data = "".join(line + "\n" for line in lines).encode()
    assert transcribe(*[data[i : i + size] for i in range(0, len(data), size)]).encode() == data


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ("\x1b[1;31mred\x1b[0m\n", "red\n"),
        ("10%\r20%\r100%\n", "100%\n"),
        ("long line\rab\x1b[K\n", "ab\n"),
        ("a\nb\n\x1b[2A\x1b[2Kc\n", "a\nb\nc\n"),  # what is written is written; later frames are not repeated
        ("ab\bc\n", "ac\n"),
        ("no newline", "no newline\n"),
        ("kept\x1b[3K\n", "kept\n"),  # there is no such erasure
        ("\x1b[4000000000Gx\ra\n", "a".ljust(999) + "x\n"),
        (f"a\x1b[{'9' * 5000}Bb", "a\n" + "\n" * 999 + " b\n"),
        ("", ""),
    ],
)
def test_control_sequences(data: str, text: str) -> None:
    chunks = [data.encode()] if "\x1b[2A" not in data else [data[:4].encode(), data[4:].encode()]
    assert transcribe(*chunks) == text


def test_a_live_view_is_written_as_it_was_last() -> None:
    chunks: list[bytes] = []

    class Sink(io.StringIO):
        def write(self, text: str) -> int:
            chunks.append(text.encode())
            return len(text)

    console = Console(file=Sink(), force_terminal=True, width=40)
    with Live(Text(""), console=console, auto_refresh=False) as live:
        for step in range(30):
            live.update(Text(f"phase {step}\nprogress {step}"), refresh=True)
            if step % 10 == 0:
                console.print(f"step {step} [red]done[/red]")
    lines = transcribe(*chunks).splitlines()
    assert [line for line in lines if line.startswith("step")] == ["step 0 done", "step 10 done", "step 20 done"]
    assert lines[-2:] == ["phase 29", "progress 29"]
    assert len([line for line in lines if line.startswith("phase")]) <= 2


def test_rank_0_has_a_terminal_where_the_launcher_has_one(tmp_path: Path) -> None:
    launcher = (
        "import sys; from pathlib import Path; from megatron_rl.runtime.spawn import run_ranks\n"
        "code = 'import sys, os; print(sys.stdout.isatty(), os.get_terminal_size().columns)'\n"
        f"sys.exit(run_ranks([sys.executable, '-c', code], 1, Path({str(tmp_path)!r})).code)"
    )
    ours, theirs = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", launcher], stdout=theirs, stdin=theirs)
    os.close(theirs)
    shown = os.read(ours, 1000)
    assert process.wait(timeout=20) == 0
    os.close(ours)
    assert shown.split()[0] == b"True"
    assert (tmp_path / "rank_0.log").read_text().startswith("True ")


def test_a_log_that_takes_no_more_does_not_halt_what_is_copied(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    with open("/dev/full", "wb", buffering=0) as log:
        tee = Tee(log)
        child = subprocess.Popen(
            [sys.executable, "-c", "for _ in range(9000): print('some text')"], stdout=tee.child_end
        )
        tee.start()
        assert child.wait(timeout=20) == 0
        tee.join(5.0)
    assert capfdbinary.readouterr().out == b"some text\n" * 9000
