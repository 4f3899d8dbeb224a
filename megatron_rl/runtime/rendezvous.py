"""The rendezvous of a run: torch's TCPStore, which listens at one address and not on every interface.

The store has no password, and the objects that ranks exchange through gloo are pickles: anyone who reaches these ports can
take part. Within one machine all of it stays on 127.0.0.1.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
from datetime import timedelta

import torch.distributed as dist

_LOOPBACK = "lo"  # the name that Linux gives it


def store(timeout: timedelta, wait: bool = True) -> dist.Store:
    """The store at MASTER_ADDR:MASTER_PORT. Rank 0 serves it there, unless torchrun's agent does.

    Within one machine gloo is told to use the loopback interface, too, unless GLOO_SOCKET_IFNAME is set.

    Args:
        timeout: how long to wait for the store, and for its keys later.
        wait: until all ranks have come.

    Raises:
        OSError: rank 0 cannot listen; EADDRINUSE is in the message where the port is taken.
        RuntimeError: the store does not answer in time.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    one_machine = os.environ.get("LOCAL_WORLD_SIZE") == str(world)
    if one_machine:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)
    if rank != 0 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return dist.TCPStore(address, port, world, False, timeout, wait_for_workers=wait)
    listening = listen(address, port, one_machine)
    return dist.TCPStore(
        address,
        port,
        world,
        True,
        timeout,
        wait_for_workers=wait,
        master_listen_fd=listening.detach(),  # the store closes it
    )


def listen(address: str, port: int, one_machine: bool) -> socket.socket:
    """A socket that listens at this address of this machine.

    Where the address is none of this machine's (behind a translation of addresses), or is a name that means this machine only
    although ranks of others may have to come (some systems give their own name 127.0.1.1), it listens on all interfaces
    and says so.

    Raises:
        OSError: it cannot; EADDRINUSE is in the message where the port is taken.
    """
    found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, endpoint = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    if not one_machine and _is_loopback(str(endpoint[0])) and not (_is_loopback(address) or address == "localhost"):
        return _everywhere(f"{address} is {endpoint[0]} here, which other machines cannot reach", port)
    try:
        return _bound(family, (str(endpoint[0]), port))
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
    return _everywhere(f"{address} ({endpoint[0]}) is no address of this machine", port)


def _everywhere(why: str, port: int) -> socket.socket:
    print(f"megatron-rl: the rendezvous listens on all interfaces: {why}", file=sys.stderr, flush=True)
    return _bound(socket.AF_INET, ("", port))


def _bound(family: int, endpoint: tuple[str, int]) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(endpoint)
        bound.listen(socket.SOMAXCONN)
    except OSError as error:
        bound.close()
        name = errno.errorcode.get(error.errno or 0, "")
        raise OSError(error.errno, f"{name}: {error.strerror}: cannot listen at {endpoint[0]}:{endpoint[1]}") from None
    return bound


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
