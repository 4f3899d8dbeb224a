"""Rows of files, datasets and user's generators, as (where, row), before columns get a meaning.

Arrow stores keys that an object lacks as null; `prune` removes such nulls from messages and tool schemas.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.base.messages import errors_named
from megatron_rl.base.plugins import load_function, require_regular
from megatron_rl.base.shipped import missing
from megatron_rl.base.typed_params import Params, check_types
from megatron_rl.config.schema import TaskConfig, TasksConfig
from megatron_rl.rewards.score_checks import place_of

if TYPE_CHECKING:
    from datasets import Dataset

Row = dict[str, object]
Rows = Iterator[tuple[str, Row]]  # (file and line, for messages; row)

_ARRAY = "{path} is one JSON array; JSON Lines has one object a line: jq -c '.[]' {path} > FILE.jsonl"
_LONGEST_LINE = 2**30  # bytes
_BATCH = 1024  # rows of a Parquet file held at once


def files_of(path: str, suffix: str) -> list[Path]:
    """The files of a task's `path`, sorted: one file, those of a folder with the suffix, or those that match a pattern.

    Raises:
        ValueError: no such file, or one that is not a regular file.
    """
    if not path.strip():
        raise ValueError("the path is empty")
    files = _found(path, suffix)
    for file in files:
        with errors_named(f"cannot read {file}", OSError):
            require_regular(file)
    return files


def _found(path: str, suffix: str) -> list[Path]:
    # A name that is too long, a user that does not exist.
    with errors_named(f"cannot read {path}", OSError, RuntimeError):
        location = Path(path).expanduser()
        location.exists()
    if location.is_dir():
        matching, lacking = sorted(location.glob(f"*{suffix}")), f"the folder has no {suffix} file"
    elif location.exists():
        return [location]
    elif any(character in path for character in "*?["):
        fixed = next(parent for parent in location.parents if not any(c in str(parent) for c in "*?["))
        matching, lacking = sorted(fixed.glob(str(location.relative_to(fixed)))), "no file matches the pattern"
    else:
        raise ValueError(f"cannot read {path}: No such file or directory{missing(location)}")
    if not matching:
        raise ValueError(f"{path}: {lacking}")
    return matching


def read_jsonl(path: Path) -> Iterator[tuple[int, Row]]:
    """(line number from 1, object) of every non-blank line.

    Raises:
        ValueError: no such file, or a line that is not a JSON object in UTF-8; names file and line.
    """
    with errors_named(f"cannot read {path}", OSError):
        file = path.open("rb")
    with file:
        lines = iter(lambda: file.readline(_LONGEST_LINE + 1), b"")
        for number, line in enumerate(lines, 1):
            if len(line) > _LONGEST_LINE:
                raise ValueError(
                    f"{path}, line {number}: it has more than {_LONGEST_LINE:,} bytes; is this JSON Lines?"
                )
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:
                if number == 1 and line.lstrip()[:1] == b"[":
                    raise ValueError(_ARRAY.format(path=path)) from None
                raise ValueError(f"{path}, line {number}: not JSON ({error})") from None
            if isinstance(row, list) and number == 1:
                raise ValueError(_ARRAY.format(path=path))
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}: must be a JSON object, not {type(row).__name__}")
            yield number, row


def jsonl_rows(config: TaskConfig) -> Rows:
    assert config.path is not None
    for path in files_of(config.path, ".jsonl"):
        for number, row in read_jsonl(path):
            yield f"{path}, line {number}", row


def own_rows(config: TaskConfig) -> Rows:
    """Rows of the user's generator, called with the task's `seed` and `params`.

    Raises:
        ValueError: it cannot be loaded, takes other parameters, raises, or yields something other than a dictionary.
    """
    generator = load_function(config.source, "source")
    arguments = {"seed": config.seed, **config.params}
    with errors_named(f"{config.source} is called with {', '.join(arguments)}", TypeError):
        inspect.signature(generator).bind(**arguments)
    check_types(generator, arguments)
    for number, row in enumerate(_yielded(config.source, generator, arguments), 1):
        if not isinstance(row, dict):
            raise ValueError(f"{config.source}, row {number} is {type(row).__name__}, must be a dictionary")
        yield f"{config.source}, row {number}", row


def _yielded(source: str, generator: Callable[..., Iterable[object]], arguments: Params) -> Iterator[object]:
    """The rows of a user's generator. ValueError where it raises, naming its line."""
    try:
        yield from generator(**arguments)
    except Exception as error:  # a user's code: whatever it raises
        raise ValueError(f"{source}: {type(error).__name__}: {error}{place_of(error)}") from error


def parquet_rows(config: TaskConfig) -> Rows:
    import pyarrow
    import pyarrow.parquet

    assert config.path is not None
    for path in files_of(config.path, ".parquet"):
        number = 0
        # OSError: corrupt pages, too.
        unreadable = errors_named(f"cannot read {path} as Parquet", pyarrow.ArrowException, OSError)
        with unreadable, pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(_BATCH):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", row


def huggingface_rows(config: TaskConfig) -> Rows:
    """Rows of a dataset on the hub, in the local cache, or in a folder (of files, or written by `save_to_disk`)."""
    dataset = _load_dataset(config)
    for name, feature in dataset.features.items():
        dataset.info.features[name] = _as_stored(feature)
    for number, row in enumerate(dataset, 1):
        yield f"{config.path}, row {number} of {config.split}", row


def _as_stored(feature: Any) -> Any:
    """A column's type with files left as they are, bytes or paths: decoders take any format, and hand PostScript, say, to
    other programs."""
    import datasets

    if isinstance(feature, dict):
        return {key: _as_stored(inner) for key, inner in feature.items()}
    if hasattr(feature, "feature"):  # of a list
        feature.feature = _as_stored(feature.feature)
    elif hasattr(feature, "decode") and not isinstance(feature, datasets.Json):
        feature.decode = False
    return feature


def asks_hub(tasks: TasksConfig) -> bool:
    """Whether a task names a dataset of the Hugging Face hub, and not a folder."""
    named = (task for task in (*tasks.train.values(), *tasks.eval.values()) if task.source == "huggingface")
    return any(task.path is not None and not Path(task.path).expanduser().is_dir() for task in named)


def is_saved_to_disk(folder: Path) -> bool:
    return (folder / "dataset_dict.json").exists() or (folder / "state.json").exists()


def _load_dataset(config: TaskConfig) -> Dataset:
    import datasets

    assert config.path is not None
    location = Path(config.path).expanduser()
    is_saved = location.is_dir() and is_saved_to_disk(location)
    for key in ("subset", "revision") if is_saved else ():
        if getattr(config, key) is not None:
            raise ValueError(f"{key}: {config.path} was written by save_to_disk and has no {key}; remove it")
    name = str(location) if location.is_dir() else config.path
    # Hub, names, formats; a damaged folder of save_to_disk.
    unreadable = (OSError, ValueError, RuntimeError, LookupError, TypeError, datasets.exceptions.DatasetsError)
    try:
        if not is_saved:
            return datasets.load_dataset(name, config.subset, split=config.split, revision=config.revision)
        saved = datasets.load_from_disk(name)
    except unreadable as error:
        said = str(error).strip().splitlines()
        reason = f"{type(error).__name__}: {said[0] if said else ''}"
        raise ValueError(f"cannot load the dataset {config.path}: {reason}{_remedy(config, location)}") from error
    if not isinstance(saved, datasets.DatasetDict):
        return saved
    if config.split not in saved:
        raise ValueError(f"split: {config.path} has no split {config.split!r}, only {', '.join(saved)}")
    return saved[config.split]


def _remedy(config: TaskConfig, place: Path) -> str:
    if place.is_dir():
        return ""
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    state = "it needs the hub"
    if offline:
        state = "HF_HUB_OFFLINE is set, so only the local cache was asked; HF_HUB_OFFLINE=0 lets it download"
    return (
        f" ({state}). Where there is no network: on a machine that has one, run `hf download {config.path} "
        "--repo-type dataset --local-dir FOLDER`, copy FOLDER here, and set path=FOLDER; or fill the cache with "
        "datasets.load_dataset and copy HF_HOME"
    )


def prune(value: Any) -> Any:
    """A value without the nulls in its objects, at any depth."""
    if isinstance(value, dict):
        return {key: prune(item) for key, item in value.items() if item is not None}
    return [prune(item) for item in value] if isinstance(value, list) else value
