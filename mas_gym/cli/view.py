"""``mas-gym view``: browse the trees of a run store and compare runs in a local browser."""

from __future__ import annotations

import hmac
import json
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from math import isnan
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

import typer

from mas_gym.cli.console import note
from mas_gym.cli.error_output import show_traceback
from mas_gym.errors import ConfigError, MASGymError, MissingDependencyError, StoreError
from mas_gym.tasks.base import GRADING_MODES

if TYPE_CHECKING:
    from mas_gym.tasks.base import Grade, Grader, Problem
    from search import RunInfo, Store
    from search.report.store_pages import StoredRow
    from search.results.outcomes import Outcome, Totals
    from search.store.stored_grades import Regraded

PLOT = "/plot/"
"""The address of pictures, followed by the key of a row."""

_KEY = 16
_QUESTION = 300
_READ_SECONDS = 1.0
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
                self._send(200, self._pages.plot(unquote(url.path)), "image/svg+xml")
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


class _ReadRun(NamedTuple):
    """A run and its aggregates, with a fingerprint that changes when the run changes."""

    mark: str
    info: RunInfo
    totals: Totals


class _Searches(NamedTuple):
    """A run's data for the problems page: its fingerprint when it was read, and texts and outcome of each search."""

    mark: str
    outcomes: dict[str, Outcome]
    questions: dict[str, str]
    references: dict[str, str]


class Pages:
    """The pages of a store.

    Each run's aggregates are read once, and again only after the run has changed. The same applies to its answers and
    questions, which are read when its problems are first shown, and to its plot.
    """

    def __init__(self, path: Path) -> None:
        """Store the path; nothing is read yet."""
        self._path = path
        self._lock, self._drawing = threading.Lock(), threading.Lock()
        self._stamp: object = None
        self._runs: dict[str, _ReadRun] = {}
        self._searches: dict[str, _Searches] = {}
        self._rows: list[StoredRow] = []
        self._texts: dict[str, str] = {}
        self._damage: dict[str, str] = {}
        self._plots: dict[tuple[str, ...], str] = {}
        self._regraded: list[Regraded] = []

    def page(self, place: str, query: Mapping[str, str]) -> str:
        """Return the page at a path: ``/``, ``/problems`` with ``a`` and ``b``, or ``/tree/RUN`` with ``problem``.

        Raises:
            ConfigError: There is no such page.
            MASGymError: There is no such run or problem.
        """
        from search import open_store

        if place == "/":
            rows, faults, unread = self._listing()
            from search.report.store_pages import index_page

            return index_page(
                self._path.name, rows, faults, unread, drawn=not unread and _can_draw(), regraded=self._regraded
            )
        if place == "/problems":
            rows, _, _ = self._listing()
            number = query.get("page", "0")
            page = int(number) if number.isdecimal() and len(number) < 9 else 0
            first, second = (_row(rows, query.get(name, "")) for name in ("a", "b"))
            if first is None:
                raise ConfigError(f"expected a row of the index page, got {query.get('a', '')[:80]!r}; start at /")
            second = None if second is None or second is first else self._with_outcomes(second)
            from search.report.store_pages import ListingQuery, problems_page

            shown, words = query.get("show", "all"), query.get("q", "").strip()
            return problems_page(self._path.name, ListingQuery(self._with_outcomes(first), second, shown, words, page))
        if place.startswith("/tree/"):
            with open_store(self._path) as store:
                return _tree(store, place.removeprefix("/tree/"), query.get("problem", ""))
        raise ConfigError(f"expected /, /problems?a=ROW&b=ROW or /tree/RUN?problem=ID, got {place[:80]!r}")

    def _listing(self) -> tuple[list[StoredRow], list[str], int]:
        """Return the rows read so far, the errors found, and the number of runs not read within the time limit."""
        from search import open_store

        # One thread reads at a time; the others wait and then use its result.
        with self._lock:
            stamp = [(file.stat().st_mtime_ns, file.stat().st_size) for file in self._files()]
            unread = 0
            if stamp != self._stamp:
                end = time.monotonic() + _READ_SECONDS
                with open_store(self._path) as store:
                    runs = store.runs()
                    for run in runs:
                        mark = json.dumps([run.searches, run.failed, dict(run.facts)], sort_keys=True, default=str)
                        if run.run in self._runs and self._runs[run.run].mark == mark:
                            continue
                        if time.monotonic() > end:
                            unread += 1
                        else:
                            self._read(store, run, mark)
                    self._regraded = [] if unread else self._read_grades(store, runs)
                self._runs = {run.run: self._runs[run.run] for run in runs if run.run in self._runs}
                self._damage = {key: text for key, text in self._damage.items() if key in self._runs}
                self._rows = stored_rows(self._runs.values())
                self._stamp = None if unread else stamp
            return self._rows, list(self._damage.values()), unread

    def _read_grades(self, store: Store, runs: Sequence[RunInfo]) -> list[Regraded]:
        found: list[Regraded] = []
        for run in runs:
            try:
                found += store.regraded(run.run)
            except StoreError as error:
                self._damage[run.run] = str(error)
        return found

    def _files(self) -> Iterator[Path]:
        return (file for file in (self._path, Path(f"{self._path}-wal")) if file.exists())

    def _read(self, store: Store, run: RunInfo, mark: str) -> None:
        from search.results.outcomes import totals_of

        self._damage.pop(run.run, None)
        try:
            totals = store.totals(run.run)
        except StoreError as error:
            self._damage[run.run] = str(error)
            totals = totals_of(_intact(store, run.run))
        self._runs[run.run] = _ReadRun(mark, run, totals)

    def _with_outcomes(self, row: StoredRow) -> StoredRow:
        """Return a row of the index with the outcome and question of each search."""
        outcomes: dict[str, dict[int, Outcome]] = {}
        questions: dict[str, str] = {}
        references: dict[str, str] = {}
        with self._lock:
            for run in [run for run in self._runs.values() if run.info.run[:_KEY] in row.runs.values()]:
                known = self._searches.get(run.info.run)
                if known is None or known.mark != run.mark:
                    known = self._searches[run.info.run] = self._read_searches(run)
                for problem, outcome in known.outcomes.items():
                    outcomes.setdefault(problem, {})[outcome.seed] = outcome
                questions |= known.questions
                references |= known.references
        return replace(row, outcomes=outcomes, questions=questions, references=references)

    def _read_searches(self, run: _ReadRun) -> _Searches:
        from search import open_store

        found = _Searches(run.mark, {}, {}, {})
        with open_store(self._path) as store:
            found.outcomes.update({one.problem_id: one for one in _intact(store, run.info.run)})
            try:
                for row in store.rows(run.info.run):
                    # Runs of one task share texts; different tasks may use the same id for different questions.
                    for texts, name in ((found.questions, "question"), (found.references, "reference")):
                        text = row[name][:_QUESTION]
                        texts[row["problem"]] = self._texts.setdefault(text, text)
            except StoreError as error:
                self._damage[run.info.run] = str(error)
        return found

    def plot(self, place: str) -> str:
        """Return the SVG plot of a row's setting, at ``/plot/ROW``; it is redrawn only when the results change.

        Raises:
            ConfigError: There is no such row.
            MissingDependencyError: matplotlib is not installed.
        """
        from search import open_store
        from search.report.report_figures import svg
        from search.results.plots import tradeoff_figure
        from search.results.run_info import settings
        from search.results.stored_tables import table_of

        rows, _, _ = self._listing()
        first = _row(rows, place.removeprefix(PLOT))
        if first is None:
            raise ConfigError(f"expected {PLOT}ROW for a row of the index page, got {place[:80]!r}; start at /")
        key = tuple(f"{row.key} {row.result.searches}" for row in rows if row.setting == first.setting)
        with self._drawing:
            if key not in self._plots:
                with open_store(self._path) as store:
                    groups = settings(store.runs())
                    [group] = [one for one in groups if any(run.run.startswith(first.key) for run in one.runs)]
                    named = zip(group.runs, group.labels, strict=True)
                    outcomes = [outcome for run, names in named for outcome in _intact(store, run.run, *names)]
                    found = table_of(self._path, group, outcomes).rows
                self._plots[key] = svg(tradeoff_figure([row for row in found if row.drawable]))
            return self._plots[key]


def _intact(store: Store, run: str, planner: str = "", critic: str = "") -> list[Outcome]:
    """Return the outcomes of a run's intact searches."""
    found: list[Outcome] = []
    with suppress(StoreError):
        found.extend(store.outcomes(run, planner, critic))
    return found


def _can_draw() -> bool:
    return find_spec("matplotlib") is not None


def _row(rows: Sequence[StoredRow], key: str) -> StoredRow | None:
    return next((row for row in rows if row.key == key), None)


def stored_rows(runs: Iterable[_ReadRun]) -> list[StoredRow]:
    """Group the runs of each planner and critic; rows of one setting are adjacent and sorted by increasing cost."""
    from search.report.store_pages import StoredRow
    from search.results.run_info import settings
    from search.results.summary import row_of_totals

    read = {run.info.run: run for run in runs if run.totals.grades}

    found: list[StoredRow] = []
    for setting in settings(run.info for run in read.values()):
        groups: dict[tuple[str, str], list[_ReadRun]] = {}
        for info, label in zip(setting.runs, setting.labels, strict=True):
            groups.setdefault(label, []).append(read[info.run])
        rows = []
        for (planner, critic), members in groups.items():
            keys = {one.info.config["seed"]: one.info.run[:_KEY] for one in members}
            result = row_of_totals(planner, critic, [(one.info.config["seed"], one.totals) for one in members])
            rows.append(StoredRow(members[0].info.run[:_KEY], setting.title, result, keys))
        found += sorted(rows, key=lambda row: (isnan(row.result.tokens.mean), row.result.tokens.mean))
    return found


def _tree(store: Store, key: str, problem_id: str) -> str:
    run = store.find(key)
    problem, plan = store.search(problem_id, key)
    if plan.tree is None:
        raise ConfigError(f"the search on {problem_id!r} has no tree: {plan.error or 'its planner builds none'}")
    critic = run.config["critic"]
    facts = {
        "problem": problem.id,
        "planner": str(run.facts["planner"]),
        "critic": str(critic["name"]) if critic else "none",
        run.mas.kind: run.mas.name,
        "policy": str(run.config["policy"]["name"]),
        "seed": str(run.config["seed"]),
    }
    from search.pages.tree_page import tree_page

    return tree_page(plan, facts, problem.answer, _grade(run.config["grading"], problem))


def _grade(grading: object, problem: Problem) -> Callable[[str], Grade | None] | None:
    """Return the run's grading function for texts; None for graders that need a file, a judge or a sandbox."""
    from mas_gym.tasks.grading.answers import KindGrader

    if grading not in GRADING_MODES:
        return None
    grader = KindGrader(grading)  # type: ignore[arg-type]
    return None if grader.refusal(problem.kind) else partial(_graded, grader, problem)


def _graded(grader: Grader, problem: Problem, text: str) -> Grade | None:
    try:
        return grader.grade(problem, text)
    except MissingDependencyError:
        return None
