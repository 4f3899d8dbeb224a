"""`python -m megatron_rl`: the same as `megatron-rl`."""

from megatron_rl.runtime import stop

stop.end_at_once()  # before the imports, which take a while

import os  # noqa: E402
import sys  # noqa: E402

from megatron_rl.cli import main as command  # noqa: E402
from megatron_rl.runtime import streams  # noqa: E402


def main() -> int:
    """Runs one command as a process of its own; the exit code."""
    _use_utf8()
    streams.open_missing()
    streams.accept_any_text()
    try:
        return command()
    finally:
        stop.end_at_once()
        streams.finish()


def _use_utf8() -> None:
    """Starts the command again in Python's UTF-8 mode where the locale has another encoding (PYTHONUTF8=0 with LC_ALL=C).
    Recipes are UTF-8, and so are the paths in them, which the ranks get."""
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get("PYTHONUTF8") != "1":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
