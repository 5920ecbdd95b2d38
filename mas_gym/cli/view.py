"""``mas-gym view``: explore the trees of a run store and compare its runs in a browser, on this machine only."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from functools import partial
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import parse_qs, unquote, urlsplit

import typer

from mas_gym.cli.console import note, show_traceback
from mas_gym.errors import ConfigError, MASGymError, StoreError
from mas_gym.report.pages import Cell, Column, listing_page, tree_page, tree_view
from mas_gym.service.origin import foreign

if TYPE_CHECKING:
    from search import RunInfo, Store

_KEY = 16
_HEAD_SECONDS, _IDLE_SECONDS = 10.0, 10.0
_READ_SECONDS = 1.0
_CONNECTIONS = 64


def view(
    store: Annotated[Path, typer.Argument(metavar="RUNS.DB", help="Store written with --store.")],
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Port on 127.0.0.1; 0 picks a free one.")
    ] = 8765,
    browser: Annotated[bool, typer.Option("--open/--no-open", help="Open the browser.")] = True,
) -> None:
    """Explore search trees and compare runs in the browser; Ctrl-C stops the server."""
    from search import open_store

    open_store(store).close()
    try:
        server = make_server(store, port)
    except OSError as error:
        raise ConfigError(f"port {port} cannot be used ({error.strerror}): choose another with --port") from error
    address = f"http://127.0.0.1:{server.server_port}/"
    note(f"{store} at {address} (Ctrl-C stops)", "bold")
    if browser:
        import webbrowser

        webbrowser.open(address)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        note("Stopped.")
    finally:
        server.server_close()


class _Server(ThreadingHTTPServer):
    """A server with a bounded number of connections that reports only its own errors."""

    daemon_threads = True
    request_queue_size = _CONNECTIONS

    def __init__(self, store: Path, port: int) -> None:
        self._room = threading.BoundedSemaphore(_CONNECTIONS)
        super().__init__(("127.0.0.1", port), partial(_Handler, Pages(store)))

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer on a new thread, or close the connection if there are too many."""
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, then release the connection's slot."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect or stop sending."""
        error = sys.exception()
        if error is not None and not isinstance(error, OSError):
            show_traceback(error)


def make_server(store: Path, port: int) -> ThreadingHTTPServer:
    """Return a server of a store's pages, bound to the loopback address and not yet started."""
    return _Server(store, port)


class _Handler(BaseHTTPRequestHandler):
    """Answers GET requests for the listing and for trees."""

    timeout = _IDLE_SECONDS
    # Without a version in a request, the reply would have no status line.
    default_request_version = "HTTP/1.0"

    def __init__(self, pages: Pages, *rest: Any) -> None:
        self._pages = pages
        super().__init__(*rest)

    def setup(self) -> None:
        """Close connections whose request is not complete in time, even if they keep sending."""
        super().setup()
        self._deadline = threading.Timer(_HEAD_SECONDS, self._hang_up)
        self._deadline.daemon = True
        self._deadline.start()

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def parse_request(self) -> bool:
        """Read the rest of the request's head."""
        try:
            return super().parse_request()
        finally:
            self._deadline.cancel()

    def finish(self) -> None:
        """Close the connection."""
        self._deadline.cancel()
        super().finish()

    def do_GET(self) -> None:
        """Send a page, or the reason why there is none."""
        # Another site's page could reach this server through DNS rebinding; it must not read the store.
        refusal = foreign(self.headers.get("Host"), self.headers.get("Origin"))
        if refusal is not None:
            self._send(403, _error_page(refusal))
            return
        try:
            url = urlsplit(self.path)
            query = {key: values[-1] for key, values in parse_qs(url.query).items()}
            self._send(200, self._pages.page(unquote(url.path), query))
        except MASGymError as error:
            self._send(404, _error_page(str(error)))
        except ValueError as error:
            self._send(400, _error_page(f"expected the address of a page, got {self.path[:80]!r}: {error}"))

    def _send(self, status: int, text: str) -> None:
        body = text.encode("utf-8", "replace")
        self.send_response(status)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Keep the terminal quiet."""


def _error_page(message: str) -> str:
    return f"<!doctype html><meta charset=utf-8><title>Error</title><p>{escape(message)}</p>"


class Pages:
    """The pages of a store. Each run's outcomes are read once, and again only when the run has changed."""

    def __init__(self, path: Path) -> None:
        """Keep the path; nothing is read yet."""
        self._path = path
        self._lock = threading.Lock()
        self._stamp: object = None
        self._columns: dict[str, tuple[str, Column]] = {}
        self._damage: dict[str, str] = {}

    def page(self, place: str, query: Mapping[str, str]) -> str:
        """Return the page at a place: ``/``, or ``/tree/RUN`` with ``problem`` in the query.

        Raises:
            ConfigError: There is no such page.
            MASGymError: There is no such run or problem.
        """
        from search import open_store

        if place == "/":
            page = query.get("page", "0")
            number = int(page) if page.isdecimal() and len(page) < 9 else 0
            columns, faults, unread = self._listing()
            return listing_page(self._path.name, columns, query.get("show", "all"), number, faults, unread)
        if place.startswith("/tree/"):
            with open_store(self._path) as store:
                return _tree(store, place.removeprefix("/tree/"), query.get("problem", ""))
        raise ConfigError(f"expected / or /tree/RUN?problem=ID, got {place[:80]!r}")

    def _listing(self) -> tuple[list[Column], list[str], int]:
        """Return the runs read so far, damage found, and the number of runs not read yet for lack of time."""
        from search import open_store

        # One thread reads at a time; the others wait, then get its result.
        with self._lock:
            stamp = [(file.stat().st_mtime_ns, file.stat().st_size) for file in self._files()]
            unread = 0
            if stamp != self._stamp:
                end = time.monotonic() + _READ_SECONDS
                with open_store(self._path) as store:
                    runs = store.runs()
                    for run in runs:
                        mark = json.dumps([run.searches, run.failed, dict(run.facts)], sort_keys=True, default=str)
                        if self._columns.get(run.run, ("",))[0] == mark:
                            continue
                        if time.monotonic() > end:
                            unread += 1
                        else:
                            self._read(store, run, mark)
                keys = [run.run for run in runs if run.run in self._columns]
                self._columns = {key: self._columns[key] for key in keys}
                self._damage = {key: self._damage[key] for key in keys if key in self._damage}
                self._stamp = None if unread else stamp
            return [column for _, column in self._columns.values()], list(self._damage.values()), unread

    def _files(self) -> Iterator[Path]:
        return (file for file in (self._path, Path(f"{self._path}-wal")) if file.exists())

    def _read(self, store: Store, run: RunInfo, mark: str) -> None:
        self._damage.pop(run.run, None)
        plans = []
        try:
            for plan in store.plans(run.run, trees=False, failed=True):
                plans.append((plan.problem_id, Cell(plan.answer, bool(plan.correct), plan.error), plan.usage))
        except StoreError as error:
            self._damage[run.run] = str(error)
        ended = [usage for _, cell, usage in plans if cell.error is None]
        facts = {"searches": f"{len(plans):,}"}
        if ended:
            facts["Hit@1"] = f"{100 * sum(cell.correct for _, cell, _ in plans) / len(plans):.1f}"
            facts["TOK"] = f"{sum(usage.generated_tokens for usage in ended) / len(ended):,.1f}"
            facts["AC"] = f"{sum(usage.agent_calls for usage in ended) / len(ended):,.1f}"
            facts["RC"] = f"{sum(usage.reward_calls for usage in ended) / len(ended):,.1f}"
        label = run.label + (", true reward" if run.config["training"] else "")
        cells = {problem: cell for problem, cell, _ in plans}
        self._columns[run.run] = mark, Column(run.run[:_KEY], label, facts, cells)


def _tree(store: Store, key: str, problem_id: str) -> str:
    run = store.find(key)
    problem, plan = store.search(problem_id, key)
    if plan.tree is None:
        raise ConfigError(f"the search of {problem_id!r} has no tree: {plan.error or 'its planner keeps none'}")
    critic = run.config["critic"]
    facts = {
        "problem": problem.id,
        "planner": str(run.facts["planner"]),
        "critic": str(critic["name"]) if critic else "none",
        "MAS": run.mas.name,
        "policy": str(run.config["policy"]["name"]),
        "seed": str(run.config["seed"]),
    }
    return tree_page(tree_view(plan, facts, problem.answer))
