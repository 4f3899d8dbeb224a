"""Conversion against copying: throughput beside `cp` of the same bytes on the same disk, and peak memory.

python -m benchmarks.conversion [--gigabytes 4.5] [--workers 1 2] [--folder DIR] [--json FILE]

Makes a Qwen3 model in bf16 (its values are noise), copies its folder with `cp`, converts it to Megatron and back, and
copies again. Every time ends when the bytes are on the disk: the conversion syncs its files itself, after `cp` the folder's
file system is synced. Shares are of the fastest copy: what else the machine does can only slow a copy down. CPU seconds
are of all processes of a conversion, without imports. Goals: at least 60 % of cp's throughput, at most four times the
largest tensor plus 1 GB of memory.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from megatron_rl.checkpoint.convert import jobs
from megatron_rl.checkpoint.convert.layout import Layout
from megatron_rl.checkpoint.convert.to_hf import ToHF, _header, _Tensor
from megatron_rl.checkpoint.convert.to_megatron import ToMegatron
from megatron_rl.checkpoint.convert.write_behind import WriteBehind
from megatron_rl.models import family_for

SHARE, TENSORS, EXTRA = 0.6, 4, 10**9  # the goals
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "rope_theta": 1000000.0,
    "dtype": "bfloat16",
}


def make_model(folder: Path, gigabytes: float) -> tuple[int, int]:
    """A model folder of at least so many GB. Returns its bytes, and those of the largest tensor."""
    layers, total, held = 0, 0, []
    while total < gigabytes * 1e9:
        layers += 1
        config = CONFIG | {"num_hidden_layers": layers}
        family = family_for(config)
        description = family.describe(config)
        held = [
            _Tensor(tensor.name, tensor.name, tensor.sizes(description.dims), "BF16")
            for rule in family.weights(description)
            for tensor in rule.hf
        ]
        total = sum(tensor.nbytes for tensor in held)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    noise = memoryview(os.urandom(2**25 + 2**16))
    header, offsets = _header(held)
    with WriteBehind(folder / "model.safetensors") as file:
        file.write([header])
        for number, tensor in enumerate(held):
            at = offsets[tensor.name]
            for start in range(0, tensor.nbytes, 2**25):
                shift = (number * 31 + start // 2**25 * 7) % 2**16
                file.write([noise[shift : shift + min(2**25, tensor.nbytes - start)]], at=at + start)
    return total, max(tensor.nbytes for tensor in held)


def copy(source: Path, target: Path) -> tuple[float, float]:
    """Seconds of `cp`, and until everything is on the disk."""
    begin = time.perf_counter()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    copied = time.perf_counter() - begin
    subprocess.run(["sync", "-f", str(target)], check=True)
    done = time.perf_counter() - begin
    shutil.rmtree(target)
    return copied, done


def convert(task: ToMegatron | ToHF, target: Path, workers: int) -> tuple[float, float, int]:
    """Seconds, CPU seconds of all processes that convert, and the largest resident memory in bytes of any of them."""
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    child = context.Process(target=_convert, args=(task, target, workers, results))
    child.start()
    child.join()
    if child.exitcode != 0:
        raise RuntimeError(f"the conversion ended with exit code {child.exitcode}")
    return results.get()


def _convert(task: ToMegatron | ToHF, target: Path, workers: int, results: Any) -> None:
    torch.set_num_threads(1)
    begin, before = time.perf_counter(), _cpu_seconds()
    jobs.run(task, target, workers, print)
    seconds, cpu = time.perf_counter() - begin, _cpu_seconds() - before
    kilobytes = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    results.put((seconds, cpu, kilobytes * 1024))


def _cpu_seconds() -> float:
    """Of this process and those of its children that have ended."""
    return sum(os.times()[:4])


def measure(root: Path, gigabytes: float, workers: Sequence[int]) -> dict[str, Any]:
    source = root / "hf"
    total, largest = make_model(source, gigabytes)
    copies = [copy(source, root / "copy")]
    rows: list[dict[str, Any]] = []
    for count in workers:
        there, back = root / f"megatron-{count}", root / f"back-{count}"
        tasks: list[tuple[str, ToMegatron | ToHF, Path]] = [
            ("HF to Megatron", ToMegatron(source, Layout(), file_bytes=10**9), there),
            ("Megatron to HF", ToHF(there, there, file_bytes=10**9), back),
        ]
        for name, task, target in tasks:
            seconds, cpu, memory = convert(task, target, count)
            rows.append({"what": name, "workers": count, "seconds": seconds, "cpu_seconds": cpu, "peak_bytes": memory})
            copies.append(copy(source, root / "copy"))
        shutil.rmtree(there)
        shutil.rmtree(back)
    best, best_unsynced = min(done for _, done in copies), min(copied for copied, _ in copies)
    for row in rows:
        row |= {
            "gb_per_s": total / row["seconds"] / 1e9,
            "cpu_seconds_per_gb": row["cpu_seconds"] / total * 1e9,
            "share_of_cp": best / row["seconds"],
            "share_of_unsynced_cp": best_unsynced / row["seconds"],
        }
    return {
        "bytes": total,
        "largest_tensor": largest,
        "memory_goal": TENSORS * largest + EXTRA,
        "cp_seconds": [done for _, done in copies],
        "cp_unsynced_seconds": [copied for copied, _ in copies],
        "rows": rows,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0, or 1 where a goal is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=4.5, help="of the model, at least (default 4.5)")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], metavar="N")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; takes three times the model for a while")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="conversion-") as folder:
        found = measure(Path(folder), args.gigabytes, args.workers)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    console = Console(highlight=False)
    console.print(f"{found['bytes'] / 1e9:.2f} GB, largest tensor {found['largest_tensor'] / 1e9:.2f} GB")
    console.print("cp and sync: " + ", ".join(f"{found['bytes'] / s / 1e9:.2f}" for s in found["cp_seconds"]) + " GB/s")
    peak_title = f"peak GB (goal {found['memory_goal'] / 1e9:.1f})"
    table = Table("", "workers", "GB/s", f"of cp (goal {SHARE:.0%})", "CPU s per GB", peak_title)
    good = True
    for row in found["rows"]:
        good &= row["share_of_cp"] >= SHARE and row["peak_bytes"] <= found["memory_goal"]
        share, peak = f"{row['share_of_cp']:.0%}", f"{row['peak_bytes'] / 1e9:.2f}"
        cpu = f"{row['cpu_seconds_per_gb']:.2f}"
        table.add_row(row["what"], str(row["workers"]), f"{row['gb_per_s']:.2f}", share, cpu, peak)
    console.print(table)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
