"""A server that answers as the Hugging Face hub does, with datasets of one file each: what `datasets` asks of it."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

_REVISION = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """`datasets`: names such as `someone/sums`, and their rows. `asked`: methods and paths of all requests."""

    def __init__(self, datasets: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        self.files = {name: "".join(json.dumps(row) + "\n" for row in rows) for name, rows in datasets.items()}
        self.asked: list[str] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def environment(self, home: Path) -> dict[str, str]:
        """What a process has to have in its environment to ask this hub, with an empty cache in `home`."""
        return {"HF_ENDPOINT": f"http://127.0.0.1:{self._server.server_port}", "HF_HOME": str(home)}

    def place(self, name: str) -> str:
        """The path of a dataset's file."""
        return f"/datasets/{name}/resolve/{_REVISION}/train.jsonl"

    def about(self, name: str) -> dict[str, Any]:
        return {
            "_id": "1",
            "id": name,
            "sha": _REVISION,
            "private": False,
            "gated": False,
            "disabled": False,
            "downloads": 0,
            "likes": 0,
            "tags": [],
            "siblings": [{"rfilename": "train.jsonl"}],
        }

    def tree(self, name: str) -> list[dict[str, Any]]:
        text = self.files[name].encode()
        return [{"type": "file", "path": "train.jsonl", "size": len(text), "oid": hashlib.sha1(text).hexdigest()}]


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            hub.asked.append(f"{self.command} {self.path}")
            path = self.path.partition("?")[0]
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            for name, text in hub.files.items():
                if path == hub.place(name):
                    return self._answer(200, text.encode(), "text/plain")
                if path.startswith(f"/api/datasets/{name}/tree/"):
                    return self._answer(200, json.dumps(hub.tree(name)).encode())
                if path == f"/api/datasets/{name}" or path.startswith(f"/api/datasets/{name}/revision/"):
                    return self._answer(200, json.dumps(hub.about(name)).encode())
                if path.startswith(f"/datasets/{name}/resolve/"):
                    return self._answer(404, b"", error="EntryNotFound")
            return self._answer(404, b"", error="RepoNotFound")

        do_HEAD = do_POST = do_GET

        def _answer(self, code: int, body: bytes, kind: str = "application/json", error: str = "") -> None:
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("X-Repo-Commit", _REVISION)
            self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
            if error:
                self.send_header("X-Error-Code", error)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    return Handler
