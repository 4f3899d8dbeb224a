"""The plan of a sweep or a chain, for the scripts in slurm/."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.config import ConfigError
from megatron_rl.launch.job_plan import LaunchError, chain, read_sweep, sweep
from megatron_rl.runtime import exit_codes


def main(arguments: Sequence[str]) -> int:
    """`python -m megatron_rl.launch sweep|task|chain ROOT PROCESSES [FILE [NUMBER]] RECIPE [key=value ...]`

    Prints one job per line: the command, then its arguments as a shell reads them; for `task` the one of the sweep's line
    NUMBER, from 0. PROCESSES is the number of ranks of each job, or `unknown`.
    """
    kind, root, processes, *words = arguments
    world = None if processes == "unknown" else int(processes)
    try:
        lines = [] if kind == "chain" else read_sweep(Path(words.pop(0)))
        only = int(words.pop(0)) if kind == "task" else None
        if not words:
            raise LaunchError(f"{kind}: name a recipe")
        recipe, *overrides = words
        if kind == "chain":
            tasks = chain(recipe, overrides, world, Path(root))
        else:
            tasks = sweep(recipe, lines, overrides, world, Path(root), only=only)
    except (ConfigError, LaunchError) as error:
        print(f"megatron-rl: {error}", file=sys.stderr)
        return exit_codes.BAD_INPUT
    for task in tasks:
        print(shlex.join(task.arguments))
    return exit_codes.OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
