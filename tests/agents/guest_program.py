"""A guest that does as it is told: it converses, fails, hangs, leaves children, or dies."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "megatron_rl" / "agents" / "guests"))
import pipe

FOREVER = [sys.executable, "-c", "import time; time.sleep(600)"]


def note(pids: Path, pid: int) -> None:
    with pids.open("a") as file:
        file.write(f"{pid}\n")


@asynccontextmanager
async def world(params: dict[str, Any]) -> AsyncIterator[pipe.Answer]:
    print("this is no answer")
    if params["how"] == "never ready":
        sys.exit("no such taskset")
    pids = Path(params["pids"])
    note(pids, os.getpid())

    async def respond(request: dict[str, Any]) -> dict[str, Any]:
        how, first = params["how"], not pids.with_suffix(".asked").exists()
        pids.with_suffix(".asked").touch()
        if how == "child":
            note(pids, subprocess.Popen(FOREVER).pid)
        if how == "die" or (how == "die once" and first):
            print("out of memory", file=sys.stderr)
            os._exit(9)
        if how == "hang":
            try:
                await asyncio.sleep(600)
            finally:
                pids.with_suffix(".cancelled").touch()
        if how == "block":
            time.sleep(600)
        if how == "raise":
            raise ValueError("no task")
        if how == "inherit":
            return {name: 1.0 for name in os.environ if name.startswith(("PYTHON", "LOCAL_RANK", "CUDA", "OF_A_USER"))}
        return {"reward": 1.0, "nothing": None}

    yield respond


if __name__ == "__main__":
    pipe.speak(world)
