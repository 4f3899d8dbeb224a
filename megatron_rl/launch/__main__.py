"""The plan of a sweep or a chain, for slurm/submit.sh."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.config import ConfigError
from megatron_rl.launch.plan import LaunchError, chain, read_sweep, sweep
from megatron_rl.runtime import exit_codes


def main(arguments: Sequence[str]) -> int:
    """`python -m megatron_rl.launch sweep|chain ROOT PROCESSES [FILE] RECIPE [key=value ...]`

    Prints one job per line: the name of the batch script, then its arguments as a shell reads them. PROCESSES is the number
    of ranks of each job, or `unknown`.
    """
    kind, root, processes, *words = arguments
    world = None if processes == "unknown" else int(processes)
    try:
        lines = read_sweep(Path(words.pop(0))) if kind == "sweep" else []
        if not words:
            raise LaunchError(f"{kind}: name a recipe")
        recipe, *overrides = words
        if kind == "sweep":
            tasks = sweep(recipe, lines, overrides, world, Path(root))
        else:
            tasks = chain(recipe, overrides, world, Path(root))
    except (ConfigError, LaunchError) as error:
        print(f"megatron-rl: {error}", file=sys.stderr)
        return exit_codes.BAD_INPUT
    for task in tasks:
        print(shlex.join(task.arguments))
    return exit_codes.OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
