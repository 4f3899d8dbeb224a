"""What a session's server bears: limits, keys, clients that are slow, that go, or that come in numbers."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from megatron_rl.agents import endpoint
from megatron_rl.agents.endpoint import HttpServer
from megatron_rl.agents.session import Session
from tests.agents.held import USER, Held, code_of


class Served:
    """Sessions over a socket, in a thread of their own as the agents' is."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.sessions: dict[str, Session] = {}
        self.server = HttpServer(endpoint.make_app(self.sessions.get), self.loop)
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.port = int(self.server.address().rpartition(":")[2])

    def add(self, held: Held) -> Held:
        self.sessions["1"] = held.session
        return held

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)

    def post(self, held: Held, path: str = "v1/chat/completions", **body: Any) -> httpx2.Response:
        headers = {"authorization": f"Bearer {held.session.api_key}"}
        return httpx2.post(f"http://127.0.0.1:{self.port}/sessions/1/{path}", json=body, headers=headers, timeout=30)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.server.close)
        time.sleep(0.1)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(5)


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.close()


def request(held: Held, body: bytes, **headers: str) -> bytes:
    """A chat's request as it goes over the wire."""
    lines = {
        "host": "a",
        "authorization": f"Bearer {held.session.api_key}",
        "content-length": str(len(body)),
        **headers,
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"POST /sessions/1/v1/chat/completions HTTP/1.1\r\n{head}\r\n".encode() + body


def received(connection: socket.socket) -> bytes:
    """All until the server closes."""
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def test_threads_that_ask_at_once_have_the_same_address(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    create_server = socket.create_server

    def slow(*arguments: Any, **more: Any) -> socket.socket:
        time.sleep(0.05)
        return create_server(*arguments, **more)

    monkeypatch.setattr(endpoint.socket, "create_server", slow)
    server = HttpServer(endpoint.make_app({}.get), served.loop)
    with ThreadPoolExecutor(4) as threads:
        addresses = {asked.result() for asked in [threads.submit(server.address) for _ in range(4)]}
    assert len(addresses) == 1
    served.loop.call_soon_threadsafe(server.close)


def test_slow_clients_are_let_go(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "_SECONDS", 0.5)
    held = served.add(Held("Yes.", tools=None))
    silent, headers, body, after = (served.connect() for _ in range(4))
    whole = request(held, json.dumps({"messages": [USER]}).encode())
    headers.sendall(whole[:40])
    body.sendall(whole[:-5])
    after.sendall(b"GET /nothing HTTP/1.1\r\nhost: a\r\n\r\n")
    answer = b""
    while not answer.endswith(b"Not Found"):
        answer += after.recv(65536)
    after.sendall(whole[:40])
    began = time.monotonic()
    assert received(silent) == received(headers) == b""
    assert b"request_timeout" in (said := received(body))
    assert said.startswith(b"HTTP/1.1 408")
    assert received(after) == b""
    assert time.monotonic() - began < 15
    assert not held.requests
    monkeypatch.setattr(endpoint, "_SECONDS", 60.0)
    assert served.post(held, messages=[USER]).json()["choices"][0]["message"]["content"] == "Yes."


def test_connections_beyond_the_limit_are_closed_and_the_others_are_served(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "_MOST_CONNECTIONS", 3)
    held = served.add(Held("Yes.", tools=None))
    waiting = [served.connect() for _ in range(2)]
    time.sleep(0.2)
    mine = served.connect()
    time.sleep(0.2)
    assert received(served.connect()) == b""
    body = json.dumps({"messages": [USER]}).encode()
    mine.sendall(request(held, body, connection="close"))
    assert b"Yes." in received(mine)
    for connection in waiting:
        connection.close()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and not (answer := received_or_none(served, held)):
        time.sleep(0.05)
    assert b"Yes." not in (answer or b"")
    assert b"forked" in (answer or b""), "there is room again, and the turn was had"


def received_or_none(served: Served, held: Held) -> bytes | None:
    with served.connect() as connection:
        try:
            connection.sendall(request(held, json.dumps({"messages": [USER]}).encode(), connection="close"))
            return received(connection)
        except OSError:
            return None


def test_a_client_that_goes_in_the_middle_of_a_turn_has_its_answer_when_it_comes_back(served: Served) -> None:
    held = served.add(Held("Yes.", tools=None))
    held.hold = True
    body = json.dumps({"messages": [USER]}).encode()
    for how in (socket.SHUT_WR, socket.SHUT_RDWR):  # half closed, and closed
        gone = served.connect()
        gone.sendall(request(held, body))
        while not held.requests:
            time.sleep(0.01)
        gone.shutdown(how)
        gone.close()
    served.loop.call_soon_threadsafe(held.release)
    answer = b""
    with served.connect() as connection:
        connection.sendall(request(held, body, connection="close", **{"x-stainless-retry-count": "1"}))
        answer = received(connection)
    assert b"Yes." in answer
    assert len(held.requests) == 1, "it was drawn once"
    assert held.session.ledger.turns == 1


def test_a_request_that_says_it_is_too_long_is_not_read(served: Served) -> None:
    held = served.add(Held(tools=None))
    with served.connect() as connection:
        head = request(held, b"", **{"content-length": str(2**40)})
        connection.sendall(head)
        assert b"too_large" in received(connection)


def test_what_is_no_request_is_refused(served: Served) -> None:
    held = served.add(Held(tools=None))
    for body in (b"{", b"[]", b"\xff", b'{"messages": ' + b"[" * 100_000, b""):
        with served.connect() as connection:
            connection.sendall(request(held, body, connection="close"))
            said = received(connection)
        assert said.startswith(b"HTTP/1.1 400"), said
        assert b"invalid_json" in said
    with served.connect() as connection:
        connection.sendall(b"\x16\x03\x01 no http\r\n\r\n")
        assert received(connection).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("path", ["v1/chat/completions", "v1/responses", "v1/messages", "inference/v1/generate"])
def test_every_dialect_keeps_to_the_sessions_limits(path: str) -> None:
    async def turn(held: Held, most: int | None = None) -> httpx2.Response:
        ledger = held.session.ledger
        said = [*ledger.messages, *([{"role": "user", "content": "And now?"}] if ledger.turns else [])]
        ids = [i for segment in ledger.segments for i in segment.ids.tolist()]
        bodies: dict[str, Any] = {
            "v1/chat/completions": {"messages": said, "max_tokens": most},
            "v1/responses": {"input": said, "max_output_tokens": most},
            "v1/messages": {"messages": said, "max_tokens": most},
            "inference/v1/generate": {
                "token_ids": [*ids, *([5] if ledger.turns else [])],
                "sampling_params": {"max_tokens": most},
            },
        }
        return await held.post(path, bodies[path])

    async def ask() -> None:
        held = Held("Yes.", "No.", tools=None, agent={"max_turns": 2, "turn_tokens": 30}, max_tokens=100)
        for most, allowed in ((7, 7), (50, 30)):
            assert (await turn(held, most)).status_code == 200
            assert held.requests[-1].sampling.max_tokens == allowed
        assert code_of(await turn(held))[:2] == (400, "turn_limit")
        assert held.session.failure is not None
        held = Held("Yes.", "No.", tools=None, max_tokens=5)
        assert (await turn(held)).status_code == 200
        assert code_of(await turn(held))[:2] == (400, "context_length_exceeded")
        held.session.close()
        assert code_of(await turn(held))[:2] == (410, "session_closed")
        assert len(held.requests) == 1

    asyncio.run(ask())
