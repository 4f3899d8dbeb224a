"""A client for HTTP servers that speak JSON: many requests in flight, retries, failover, deadlines, counts.

aiohttp is imported at the first request: making a client, which checks its settings, needs no package.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import json
import os
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import urlsplit

from megatron_rl.base.messages import LARGEST
from megatron_rl.config.schema import ServerConfig

if TYPE_CHECKING:
    import aiohttp

_LONGEST_BACKOFF = 30.0  # seconds
_LONGEST_REPLY = 16 << 20  # bytes
_MISCONFIGURED = (401, 403, 404)
Reply: TypeAlias = dict[str, Any]  # a JSON object, as a server has written it


class Unanswered(RuntimeError):
    """A request got no usable reply; the text says why. `kind`: `failed`, `refused`, `budget`."""

    def __init__(self, reason: str, kind: str = "failed") -> None:
        super().__init__(reason)
        self.kind = kind


class EndpointError(RuntimeError):
    """The endpoint cannot be used as the recipe says: no access, no such model. No request was ever answered."""


@dataclass
class Traffic:
    """Counts of HTTP requests. Every request is one of `replies`, `timeouts`, `rate_limited`, `errors`, `aborted`."""

    requests: int = 0  # sent; retries included
    retries: int = 0  # of them, those that ask again
    replies: int = 0
    timeouts: int = 0
    rate_limited: int = 0  # HTTP 429
    errors: int = 0  # connection lost, other HTTP errors, replies that are not JSON or lack what was asked for
    aborted: int = 0  # in flight when the step's deadline came
    unreachable: int = 0  # attempts that found no server; not among `requests`
    prompt_tokens: int = 0
    completion_tokens: int = 0
    latencies: list[float] = field(default_factory=list)  # seconds of each reply

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def __iadd__(self, other: Traffic) -> Traffic:
        for entry in fields(self):
            setattr(self, entry.name, getattr(self, entry.name) + getattr(other, entry.name))
        return self


def check_urls(urls: str | Sequence[str]) -> tuple[str, ...]:
    """One base URL or several, without a slash at the end. ValueError for an empty list and for what is no URL."""
    several = (urls,) if isinstance(urls, str) else tuple(urls)
    if not several:
        raise ValueError("urls is empty, must name at least one server such as http://localhost:8000/v1")
    for url in several:
        _check_url(url)
    return tuple(url.rstrip("/") for url in several)


def check_key(name: str | None) -> None:
    """ValueError unless this environment variable is set, to what a header can hold; None: no key is sent."""
    if name is None:
        return
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError("api_key_env must be the NAME of an environment variable, not the key itself")
    key = os.environ.get(name, "")
    if not key:
        raise ValueError(f"api_key_env: the environment variable {name} is not set")
    if not (key.isascii() and key.isprintable()):  # what sends it would show it in its error
        raise ValueError(f"api_key_env: {name} holds a line break, or another character that is in no key; set it anew")


def _check_url(url: str) -> None:
    try:
        split = urlsplit(url)
        good = split.scheme in ("http", "https") and bool(split.hostname) and split.port != 0
    except ValueError:
        good = False
    if not good:
        raise ValueError(f"urls: {url!r} is not a URL such as http://localhost:8000/v1")
    if split.username or split.password or split.query or split.fragment:
        raise ValueError(
            f"urls: {split.scheme}://{split.hostname}: leave out user, password, query and fragment; keys go by api_key_env"
        )


class _Server:
    def __init__(self, url: str) -> None:
        self.url = url
        self.rest_until = 0.0  # monotonic time
        self.failures = 0  # in a row


class Endpoint:
    """Posts JSON to equal servers. All its coroutines run in one event loop.

    Args:
        urls: base URLs, as OpenAI clients take them (`http://host:8000/v1`); requests go round.
        config: how they are asked. A `Retry-After` is obeyed, up to `request_seconds`.
        spend: called before every request; raises Unanswered where the budget is used up.
        is_reply: whether a JSON object is a reply of this kind of server. One that is not (`{"choices": []}`) is a passing
            fault: the request is sent again.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        config: ServerConfig,
        spend: Callable[[], None] = lambda: None,
        is_reply: Callable[[Reply], bool] = lambda reply: True,
    ) -> None:
        self.urls = check_urls(urls)
        self.config = config
        check_key(config.api_key_env)
        self._is_reply = is_reply
        self.traffic = Traffic()
        self._spend = spend
        self._servers = [_Server(url) for url in self.urls]
        self._turn = random.randrange(len(self._servers))  # ranks do not start with the same server
        self._answered = False
        self._session: aiohttp.ClientSession | None = None
        self._slots: asyncio.Semaphore | None = None
        self._in_flight = config.max_in_flight

    def share(self, parts: int) -> None:
        """Take this process's part of `max_in_flight`, at least 1. While no request is under way."""
        self._in_flight, self._slots = max(1, self.config.max_in_flight // parts), None

    async def post(self, path: str, body: Mapping[str, object]) -> Reply:
        """The JSON object that a server replies.

        Raises:
            Unanswered: no server did, after all retries; or a server refuses this body (HTTP 400).
            EndpointError: HTTP 401, 403 or 404 before anything was ever answered.
        """
        if self._slots is None:
            self._slots = asyncio.Semaphore(self._in_flight)
        wait = 0.0
        for attempt in range(self.config.retries + 1):
            await asyncio.sleep(wait)
            async with self._slots:
                self._spend()
                self.traffic.retries += attempt > 0
                server = self._next_server()
                try:
                    reply = await self._post_once(server, path, body)
                except _Failed as failed:
                    server.failures += 1
                    asked = min(failed.retry_after, self.config.request_seconds)
                    server.rest_until = time.monotonic() + max(asked, self._backoff(server.failures))
                    reason, wait = failed.reason, max(asked, self._backoff(attempt + 1))
                else:
                    server.failures, server.rest_until = 0, 0.0
                    self._answered = True
                    return reply
        raise Unanswered(f"{server.url}: {reason}, after {self.config.retries + 1} requests")

    def _backoff(self, failures: int) -> float:
        longest = min(_LONGEST_BACKOFF, self.config.backoff_seconds * 2 ** min(failures - 1, 30))
        return longest * random.uniform(0.5, 1.0)

    def _next_server(self) -> _Server:
        """The next in turn that is not resting; where all are, the one whose rest ends first."""
        now = time.monotonic()
        self._turn += 1
        order = [self._servers[(self._turn + i) % len(self._servers)] for i in range(len(self._servers))]
        return next((server for server in order if server.rest_until <= now), None) or min(
            order, key=lambda server: server.rest_until
        )

    async def _post_once(self, server: _Server, path: str, body: Mapping[str, object]) -> Reply:
        import aiohttp

        if self._session is None:
            headers = {"User-Agent": "megatron-rl"}
            if self.config.api_key_env is not None:
                headers["Authorization"] = f"Bearer {os.environ[self.config.api_key_env]}"
            # Idle connections are dropped before common servers drop them (5 s in uvicorn) and a request is lost.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3)
            self._session = aiohttp.ClientSession(
                connector=connector, headers=headers, timeout=aiohttp.ClientTimeout(total=None)
            )
        traffic, began = self.traffic, time.monotonic()
        traffic.requests += 1
        try:
            async with (
                asyncio.timeout(self.config.request_seconds),
                self._session.post(server.url + path, json=body, allow_redirects=False) as response,
            ):
                content = await response.content.read(_LONGEST_REPLY)
                while chunk := await response.content.read(_LONGEST_REPLY):
                    content += chunk
                    if len(content) > _LONGEST_REPLY:
                        raise aiohttp.ClientPayloadError(f"a reply of more than {_LONGEST_REPLY >> 20} MiB")
                status, headers_in = response.status, response.headers
        except asyncio.CancelledError:
            traffic.aborted += 1
            raise
        except TimeoutError:
            traffic.timeouts += 1
            raise _Failed(f"no reply within {self.config.request_seconds:g} s") from None
        except aiohttp.ClientConnectorError as error:
            traffic.requests -= 1
            traffic.unreachable += 1
            raise _Failed(f"not reachable ({error.os_error or error})") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:  # ValueError: a reply that is not HTTP
            traffic.errors += 1
            raise _Failed(f"connection lost ({type(error).__name__}: {error})"[:300]) from None
        return self._read(status, headers_in, content, server, time.monotonic() - began)

    def _read(self, status: int, headers: Mapping[str, str], content: bytes, server: _Server, seconds: float) -> Reply:
        text = content[:300].decode(errors="replace")
        if status == 429:
            self.traffic.rate_limited += 1
            raise _Failed("HTTP 429, too many requests", _retry_after(headers))
        if status != 200:
            self.traffic.errors += 1
            if status in _MISCONFIGURED and not self._answered:
                raise EndpointError(f"{server.url} answers HTTP {status}: {text}")
            if 400 <= status < 500 and status not in (*_MISCONFIGURED, 408, 409, 425):
                raise Unanswered(f"{server.url} answers HTTP {status}: {text}", "refused")
            raise _Failed(f"HTTP {status}: {text}", _retry_after(headers))
        try:
            reply = json.loads(content)
        except (ValueError, RecursionError):
            reply = None
        if not isinstance(reply, dict):
            self.traffic.errors += 1
            raise _Failed(f"the reply is not a JSON object: {text[:100]!r}")
        if not self._is_reply(reply):
            self.traffic.errors += 1
            raise _Failed(f"the reply lacks what was asked for: {text[:100]!r}")
        self.traffic.replies += 1
        self.traffic.latencies.append(seconds)
        usage = reply.get("usage")
        if isinstance(usage, dict):
            self.traffic.prompt_tokens += _count(usage.get("prompt_tokens"))
            self.traffic.completion_tokens += _count(usage.get("completion_tokens"))
        return reply

    def take_traffic(self) -> Traffic:
        """The counts so far; starts over."""
        taken, self.traffic = self.traffic, Traffic()
        return taken

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


class _Failed(Exception):
    """One request failed in a way that another may not."""

    def __init__(self, reason: str, retry_after: float = 0.0) -> None:
        super().__init__(reason)
        self.reason, self.retry_after = reason, retry_after


def _retry_after(headers: Mapping[str, str]) -> float:
    """Seconds that a `Retry-After` header asks for, as a number or a date; 0 without a readable one."""
    value = headers.get("Retry-After", "").strip()
    if re.fullmatch(r"\d{1,9}(\.\d+)?", value):
        return float(value)
    # A date of no calendar overflows, for one.
    with contextlib.suppress(ValueError, TypeError, ArithmeticError, LookupError, OSError):
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    return 0.0


def _count(value: object) -> int:
    return value if isinstance(value, int) and 0 < value <= LARGEST else 0
