"""`python -m megatron_rl`: the same as `megatron-rl`."""

from megatron_rl.runtime import stop

stop.end_at_once()  # before the imports, which take a while

import sys  # noqa: E402

from megatron_rl.cli import main as command  # noqa: E402
from megatron_rl.runtime import streams  # noqa: E402


def main() -> int:
    """Runs one command as a process of its own; the exit code."""
    streams.open_missing()
    streams.accept_any_text()
    try:
        return command()
    finally:
        stop.end_at_once()
        streams.finish()


if __name__ == "__main__":
    sys.exit(main())
