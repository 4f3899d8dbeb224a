"""Checks of one rank's own node. Needs no torch but for the GPU's memory.

Each check yields (level, sentence) per problem. `FACTS` are what must be the same on all ranks.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import resource
import shutil
import socket
import tempfile
import urllib.error
from collections.abc import Callable, Iterator
from pathlib import Path

from megatron_rl.config import to_yaml
from megatron_rl.config.algorithm_checks import reward_columns
from megatron_rl.config.schema import Config, TaskConfig
from megatron_rl.methods import load_plugins
from megatron_rl.preflight import gpus
from megatron_rl.preflight.verdict import FAILED, WARNING, Problems
from megatron_rl.runtime import fetch
from megatron_rl.runtime.disk import size_text
from megatron_rl.runtime.provenance import versions
from megatron_rl.tasks.rows import files_of, read_jsonl

GIB = 2**30
_HEAD = 2**16  # bytes of each data file that are compared
_ROWS = 3
_MODEL_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "*.index.json")


# --------------------------------------------------------------------------------------------------------------- facts
def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def model_facts(config: Config) -> dict[str, str]:
    """Checksums of the model folder's small files, sizes of its large ones."""
    if config.model.path is None or not Path(config.model.path).expanduser().is_dir():
        return {}
    folder = Path(config.model.path).expanduser()
    small = {path for pattern in _MODEL_FILES for path in folder.glob(pattern)}
    facts = {str(path): _digest(path.read_bytes()) for path in sorted(small)}
    return facts | {str(path): f"{path.stat().st_size} bytes" for path in weight_files(folder)}


def weight_files(folder: Path) -> list[Path]:
    return sorted([*folder.glob("*.safetensors"), *folder.glob("*.distcp")])


def data_facts(config: Config) -> dict[str, str]:
    """Size and checksum of the beginning of every file of prompts."""
    facts = {}
    for _, task in _file_tasks(config):
        with contextlib.suppress(ValueError):  # `check_data` says it
            for path in _files(task):
                with path.open("rb") as file:
                    head = _digest(file.read(_HEAD))
                facts[str(path)] = f"{path.stat().st_size} bytes, {head}"
    return facts


# What has to be the same everywhere: check -> function of the recipe.
FACTS: dict[str, Callable[[Config], dict[str, str]]] = {
    "versions": lambda config: versions(),
    "recipe": lambda config: {"the recipe": _digest(to_yaml(config).encode())},
    "model": model_facts,
    "data": data_facts,
    "compilers": gpus.compiler_facts,
}


# -------------------------------------------------------------------------------------------------------------- checks
def check_model(config: Config) -> Problems:
    if config.model.path is None:
        return
    folder = Path(config.model.path).expanduser()
    if not folder.is_dir():
        yield FAILED, f"model.path {folder} is not there; is its file system mounted?"
        return
    for name in ("config.json", "tokenizer_config.json"):
        if not os.access(folder / name, os.R_OK):
            yield FAILED, f"model.path {folder}: {name} cannot be read"
    if not weight_files(folder):
        yield FAILED, f"model.path {folder} has neither .safetensors files nor a converted checkpoint's .distcp files"


def check_data(config: Config) -> Problems:
    """The first rows of every file."""
    for key, task in _file_tasks(config):
        try:
            files = _files(task)
        except ValueError as error:
            yield FAILED, f"{key}.path: {error}"
            continue
        if not files:
            yield FAILED, f"{key}.path: {task.path} has no files"
        for path in files:
            try:
                problem = _beginning(path, task.source)
            except (OSError, ValueError) as error:
                problem = str(error)
            if problem:
                yield FAILED, f"{key}.path: {path}: {problem}"


def _beginning(path: Path, source: str) -> str | None:
    """The problem with a file's beginning, if any. A dataset's folder has files of other kinds beside its rows: these
    need only be readable."""
    if source == "jsonl" or path.suffix == ".jsonl":
        return None if list(itertools.islice(read_jsonl(path), _ROWS)) else "it is empty"
    with path.open("rb") as file:
        head = file.read(4)
        if source != "parquet" and path.suffix != ".parquet":
            return None
        file.seek(max(0, path.stat().st_size - 4))
        return None if head == file.read(4) == b"PAR1" else "it is not a whole Parquet file"


def _file_tasks(config: Config) -> Iterator[tuple[str, TaskConfig]]:
    for part in ("train", "eval"):
        for name, task in getattr(config.tasks, part).items():
            # A dataset's name on the hub looks like a relative path: only what is meant to be a file is looked for.
            if task.path and (task.source in ("jsonl", "parquet") or Path(task.path).is_absolute()):
                yield f"tasks.{part}.{name}", task


def _files(task: TaskConfig) -> list[Path]:
    """ValueError: its path has none, or cannot be read."""
    if task.source in ("jsonl", "parquet"):
        return files_of(str(task.path), f".{task.source}")
    folder = Path(str(task.path))
    own = (path for path in folder.rglob("*") if not any(part[0] == "." for part in path.relative_to(folder).parts))
    return sorted(path for path in own if path.is_file())  # what begins with a dot is of those who brought them here


def check_run_dir(config: Config) -> Problems:
    """It can be written, and a save fits."""
    folder = Path(config.run_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".preflight-") as file:
            file.write(bytes(2**20))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        yield FAILED, f"run_dir {folder}: writing 1 MiB fails: {error.strerror}"
        return
    free, needed = shutil.disk_usage(folder).free, checkpoint_bytes(config)
    if not config.checkpoint.every or needed is None:
        if free < GIB:
            yield WARNING, f"run_dir {folder} has {size_text(free)} free"
        return
    checkpoints = config.checkpoint.keep + config.checkpoint.keep_best + 1  # one more is written before an old one goes
    if needed > free:
        yield (FAILED, f"run_dir {folder} has {size_text(free)} free, one checkpoint needs about {size_text(needed)}")
    elif checkpoints * needed > free:
        yield (
            WARNING,
            f"run_dir {folder} has {size_text(free)} free; {checkpoints} checkpoints of about {size_text(needed)} do not "
            "fit (checkpoint.keep)",
        )


def checkpoint_bytes(config: Config) -> int | None:
    """Weights, 32-bit master weights and Adam's two moments, from the size of the model folder; None without one."""
    if config.model.path is None:
        return None
    folder = Path(config.model.path).expanduser()
    weights = sum(path.stat().st_size for path in weight_files(folder))
    width = 4 if config.model.dtype == "float32" else 2
    return weights // width * (width + (0 if width == 4 else 4) + 8) or None


def check_disks(config: Config) -> Problems:
    """Temporary folders, caches and shared memory."""
    places = {"TMPDIR": Path(tempfile.gettempdir())}
    hub = os.environ.get("HF_HOME")
    if hub and Path(hub).exists():
        places["HF_HOME"] = Path(hub)
    for name, place in places.items():
        free = shutil.disk_usage(place).free
        if free < GIB:
            yield WARNING, f"{name} {place} has {size_text(free)} free"
        if not os.access(place, os.W_OK):
            yield FAILED, f"{name} {place} cannot be written"
    shm = Path("/dev/shm")
    free = shutil.disk_usage(shm).free if shm.is_dir() else 0
    if free < GIB // 4:
        yield (
            FAILED if free < GIB // 16 else WARNING,
            f"/dev/shm has {size_text(free)} free; the engine's and NCCL's processes share memory there (in a "
            "container: --shm-size)",
        )


def check_limits(config: Config) -> Problems:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < 4096:
        yield (
            FAILED if files < 512 else WARNING,
            f"at most {files} open files per process (ulimit -n); data, sockets and checkpoints of a large job need 4096",
        )
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if space != resource.RLIM_INFINITY:
        yield (
            FAILED if space < 4 * GIB else WARNING,
            f"address space is limited to {space / GIB:.1f} GiB per process (ulimit -v); libraries alone take 4 GiB of it, "
            "and threads and GPUs reserve far more than they use: make it unlimited",
        )
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if Path("/dev/infiniband").is_dir() and locked != resource.RLIM_INFINITY:
        yield WARNING, f"locked memory is limited to {locked / 2**20:.0f} MiB (ulimit -l); InfiniBand needs unlimited"


def limits_in_the_way(config: Config) -> str | None:
    """Limits with which ranks cannot even find each other, since gloo's sockets and threads count against them, in words."""
    failed = [text for level, text in check_limits(config) if level == FAILED]
    return f"node {socket.gethostname()} is not fit: {'; '.join(failed)}" if failed else None


def check_endpoints(config: Config) -> Problems:
    """Judges and reward models that the run will ask over HTTP.

    Of several equal servers one that is silent is a warning. So are all of them where this run folder has kept answers: a
    judge that goes away during a run does not end it (its `unanswered` decides), nor does it keep it from going on.
    """
    for column, urls, key in _endpoints(config):
        if key and not os.environ.get(key):
            yield FAILED, f"rewards.{column}: the environment variable {key} (api_key_env) is not set"
            continue
        answers = {url: _ask(url, os.environ.get(key) if key else None) for url in urls}
        kept = any((Path(config.run_dir) / "answers" / column).glob("rank*.jsonl"))
        silent = all(level for level, _ in answers.values())
        for url, (level, problem) in answers.items():
            if level == WARNING and silent and not kept:
                level = FAILED
            elif level == WARNING and silent:
                problem += "; what it has answered before is kept, for the rest `unanswered` decides"
            if level:
                yield level, f"rewards.{column}: {url}: {problem}"


def silent_endpoints(config: Config) -> list[str]:
    """`rewards.<column> (<url>, ...)` of every reward none of whose servers can be reached."""
    found = []
    for column, urls, key in _endpoints(config):
        token = os.environ.get(key) if key else None
        if urls and all(_ask(url, token)[0] == WARNING for url in urls):
            found.append(f"rewards.{column} ({', '.join(urls)})")
    return found


def has_endpoints(config: Config) -> bool:
    return any(True for _ in _endpoints(config))


def _endpoints(config: Config) -> Iterator[tuple[str, list[str], str | None]]:
    """Reward column, URLs of its servers, and the variable with their key, of every reward that asks a server."""
    for column in _computed(config):
        params = config.rewards[column].params
        urls, key = params.get("urls") or [], params.get("api_key_env")
        if urls or key:
            yield column, [str(url) for url in ([urls] if isinstance(urls, str) else urls)], str(key) if key else None


def _computed(config: Config) -> list[str]:
    with contextlib.suppress(ValueError):  # the check of the recipe says what is wrong
        load_plugins(config.algorithm.plugins)
        return reward_columns(config)
    return list(config.rewards)


def _ask(url: str, key: str | None) -> tuple[str, str]:
    """Level and problem of a server that speaks the OpenAI API; empty for any answer but a refusal."""
    try:
        fetch.get(f"{url.rstrip('/')}/models", key or None, 5.0)
        return "", ""
    except urllib.error.HTTPError as error:
        return (FAILED, f"HTTP {error.code}: the key is refused") if error.code in (401, 403) else ("", "")
    except (OSError, ValueError) as error:
        return WARNING, f"not reachable ({getattr(error, 'reason', error)})"


# check -> function; once per rank, or once per node.
PER_NODE: dict[str, Callable[[Config], Problems]] = {
    "model": check_model,
    "data": check_data,
    "run_dir": check_run_dir,
    "disks": check_disks,
    "endpoints": check_endpoints,
    "gpus": gpus.check_gpus,
    "caches": gpus.check_caches,
    "compilers": gpus.check_compilers,
}
PER_RANK: dict[str, Callable[[Config], Problems]] = {"limits": check_limits, "devices": gpus.check_devices}


def survey(config: Config, first_of_node: bool) -> tuple[list[tuple[str, str, str]], dict[str, dict[str, str]]]:
    """(check, level, sentence) per problem of this rank, and the facts to compare."""
    problems = []
    for name, check in {**PER_RANK, **(PER_NODE if first_of_node else {})}.items():
        try:
            problems += [(name, level, text) for level, text in check(config)]
        except OSError as error:
            problems.append((name, FAILED, str(error)))
    facts: dict[str, dict[str, str]] = {}
    for name, read in FACTS.items():
        try:
            facts[name] = read(config) if first_of_node or name in ("versions", "recipe") else {}
        except OSError as error:
            problems.append((name, FAILED, f"{error.filename} cannot be read: {error.strerror}"))
    return problems, facts
