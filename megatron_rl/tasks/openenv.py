"""A client of servers with OpenEnv's protocol (PyPI `openenv`, written for 0.10): one WebSocket per episode.

Messages are JSON: `{"type": "reset", "data": {"seed": 7}}` and `{"type": "step", "data": <action>}` are answered by
`{"type": "observation", "data": {"observation": {...}, "reward": 1.0, "done": false}}`, or by `{"type": "error", ...}`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from megatron_rl.base.messages import errors_named
from megatron_rl.base.typed_params import Params
from megatron_rl.rewards.call_json import load_json
from megatron_rl.tasks.reset_step_worker import Step

if TYPE_CHECKING:
    import aiohttp

_MOST_BYTES = 1 << 22  # of a message


class Served:
    """One episode at a server; its methods are of one event loop.

    Args:
        url: of the server; its path `/ws` is the WebSocket.
        action: the field of an action that takes the policy's text.
        observation: the field of an observation that is shown; None: all of it, as JSON.
        reset: what `reset` is told beside its seed.

    Raises:
        ValueError: the server's answer is an error or none of the protocol; from the constructor, the URL is none.
        OSError: no connection.
    """

    def __init__(
        self, url: str, action: str = "message", observation: str | None = None, reset: Params | None = None
    ) -> None:
        if not url.startswith(("http://", "https://", "ws://", "wss://")):
            raise ValueError(f"url: {url!r} begins with none of http://, https://, ws:// and wss://")
        self._url, self._action, self._observation = url.rstrip("/") + "/ws", action, observation
        self._reset = dict(reset or {})
        self._session: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def reset(self, seed: int) -> str:
        """Connects, unless it has, and begins."""
        if self._socket is None:
            import aiohttp

            self._session = aiohttp.ClientSession()
            try:
                self._socket = await self._session.ws_connect(self._url, max_msg_size=_MOST_BYTES)
            except aiohttp.ClientError as error:
                raise ConnectionError(f"{self._url}: {error}") from None
        return (await self._ask("reset", {**self._reset, "seed": seed})).observation

    async def step(self, action: str) -> Step:
        return await self._ask("step", {self._action: action})

    async def close(self) -> None:
        if self._session is None:
            return
        async with self._session:  # closed whatever becomes of the socket
            if self._socket is not None and not self._socket.closed:
                await self._socket.send_str('{"type": "close"}')
                await self._socket.close()

    async def _ask(self, what: str, data: dict[str, object]) -> Step:
        assert self._socket is not None
        await self._socket.send_str(json.dumps({"type": what, "data": data}))
        message = await self._socket.receive()
        if not isinstance(message.data, str):
            raise ConnectionError(f"{self._url} closed the connection (code {self._socket.close_code})")
        said: Any = load_json(message.data)
        payload = said.get("data") if isinstance(said, dict) else None
        if not isinstance(payload, dict) or said.get("type") != "observation" or "observation" not in payload:
            raise ValueError(f"{self._url} answered: {_problem(payload) or message.data:.500}")
        observation, reward = payload["observation"], payload.get("reward") or 0.0
        if self._observation is not None:
            fields = observation if isinstance(observation, dict) else {}
            if self._observation not in fields:
                has = f"it has {', '.join(fields)}" if fields else f"it is {observation!r:.80}"
                raise ValueError(f"an observation has no field {self._observation!r}: {has}")
            observation = fields[self._observation]
        text = observation if isinstance(observation, str) else json.dumps(observation, ensure_ascii=False)
        with errors_named(f"a step's reward is {reward!r:.80}", TypeError, ValueError, OverflowError):
            return Step(text, float(reward), bool(payload.get("done")))


def _problem(payload: object) -> str | None:
    """The server's words in an error, with what was wrong with an action; None in anything else."""
    if not isinstance(payload, dict) or "message" not in payload:
        return None
    return f"{payload['message']} {json.dumps(payload['errors']) if 'errors' in payload else ''}".strip()
