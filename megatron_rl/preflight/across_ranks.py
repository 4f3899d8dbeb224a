"""All ranks together: what each has found, what must be equal, and what only shows between nodes."""

from __future__ import annotations

import os
import secrets
import socket
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_rl.config.schema import Config
from megatron_rl.preflight import storage
from megatron_rl.preflight.local import FACTS, PER_NODE, PER_RANK, has_endpoints, silent_endpoints, survey
from megatron_rl.preflight.storage import Ranks
from megatron_rl.preflight.verdict import FAILED, WARNING, Measured, NodeFinding, Report, merged
from megatron_rl.runtime import device, disk

_SKEW = 5.0  # seconds between two clocks above which it warns
_SEEN = 10.0  # seconds within which other nodes must see a new file
_THROUGH = 90.0  # seconds within which a first message must arrive,
_RANKS_PER_SECOND = 8  # and one more for so many ranks: NCCL first has all of them connect
_ASK_AGAIN = 5.0  # seconds until a server that does not answer is asked again
_TELL = 60.0  # seconds between two messages about it
_SLOW = 0.5  # a pair of nodes slower than this share of the median is named


def preflight(config: Config, ranks: Ranks, full: bool, extra: Sequence[tuple[str, str, str]] = ()) -> Report:
    """Every rank calls it; every rank gets the same report.

    Args:
        full: also measure bandwidth, which takes seconds.
        extra: (check, level, sentence) of earlier checks of this rank.

    Raises:
        ConnectionError: two nodes, or all ranks, cannot exchange a message; it says which.
    """
    begin = time.monotonic()
    host = socket.gethostname()
    hosts = ranks.all_gather(host)
    nodes = list(dict.fromkeys(hosts))
    leaders = [hosts.index(node) for node in nodes]
    _await_endpoints(config, ranks, ranks.rank in leaders)
    problems, facts = survey(config, ranks.rank in leaders)
    together = ["shared", "clock", "collectives", *["storage"] * full]
    report = Report(nodes, ranks.world, [*dict.fromkeys([*PER_NODE, *PER_RANK, *FACTS, *together])])
    everything = ranks.all_gather((host, [*extra, *problems], facts))
    findings = [NodeFinding(check, level, node, text) for node, own, _ in everything for check, level, text in own]
    findings += _differences([(node, facts) for node, _, facts in everything])
    findings += _shared(Path(config.run_dir), ranks, hosts)
    findings += _clocks(ranks, hosts, report.measured)
    findings += _collectives(ranks, hosts, report.measured, full)
    if full:
        findings += storage.reading(config, ranks, report.measured)
    report.findings = merged(findings)
    report.seconds = time.monotonic() - begin
    return report


def endpoint_minutes(config: Config, environment: Mapping[str, str]) -> float:
    """Minutes to wait for servers, which in a batch job may start at the same time."""
    given = config.launch.endpoint_minutes
    return given if given is not None else 10.0 if "SLURM_JOB_ID" in environment else 0.0


def _await_endpoints(config: Config, ranks: Ranks, first_of_node: bool) -> None:
    """Waits until every reward has a server that each node can reach. What is silent then, the survey names."""
    limit = 60 * ranks.all_gather(endpoint_minutes(config, os.environ))[0]
    if not limit or not has_endpoints(config):
        return
    begin, last_message = time.monotonic(), -_TELL
    while True:
        mine = silent_endpoints(config) if first_of_node else []
        # Rank 0's clock decides.
        reports = ranks.all_gather((mine, time.monotonic() - begin))
        silent, waited = sorted({name for names, _ in reports for name in names}), reports[0][1]
        if not silent or waited >= limit:
            return
        if ranks.rank == 0 and waited - last_message >= _TELL:
            last_message = waited
            print(
                f"pre-flight: no answer yet from {'; '.join(silent)}; waiting, at most {limit / 60:g} min "
                f"(launch.endpoint_minutes), {waited:.0f} s so far",
                file=sys.stderr,
                flush=True,
            )
        time.sleep(min(_ASK_AGAIN, limit - waited))


def _differences(facts: Sequence[tuple[str, dict[str, dict[str, str]]]]) -> list[NodeFinding]:
    """Nodes whose facts are not those of the majority (of the first, without a majority)."""
    findings = []
    for check in FACTS:
        own = [(node, values[check]) for node, values in facts if values.get(check)]
        for name in sorted({name for _, values in own for name in values}):
            said = [(node, values.get(name, "missing")) for node, values in own]
            usual = Counter(value for _, value in said).most_common(1)[0][0]
            for node, value in said:
                if value != usual:
                    findings.append(NodeFinding(check, FAILED, node, f"{name} is {value} here and {usual} elsewhere"))
    return findings


def _shared(run_dir: Path, ranks: Ranks, hosts: Sequence[str]) -> list[NodeFinding]:
    """Whether run_dir is one folder: a file of every node is seen by all."""
    token = ranks.all_gather(secrets.token_hex(4))[0]
    leaders = {hosts.index(node) for node in hosts}
    probe = run_dir / f".preflight_{token}_{ranks.rank}"
    if ranks.rank in leaders:
        try:
            probe.write_text(token, encoding="utf-8")
        except OSError:
            probe = run_dir / "nowhere"  # `check_run_dir` has said why
    ranks.barrier()
    until = time.monotonic() + (_SEEN if len(leaders) > 1 else 0.0)
    unseen = sorted(leaders)
    while unseen:
        unseen = [rank for rank in unseen if not (run_dir / f".preflight_{token}_{rank}").is_file()]
        if time.monotonic() >= until:
            break
        time.sleep(0.05)
    seen = ranks.all_gather(unseen)
    if ranks.rank in leaders:
        probe.unlink(missing_ok=True)
    return [
        NodeFinding(
            "shared",
            FAILED,
            hosts[rank],
            f"run_dir {run_dir}: a file written here is not seen on {', '.join(sorted({hosts[r] for r in blind}))}: it has "
            "to be one folder on a file system that all nodes share",
        )
        for rank in sorted(leaders)
        if (blind := [r for r, missing in enumerate(seen) if rank in missing])
    ]


def _clocks(ranks: Ranks, hosts: Sequence[str], measured: Measured) -> list[NodeFinding]:
    """Differences of the clocks, to about the time that a barrier takes."""
    ranks.barrier()
    times = ranks.all_gather(time.time())
    middle = sorted(times)[len(times) // 2]
    measured["clock_skew_s"] = round(max(times) - min(times), 3)
    return [
        NodeFinding("clock", WARNING, host, f"its clock is {value - middle:+.0f} s from the others'; is NTP running?")
        for host, value in zip(hosts, times, strict=True)
        if abs(value - middle) > _SKEW
    ]


def _collectives(ranks: Ranks, hosts: Sequence[str], measured: Measured, full: bool) -> list[NodeFinding]:
    """A sum over all ranks that is known beforehand; with `full` how fast it is, and each node's way to the next."""
    gpu = device.has_gpu()
    length = (2**26 if gpu else 2**22) if full else 2**18
    n = ranks.world
    factors = [rank % 8 + 1 for rank in range(n)]  # small: sums of thousands of ranks are exact in 32 bits

    def once(first: bool) -> tuple[float, bool]:
        ramp = torch.arange(length, device=device.device(), dtype=torch.float32) % 256
        mine = ramp * factors[ranks.rank]
        device.synchronize()
        ranks.barrier()
        begin = time.perf_counter()
        work = dist.all_reduce(mine, group=ranks.device_group, async_op=True)
        _wait(work, f"node {hosts[ranks.rank]}: an all-reduce over all {n} ranks", n if first else None)
        device.synchronize()
        return time.perf_counter() - begin, bool(torch.equal(mine, ramp * sum(factors)))

    links = _links(ranks, hosts, measured) if full else []  # first: where one is broken, it is named
    runs = [once(first=i == 0) for i in range(4 if full else 1)]
    seconds, right = min(run[0] for run in runs), all(run[1] for run in runs)
    results = ranks.all_gather((seconds, right))
    findings = [
        NodeFinding("collectives", FAILED, hosts[rank], "an all-reduce of known numbers came out wrong on this node")
        for rank, (_, good) in enumerate(results)
        if not good
    ]
    if full and n > 1:
        moved = 2 * (n - 1) / n * 4 * length  # bytes per rank, of a ring
        measured["allreduce_gb_per_s"] = round(moved / max(s for s, _ in results) / 1e9, 3)
    return findings + links


def _wait(work: dist.Work | None, what: str, world: int | None) -> None:
    """Waits for a collective. `world`: the number of ranks where it is the first of its kind, which has a limit of its own.

    Raises:
        ConnectionError: it is not.
    """
    assert work is not None  # this rank takes part
    seconds = _THROUGH + (world or 0) // _RANKS_PER_SECOND
    try:
        if world is None:
            work.wait()
        else:
            work.wait(timedelta(seconds=seconds))
    except RuntimeError as error:
        raise ConnectionError(
            f"{what} does not get through within {seconds:.0f} s (the network that NCCL or gloo has chosen: "
            f"NCCL_SOCKET_IFNAME, NCCL_IB_HCA, GLOO_SOCKET_IFNAME; NCCL_DEBUG=INFO says more): {str(error).splitlines()[0]}"
        ) from None


def _links(ranks: Ranks, hosts: Sequence[str], measured: Measured) -> list[NodeFinding]:
    """Bandwidth from each node to the next, one pair at a time, by the first rank of each."""
    nodes = list(dict.fromkeys(hosts))
    if len(nodes) < 2:
        return []
    data = torch.ones(2**24 if device.has_gpu() else 2**21, device=device.device())
    speeds: dict[str, float] = {}
    for sender, receiver in zip(nodes, nodes[1:] + nodes[:1], strict=True):
        a, b = hosts.index(sender), hosts.index(receiver)
        seconds = float("inf")
        for i in range(3):
            ranks.barrier()
            begin = time.perf_counter()
            if ranks.rank in (a, b):
                group = ranks.device_group
                work = dist.isend(data, b, group) if ranks.rank == a else dist.irecv(data, a, group)
                what = f"{sender} -> {receiver}: a message of the first rank there to the first here"
                _wait(work, what, ranks.world if i == 0 else None)
            device.synchronize()
            seconds = min(seconds, time.perf_counter() - begin)
        speeds[f"{sender} -> {receiver}"] = data.numel() * 4 / ranks.all_gather(seconds)[b] / 1e9
    measured["links_gb_per_s"] = {name: round(speed, 3) for name, speed in speeds.items()}
    median = sorted(speeds.values())[len(speeds) // 2]
    return [
        NodeFinding("collectives", WARNING, name, f"{speed:.2f} GB/s, {median:.2f} GB/s between other nodes")
        for name, speed in speeds.items()
        if speed < _SLOW * median
    ]


def write_report(report: Report, config: Config, rank: int) -> None:
    """`<run_dir>/preflight.json`, by rank 0; not where the folder cannot be written, which the report says."""
    if rank == 0 and os.access(config.run_dir, os.W_OK):
        try:
            disk.replace(Path(config.run_dir) / "preflight.json", report.json())
        except OSError as error:
            report.findings.append(NodeFinding("run_dir", FAILED, report.nodes[0], f"preflight.json: {error.strerror}"))
