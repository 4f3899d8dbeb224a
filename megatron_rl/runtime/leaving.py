"""The end of a process whose memory is left to the system: to take a million objects apart, most of which forks share until
then, takes Python a second of a processor at the end of each rank."""

from __future__ import annotations

import atexit
import gc
import io
import os
import sys
import threading
import weakref
from typing import NoReturn

_BUFFERED = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
_frozen: weakref.WeakSet[io.IOBase] = weakref.WeakSet()  # files among what was frozen


def freeze() -> None:
    """`gc.freeze`, after which `leave` still finds the files."""
    _frozen.update(_files())
    gc.freeze()


def leave(code: int) -> NoReturn:
    """Ends this process as `sys.exit` does (threads, `atexit`, what lies in the buffers of open files), but frees nothing.

    A process that has used a GPU ends by `sys.exit`: libraries and profilers of the device have exit handlers in C.
    """
    if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_initialized():
        sys.exit(code)
    threading._shutdown()  # type: ignore[attr-defined]  # waits for those that are not daemons, as Python does
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        if (about := finalizer.peek()) is not None and about[1].__module__ == "torch.library":
            finalizer.atexit = False  # it would take operators out of torch's dispatcher, one by one
    atexit._run_exitfuncs()
    for file in (*_frozen, *_files()):
        try:
            if not file.closed and file.writable() and file not in (sys.stdout, sys.stderr):
                file.flush()
        except OSError as error:  # no failure of this process, as it is none where Python takes a file apart
            print(f"{file!r} could not be written: {error}", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _files() -> list[io.IOBase]:
    """Open files, of what has not been frozen; the outermost layers first, which write into those beneath."""
    # `isinstance` would ask an object for its `__class__`, upon which libraries' stand-ins for modules import them.
    found = [each for each in gc.get_objects() if issubclass(type(each), _BUFFERED)]
    return sorted(found, key=lambda file: not isinstance(file, io.TextIOWrapper))
