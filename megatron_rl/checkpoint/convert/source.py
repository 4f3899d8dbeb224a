"""Kinds of source folders: a Hugging Face model, a checkpoint of this package, or a plain one of Megatron-Core."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from megatron_rl.base.plugins import read_yaml
from megatron_rl.checkpoint import manifest
from megatron_rl.checkpoint.convert.reader import MegatronModel
from megatron_rl.models import HFConfig, Model, model_of, read_hf_config
from megatron_rl.weights.files import Bits, SafetensorsFolder, WeightSource, companions
from megatron_rl.weights.stacked import opened

TRACKER = "latest_checkpointed_iteration.txt"  # of Megatron-LM, beside its `iter_<n>` folders
BRIDGE_TRACKER = "latest_train_state.pt"  # of Megatron-Bridge, likewise
_SAMPLE = 2**16  # bytes


@dataclass(frozen=True)
class SourceModel(Model):
    """A model with the config.json that it was read from."""

    folder: Path  # also holds tokenizer, generation config and chat template
    hf_config: HFConfig

    @classmethod
    def read(cls, folder: Path) -> SourceModel:
        model = model_of(hf_config := read_hf_config(folder))
        return cls(model.family, model.description, folder, hf_config)


def is_megatron(folder: str | Path) -> bool:
    return (Path(folder) / ".metadata").is_file()


def open_weights(folder: str | Path) -> WeightSource:
    """The weights of a model folder: Hugging Face's safetensors, or a converted Megatron checkpoint (with config.json)."""
    model = SourceModel.read(Path(folder))
    if not is_megatron(folder):
        return opened(SafetensorsFolder(folder), model.family)
    return MegatronModel(folder, model)


def megatron_folder(folder: Path) -> Path:
    """The folder with the tensors: itself, or the newest iteration of a folder as Megatron-LM or Megatron-Bridge leaves it.

    Raises:
        ValueError: no checkpoint found; those in a folder of checkpoints are listed.
    """
    if is_megatron(folder):
        return folder
    if (folder / TRACKER).is_file():
        text = (folder / TRACKER).read_text(errors="replace").strip()
        if text != "release" and not text.isdecimal():
            raise ValueError(f"{folder / TRACKER} says {text!r:.80}, expected `release` or the number of an iteration")
        inner = folder / ("release" if text == "release" else f"iter_{int(text):07d}")
        if is_megatron(inner):
            return inner
        raise ValueError(f"{folder / TRACKER} names {inner.name}, which holds no checkpoint of format torch_dist")
    if (folder / BRIDGE_TRACKER).is_file():
        found = [path.parent for path in folder.glob("iter_*/.metadata") if path.parent.name[5:].isdecimal()]
        if found:
            return max(found, key=lambda path: int(path.name[5:]))
    inside = sorted(path.parent.name for path in folder.glob("*/.metadata")) if folder.is_dir() else []
    if inside:
        raise ValueError(f"{folder} holds the checkpoints {', '.join(inside)}: name one of them")
    what = "is not a folder" if folder.exists() else "does not exist"
    raise ValueError(f"{folder} {'holds no Megatron checkpoint of format torch_dist' if folder.is_dir() else what}")


def config_folder(checkpoint: Path, config_path: Path | None) -> Path:
    """The Hugging Face folder whose config.json and tokenizer belong to a Megatron checkpoint.

    `config_path`, or the checkpoint itself (a conversion), or the model that the run started from (a training checkpoint).

    Raises:
        ValueError: it cannot be told.
    """
    if config_path is not None:
        return config_path
    if (checkpoint / "config.json").is_file():
        return checkpoint
    run_dir = checkpoint.resolve().parent.parent
    recipe = run_dir / "recipe.yaml"
    if recipe.is_file():
        content = read_yaml(recipe)
        section = content.get("model") if isinstance(content, dict) else None
        path = section.get("path") if isinstance(section, dict) else None
        folder = run_dir / "model" if path is None else Path(str(path))
        if (folder / "config.json").is_file():
            return folder
        raise ValueError(
            f"{recipe} says that the model came from {folder}, which has no config.json; name it with --config"
        )
    raise ValueError(
        f"{checkpoint} does not say which model it is of: name a Hugging Face folder with its config.json and tokenizer "
        "with --config"
    )


class HFFolder(SafetensorsFolder):
    """A Hugging Face folder; where it has checksums (what this package exports has), they are compared with what is read.

    A checksum is taken of a tensor's rows as they are read, one after the other; `check_begun` reads what was left out.
    """

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder)
        self._begun: dict[str, tuple[int, blake3]] = {}  # bytes read, from the first on, and their checksum

    def read_into(self, out: Bits, name: str, start: int = 0) -> None:
        super().read_into(out, name, start)
        chunk = self._pieces.get(name)
        if chunk is None:
            return
        done, digest = self._begun.setdefault(name, (0, blake3()))
        if start * (chunk.length // self.entry(name).rows) == done < chunk.length:
            digest.update(out.data.cast("B"))
            self._begun[name] = (done + out.nbytes, digest)
            if done + out.nbytes == chunk.length:
                self._compare(name, digest.hexdigest(length=manifest.DIGEST_BYTES))

    def check_begun(self) -> None:
        """Raises ValueError where bytes of a tensor of which something was read are not those that were written."""
        for name, (done, _) in self._begun.items():
            piece = self._pieces[name]
            if done < piece.length:
                with self.file_of(name).open("rb") as file:
                    self._compare(name, manifest.digest_at(file, piece.offset, piece.length))
        self._begun = {}

    def _compare(self, name: str, digest: str) -> None:
        if digest != self._pieces[name].digest:
            raise ValueError(f"{self.file_of(name)} is damaged in tensor {name}: its checksum does not fit")

    @functools.cached_property
    def _pieces(self) -> dict[str, manifest.StoredChunk]:
        if not (self.folder / manifest.TENSORS).is_file():
            return {}
        return {piece.name: piece for piece in manifest.read_tensors(self.folder)[1]}


def fingerprint(folder: Path, patterns: Sequence[str]) -> list[list[str | int]]:
    """Identifies the state of a source folder: of its weights in files of these patterns, its config.json,
    tokenizer and the rest the name, size, time of change, and checksum of both ends.

    Times alone do not tell: archives and object stores round them, and all checkpoints of a run have the same sizes.

    Raises:
        OSError: a file cannot be read; a tokenizer that is a link to nowhere is found here, before hours of work.
    """
    found = {path.name: path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    found |= {"config.json": folder / "config.json", **companions(folder)}
    return [[name, *_looks(path)] for name, path in sorted(found.items()) if path.is_symlink() or path.exists()]


def weights_checksum(folder: Path) -> str:
    """Checksum of the names, sizes and ends of a model folder's files, whenever they were written."""
    files = [[name, size, ends] for name, size, _, ends in fingerprint(folder, ("*.safetensors", "*.distcp"))]
    return manifest.digest(json.dumps(files).encode())


def _looks(path: Path) -> tuple[int, int, str]:
    with path.open("rb") as file:
        about = os.fstat(file.fileno())
        ends = file.read(_SAMPLE)
        file.seek(max(0, about.st_size - _SAMPLE))
        return about.st_size, about.st_mtime_ns, manifest.digest(ends + file.read())
