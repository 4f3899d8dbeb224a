"""Rank 0's output in two places: on the terminal as it is, in the log file as readable lines.

A live view redraws its lines by moving the cursor up. On a terminal that is an animation; in a file it would be
thousands of stale lines. `Transcript` follows the cursor and writes only what finally stood there.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import fcntl
import os
import pty
import re
import struct
import sys
import termios
import threading
from typing import BinaryIO

_TOKEN = re.compile(r"\x1b\[([0-9;?]*)([@-~])|\x1b[^\[]|[\r\n\b]|[^\x1b\r\n\b]+")
_UNFINISHED = re.compile(r"\x1b(\[[0-9;?]*)?$")
_TALLEST = 200  # lines a live view may redraw; what is further up is written for good
_FURTHEST = 1000  # rows or columns that the cursor moves at once: a model's text may ask for any number


class Transcript:
    """Terminal output as plain text: colours dropped, redrawn lines written once, as they were last.
    `file`: where finished lines go, as UTF-8.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        self._rest = ""
        self._lines = [""]  # not written yet: a live view may still change them
        self._row = self._column = 0
        self._height = 0  # how far above the last line the cursor has ever gone

    def write(self, data: bytes) -> None:
        text = self._rest + self._decode(data)
        unfinished = _UNFINISHED.search(text)
        self._rest = text[unfinished.start() :] if unfinished else ""
        for match in _TOKEN.finditer(text[: len(text) - len(self._rest)]):
            token = match[0]
            if match[2]:
                self._control(match[1], match[2])
            elif token == "\n":
                self._down(1)
                self._column = 0
            elif token == "\r":
                self._column = 0
            elif token == "\b":
                self._column = max(0, self._column - 1)
            elif not token.startswith("\x1b"):
                self._put(token)
        self._flush(self._height)

    def close(self) -> None:
        """Writes what is still pending."""
        while self._lines and not self._lines[-1]:
            self._lines.pop()
        self._flush(-1)

    def _put(self, text: str) -> None:
        line = self._lines[self._row].ljust(self._column)
        self._lines[self._row] = line[: self._column] + text + line[self._column + len(text) :]
        self._column += len(text)

    def _control(self, argument: str, letter: str) -> None:
        count = min(int(argument[:9]), _FURTHEST) if argument.isdigit() else 0
        if letter in "AF":
            self._up(max(count, 1))
        elif letter in "BE":
            self._down(max(count, 1))
        elif letter == "G":
            self._column = max(count, 1) - 1
        elif letter == "K" and count <= 2:
            line = self._lines[self._row]
            self._lines[self._row] = (line[: self._column], line[self._column :].rjust(len(line)), "")[count]
        elif letter == "J" and count == 0:
            self._lines[self._row] = self._lines[self._row][: self._column]
            del self._lines[self._row + 1 :]
        if letter in "EF":
            self._column = 0

    def _up(self, count: int) -> None:
        written = max(0, min(count, _TALLEST) - self._row)  # the first time a view is redrawn, its lines are written
        self._lines = [""] * written + self._lines
        self._row = max(0, self._row - count)
        self._height = min(_TALLEST, max(self._height, len(self._lines) - 1 - self._row))

    def _down(self, count: int) -> None:
        self._row += count
        self._lines += [""] * (self._row + 1 - len(self._lines))

    def _flush(self, keep: int) -> None:
        """Writes all but the last line and the `keep` before it."""
        done = min(len(self._lines) - keep - 1, self._row if keep >= 0 else len(self._lines))
        if done > 0:
            self._file.write("".join(line.rstrip() + "\n" for line in self._lines[:done]).encode())
            self._file.flush()
            del self._lines[:done]
            self._row -= done


class Tee:
    """A child's standard output, copied to this process's and to a transcript.

    The child gets a terminal (of the same size) where this process has one, so that it may draw a live view; else a pipe.
    Give `child_end` to the child, then call `start`, and `join` once the child has ended.
    """

    def __init__(self, log: BinaryIO) -> None:
        self._transcript = Transcript(log)
        self._is_terminal = sys.stdout.isatty()
        self._our_end, self.child_end = pty.openpty() if self._is_terminal else os.pipe()
        if self._is_terminal:
            attributes = termios.tcgetattr(self.child_end)
            attributes[1] &= ~termios.OPOST  # the real terminal turns newlines into its own
            termios.tcsetattr(self.child_end, termios.TCSANOW, attributes)
            self.resize()
        self._thread = threading.Thread(target=self._copy, daemon=True)

    def start(self) -> None:
        os.close(self.child_end)
        self._thread.start()

    def join(self, timeout: float) -> None:
        self._thread.join(timeout)

    def resize(self) -> None:
        if self._is_terminal:
            with contextlib.suppress(OSError):
                size = fcntl.ioctl(sys.stdout.fileno(), termios.TIOCGWINSZ, struct.pack("4H", 0, 0, 0, 0))
                fcntl.ioctl(self._our_end, termios.TIOCSWINSZ, size)

    def _copy(self) -> None:
        terminal: BinaryIO | None = sys.stdout.buffer
        while data := self._read():
            if terminal is not None:
                try:
                    terminal.write(data)
                    terminal.flush()
                except OSError:  # the reader has closed the pipe: the run and its log continue
                    terminal = None
            with contextlib.suppress(OSError):  # a full disk is reported by what has something to save
                self._transcript.write(data)
        with contextlib.suppress(OSError):
            self._transcript.close()
        os.close(self._our_end)

    def _read(self) -> bytes:
        try:
            return os.read(self._our_end, 65536)
        except OSError as error:
            if error.errno == errno.EIO:  # how a terminal reports that its last writer has closed it
                return b""
            raise
