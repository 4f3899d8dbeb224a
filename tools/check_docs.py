"""Runs the command blocks of pages that people copy from, on this machine's CPU: `make check-docs`.

    python tools/check_docs.py [PAGE ...] [--list]

A block is what stands between ```bash and ```. It is run as it stands, by bash, in a copy of the tracked files, where
`recipes/mine.yaml` and `recipes/my.yaml` are short versions of the quick start; the pages' blocks run one after the other, so
that a later one finds the run of an earlier one. What cannot run here says why, in a comment before the block:

    <!-- not run: a cluster is needed -->
    <!-- not run: `slurm/submit.sh`, `megatron-rl selftest`: a cluster, a GPU -->     only lines that begin so
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", *(f"docs/{name}.md" for name in ("quickstart", "slurm", "nemo_run", "data", "evaluation")))
_BLOCK = re.compile(r"(?:^<!-- not run: (?P<not>.*?) -->\n+)?^```bash\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
_PREFIXES = re.compile(r"((?:`[^`]+`(?:, )?)+): (.+)", re.DOTALL)
_LINKED = (".venv", ".venv-launch", ".te", ".uv")
# By these `make check-docs ARGS=PAGE` would hand its own ARGS to every `make` of a page.
_OF_MAKE = ("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "ARGS")
_SHORT = """\
base: cpu/quickstart.yaml
run_dir: runs/mine
sft: {steps: 20}
trainer: {steps: 2}
"""


@dataclass(frozen=True)
class Block:
    """Attributes:
    line: of the page, where its code begins.
    code: what is run; empty: nothing.
    left_out: what is not, and why.
    """

    page: str
    line: int
    code: str
    left_out: str = ""


def blocks(page: str, text: str) -> Iterator[Block]:
    """The command blocks of a page, each less the lines that its comment names."""
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("code")) + 1
        code, reason = match["code"], match["not"]
        if reason is None:
            yield Block(page, line, code)
            continue
        some = _PREFIXES.fullmatch(reason)
        if some is None:
            yield Block(page, line, "", reason)
            continue
        prefixes = tuple(re.findall("`([^`]+)`", some[1]))
        commands = re.findall(r"(?:.*\\\n)*.*\n", code)
        kept = [command for command in commands if not command.startswith(prefixes)]
        if unused := [prefix for prefix in prefixes if not any(command.startswith(prefix) for command in commands)]:
            raise ValueError(f"{page}:{line}: no line begins with {unused[0]!r}")
        yield Block(page, line, "".join(kept), reason)


def copy(folder: Path) -> None:
    """The tracked files as they are here, the environments linked, and the recipes that the pages speak of.

    The files are as old as can be, so that `make` finds the environments up to date.
    """
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
        os.utime(folder / name, (0, 0))
    for name in filter(lambda name: (ROOT / name).exists(), _LINKED):
        (folder / name).symlink_to(ROOT / name)
    for name in ("mine", "my"):
        (folder / "recipes" / f"{name}.yaml").write_text(_SHORT)
    # NeMo-Run packs the files of a repository.
    git = ["git", "-c", "user.name=check_docs", "-c", "user.email=check_docs@localhost"]
    for arguments in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "--message", "Copy"]):
        subprocess.run([*git, *arguments], cwd=folder, check=True)


def run(block: Block, folder: Path, log: Path) -> tuple[int, float]:
    """Exit code and seconds; the output is added to the log."""
    begin = time.monotonic()
    path = f"{folder / '.venv' / 'bin'}:{os.environ['PATH']}:{folder / '.venv-launch' / 'bin'}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(folder)}
    for name in _OF_MAKE:
        environment.pop(name, None)
    with log.open("a") as out:
        print(f"# {block.page}:{block.line}\n{block.code}", file=out, flush=True)
        code = subprocess.run(
            ["bash", "-c", f"set -e -o pipefail\nshopt -s expand_aliases\n{block.code}"],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
        ).returncode
    return code, time.monotonic() - begin


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("pages", metavar="PAGE", nargs="*", help=f"default: {', '.join(PAGES)}")
    parser.add_argument("--list", action="store_true", help="say what would run, and run nothing")
    args = parser.parse_args(arguments)
    found = [block for page in args.pages or PAGES for block in blocks(page, (ROOT / page).read_text("utf-8"))]
    if args.list:
        for block in found:
            print(f"{block.page}:{block.line}: {block.left_out and f'[not run: {block.left_out}]'}\n{block.code}")
        return 0
    folder, failed = Path(tempfile.mkdtemp(prefix="check_docs_")), 0
    copy(folder)
    for block in found:
        if block.left_out:
            print(f"{block.page}:{block.line}: not run: {block.left_out}", flush=True)
        if block.code.strip():
            code, seconds = run(block, folder, folder / "log.txt")
            failed += code != 0
            print(
                f"{block.page}:{block.line}: {'ok' if code == 0 else f'FAILED, exit code {code}'} ({seconds:.0f} s)",
                flush=True,
            )
    print(f"{failed} failed; everything is in {folder}, what was printed in log.txt")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
