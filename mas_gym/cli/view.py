"""``mas-gym view``: browse the trees of a run store and compare runs in a local browser."""

from __future__ import annotations

import hmac
import secrets
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import parse_qs, unquote, urlsplit

import typer

from mas_gym.cli.console import note
from mas_gym.cli.error_output import show_traceback
from mas_gym.errors import ConfigError, MASGymError, StoreError

if TYPE_CHECKING:
    from mas_gym.tasks.base import Problem
    from search import RunInfo, Store
    from search.report.store_pages import StoredRow
    from search.results.outcomes import Outcome
    from search.store.stored_grades import Regraded

PLOT = "/plot/"
"""The address of pictures, followed by the key of a row."""

_KEY = 16
_COOKIE = "HttpOnly; SameSite=Strict; Path=/"


def view(
    store: Annotated[Path, typer.Argument(metavar="RUNS.DB", help="Store written with --store.")],
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Port on 127.0.0.1; 0 picks a free one.")
    ] = 8765,
    browser: Annotated[bool, typer.Option("--open/--no-open", help="Open the browser.")] = True,
) -> None:
    """Explore search trees and compare runs in the browser; Ctrl-C stops the server.

    Pages are shown only with the token in the printed address, so that other users of the machine cannot read them.
    """
    from search import open_store

    open_store(store).close()
    try:
        server = make_server(store, port)
    except OSError as error:
        raise ConfigError(f"port {port} cannot be used ({error.strerror}): choose another with --port") from error
    note(f"{store} at {server.url} (Ctrl-C stops)", "bold")
    if browser:
        import webbrowser

        webbrowser.open(server.url)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        note("Stopped.")
    finally:
        server.server_close()


class _Server(ThreadingHTTPServer):
    """A server that ignores client connection errors.

    Attributes:
        token: The secret that requests state once, as ``?token=``, and then send as a cookie.
    """

    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: Callable[..., _Handler]) -> None:
        super().__init__(address, handler)
        self.token = secrets.token_urlsafe(24)

    @property
    def cookie(self) -> str:
        """The cookie with the token; its name has the port, because the ports of a host share their cookies."""
        return f"mas-gym-view-{self.server_port}={self.token}"

    @property
    def url(self) -> str:
        """The address of the index page, with the token."""
        return f"http://127.0.0.1:{self.server_port}/?token={self.token}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that disconnect."""
        error = sys.exception()
        if error is not None and not isinstance(error, OSError):
            show_traceback(error)


def make_server(store: Path, port: int) -> _Server:
    """Return a server for a store's pages, bound to the loopback address and not yet started."""
    return _Server(("127.0.0.1", port), partial(_Handler, Pages(store)))


class _Handler(BaseHTTPRequestHandler):
    """Handles GET requests for pages and plots."""

    server: _Server
    timeout = 10.0

    def __init__(self, pages: Pages, *rest: Any) -> None:
        self._pages = pages
        super().__init__(*rest)

    def do_GET(self) -> None:
        # Another site's page could reach this server through DNS rebinding; it must not read the store.
        from search.service import foreign

        refusal = foreign(self.headers.get("Host"), self.headers.get("Origin"))
        if refusal is not None:
            self._send(403, _error_page(refusal))
            return
        try:
            url = urlsplit(self.path)
        except ValueError as error:
            self._send(400, _error_page(f"expected a path, got {self.path[:80]!r}: {error}"))
            return
        query = {key: values[-1] for key, values in parse_qs(url.query).items()}
        if _equal(query.pop("token", ""), self.server.token):
            # The token leaves the address bar, and pages link to each other without it.
            self._send(303, "", headers={"Location": "/", "Set-Cookie": f"{self.server.cookie}; {_COOKIE}"})
            return
        if not any(_equal(part.strip(), self.server.cookie) for part in self.headers.get("Cookie", "").split(";")):
            self._send(401, _error_page("Enter the token from the address that mas-gym view printed.", True))
            return
        try:
            if url.path.startswith(PLOT):
                self._send(200, self._pages.plot(unquote(url.path).removeprefix(PLOT)), "image/svg+xml")
            else:
                self._send(200, self._pages.page(unquote(url.path), query))
        except MASGymError as error:
            self._send(404, _error_page(str(error)))

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        self._send(code, _error_page(HTTPStatus(code).phrase))

    def _send(
        self, status: int, text: str, kind: str = "text/html", headers: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        from search.pages.templates import DRAWING_POLICY, page_policy

        body = text.encode("utf-8", "replace")
        self.send_response(status)
        own = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Content-Security-Policy": page_policy() if kind == "text/html" else DRAWING_POLICY,
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Referrer-Policy": "no-referrer",
        }
        for name, value in (own | dict(headers)).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Suppress log output."""


def _equal(sent: str, secret: str) -> bool:
    return hmac.compare_digest(sent.encode("utf-8", "replace"), secret.encode())


def _error_page(message: str, asks_token: bool = False) -> str:
    from search.pages.templates import render

    return render("error.html", title="Error", message=message, asks_token=asks_token)


class Pages:
    """The pages of a store; its index is read again only after the store has changed."""

    def __init__(self, path: Path) -> None:
        """Store the path; nothing is read yet."""
        self._path = path
        self._lock, self._drawing = threading.Lock(), threading.Lock()
        self._stamp: object = None
        self._rows: list[StoredRow] = []
        self._faults: list[str] = []
        self._regraded: list[Regraded] = []
        self._whole: dict[str, StoredRow] = {}
        self._plots: dict[tuple[object, ...], str] = {}

    def page(self, place: str, query: Mapping[str, str]) -> str:
        """Return the page at a path: ``/``, ``/problems`` with ``a`` and ``b``, or ``/tree/RUN`` with ``problem``.

        Raises:
            ConfigError: There is no such page.
            MASGymError: There is no such run or problem.
        """
        from search import open_store
        from search.report.store_pages import ListingQuery, index_page, problems_page

        if place in ("/", "/problems"):
            # One request reads at a time; the others wait and use its result.
            with self._lock:
                self._refresh()
                if place == "/":
                    drawn, faults = find_spec("matplotlib") is not None, list(dict.fromkeys(self._faults))
                    return index_page(self._path.name, self._rows, faults, drawn, self._regraded)
                first = self._row(query.get("a", ""))
                second = next((row for row in self._rows if row.key == query.get("b") != first.key), None)
                rows = tuple(self._with_outcomes(row) for row in (first, second) if row is not None)
            number = query.get("page", "0")
            page = int(number) if number.isdecimal() and len(number) < 9 else 0
            shown, words = query.get("show", "all"), query.get("q", "").strip()
            return problems_page(self._path.name, ListingQuery(rows, shown, words, page))
        if place.startswith("/tree/"):
            with open_store(self._path) as store:
                return _tree(store, place.removeprefix("/tree/"), query.get("problem", ""))
        raise ConfigError(f"expected /, /problems?a=ROW&b=ROW or /tree/RUN?problem=ID, got {place[:80]!r}")

    def plot(self, key: str) -> str:
        """Return the SVG plot of the setting of a row; it is redrawn only when the results change.

        Raises:
            ConfigError: There is no such row.
            MissingDependencyError: matplotlib is not installed.
        """
        from search.report.report_figures import svg
        from search.results.plots import tradeoff_figure

        with self._lock:
            self._refresh()
            first = self._row(key)
            group = [row for row in self._rows if row.setting == first.setting]
        drawn = tuple((row.key, row.result.searches) for row in group)
        # matplotlib draws in one thread at a time.
        with self._drawing:
            if drawn not in self._plots:
                self._plots[drawn] = svg(tradeoff_figure([row.result for row in group if row.result.drawable]))
            return self._plots[drawn]

    def _row(self, key: str) -> StoredRow:
        for row in self._rows:
            if row.key == key:
                return row
        raise ConfigError(f"expected a row of the index page, got {key[:80]!r}; start at /")

    def _with_outcomes(self, row: StoredRow) -> StoredRow:
        """Return a row of the index with the outcome and problem of each intact search."""
        from search import open_store

        # The first page of a large row takes a second.
        if row.key not in self._whole:
            outcomes: dict[str, dict[int, Outcome]] = {}
            problems: dict[str, Problem] = {}
            with open_store(self._path) as store:
                for seed, run in row.runs.items():
                    with suppress(StoreError):
                        for outcome in store.outcomes(run):
                            outcomes.setdefault(outcome.problem_id, {})[seed] = outcome
                    with suppress(StoreError):
                        problems |= {problem.id: problem for problem in store.problems(run)}
            self._whole[row.key] = replace(row, outcomes=outcomes, problems=problems)
        return self._whole[row.key]

    def _refresh(self) -> None:
        """Read the index if the store has changed."""
        from search import open_store

        files = (self._path, Path(f"{self._path}-wal"))
        stamp = [(file.stat().st_mtime_ns, file.stat().st_size) for file in files if file.exists()]
        if stamp != self._stamp:
            self._faults, self._regraded, self._whole = [], [], {}
            with open_store(self._path) as store:
                runs = [run for run in store.runs() if run.searches]
                self._rows = stored_rows(store, runs, self._faults)
                for run in runs:
                    try:
                        self._regraded += store.regraded(run.run)
                    except StoreError as error:
                        self._faults.append(str(error))
            self._stamp = stamp


def stored_rows(store: Store, runs: Sequence[RunInfo], faults: list[str]) -> list[StoredRow]:
    """Return the rows of the index; rows of one setting are adjacent and sorted by increasing cost.

    ``faults`` receives a message for each run with corrupt searches; its other searches are read.
    """
    from search.report.store_pages import StoredRow
    from search.results.run_info import settings
    from search.results.table import table_of

    found: list[StoredRow] = []
    for setting in settings(runs):
        outcomes: list[Outcome] = []
        keys: dict[tuple[str, str], dict[int, str]] = {}
        for run, names in zip(setting.runs, setting.labels, strict=True):
            keys.setdefault(names, {})[run.config["seed"]] = run.run[:_KEY]
            try:
                outcomes.extend(store.outcomes(run.run, *names))
            except StoreError as error:
                faults.append(str(error))
        for result in table_of(store.path, setting, outcomes).rows:
            of_row = keys[result.planner, result.critic]
            found.append(StoredRow(next(iter(of_row.values())), setting.title, result, of_row))
    return found


def _tree(store: Store, key: str, problem_id: str) -> str:
    run = store.find(key)
    problem, plan = store.search(problem_id, key)
    if plan.tree is None:
        raise ConfigError(f"the search on {problem_id!r} has no tree: {plan.error or 'its planner builds none'}")
    facts = {
        "problem": problem.id,
        "planner": str(run.facts["planner"]),
        "critic": run.critic or "none",
        run.mas.kind: run.mas.name,
        "policy": str(run.config["policy"]["name"]),
        "seed": str(run.config["seed"]),
    }
    from search.pages.tree_page import tree_page

    return tree_page(plan, facts, problem.answer)
