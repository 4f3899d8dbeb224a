"""The rendezvous listens at one address, where ranks can reach it."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import pytest

from megatron_rl.runtime import rendezvous
from megatron_rl.runtime.attempts import free_port


def world(monkeypatch: pytest.MonkeyPatch, address: str, port: int, **variables: str) -> None:
    names = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": address, "MASTER_PORT": str(port)}
    for name, value in (names | variables).items():
        monkeypatch.setenv(name, value)
    for name in ("GLOO_SOCKET_IFNAME", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)


def answers(address: str, port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((address, port)) == 0


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_the_store_of_one_machine_is_reached_at_its_own_address_only(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    port = free_port()
    world(monkeypatch, address, port)
    store = rendezvous.store(timedelta(seconds=30))
    store.set("key", "value")
    assert store.get("key") == b"value"
    assert answers("127.0.0.1", port)
    assert not answers("127.0.0.2", port), "another address of the same machine, as one on the network would be"


def names_of(monkeypatch: pytest.MonkeyPatch, names: dict[str, str]) -> None:
    resolve = socket.getaddrinfo

    def resolved(host: str, *args: Any, **kwargs: Any) -> Any:
        return resolve(names.get(host, host), *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", resolved)


def test_a_name_that_means_this_machine_only_does_not_shut_out_other_machines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names_of(monkeypatch, {"node1": "127.0.1.1"})
    port = free_port()
    with rendezvous.listen("node1", port, one_machine=False) as listening:
        assert listening.getsockname() == ("0.0.0.0", port)
    assert "listens on all interfaces: node1 is 127.0.1.1 here" in capsys.readouterr().err
    with rendezvous.listen("node1", port, one_machine=True) as listening:
        assert listening.getsockname() == ("127.0.1.1", port)


def test_an_address_of_a_translation_is_listened_for_everywhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    with rendezvous.listen("192.0.2.1", port, one_machine=False) as listening:  # an address for documentation
        assert listening.getsockname() == ("0.0.0.0", port)
    assert "192.0.2.1 (192.0.2.1) is no address of this machine" in capsys.readouterr().err


def test_a_port_that_is_taken_is_named_as_the_launcher_looks_for_it() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"EADDRINUSE.*cannot listen at 127.0.0.1:{port}"):
            rendezvous.listen("127.0.0.1", port, one_machine=True)


@pytest.mark.parametrize(("size", "interface"), [("1", "lo"), ("2", None)])
def test_gloo_stays_within_the_machine_where_the_run_does(
    monkeypatch: pytest.MonkeyPatch, size: str, interface: str | None
) -> None:
    world(monkeypatch, "127.0.0.1", free_port(), WORLD_SIZE=size)
    rendezvous.store(timedelta(seconds=30), wait=False)
    assert os.environ.get("GLOO_SOCKET_IFNAME") == interface
