"""`megatron-rl report RUN …`: one HTML page with findings, curves, times, rollouts to read; several runs side by side.
Written, or served as it is at the moment."""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from megatron_rl.base.messages import ConfigError
from megatron_rl.report import find, read_run, render
from megatron_rl.report.significance import as_lines, recipe_differences
from megatron_rl.runtime import disk, exit_codes

_SILENT_SECONDS = 10  # a connection that says nothing for so long is closed
_OWN_NAMES = ("localhost", "127.0.0.1", "[::1]")


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="run folder; several are laid side by side")
    add_compared(parser)
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--output",
        metavar="FILE",
        type=Path,
        help="the page (default: RUN/report.html; report.html here for several runs)",
    )
    where.add_argument(
        "--serve",
        metavar="PORT",
        type=int,
        help="no file: http://localhost:PORT has the page, drawn anew where a run went on, until Ctrl-C (0: any free port)",
    )


def add_compared(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--compare",
        metavar="METRIC",
        action="append",
        default=[],
        help="a metric whose difference between recipes is tested, seed by seed; repeat (default: all evaluations)",
    )


def run(args: argparse.Namespace) -> int:
    if args.compare and len(args.runs) == 1:
        raise ConfigError("--compare needs several runs: of two recipes or more, with the same seeds")
    records = [read_run(path.resolve()) for path in args.runs]
    if args.serve is not None:
        return _serve([record.path for record in records], args.serve, args.compare)
    default = records[0].path / "report.html" if len(records) == 1 else Path("report.html")
    output: Path = args.output or default
    try:
        disk.replace(output, render(records, args.compare))
    except OSError as error:
        print(
            f"megatron-rl: cannot write {output}: {error.strerror}; name another place with --output", file=sys.stderr
        )
        return exit_codes.FAILED
    for record in records:
        for finding in find(record):
            print(f"{record.name}: {finding.level}: {finding.text}")
    if len(records) > 1:
        for line in as_lines(recipe_differences(records, args.compare)):
            print(line)
    print(f"the page: {output}")
    return exit_codes.OK


def _host(header: str) -> str:
    """The name in a `Host` header, without its port."""
    name, colon, port = header.strip().rpartition(":")
    return (name if colon and port.isdigit() else header.strip()).lower()


def _serve(runs: Sequence[Path], port: int, compared: Sequence[str]) -> int:
    """Serves this machine only. Pages are drawn one at a time; a connection that sends nothing is nobody else's matter."""
    drawn: dict[tuple[int, ...], bytes] = {}  # the last page, by the sizes of the metrics that it shows
    drawing = threading.Lock()

    def page() -> bytes:
        with drawing:
            sizes = tuple((run / "metrics.jsonl").stat().st_size for run in runs)
            if sizes not in drawn:
                drawn.clear()
                drawn[sizes] = render([read_run(run) for run in runs], compared).encode()
            return drawn[sizes]

    class Handler(BaseHTTPRequestHandler):
        timeout = _SILENT_SECONDS

        def do_GET(self) -> None:
            if (
                _host(self.headers.get("Host", "")) not in _OWN_NAMES
            ):  # a page elsewhere whose name means this machine now
                self.send_error(421, explain="this server answers to localhost only")
                return
            if self.path != "/":
                self.send_error(404)
                return
            try:
                content = page()
            except (OSError, ValueError, ConfigError) as error:
                self.send_error(500, explain=f"the run cannot be read now: {error}")
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            with contextlib.suppress(ConnectionError, TimeoutError):  # the reader went away
                self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Prints nothing per request."""

    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)  # its threads are daemons
    except (OSError, OverflowError) as error:
        print(f"megatron-rl: cannot serve on port {port}: {error}; name another one with --serve", file=sys.stderr)
        return exit_codes.FAILED
    with server:
        print(f"http://localhost:{server.server_port} until Ctrl-C", flush=True)
        server.serve_forever()
    return exit_codes.OK
