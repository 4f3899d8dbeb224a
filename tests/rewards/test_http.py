"""The HTTP client by itself: which server is asked when, which replies are asked for again, what is counted."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import threading
import time
import urllib.error
from collections import Counter
from concurrent.futures import Future
from dataclasses import fields
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from megatron_rl.config.schema import ServerConfig
from megatron_rl.runtime import calls, fetch, http
from megatron_rl.runtime.calls import CallPool, CallTimeout, call_pool
from megatron_rl.runtime.http import Endpoint, EndpointError, Traffic, Unanswered, check_urls

from .chat_server import Behave, serving

ONCE = ServerConfig(retries=0, request_seconds=5.0, backoff_seconds=0.01)
AGAIN = ServerConfig(retries=1, request_seconds=5.0, backoff_seconds=0.01)


def posted(behave: Behave | str, config: ServerConfig = ONCE, count: int = 1) -> tuple[Traffic, list[Any]]:
    """Replies, or what was raised, of `count` requests one after the other."""

    async def post(endpoint: Endpoint) -> list[Any]:
        got: list[Any] = []
        for number in range(count):
            try:
                got.append(await endpoint.post("/chat", {"n": number}))
            except (Unanswered, EndpointError) as error:
                got.append(error)
        await endpoint.close()
        return got

    with serving(behave) as server:
        endpoint = Endpoint(server.url, config)
        return endpoint.traffic, asyncio.run(post(endpoint))


# ------------------------------------------------------------------------------------------------------------ what is read
@pytest.mark.parametrize(
    ("value", "seconds"),
    [("", 0), ("2", 2), ("0.25", 0.25), ("-3", 0), ("soon", 0), ("1e9", 0), ("12345678901", 0)],
)
def test_a_wait_as_a_number(value: str, seconds: float) -> None:
    assert http._retry_after({"Retry-After": f" {value} "}) == seconds
    assert http._retry_after({}) == 0


def test_a_wait_as_a_date() -> None:
    now = time.time()
    assert http._retry_after({"Retry-After": formatdate(now + 100, usegmt=True)}) == pytest.approx(100, abs=3)
    assert http._retry_after({"Retry-After": formatdate(now - 100, usegmt=True)}) == 0


def test_a_key_goes_nowhere_else_and_an_answer_has_an_end() -> None:
    """A server that redirects, one whose answer does not end, one that speaks no HTTP."""
    heard: list[dict[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            heard.append(dict(self.headers))
            if self.path.endswith("/endless"):
                self.send_response(200)
                self.end_headers()
                with contextlib.suppress(OSError):
                    while True:
                        self.wfile.write(b"x" * 65536)
            elif self.path.endswith("/nonsense"):
                self.wfile.write(b"SSH-2.0-x\r\n\r\n")
            else:
                self.send_response(302)
                self.send_header("Location", f"http://127.0.0.1:{elsewhere.server_port}/models")
                self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with (
        ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server,
        ThreadingHTTPServer(("127.0.0.1", 0), Handler) as elsewhere,
    ):
        for one in (server, elsewhere):
            threading.Thread(target=one.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        try:
            with pytest.raises(urllib.error.HTTPError, match="302"):
                fetch.get(f"{url}/models", "secret", 10)
            assert [one["Authorization"] for one in heard] == ["Bearer secret"]
            with pytest.raises(ValueError, match="more than"):
                fetch.get(f"{url}/endless", None, 10)
            with pytest.raises(OSError, match="no HTTP"):
                fetch.get(f"{url}/nonsense", None, 10)
        finally:
            for one in (server, elsewhere):
                one.shutdown()


@pytest.mark.parametrize("key", ["sk-secret\r", "sk-secret\n", "sk-secr\u00e9t"])
def test_a_key_that_no_header_holds_is_refused_unseen(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OWN_KEY", key)
    with pytest.raises(ValueError, match="OWN_KEY holds a line break") as caught:
        http.check_key("OWN_KEY")
    assert "secr" not in str(caught.value)


DATES = [
    *("Mon, 01 Jan 99999999999999999999 00:00:00 GMT", "Mon, 01 Jan 2029 00:00:00 +99999999999999999999"),
    *(
        "Mon, 01 Jan 0000 00:00:00 GMT",
        "Mon, 01 Jan 9999 23:59:59 -9999",
        "Mon, 01 Jan 2029 99:99:99",
        "1 Jan",
        ",",
        "\x00",
    ),
]


def test_no_wait_asked_for_ends_the_run() -> None:
    """Whatever stands there: a server's clock may be broken, or its author no friend."""
    rng = random.Random(5511)
    scraps = [*"0123456789 :,+-\t\u0661", "Jan", "GMT", "Mon", "9" * 30, "9" * 5000, "99:99", "1e9", "inf", "nan"]
    for number in range(4000):
        value = rng.choice([*DATES, formatdate(1e9, usegmt=True)])
        for _ in range(rng.randint(0, 4) if number >= len(DATES) else 0):
            at = rng.randint(0, len(value))
            value = value[:at] + rng.choice(scraps) + value[at + rng.randint(0, 3) :]
        for said in (value, DATES[number % len(DATES)]):
            assert http._retry_after({"Retry-After": said}) >= 0, said


@pytest.mark.parametrize("status", [400, 402, 413, 422])
def test_a_refusal_is_final(status: int) -> None:
    traffic, [error] = posted(f"status:{status}", AGAIN)
    assert error.kind == "refused"
    assert f"HTTP {status}" in str(error)
    assert (traffic.requests, traffic.errors, traffic.retries) == (1, 1, 0)


@pytest.mark.parametrize("status", [301, 408, 409, 425, 429, 500, 503])
def test_a_passing_fault_is_asked_again(status: int) -> None:
    traffic, [reply] = posted(lambda number, _: "score:1.0" if number else f"status:{status}", AGAIN)
    assert reply["choices"]
    assert (traffic.requests, traffic.retries, traffic.replies) == (2, 1, 1)
    assert (traffic.rate_limited, traffic.errors) == ((1, 0) if status == 429 else (0, 1))
    assert (traffic.prompt_tokens, traffic.completion_tokens, traffic.tokens) == (100, 7, 107)
    [latency] = traffic.latencies
    assert 0 < latency < 5


@pytest.mark.parametrize("status", [401, 403, 404])
def test_no_access_stops_the_run_until_something_was_answered(status: int) -> None:
    _, [error] = posted(f"status:{status}")
    assert isinstance(error, EndpointError)
    _, [reply, error, again] = posted(lambda number, _: f"status:{status}" if number else "score:1.0", count=3)
    assert reply["choices"]
    assert isinstance(error, Unanswered)
    assert (error.kind, again.kind) == ("failed", "failed")


@pytest.mark.parametrize("usage", ['"a"', "-5", "null", "1.5", "9" * 400])
def test_a_token_count_that_is_none_is_not_added(usage: str) -> None:
    traffic, [reply] = posted(f'raw:{{"usage": {{"prompt_tokens": {usage}, "completion_tokens": 3}}}}')
    assert reply["usage"]["completion_tokens"] == traffic.tokens == 3


def test_a_reply_beyond_all_bounds_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_LONGEST_REPLY", 1 << 10)
    traffic, [error] = posted(f'raw:{{"a": "{"x" * 5000}"}}')
    assert "a reply of more than 0 MiB" in str(error)
    assert (traffic.requests, traffic.errors) == (1, 1)
    _, [reply] = posted(f'raw:{{"a": "{"x" * 1015}"}}')
    assert len(reply["a"]) == 1015  # and 9 bytes around it
    _, [error] = posted(f'raw:{{"a": "{"x" * 1016}"}}')
    assert "MiB" in str(error)


def test_what_is_sent_names_the_program_and_asks_no_key() -> None:
    with serving("score:1.0") as server:
        endpoint = Endpoint(server.url + "/", ONCE)

        async def post() -> None:
            await endpoint.post("/chat", {"n": 1})
            await endpoint.close()

        asyncio.run(post())
        [(path, body, headers)] = server.requests
    assert (path, body) == ("/v1/chat", {"n": 1})
    assert headers["user-agent"] == "megatron-rl"
    assert "authorization" not in headers


# --------------------------------------------------------------------------------------------------------- which and when
def test_servers_are_asked_in_turn_and_those_that_rest_are_passed_over() -> None:
    endpoint = Endpoint(["http://a", "http://b/", "http://c"], ONCE)
    asked = Counter(endpoint._next_server().url for _ in range(6))
    assert asked == {"http://a": 2, "http://b": 2, "http://c": 2}
    a, b, c = endpoint._servers
    b.rest_until = time.monotonic() + 100
    assert Counter(endpoint._next_server().url for _ in range(30)).keys() == {"http://a", "http://c"}
    a.rest_until, c.rest_until = b.rest_until + 2, b.rest_until + 1
    assert {endpoint._next_server() for _ in range(6)} == {b}  # all rest: the one that is back first


def test_a_pause_doubles_with_every_failure_and_ends_somewhere() -> None:
    endpoint = Endpoint("http://a", ServerConfig(backoff_seconds=0.5))
    for failures, longest in ((1, 0.5), (2, 1.0), (4, 4.0), (9, 30.0), (10_000, 30.0)):
        drawn = [endpoint._backoff(failures) for _ in range(200)]
        assert longest / 2 <= min(drawn) < 0.6 * longest
        assert 0.9 * longest < max(drawn) <= longest


def test_ranks_share_the_requests_in_flight() -> None:
    endpoint = Endpoint("http://a", ServerConfig(max_in_flight=9))
    assert endpoint._in_flight == 9
    for parts, own in ((1, 9), (2, 4), (9, 1), (100, 1)):
        endpoint.share(parts)
        assert endpoint._in_flight == own


def test_the_budget_is_asked_before_every_request() -> None:
    spent: list[int] = []

    def spend() -> None:
        spent.append(1)
        if len(spent) == 2:
            raise Unanswered("used up", "budget")

    with serving("status:503") as server:
        endpoint = Endpoint(server.url, ServerConfig(retries=5, backoff_seconds=0.01), spend)

        async def post() -> None:
            try:
                await endpoint.post("/chat", {})
            finally:
                await endpoint.close()

        with pytest.raises(Unanswered, match="used up"):
            asyncio.run(post())
        assert len(server.requests) == 1


def test_counts_add_up_field_by_field() -> None:
    parts = [Traffic(*range(first, first + 10), [float(first)]) for first in (1, 100)]
    total = parts[0]
    total += parts[1]
    names = [field.name for field in fields(Traffic)]
    assert [getattr(total, name) for name in names] == [*range(101, 121, 2), [1.0, 100.0]]
    assert total.tokens == total.prompt_tokens + total.completion_tokens


def test_base_urls_lose_their_slash() -> None:
    assert check_urls("http://a:8000/v1/") == ("http://a:8000/v1",)
    assert check_urls(["https://a/", "http://b"]) == ("https://a", "http://b")
    for url in ("http://a:0", "http://", "http://a?x=1", "http://a#x", "http://a:x", "http://me@a"):
        with pytest.raises(ValueError, match="urls: "):
            check_urls(url)


# ------------------------------------------------------------------------------------------------------ calls in threads
def test_as_many_calls_at_a_time_as_there_are_workers() -> None:
    pool, open_, most, lock = CallPool(3), 0, 0, threading.Lock()
    all_in = threading.Barrier(3)

    def call() -> int:
        nonlocal open_, most
        with lock:
            open_ += 1
            most = max(most, open_)
        all_in.wait(20)  # three really are at work together
        with lock:
            open_ -= 1
        return most

    futures = [pool.submit(call, None) for _ in range(9)]
    assert [future.result(20) for future in futures] == [3] * 9
    assert most == 3


def test_a_call_that_asks_for_the_end_of_the_process_fails_and_the_next_one_runs() -> None:
    pool = CallPool(1)
    with pytest.raises(RuntimeError, match=r"ended by SystemExit\(3\)"):
        pool.submit(lambda: sys.exit(3), None).result(20)
    assert pool.submit(lambda: 1, None).result(20) == 1


def test_a_late_call_holds_no_worker_and_a_cancelled_one_never_begins() -> None:
    pool, go, begun = CallPool(1), threading.Event(), list[str]()

    def named(name: str) -> str:
        begun.append(name)
        if name == "hangs":
            go.wait(20)
        return name

    late: Future[str] = pool.submit(lambda: named("hangs"), 0.2)
    dropped = pool.submit(lambda: named("dropped"), None)
    after = pool.submit(lambda: named("after"), 5.0)
    dropped.cancel()
    with pytest.raises(CallTimeout):
        late.result(20)
    assert after.result(20) == "after"
    assert begun == ["hangs", "after"]
    go.set()


def test_a_pool_has_this_ranks_part_of_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls.os, "sched_getaffinity", lambda _: set(range(12)))
    for ranks, workers in (("1", 12), ("5", 2), ("100", 1), (None, 12)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks) if ranks else monkeypatch.delenv("LOCAL_WORLD_SIZE")
        assert call_pool.__wrapped__()._workers._value == workers
