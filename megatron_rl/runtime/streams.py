"""Standard streams that are closed, full, or a lost terminal: they do not change how a run ends."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import TextIO


def open_missing() -> None:
    """Opens /dev/null for standard streams that the caller has closed (`>&-`): Python has None for them, and the next file or
    pipe that this process or its ranks open would get their numbers."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            if not _is_open(number):
                _discard(number)
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))


def accept_any_text() -> None:
    """From here on, what the encoding of standard output has not, half a surrogate pair in a model's or a server's text for
    example, is printed as its escape, and is no error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def say(text: str, stream: TextIO | None = None) -> None:
    """Prints a line, to standard error if no stream is given. What cannot be written is dropped: logs have it."""
    stream = stream or sys.stderr
    try:
        print(text, file=stream, flush=True)
    except OSError:
        _drop(stream)


def finish() -> None:
    """At the end: drops what standard output and error no longer take, which would turn the exit code into Python's 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            _drop(stream)


def _drop(stream: TextIO) -> None:
    """Sends a stream, with what is still in its buffer, to /dev/null."""
    _discard(stream.fileno())
    stream.flush()


def _discard(number: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    if null == number:
        os.set_inheritable(number, True)
    else:
        os.dup2(null, number)
        os.close(null)


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError as error:
        if error.errno == errno.EBADF:
            return False
        raise
    return True
