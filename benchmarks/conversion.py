"""Conversion against copying: throughput of the whole commands beside `cp -r` of the same bytes on the same disk.

python -m benchmarks.conversion [--gigabytes 4.5] [--folder DIR] [--json FILE]

Makes a Qwen3 model in bf16 (its values are noise), copies its folder with `cp -r` (the first copy is thrown away), runs
both `tools/convert_*.py` for two layouts, and copies again after each. Sources are
in the page cache, and every time ends after `sync -f`. Shares are of the fastest copy: what else the machine does can only
slow a copy down. Goals: at least 60 % of cp's throughput, at most four times the largest tensor plus 1 GB of memory.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.others import told
from megatron_rl.checkpoint.convert.to_hf import _header, _Tensor
from megatron_rl.checkpoint.convert.write_behind import WriteBehind
from megatron_rl.models import model_of

TOOLS = Path(__file__).resolve().parents[1] / "tools"
LAYOUTS = {"1 x 1 x 1": [], "TP 2 x PP 3": ["--tensor", "2", "--pipeline", "3"]}
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
        model = model_of(config)
        held = [
            _Tensor(tensor.name, tensor.name, tensor.sizes(model.dims), "BF16")
            for rule in model.weights()
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


def convert(tool: str, arguments: Sequence[str], target: Path) -> tuple[float, float, int]:
    """Wall-clock and CPU seconds of a whole command until all is on the disk, and its largest resident memory in bytes."""
    begin = time.perf_counter()
    command = [sys.executable, str(TOOLS / tool), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with exit code {process.returncode}")
    subprocess.run(["sync", "-f", str(target)], check=True)
    return time.perf_counter() - begin, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024


def warm(folder: Path) -> None:
    """Reads a folder into the page cache."""
    for path in folder.iterdir():
        with path.open("rb", buffering=0) as file:
            while file.read(2**24):
                pass


def measure(root: Path, gigabytes: float) -> dict[str, Any]:
    source, there, back = root / "hf", root / "megatron", root / "back"
    total, largest = make_model(source, gigabytes)
    warm(source)
    copy(source, root / "copy")  # the first finds a cold machine
    copies = [copy(source, root / "copy")]
    rows: list[dict[str, Any]] = []
    for layout, options in LAYOUTS.items():
        commands = [
            ("HF to Megatron", "convert_hf_to_megatron.py", ["--hf", str(source), "--megatron", str(there), *options]),
            ("Megatron to HF", "convert_megatron_to_hf.py", ["--megatron", str(there), "--hf", str(back)]),
        ]
        for (name, tool, arguments), read, target in zip(commands, (source, there), (there, back), strict=True):
            warm(read)
            seconds, cpu, memory = convert(tool, arguments, target)
            rows.append({"what": name, "layout": layout, "seconds": seconds, "cpu_seconds": cpu, "peak_bytes": memory})
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
    parser.add_argument("--folder", type=Path, help="on the disk to measure; takes three times the model for a while")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="conversion-") as folder:
        found = measure(Path(folder), args.gigabytes)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    console = Console(highlight=False)
    console.print(f"{found['bytes'] / 1e9:.2f} GB, largest tensor {found['largest_tensor'] / 1e9:.2f} GB")
    console.print("cp and sync: " + ", ".join(f"{found['bytes'] / s / 1e9:.2f}" for s in found["cp_seconds"]) + " GB/s")
    peak_title = f"peak GB (goal {found['memory_goal'] / 1e9:.1f})"
    table = Table("", "layout", "GB/s", f"of cp (goal {SHARE:.0%})", "CPU s per GB", peak_title)
    good = True
    for row in found["rows"]:
        good &= row["share_of_cp"] >= SHARE and row["peak_bytes"] <= found["memory_goal"]
        share, peak = f"{row['share_of_cp']:.0%}", f"{row['peak_bytes'] / 1e9:.2f}"
        cpu = f"{row['cpu_seconds_per_gb']:.2f}"
        table.add_row(row["what"], row["layout"], f"{row['gb_per_s']:.2f}", share, cpu, peak)
    console.print(table)
    return 0 if good else 1


if __name__ == "__main__":
    with told():
        sys.exit(main())
