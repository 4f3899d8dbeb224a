"""The code as it is, in one archive: what is committed, what is edited, what is new."""

from __future__ import annotations

import io
import shlex
import subprocess
import tarfile
from pathlib import Path

from megatron_rl.launch.job_plan import LaunchError


def name_in(root: Path, recipe: Path, packaged: bool) -> str:
    """The recipe's path from `root`, which is where the jobs read it.

    Raises:
        LaunchError: it lies elsewhere, or git ignores it although the work tree is to be `packaged`.
    """
    path = recipe.resolve()
    if not path.is_relative_to(root):
        raise LaunchError(f"{recipe} is not in {root}, which is what is packaged; put the recipe there")
    if packaged and subprocess.run(("git", "-C", str(root), "check-ignore", "--quiet", str(path))).returncode == 0:
        raise LaunchError(f"git ignores {recipe}, so it would not be packaged; put the recipe elsewhere")
    return str(path.relative_to(root))


def pack(root: Path, site: Path, archive: Path, venv: str = "") -> None:
    """Writes a .tar.gz of the work tree `root`, with `site` as its slurm/site.sh; `venv`, if any, replaces its VENV.

    In it: tracked files with uncommitted edits, and new files that git does not ignore. Not in it: what git ignores (runs,
    environments), and tracked files that have been deleted.

    Raises:
        LaunchError: `root` is not a git work tree, or has submodules, whose files git would not list.
    """
    if (root / ".gitmodules").exists():
        raise LaunchError(f"{root} has git submodules, whose files would be left out; launch from a plain work tree")
    command = ("git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    listed = subprocess.run(command, capture_output=True, text=True)
    if listed.returncode:
        raise LaunchError(f"{root} cannot be packaged: {listed.stderr.strip()}")
    names = sorted({name for name in listed.stdout.split("\0") if name and (root / name).is_file()})
    with tarfile.open(archive, "w:gz") as tar:
        for name in names:
            if name != "slurm/site.sh":
                tar.add(root / name, arcname=name)
        text = site.read_bytes() + (f"\nVENV={shlex.quote(venv)}\n".encode() if venv else b"")
        entry = tar.gettarinfo(str(site.resolve()), arcname="slurm/site.sh")
        entry.size = len(text)
        tar.addfile(entry, io.BytesIO(text))
