"""The log-prob head against plain torch: CPU time, peak memory and rounding of one forward and backward pass.

python -m benchmarks.head [--tokens 1024 4096] [--rounds 3] [--vocabulary 151936] [--hidden 1024] [--json FILE]

Plain is `log_softmax((hidden @ weight.T).float()).gather(targets)`. Each measurement is a process of its own with one
thread, and the two take turns. Peak is what the process grew beyond its inputs and the gradients that it returns. Error is
the largest difference from float64 on the first 64 tokens: of log-probs, and of gradients relative to the largest element.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.others import told
from megatron_rl.actor.head import VocabShard, log_probs_from_hidden

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
LIMITS = {1024: 1 / 4, 4096: 1 / 8}  # of plain's peak
TIME_LIMIT = 1.25
CHECKED = 64  # tokens


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return torch.log_softmax((hidden @ weight.t()).float(), -1).gather(1, targets[:, None]).squeeze(1)


def tiled(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return log_probs_from_hidden(hidden, weight, targets, VocabShard(0, len(weight), None))[0]


WAYS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"plain": plain, "tiled": tiled}


def _problem(tokens: int, vocabulary: int, hidden_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, generator=generator)
    weight = torch.randn(vocabulary, hidden_size, generator=generator) * 0.03
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    return hidden, weight, targets, torch.randn(tokens, generator=generator)


def _gradients(
    way: Callable[[Tensor, Tensor, Tensor], Tensor], hidden: Tensor, weight: Tensor, targets: Tensor, upstream: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    log_probs = way(hidden, weight, targets)
    (log_probs * upstream).sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return log_probs.detach(), hidden.grad, weight.grad


def _resident(field: str) -> float:
    """MiB; VmRSS is now, VmHWM the most since it was reset."""
    for row in Path("/proc/self/status").read_text().splitlines():
        if row.startswith(field):
            return int(row.split()[1]) / 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


def measure(way: str, dtype: str, tokens: int, vocabulary: int, hidden_size: int) -> dict[str, float]:
    """In this process: CPU seconds and MiB of one pass, and its errors."""
    torch.set_num_threads(1)
    hidden, weight, targets, upstream = _problem(tokens, vocabulary, hidden_size)
    hidden, weight = hidden.to(DTYPES[dtype]), weight.to(DTYPES[dtype])
    warm = torch.ones(64, 64, dtype=hidden.dtype)
    _gradients(WAYS[way], warm, warm, torch.zeros(64, dtype=torch.long), torch.ones(64))
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    begin = time.process_time()
    found = _gradients(WAYS[way], hidden, weight, targets, upstream)
    seconds = time.process_time() - begin
    grown = _resident("VmHWM") - before
    gradients = (found[1].nbytes + found[2].nbytes) / 2**20
    del found
    part = hidden[:CHECKED], weight, targets[:CHECKED], upstream[:CHECKED]
    own = _gradients(WAYS[way], *part)
    want = _gradients(plain64, part[0].double(), weight.double(), *part[2:])
    differences = [float((a.double() - b).abs().max()) for a, b in zip(own, want, strict=True)]
    scales = [1.0, *(float(gradient.abs().max()) for gradient in want[1:])]
    names = ("log_prob_error", "hidden_gradient_error", "weight_gradient_error")
    errors = {name: d / scale for name, d, scale in zip(names, differences, scales, strict=True)}
    return {"cpu_seconds": seconds, "peak_mib": grown - gradients} | errors


def plain64(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return torch.log_softmax(hidden @ weight.t(), -1).gather(1, targets[:, None]).squeeze(1)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument("--one", nargs=3, metavar=("WAY", "DTYPE", "TOKENS"), help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.one:
        way, dtype, tokens = args.one
        print(json.dumps(measure(way, dtype, int(tokens), args.vocabulary, args.hidden)))
        return 0
    sizes = ["--vocabulary", str(args.vocabulary), "--hidden", str(args.hidden)]
    table = Table("tokens", "dtype", "", "CPU s", "of plain", "peak MiB", "of plain", "errors: log-prob", "gradients")
    figures = []
    for tokens in args.tokens:
        for dtype in DTYPES:
            runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
            for _ in range(args.rounds):
                for way, found in runs.items():
                    command = [sys.executable, "-m", "benchmarks.head", "--one", way, dtype, str(tokens), *sizes]
                    found.append(json.loads(subprocess.check_output(command)))
            middle = {way: {key: median(run[key] for run in found) for key in found[0]} for way, found in runs.items()}
            for way, figure in middle.items():
                ratios = {key: figure[key] / middle["plain"][key] for key in ("cpu_seconds", "peak_mib")}
                figures.append({"tokens": tokens, "dtype": dtype, "way": way} | figure | {"of_plain": ratios})
                limits = ("", "")
                if way == "tiled":
                    limit = LIMITS.get(tokens)
                    limits = (f" (goal {TIME_LIMIT})", f" (goal {limit:g})" if limit else "")
                table.add_row(
                    *(str(tokens), dtype, way),
                    f"{figure['cpu_seconds']:.2f}",
                    f"{ratios['cpu_seconds']:.2f}{limits[0]}",
                    f"{figure['peak_mib']:.0f}",
                    f"{ratios['peak_mib']:.3f}{limits[1]}",
                    f"{figure['log_prob_error']:.1e}",
                    f"{figure['hidden_gradient_error']:.1e}, {figure['weight_gradient_error']:.1e}",
                )
    Console(highlight=False, width=150).print(table)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    with told():
        sys.exit(main())
