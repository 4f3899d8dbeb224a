"""Rollouts between ranks at scale: real gloo processes exchange what they drew, without engines or models.

python -m benchmarks.scale_batches [--ranks 8 16] [--mib 1] [--rounds 3] [--no-gather] [--json]

Every rank is an engine and a data-parallel replica of its own. It has drawn 32 rollouts, `--mib` MiB (9 bytes a token), and
needs 32 of all. `received`, `sent`: bytes of the rank with the most. Then seconds until all ranks are done, CPU seconds of
all (medians over rounds), and MiB that the rank with the most adds meanwhile:

copy      every rank copies its own bytes in memory, all at the same time
send      every rank sends its own bytes to the next one, as one message
facts     what all ranks learn of all rollouts, 25 bytes each (`ProcessGrid.all_gather_bytes`)
exchange  `rollout.exchange`, by gloo
gather    instead, all rollouts pickled to all ranks (`all_gather_object`)
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.others import told
from megatron_rl.data.rollout import FACTS, Rollout, Rollouts
from megatron_rl.data.sample import Sample
from megatron_rl.rollout.exchange import BYTES_PER_TOKEN, exchange
from megatron_rl.runtime.distributed import ALONE, ProcessGrid

GROUPS, COUNT = 4, 8  # of a rank
IMPORTED = ("torch.distributed", "megatron_rl.rollout.exchange")


def drawn(rank: int, world: int, mib: float) -> Rollouts:
    """What a rank holds, and the facts of all. Lengths differ by up to a half, and are the same multiset on every rank."""
    rows, mean = GROUPS * COUNT, mib * 2**20 / BYTES_PER_TOKEN / (GROUPS * COUNT)
    lengths = np.tile((mean * np.linspace(0.5, 1.5, rows)).astype(int), world)
    samples = [Sample(str(i), "t", "", [1]) for i in range(GROUPS * world)]
    facts = np.zeros(rows * world, dtype=FACTS)
    facts["row"], facts["length"], facts["num_tokens"] = np.arange(rows * world), lengths, lengths + 1
    facts["source"] = np.arange(rows * world) // rows
    rng, held = np.random.default_rng(rank), dict[int, Rollout]()
    for row in range(rank * rows, (rank + 1) * rows):
        ids, log_probs = rng.integers(0, 2**17, lengths[row]), rng.random(lengths[row], dtype=np.float32)
        held[row] = Rollout.single_turn(samples[row // COUNT], row % COUNT, ids, "stop", log_probs)
    return Rollouts(samples, COUNT, facts, held)


def status(field: str) -> float:
    """MiB of this process, from /proc."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


def measured(grid: ProcessGrid, work: Callable[[], object]) -> tuple[float, float, float]:
    """Seconds until all ranks have done it, CPU seconds of all of them, and MiB that it adds at its peak on the rank with the
    most."""
    ctypes.CDLL(None).malloc_trim(0)  # what earlier work has freed would serve this one
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status("VmRSS")
    grid.barrier()
    begin, cpu_begin = time.perf_counter(), time.process_time()
    result = work()
    cpu = time.process_time() - cpu_begin
    grid.barrier()
    seconds = time.perf_counter() - begin
    cpus, added = zip(*grid.all_gather((cpu, status("VmHWM") - before)), strict=True)
    del result
    return seconds, sum(cpus), max(added)


def run_rank(rank: int, folder: str, world: int, mib: float, rounds: int, gathers: bool) -> None:
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=timedelta(minutes=10))
    grid = ProcessGrid(**{**vars(ALONE), "rank": rank, "world": world, "host_group": dist.group.WORLD})
    rollouts = drawn(rank, world, mib)
    rows = np.random.default_rng(0).permutation(len(rollouts)).reshape(world, -1)
    needs = [([replica], own.tolist()) for replica, own in enumerate(rows)]
    sizes, source = rollouts.facts["length"] * BYTES_PER_TOKEN, rollouts.facts["source"]
    received = [int(sizes[own][source[own] != replica].sum()) for replica, own in enumerate(rows)]
    sent = [int(sizes[(source == r) & ~np.isin(np.arange(len(sizes)), rows[r])].sum()) for r in range(world)]
    flat = np.zeros(int(sizes[source == rank].sum()), dtype=np.uint8)
    facts = rollouts.facts[source == rank].tobytes()
    grid.all_gather(None)  # connections are made at the first use

    def send() -> np.ndarray:
        taken = np.empty(int(sizes[source == (rank - 1) % world].sum()), dtype=np.uint8)
        work = dist.irecv(torch.from_numpy(taken), (rank - 1) % world)
        dist.send(torch.from_numpy(flat), (rank + 1) % world)
        assert work is not None  # this rank is in the group
        work.wait()
        return taken

    works: dict[str, Callable[[], object]] = {
        "copy": flat.copy,
        "send": send,
        "facts": lambda: grid.all_gather_bytes(facts),
        "exchange": lambda: exchange(grid, rollouts, needs),
    }
    if gathers:
        works["gather"] = lambda: grid.all_gather([*rollouts.held.values()])
    found: dict[str, float] = {"ranks": world, "bytes": int(sizes.sum()), "received": max(received), "sent": max(sent)}
    for name, work in works.items():
        figures = [measured(grid, work) for _ in range(rounds)]
        seconds, cpu, added = zip(*figures, strict=True)
        found |= {f"{name}_s": median(seconds), f"{name}_cpu_s": median(cpu), f"{name}_mib": max(added)}
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--mib", type=float, default=1.0, help="of rollouts per rank")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--no-gather", action="store_true", help="leave out the gather of pickles, which needs ranks^2 memory"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(IMPORTED))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for world in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            given = (folder, world, options.mib, options.rounds, not options.no_gather)
            mp.start_processes(run_rank, given, nprocs=world, start_method="forkserver")
            found = json.loads(Path(folder, "found.json").read_text())
        found["load"] = os.getloadavg()[0]
        if options.json:
            print(json.dumps(found))
        else:
            print("  ".join(f"{name} {value:,.4g}" for name, value in found.items()), flush=True)
    return 0


if __name__ == "__main__":
    with told():
        sys.exit(main())
