"""`deat watch`: serve the report of runs on this machine, live from their folders."""

import json
import threading
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Annotated, Any, ClassVar
from urllib.parse import urlsplit

from tyro.conf import Positional, arg

from deat.cli.flag_types import IntFlag, OptionalFloat, OptionalStr
from deat.cli.report import ReportCommand, build_report
from deat.errors import DeatError, UsageError
from deat.report.html import read_asset, render_page
from deat.report.live_runs import WatchedRuns, render_watch_page
from deat.report.report_data import ReportData, format_title
from deat.utils.console import print_stderr

ADDRESS = "127.0.0.1"
"""The server can be reached from this machine alone."""
DEFAULT_PORT = 8421
DEFAULT_INTERVAL = 2.0
_ASSETS = {"/page.css": "text/css", "/watch.css": "text/css", "/watch.js": "text/javascript"}
_PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; frame-src 'self'; img-src data:"
)
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True)
class WatchCommand:
    """Serve the report of runs in the browser, live while they train. It reads run folders and writes nothing.

    `deat train --watch` is something else: what to do about catastrophic overfitting.
    """

    is_resumable: ClassVar[bool] = False

    runs: Annotated[Positional[tuple[str, ...]], arg(metavar="RUN [RUN ...]", help_behavior_hint="(required)")]
    """Run and bench folders, or folders that contain them, now or later."""
    port: IntFlag = DEFAULT_PORT
    """The port on this machine; 0 takes a free one."""
    interval: OptionalFloat = None
    """How often the page asks for changes, in seconds (2)."""
    title: OptionalStr = None
    """The page's title."""

    def run(self) -> int:
        """Serve until Ctrl-C."""
        return run_watch(self)


def run_watch(args: WatchCommand) -> int:
    """Serve the page until the process is interrupted.

    Args:
        args: The command.

    Returns:
        The exit status, 0.

    Raises:
        UsageError: If a flag is not accepted, or the port is taken.
        DataError: If a folder does not exist.
    """
    if not args.runs:
        raise UsageError("name at least one run folder, such as runs/demo, or a folder of runs.")
    server = make_server(args)
    host, port = server.server_address[:2]
    print(f"watching {', '.join(args.runs)} on http://{host!s}:{port}/ (Ctrl-C ends it)", flush=True)
    try:
        server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        print_stderr("stopped")
    finally:
        server.server_close()
    return 0


def make_server(args: WatchCommand) -> ThreadingHTTPServer:
    """Make the server of the page, bound to this machine's own address.

    Args:
        args: The command.

    Returns:
        The server; `serve_forever` runs it.

    Raises:
        UsageError: If a flag is not accepted, or the port is taken.
        DataError: If a folder does not exist.
    """
    interval = DEFAULT_INTERVAL if args.interval is None else args.interval
    if not 0.2 <= interval <= 3600:
        raise UsageError(f"--interval {interval:g} is not accepted: give seconds from 0.2 to 3600.")
    if not 0 <= args.port <= 65535:
        raise UsageError(f"--port {args.port} is not accepted: give a number from 0 to 65535.")
    site = _Site(WatchedRuns([Path(run).expanduser() for run in args.runs]), args.title, interval)
    try:
        server = ThreadingHTTPServer((ADDRESS, args.port), type("Handler", (_Handler,), {"site": site}))
    except OSError as error:
        raise UsageError(f"cannot listen on port {args.port} ({error.strerror}). Try --port 0, a free one.") from None
    site.hosts = (f"{ADDRESS}:{server.server_port}", f"localhost:{server.server_port}")
    return server


class _Site:
    """The pages by their paths. There are no others, and no path reaches a file."""

    def __init__(self, watched: WatchedRuns, title: str | None, interval: float) -> None:
        self.watched, self.title, self.interval = watched, title, interval
        self._lock = threading.Lock()
        self._page: tuple[ReportData | None, str] = (None, "")
        self.hosts: tuple[str, ...] = ()

    def answer(self, path: str) -> tuple[str, str, dict[str, str]] | None:
        """Return the type, the text and further headers of a path's page; None for any other path."""
        if path == "/":
            page = render_watch_page(self.title or "deat watch", self.interval)
            return "text/html", page, {"Content-Security-Policy": f"{_PAGE_POLICY}; frame-ancestors 'none'"}
        if path == "/status":
            return "application/json", json.dumps(self.watched.status(), allow_nan=False), {}
        if path == "/report":
            return "text/html", self._render_report(), {"X-Frame-Options": "SAMEORIGIN"}
        if path in _ASSETS:
            return _ASSETS[path], read_asset(path[1:]), {}
        return None

    def _render_report(self) -> str:
        """The report, rendered once for each state of the files."""
        with self._lock:
            data = self.watched.data()
            if data is None:
                return "<!doctype html><title>No run yet</title><p>No run yet."
            if self._page[0] is not data:
                title = self.title or format_title(data)
                args = ReportCommand(runs=(), gallery=0, no_figures=True, title=title)
                self._page = (data, render_page(build_report(data, args)))
            return self._page[1]


class _Handler(BaseHTTPRequestHandler):
    site: _Site
    server_version = "deat"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer with a page."""
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        """Answer with a page's headers."""
        self._answer(with_body=False)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""

    def _answer(self, with_body: bool) -> None:
        if not self._is_asked_by_this_machine():
            return self._send(
                HTTPStatus.FORBIDDEN, "text/plain", "Open the address that deat watch printed.\n", {}, with_body
            )
        try:
            answer = self.site.answer(urlsplit(self.path).path)
        except (DeatError, OSError, ValueError) as error:
            return self._send(HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain", f"{error}\n", {}, with_body)
        if answer is None:
            return self._send(HTTPStatus.NOT_FOUND, "text/plain", "There is no such page.\n", {}, with_body)
        kind, text, headers = answer
        self._send(HTTPStatus.OK, kind, text, headers, with_body)

    def _is_asked_by_this_machine(self) -> bool:
        """Whether the request names this server: another page's script could reach it by a name of its own."""
        return self.headers.get("Host") in self.site.hosts

    def _send(self, status: HTTPStatus, kind: str, text: str, headers: dict[str, str], with_body: bool) -> None:
        data = text.encode("utf-8", "replace")
        self.send_response(status)
        for name, value in {"Content-Type": f"{kind}; charset=utf-8", **_HEADERS, **headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if with_body:
            self.wfile.write(data)
