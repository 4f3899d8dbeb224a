"""`megatron-rl sweep FILE RECIPE`: a training run per line of overrides, here; then what difference the lines made."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_rl.base.messages import ConfigError, errors_named
from megatron_rl.commands.packages import require_torch
from megatron_rl.commands.report import add_compared
from megatron_rl.launch.job_plan import read_sweep, sweep
from megatron_rl.launch.local_sweep import LocalSweep, with_seeds
from megatron_rl.report import read_run, render
from megatron_rl.report.significance import as_lines, recipe_differences
from megatron_rl.runtime import disk, exit_codes


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    parser.add_argument("file", metavar="FILE", type=Path, help="overrides of one run per line; # begins a comment")
    parser.add_argument("recipe", metavar="RECIPE", help="YAML file")
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", default=[], help="overrides of all runs")
    parser.add_argument("--seeds", metavar="N", type=int, help="every line with the seeds 0 to N - 1")
    parser.add_argument("--at-once", metavar="N", type=int, default=1, help="runs at a time (default: 1)")
    add_compared(parser)
    parser.add_argument("--check", action="store_true", help="check every line, print the run folders, start nothing")


def run(args: argparse.Namespace) -> int:
    """Returns 0 where all runs have ended well, else the exit code of the first that has not."""
    for option, value in (("--seeds", args.seeds), ("--at-once", args.at_once)):
        if value is not None and value < 1:
            raise ConfigError(f"{option} {value}: at least 1")
    tasks = sweep(args.recipe, with_seeds(read_sweep(args.file), args.seeds), args.overrides, None, Path.cwd())
    folders = {folder.name: folder for task in tasks if (folder := Path(task.arguments[-1].removeprefix("run_dir=")))}
    if args.check:
        print(*folders.values(), sep="\n")
        return exit_codes.OK
    require_torch("train")
    begun = LocalSweep({name: task.arguments for name, task in zip(folders, tasks, strict=True)}, args.at_once)
    code = begun.run()
    for name, failed_with in begun.failed.items():
        print(f"{name} ended with exit code {failed_with}; megatron-rl status {folders[name]} says why")
    records = [read_run(folder) for folder in folders.values() if (folder / "metrics.jsonl").is_file()]
    if records:
        page = next(iter(folders.values())).parent / "report.html"
        again = f"the runs are done, compare them by megatron-rl report {page.parent}/[0-9]*"
        with errors_named(again, ConfigError, as_error=ConfigError):
            differences = recipe_differences(records, args.compare)
        disk.replace(page, render(records, args.compare))
        print(*as_lines(differences), f"the page: {page}", sep="\n")
    return code
