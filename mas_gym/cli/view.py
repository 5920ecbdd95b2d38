"""``mas-gym view``: walk the trees of a run store and compare its runs in a browser, served on this machine alone."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import parse_qs, unquote, urlsplit

import typer

from mas_gym.cli.console import note
from mas_gym.cli.treeview import tree_view
from mas_gym.errors import ConfigError, MASGymError
from mas_gym.report.listing import Cell, Column, listing_page
from mas_gym.report.page import tree_page

if TYPE_CHECKING:
    from search import RunInfo, Store

_KEY = 16


def view(
    store: Annotated[Path, typer.Argument(metavar="RUNS.DB", help="A store that --store wrote.")],
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Port on 127.0.0.1; 0 takes a free one.")
    ] = 8765,
    browser: Annotated[bool, typer.Option("--open/--no-open", help="Open the browser.")] = True,
) -> None:
    """Walk search trees and compare runs in the browser; Ctrl-C ends it."""
    from search import open_store

    open_store(store).close()
    try:
        server = make_server(store, port)
    except OSError as error:
        raise ConfigError(f"port {port} cannot be used ({error.strerror}): choose another with --port") from error
    address = f"http://127.0.0.1:{server.server_port}/"
    note(f"{store} at {address} (Ctrl-C ends)", "bold")
    if browser:
        import webbrowser

        webbrowser.open(address)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        note("Stopped.")
    finally:
        server.server_close()


def make_server(store: Path, port: int) -> ThreadingHTTPServer:
    """Return a server of a store's pages, bound to the loopback address and not yet started."""
    server = ThreadingHTTPServer(("127.0.0.1", port), partial(_Handler, store))
    server.daemon_threads = True
    return server


class _Handler(BaseHTTPRequestHandler):
    """Answers GET for the listing and for trees."""

    def __init__(self, store: Path, *rest: object) -> None:
        self._store = store
        super().__init__(*rest)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        """Send a page, or why there is none."""
        assert isinstance(self.server, ThreadingHTTPServer)
        port = self.server.server_port
        # A page of another site could reach this server under its own name; it must not read the store.
        if self.headers.get("Host") not in (f"127.0.0.1:{port}", f"localhost:{port}"):
            self._send(403, "This server answers on 127.0.0.1 only.")
            return
        url = urlsplit(self.path)
        query = {key: values[-1] for key, values in parse_qs(url.query).items()}
        try:
            self._send(200, page_of(self._store, unquote(url.path), query))
        except MASGymError as error:
            self._send(404, f"<!doctype html><title>Error</title><p>{escape(str(error))}</p>")

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


def page_of(path: Path, place: str, query: Mapping[str, str]) -> str:
    """Return the page at a place of a store: ``/`` or ``/tree/RUN`` with ``problem`` in the query.

    Raises:
        ConfigError: There is no such place.
        MASGymError: The run or the problem is not there.
    """
    from search import open_store

    with open_store(path) as store:
        if place == "/":
            page = query.get("page", "0")
            number = int(page) if page.isdecimal() and len(page) < 9 else 0
            return listing_page(
                path.name, [_column(store, run) for run in store.runs()], query.get("show", "all"), number
            )
        if place.startswith("/tree/"):
            return _tree(store, place.removeprefix("/tree/"), query.get("problem", ""))
    raise ConfigError(f"expected / or /tree/RUN?problem=ID, got {place[:80]!r}")


def _column(store: Store, run: RunInfo) -> Column:
    plans = list(store.plans(run.run, trees=False, failed=True))
    cells = {plan.problem_id: Cell(plan.answer, bool(plan.correct), plan.error) for plan in plans}
    ended = [plan.usage for plan in plans if plan.error is None]
    facts = {"searches": f"{len(plans):,}"}
    if ended:
        facts["Hit@1"] = f"{100 * sum(cell.correct for cell in cells.values()) / len(plans):.1f}"
        facts["TOK"] = f"{sum(usage.generated_tokens for usage in ended) / len(ended):,.1f}"
        facts["AC"] = f"{sum(usage.agent_calls for usage in ended) / len(ended):,.1f}"
        facts["RC"] = f"{sum(usage.reward_calls for usage in ended) / len(ended):,.1f}"
    label = run.label + (", true reward" if run.config["training"] else "")
    return Column(run.run[:_KEY], label, facts, cells)


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
    return tree_page(tree_view(plan, run.mas, facts, problem.answer))
