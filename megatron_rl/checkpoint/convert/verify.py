"""Proof of a conversion: every tensor's bytes after the way there and back, and the logits of both sides."""

from __future__ import annotations

import functools
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from blake3 import blake3
from torch import Tensor

from megatron_rl.checkpoint.convert.jobs import Conversion, Progress, ProgressBar, in_parallel
from megatron_rl.checkpoint.convert.source import SourceModel
from megatron_rl.models import model_of, read_hf_config
from megatron_rl.models.classifier import is_classifier
from megatron_rl.runtime import memory_use as memory
from megatron_rl.runtime.disk import size_text
from megatron_rl.weights.files import DTYPES, WeightSource

_BLOCK = 2**27  # bytes compared at once
# Largest |difference| of logits, relative to the largest |logit|. Both sides compute in fp32 from the weights as stored, so
# weights that were not rounded leave rounding errors of the sums only.
TOLERANCE = {"keep": 1e-4, "fp32": 1e-4, "bf16": 5e-2}
_TOKENS = 64


@dataclass(frozen=True)
class Compared:
    """One tensor: the checksums (BLAKE3) of what it should be and of what it is."""

    name: str
    nbytes: int
    expected: str
    found: str


def compare(task: Conversion, target: Path, workers: int) -> list[Compared]:
    """Reads every tensor of the result back from the disk and compares it with the source.

    Raises:
        ValueError: one is missing, unexpected, reshaped, of another dtype or different; tensor and file are named.
    """
    names, source = task.names(), task.result(target)
    if set(names) != source.names():
        wrong = sorted(set(names) ^ source.names())
        raise ValueError(f"{target} does not hold the tensors of the source; first {wrong[0]}, {len(wrong)} in all")
    sizes = {name: math.prod(source.shape(name)) * DTYPES[source.dtype(name)].itemsize for name in names}
    share = -(-len(names) // (max(1, workers) * 4))
    groups = [names[at : at + share] for at in range(0, len(names), share)]
    bar = ProgressBar(list(sizes.items()), set(), "verifying")
    with bar:
        results = in_parallel(_Comparison(task, target), groups, workers, bar.advance)
    return [compared for group in results for compared in group]


class _Comparison:
    """Compares a group of tensors; the result is opened once per process."""

    def __init__(self, task: Conversion, target: Path) -> None:
        self._task, self._target = task, target
        self._source: WeightSource | None = None

    def __getstate__(self) -> dict[str, object]:
        return {"_task": self._task, "_target": self._target, "_source": None}

    def __call__(self, names: Sequence[str], progress: Progress) -> list[Compared]:
        source = self._source = self._source or self._task.result(self._target)
        out = []
        for name in names:
            compared = _compare(self._task, source, name)
            if compared.expected != compared.found:
                raise ValueError(
                    f"{name} in {source.file_of(name)} is not what the source holds: checksum {compared.found}, "
                    f"expected {compared.expected}"
                )
            progress(compared.nbytes)
            out.append(compared)
        return out


def _compare(task: Conversion, source: WeightSource, name: str) -> Compared:
    shape, dtype = source.shape(name), DTYPES[source.dtype(name)]
    nbytes = math.prod(shape) * dtype.itemsize
    rows = max(1, shape[0] * _BLOCK // max(nbytes, 1)) if not name.endswith("_scale_inv") else shape[0]
    if dtype.itemsize == 1:
        rows = shape[0]  # FP8 blocks are made from whole tensors
    before, after = blake3(), blake3()
    for start in range(0, shape[0], rows):
        stop = min(shape[0], start + rows)
        expected, written = task.expected(name, start, stop), source.read(name, 0, start, stop)
        if expected.dtype != written.dtype or expected.shape != written.shape:
            raise ValueError(
                f"{name} in {source.file_of(name)} is {tuple(written.shape)} {written.dtype}, expected "
                f"{tuple(expected.shape)} {expected.dtype}"
            )
        before.update(_bytes(expected))
        after.update(_bytes(written))
    return Compared(name, nbytes, before.hexdigest(length=16), after.hexdigest(length=16))


def _bytes(values: Tensor) -> memoryview:
    return values.contiguous().view(-1).view(torch.uint8).numpy().data


# ---------------------------------------------------------------------------------------------------------------- logits
@dataclass(frozen=True)
class Logits:
    """Largest |difference| and largest |logit|."""

    difference: float
    largest: float
    tolerance: float

    @property
    def relative(self) -> float:
        return self.difference / self.largest if self.difference else 0.0


def compare_logits(hf: Path, megatron: Path, config: Path, dtype: str, master: bool = False) -> Logits | str:
    """Logits of `transformers` on the Hugging Face folder and of Megatron-Core on the checkpoint, both in fp32 on the CPU.

    Returns a sentence instead where they cannot be compared here.

    Raises:
        ValueError: they differ by more than the dtype's tolerance.
    """
    if dtype == "fp8":
        return "logits are not compared for FP8, whose rounding changes them; every scale and value was"
    model = SourceModel.read(config)
    parameters = sum(4 * math.prod(tensor.sizes(model.dims)) for rule in model.weights() for tensor in rule.hf)
    free = available_memory()
    if parameters * 1.5 > free:
        needed = size_text(parameters * 1.5)
        return f"logits are not compared: that takes {needed} of memory, {size_text(free)} are free"
    function = functools.partial(_logits, master=master)
    sides: list[tuple[Path, Path | None]] = [(hf, None), (megatron, config)]
    [theirs, ours] = in_parallel(function, sides, 1, lambda _: None, spawn=True)
    result = Logits(float((theirs - ours).abs().max()), float(theirs.abs().max()), TOLERANCE[dtype])
    if not result.relative <= result.tolerance:
        raise ValueError(
            f"logits of {hf} and {megatron} differ by up to {result.difference:.3g}, {result.relative:.3g} of the largest "
            f"({result.largest:.3g}); {result.tolerance:g} is the limit for dtype {dtype}"
        )
    return result


def _logits(side: tuple[Path, Path | None], progress: Progress, master: bool) -> Tensor:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    folder, config = side
    vocab = SourceModel.read(config or folder).dims["vocab"]
    tokens = torch.randint(vocab, (1, _TOKENS), generator=torch.Generator().manual_seed(0))
    if config is None:
        return _transformers(folder, tokens)
    from megatron_rl.checkpoint.convert.megatron_logits import megatron_logits  # Megatron-Core is in no other process

    return megatron_logits(folder, config, tokens, master)


def _transformers(folder: Path, tokens: Tensor) -> Tensor:
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSequenceClassification,
    )
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    described = model_of(read_hf_config(folder))
    is_reward = is_classifier(described.family)
    auto = AutoModelForImageTextToText if described.description.vision is not None else AutoModelForCausalLM
    auto = AutoModelForSequenceClassification if is_reward else auto
    model = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False)
    with torch.no_grad():
        if is_reward:  # whose own `logits` are the last token's
            return model.score(model.base_model(tokens).last_hidden_state)[0]
        return model(tokens).logits[0]


def available_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process can still have: of the machine's, and of what its container or batch job may use."""
    free = [
        int(line.split()[1]) * 1024
        for line in (proc / "meminfo").read_text().splitlines()
        if line.startswith("MemAvailable:")
    ]
    return min(
        [
            *free,
            *(_left(folder, *_CGROUP[version]) for folder, version in memory.cgroups(proc / "self/cgroup", cgroups)),
        ]
    )


_CGROUP = {  # by its version: limit, use, and what of that are files in memory
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def _left(cgroup: Path, limit: str, usage: str, cache: str) -> int:
    """Bytes that a control group has left, those of files that it caches included."""
    try:
        most = (cgroup / limit).read_text().strip()
        used = int((cgroup / usage).read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except OSError:
        return sys.maxsize
    return sys.maxsize if most == "max" else int(most) - used + int(stat.get(cache, 0))
