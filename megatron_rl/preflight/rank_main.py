"""One rank of `megatron-rl preflight`, with the world in its environment."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from megatron_rl.config import ConfigError, Machine, check, load_recipe
from megatron_rl.config.machine import count_gpus
from megatron_rl.preflight.local import limits_in_the_way
from megatron_rl.preflight.verdict import FAILED
from megatron_rl.runtime import exit_codes, stop

if TYPE_CHECKING:
    import torch.distributed as dist

T = TypeVar("T")


@dataclass
class _Ranks:
    rank: int
    world: int
    group: dist.ProcessGroup  # gloo, all ranks
    store: dist.Store  # where every rank writes how often it has met the others
    meetings: int = 0

    def all_gather(self, item: T) -> list[T]:
        import torch.distributed as dist

        out = [item] * self.world
        with self._meeting():
            dist.all_gather_object(out, item, group=self.group)
        return out

    def barrier(self) -> None:
        import torch.distributed as dist

        with self._meeting():
            dist.barrier(group=self.group)

    @contextlib.contextmanager
    def _meeting(self) -> Iterator[None]:
        """Raises:
        RendezvousError: naming the ranks that did not arrive in time.
        """
        self.meetings += 1
        self.store.set(f"preflight/met/{self.meetings}/{self.rank}", "")
        try:
            yield
        except RuntimeError as error:
            try:
                met = [self.store.check([f"preflight/met/{self.meetings}/{rank}"]) for rank in range(self.world)]
                hosts = {
                    rank: self.store.get(f"preflight/{rank}").decode() for rank, came in enumerate(met) if not came
                }
            except RuntimeError:  # rank 0 served it
                hosts = {0: os.environ["MASTER_ADDR"]}
            behind = ", ".join(f"rank {rank} on {host}" for rank, host in hosts.items()) or "no rank"
            raise RendezvousError(
                f"node {socket.gethostname()}: {behind} has fallen behind or ended: {str(error).splitlines()[0]}"
            ) from None


def main(recipe: str, overrides: Sequence[str], full: bool, minutes: float, as_json: bool) -> int:
    """Runs on every rank; rank 0 prints the report. The recipe's own problems on this node are findings like any other."""
    config = load_recipe(recipe, overrides)
    problem = limits_in_the_way(config)
    if problem is not None:
        print(f"megatron-rl: {problem}", file=sys.stderr, flush=True)
        return exit_codes.PREFLIGHT
    from megatron_rl.preflight.across_ranks import preflight, write_report

    extra = []
    try:
        # A launcher has made the world: the layout has to fit it.
        config = check(config, machine=Machine(gpus=count_gpus(), world_size=int(os.environ["WORLD_SIZE"])))
    except ConfigError as error:
        extra = [("recipe", FAILED, line) for line in str(error).splitlines()]
    try:
        ranks = meet(minutes)
        report = preflight(config, ranks, full, extra)
        write_report(report, config, ranks.rank)
        if ranks.rank == 0:
            print(report.json() if as_json else report.text())
        ranks.barrier()
    except (RendezvousError, ConnectionError) as error:
        print(f"megatron-rl: {error}", file=sys.stderr, flush=True)
        return exit_codes.PREFLIGHT
    import torch.distributed as dist

    dist.destroy_process_group()
    return exit_codes.PREFLIGHT if report.failed else exit_codes.OK


class RendezvousError(RuntimeError):
    """Ranks did not find each other in time; the message names those that are missing, or the address."""


def meet(minutes: float) -> _Ranks:
    """Joins the world described by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    Raises:
        RendezvousError: on rank 0, naming the ranks that are missing; on the others, naming the address that does not answer.
    """
    import torch
    import torch.distributed as dist

    from megatron_rl.runtime import device, rendezvous

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    patience, host = timedelta(minutes=minutes), socket.gethostname()
    # torchrun serves the store itself.
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store = rendezvous.store(patience, wait=False)
    except (RuntimeError, OSError) as error:
        what = f"cannot listen at {address}:{port}" if serves else f"cannot reach rank 0 at {address}:{port}"
        raise RendezvousError(f"node {host}: {what} within {minutes:g} min: {str(error).splitlines()[0]}") from None
    store.set(f"preflight/{rank}", host)
    until = time.monotonic() + patience.total_seconds()
    while missing := [r for r in range(world) if not store.check([f"preflight/{r}"])]:
        if time.monotonic() > until:
            came = sorted({store.get(f"preflight/{r}").decode() for r in range(world) if r not in missing})
            raise RendezvousError(
                f"node {host}: {len(missing)} of {world} ranks have not come within {minutes:g} min: "
                f"{', '.join(map(str, missing))}; ranks came from: {', '.join(came)}"
            )
        time.sleep(0.1)
    if device.has_gpu():
        torch.cuda.set_device(device.index())
    dist.init_process_group(
        device.backend(), store=dist.PrefixStore("pg", store), rank=rank, world_size=world, timeout=patience
    )
    return _Ranks(rank, world, dist.new_group(backend="gloo", timeout=patience), store)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m megatron_rl.preflight.rank_main")
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--minutes", type=float, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # there is nothing to save
    stop.let_through()
    args = _arguments()
    sys.exit(main(args.recipe, args.overrides, not args.quick, args.minutes, args.json))
