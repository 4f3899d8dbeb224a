"""A small HTTP server that answers `/v1/completions` as vLLM does, from a rule instead of a model, and can misbehave."""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Rule = Callable[[dict[str, Any], int], tuple[int, dict[str, Any]]]  # (request, which attempt) -> status, reply


class _Silent(ThreadingHTTPServer):
    """Says nothing of clients that have hung up, as those do that give up or have what they want."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class Server:
    def __init__(self, rule: Rule, models: list[dict[str, Any]]) -> None:
        self.requests: list[dict[str, Any]] = []
        self.attempts: Counter[str] = Counter()
        lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.reply(200, {"data": models})

            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                key = json.dumps(request, sort_keys=True)
                with lock:
                    outer.requests.append(request)
                    outer.attempts[key] += 1
                    attempt = outer.attempts[key]
                self.reply(*rule(request, attempt))

            def reply(self, status: int, content: dict[str, Any]) -> None:
                body = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None: ...

        self.http = _Silent(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"


@contextmanager
def serving(rule: Rule, *names: str, room: int = 4096) -> Iterator[Server]:
    server = Server(rule, [{"id": name, "max_model_len": room} for name in names or ("tiny",)])
    thread = threading.Thread(target=server.http.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.http.shutdown()
        server.http.server_close()
        thread.join()


def answer(request: dict[str, Any], tokens: list[int], **changes: Any) -> tuple[int, dict[str, Any]]:
    choice = {
        "index": 0,
        "text": "",
        "finish_reason": "stop",
        "token_ids": tokens,
        "prompt_token_ids": request["prompt"],
    }
    return 200, {"choices": [{**choice, **changes}], "usage": {"completion_tokens": len(tokens)}}
