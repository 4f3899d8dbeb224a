"""The engine that is trained as a server of the dialects that agents speak: `/sessions/<name>/v1` is one conversation's base
URL.

Python agents and programs take the same way; for programs it listens on the loopback interface (`HttpServer`).
"""

from __future__ import annotations

import asyncio
import hmac
import json
import resource
import socket
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeAlias

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from megatron_rl.agents.dialects import DIALECTS, MODEL, Dialect, anthropic_messages
from megatron_rl.agents.dialects.asking import Event, openai_refusal
from megatron_rl.agents.session import RefusedTurn, Session

_MOST_BYTES = 2**25  # of a request
_MOST_CONNECTIONS = 4096
_SECONDS = 60.0  # until a request's headers are whole, and again until its body is
_Find: TypeAlias = Callable[[str], Session | None]
_Answer: TypeAlias = Callable[[Session, Request], Awaitable[Response]]
_Refusal: TypeAlias = Callable[[str, str, int], dict[str, Any]]


def make_app(find: _Find) -> Starlette:
    """The app over the sessions that `find` knows by name."""
    routes = [_route(find, path, "POST", _turn_in(dialect), dialect.refusal) for path, dialect in DIALECTS.items()]
    routes += [
        _route(find, "v1/messages/count_tokens", "POST", _count, anthropic_messages.refusal),
        _route(find, "v1/reward", "POST", _reward, openai_refusal),
        _route(find, "v1/models", "GET", _models, openai_refusal),
    ]
    return Starlette(routes=routes)


def _route(find: _Find, path: str, method: str, answer: _Answer, refusal: _Refusal) -> Route:
    """A path behind a session's address, for those who know its key."""

    async def answered(request: Request) -> Response:
        session = find(request.path_params["name"])
        # An unknown session and a wrong key look the same: nobody learns which sessions there are.
        if session is None or not hmac.compare_digest(_key_of(request).encode(), session.api_key.encode()):
            text = "there is no such session with this key"
            return _json(refusal(text, "invalid_api_key", 401), 401)
        try:
            return await answer(session, request)
        except RefusedTurn as error:
            # What is left of a request that was not read to its end is not the next one.
            headers = {"connection": "close"} if error.status in (408, 413) else {}
            return _json(refusal(str(error), error.code, error.status), error.status, headers)

    return Route(f"/sessions/{{name}}/{path}", answered, methods=[method])


def _key_of(request: Request) -> str:
    """The key of a request, as OpenAI's clients send it or as Anthropic's do."""
    bearer = request.headers.get("authorization", "")
    return bearer.removeprefix("Bearer ") if bearer else request.headers.get("x-api-key", "")


def _turn_in(dialect: Dialect) -> _Answer:
    async def answer(session: Session, request: Request) -> Response:
        body = await _body_of(request)
        turn_request = dialect.read(body, session.opening.sampling)
        is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
        history = [*session.up_to(turn_request.follows), *turn_request.messages]
        if turn_request.tokens is not None:
            turn = await session.go_on(turn_request.tokens, max_tokens=turn_request.max_tokens, is_retry=is_retry)
        else:
            turn = await session.complete(
                [*turn_request.instructions, *history],
                turn_request.tools,
                reads_calls=turn_request.reads_calls,
                max_tokens=turn_request.max_tokens,
                is_retry=is_retry,
            )
        reply = dialect.reply(body, turn, f"{session.opening.turn_seed(turn.turn):x}")
        if dialect.remembers:
            session.replied[reply["id"]] = [*history, turn.message]
        if not turn_request.stream or dialect.events is None:
            return _json(reply)
        return Response(_written(dialect.events(body, reply)), media_type="text/event-stream", headers=_STREAM)

    return answer


_STREAM = {"cache-control": "no-cache"}


def _written(events: Iterable[Event]) -> bytes:
    """Server-sent events."""
    lines = []
    for name, data in events:
        if name is not None:
            lines.append(b"event: " + name.encode())
        lines.append(b"data: " + (data.encode() if isinstance(data, str) else _encoded(data)) + b"\n")
    return b"\n".join(lines) + b"\n"


def _json(value: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(_encoded(value), status, headers, "application/json")


def _encoded(value: object) -> bytes:
    # ASCII, for half a character in a call's arguments has no other encoding, and no line break stands in an event. NaN is in
    # it where the client has sent it.
    return json.dumps(value, separators=(",", ":")).encode()


async def _body_of(request: Request) -> dict[str, Any]:
    """A request's JSON, which is an object."""
    text = bytearray()
    if int(request.headers.get("content-length", 0)) > _MOST_BYTES:
        raise _too_large()
    try:
        async with asyncio.timeout(_SECONDS):
            async for part in request.stream():  # not all requests say how long they are
                text += part
                if len(text) > _MOST_BYTES:
                    raise _too_large()
    except TimeoutError:
        raise RefusedTurn(f"the request was not whole after {_SECONDS:g} s", "request_timeout", 408) from None
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RefusedTurn(f"the request is not JSON: {error}", "invalid_json") from None
    if not isinstance(body, dict):
        raise RefusedTurn("the request must be an object", "invalid_json")
    return body


def _too_large() -> RefusedTurn:
    return RefusedTurn(f"the request has more than {_MOST_BYTES:,} bytes", "too_large", 413)


async def _models(session: Session, request: Request) -> Response:
    model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "megatron-rl"}
    return _json({"object": "list", "data": [model]})


async def _count(session: Session, request: Request) -> Response:
    body = await _body_of(request)
    asked = anthropic_messages.read(body, session.opening.sampling)
    return _json({"input_tokens": session.count(asked.messages, asked.tools)})


async def _reward(session: Session, request: Request) -> Response:
    session.give((await _body_of(request)).get("reward"))
    return _json({"object": "reward"})


class _Connection(HttpToolsProtocol):
    """A connection that is closed where the headers of a request are not whole in time, or where there are too many."""

    _closing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > min(_MOST_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2):
            transport.abort()
        else:
            self._closing = self.loop.call_later(_SECONDS, transport.abort)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        waits = self.cycle is None or self.cycle.response_complete
        if not waits and self._closing is not None:
            self._closing.cancel()
            self._closing = None
        elif waits and self._closing is None:
            self._closing = self.loop.call_later(_SECONDS, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._closing is not None:
            self._closing.cancel()
        super().connection_lost(exc)


class HttpServer:
    """Listens on a free port of 127.0.0.1 from the first `address` on, for programs that agents start. Its connections are
    served in `loop`, which another thread runs."""

    def __init__(self, app: Starlette, loop: asyncio.AbstractEventLoop) -> None:
        self._app, self._loop = app, loop
        self._socket: socket.socket | None = None
        self._begins = threading.Lock()
        self._server: uvicorn.Server | None = None

    def address(self) -> str:
        """Says where it listens, from any thread."""
        with self._begins:
            if self._socket is None:
                self._socket = socket.create_server(("127.0.0.1", 0), backlog=1024)
                config = uvicorn.Config(
                    self._app, lifespan="off", log_level="error", access_log=False, ws="none", http=_Connection
                )
                self._server = uvicorn.Server(config)
                asyncio.run_coroutine_threadsafe(self._server.serve([self._socket]), self._loop)
        return "http://{}:{}".format(*self._socket.getsockname())

    def close(self) -> None:
        """Closes it, in the loop."""
        if self._server is not None and self._socket is not None:
            self._server.should_exit = self._server.force_exit = True
            self._socket.close()
