"""The engine that is trained as an OpenAI-compatible server: `/sessions/<name>/v1` is one conversation's base URL.

Python agents and programs take the same way; for programs it listens on the loopback interface (`HttpServer`).
"""

from __future__ import annotations

import asyncio
import hmac
import json
import socket
from collections.abc import Callable, Mapping
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from megatron_rl.agents.session import PolicyTurn, RefusedTurn, Session

MODEL = "policy"
_MOST_BYTES = 2**25  # of a request
_IGNORED = {"model", "user", "metadata", "store", "parallel_tool_calls"}
# Parameter -> its only value besides null.
_FIXED: dict[str, object] = {
    "n": 1,
    "stream": False,
    "logprobs": False,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "response_format": {"type": "text"},
}
_READ = {"messages", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "temperature", "top_p"}
_REMEDY = {"stream": "answers come whole", "n": "ask once per rollout; rollout.group_size says how many there are"}


def make_app(find: Callable[[str], Session | None]) -> Starlette:
    """The app over the sessions that `find` knows by name."""

    async def chat(request: Request) -> Response:
        return await _answered(request, find, _complete)

    async def models(request: Request) -> Response:
        return await _answered(request, find, _list)

    return Starlette(
        routes=[
            Route("/sessions/{name}/v1/chat/completions", chat, methods=["POST"]),
            Route("/sessions/{name}/v1/models", models, methods=["GET"]),
        ]
    )


async def _answered(
    request: Request, find: Callable[[str], Session | None], answer: Callable[[Session, Request], Any]
) -> Response:
    session = find(request.path_params["name"])
    key = request.headers.get("authorization", "").removeprefix("Bearer ")
    # An unknown session and a wrong key look the same: nobody learns which sessions there are.
    if session is None or not hmac.compare_digest(key.encode(), session.api_key.encode()):
        return _error("there is no such session with this key", "invalid_api_key", 401)
    try:
        return JSONResponse(await answer(session, request))
    except RefusedTurn as error:
        return _error(str(error), error.code, error.status)


def _error(text: str, code: str, status: int) -> Response:
    return JSONResponse({"error": {"message": text, "type": "invalid_request_error", "code": code}}, status)


async def _list(session: Session, request: Request) -> dict[str, object]:
    return {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "megatron-rl"}]}


async def _complete(session: Session, request: Request) -> dict[str, object]:
    text = bytearray()
    async for part in request.stream():  # not all requests say how long they are
        text += part
        if len(text) > _MOST_BYTES:
            raise RefusedTurn(f"the request has more than {_MOST_BYTES:,} bytes", "too_large", 413)
    try:
        body = json.loads(text)
    except ValueError as error:
        raise RefusedTurn(f"the request is not JSON: {error}", "invalid_json") from None
    messages = body.get("messages") if isinstance(body, dict) else None
    if not (isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages)):
        raise RefusedTurn("`messages` must be a list of messages", "invalid_messages")
    _check(body, session)
    choice = body.get("tool_choice")
    reply = await session.complete(
        messages,
        body.get("tools") or None,
        reads_calls=choice != "none",
        max_tokens=body.get("max_completion_tokens") or body.get("max_tokens"),
        is_retry=request.headers.get("x-stainless-retry-count", "0") != "0",
    )
    return _completion(session, reply)


def _check(body: Mapping[str, object], session: Session) -> None:
    """Raises RefusedTurn where a parameter asks for what the recipe does not say, or is not known here."""
    for name, value in body.items():
        if value is None or name in _IGNORED:
            continue
        if name in _FIXED and value != _FIXED[name]:
            remedy = f": {_REMEDY[name]}" if name in _REMEDY else ""
            raise RefusedTurn(
                f"`{name}` = {value!r:.80} is not supported{remedy}; leave it out", "unsupported_parameter"
            )
        if name not in _READ and name not in _FIXED:
            raise RefusedTurn(f"`{name}` is not supported; leave it out", "unsupported_parameter")
    sampling = session.opening.sampling
    for name, value in (("temperature", sampling.temperature), ("top_p", sampling.top_p)):
        if body.get(name) not in (None, value):
            raise RefusedTurn(
                f"`{name}` is {body[name]!r:.80}, and the recipe draws with {value:g}: what is trained on is drawn as the "
                "recipe says; leave it out",
                "unsupported_parameter",
            )
    if body.get("tool_choice") not in (None, "auto", "none"):
        raise RefusedTurn(
            f"`tool_choice` is {body['tool_choice']!r:.80}; `auto` and `none` are supported", "unsupported_parameter"
        )
    for name in ("max_tokens", "max_completion_tokens"):
        limit = body.get(name)
        if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
            raise RefusedTurn(f"`{name}` is {limit!r:.80}, must be a positive integer", "invalid_parameter")
    tools = body.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise RefusedTurn("`tools` must be a list of JSON schemas", "invalid_parameter")


def _completion(session: Session, reply: PolicyTurn) -> dict[str, object]:
    """OpenAI's form. It says nothing of the time or of other conversations: an agent is a function of what was drawn."""
    tokens = {"prompt_tokens": reply.prompt_tokens, "completion_tokens": reply.completion_tokens}
    choice = {"index": 0, "message": reply.message, "finish_reason": reply.finish_reason, "logprobs": None}
    return {
        "id": f"chatcmpl-{session.opening.turn_seed(reply.turn):x}",
        "object": "chat.completion",
        "created": 0,
        "model": MODEL,
        "choices": [choice],
        "usage": {**tokens, "total_tokens": reply.prompt_tokens + reply.completion_tokens},
    }


class HttpServer:
    """Listens on a free port of 127.0.0.1 from the first `address` on, for programs that agents start. Its connections are
    served in `loop`, which another thread runs."""

    def __init__(self, app: Starlette, loop: asyncio.AbstractEventLoop) -> None:
        self._app, self._loop = app, loop
        self._socket: socket.socket | None = None
        self._server: uvicorn.Server | None = None

    def address(self) -> str:
        """Says where it listens, from any thread."""
        if self._socket is None:
            self._socket = socket.create_server(("127.0.0.1", 0), backlog=1024)
            config = uvicorn.Config(self._app, lifespan="off", log_level="error", access_log=False, ws="none")
            self._server = uvicorn.Server(config)
            asyncio.run_coroutine_threadsafe(self._server.serve([self._socket]), self._loop)
        return "http://{}:{}".format(*self._socket.getsockname())

    def close(self) -> None:
        """Closes it, in the loop."""
        if self._server is not None and self._socket is not None:
            self._server.should_exit = self._server.force_exit = True
            self._socket.close()
