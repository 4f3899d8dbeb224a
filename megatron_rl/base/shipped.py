"""The recipes that come with the package, and the files that they name: in the folder of the source, or installed with it."""

from __future__ import annotations

from pathlib import Path

from megatron_rl.base.messages import nearest

_HERE = Path(__file__).resolve().parents[1]  # the package
_FOLDER = "recipes"


def folder() -> Path:
    """The folder of the recipes that came with this package."""
    installed = _HERE / _FOLDER
    return installed if installed.is_dir() else _HERE.parent / _FOLDER


def find_recipe(name: Path) -> Path:
    """Resolves a recipe's name: the file of this path; where there is none, the shipped recipe `cpu/quickstart.yaml`,
    with or without `recipes/` before it; else the path as it is."""
    return find_file(name) if name.is_absolute() or name.exists() or not (own := folder() / name).is_file() else own


def find_file(name: Path) -> Path:
    """The file of this path; where there is none, the shipped one that `recipes/...` names; else the path as it is."""
    if name.is_absolute() or name.exists() or name.parts[:1] != (_FOLDER,):
        return name
    own = folder().joinpath(*name.parts[1:])
    return own if own.is_file() else name


def like(name: Path) -> str | None:
    """A shipped recipe that may have been meant by a name: one of the same file name, else a similar one, else None."""
    own = folder()
    known = {str(Path(_FOLDER, path.relative_to(own))): path.name for path in sorted(own.rglob("*.yaml"))}
    same = [path for path, last in known.items() if last == name.name and not last.startswith("_")]
    if same:
        return nearest(str(name), same, 0.0)
    return nearest(str(name), known, 0.8)


def missing(path: Path) -> str:
    """Where a relative path was looked for, in words that follow "does not exist"."""
    return "" if path.is_absolute() else f" in {Path.cwd()}"
