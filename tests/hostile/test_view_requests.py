"""Hostile requests to ``mas-gym view`` over real sockets, damaged stores, and the cost of a click."""

from __future__ import annotations

import contextlib
import html
import http.client
import re
import socket
import sqlite3
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import pytest

import search
from mas_gym.cli import view
from mas_gym.cli.view import Pages, make_server
from mas_gym.policies import ScriptedPolicy
from mas_gym.tasks import Problem, ProblemTask
from search.pages.templates import DRAWING_POLICY, page_policy
from search.results.outcomes import Outcome

EVIL = "</title><script>alert(1)</script>\x1b[2J\u202e\"'&"
PROBLEMS = 8


def fill(file: Path, seed: int = 0, problems: int = PROBLEMS) -> None:
    policy = ScriptedPolicy(lambda request, seed: f"{EVIL}\nFinal Answer: {seed % 2}", name=EVIL)
    task = ProblemTask.of([Problem(f"{EVIL}/{i}", f"{EVIL} {i}", "1", "number") for i in range(problems)])
    list(search.run("sc:2", task, mas="rpsv", policy=policy, seed=seed, store=str(file)))


COOKIES: dict[int, str] = {}


@contextlib.contextmanager
def served(file: Path) -> Iterator[int]:
    server = make_server(file, 0)
    COOKIES[server.server_port] = server.cookie
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("view") / "runs.db"
    for seed in range(2):
        fill(file, seed)
    return file


@pytest.fixture(scope="module")
def port(store: Path) -> Iterator[int]:
    with served(store) as found:
        yield found


@pytest.fixture(autouse=True)
def stays_silent(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """No request prints a traceback."""
    yield
    shown = capfd.readouterr()
    assert shown.out == shown.err == ""


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=20)


def exchange(port: int, raw: bytes) -> tuple[int, str]:
    with connect(port) as sock:
        sock.sendall(raw)
        answer = http.client.HTTPResponse(sock)
        answer.begin()
        return answer.status, answer.read().decode()


def get(port: int, target: str = "/", *lines: str, host: str = "localhost") -> tuple[int, str]:
    head = [f"GET {target} HTTP/1.1", f"Host: {host}", f"Cookie: a=b; {COOKIES[port]}", *lines, "", ""]
    return exchange(port, "\r\n".join(head).encode("utf-8", "surrogateescape"))


TARGETS = {
    "unknown": "/nope",
    "no run": "/problems",
    "unknown run": "/problems?a=none",
    "another host": "http://evil.example/nope",
    "parents": "/../../etc/passwd",
    "encoded parents": "/tree/%2e%2e%2f%2e%2e%2fetc%2fpasswd",
    "NUL": "/tree/%00?problem=%00",
    "not UTF-8": "/tree/%ff%fe?problem=%ff",
    "surrogate": "/tree/%ed%a0%80?problem=%ed%a0%80",
    "quotes": "/tree/'%22;DROP TABLE runs".replace(" ", "%20"),
    "markup": "/<script>alert(1)</script>",
    "percent": "/%",
    "wildcards": "/tree/%25?problem=%25",
    "no problem": "/tree/",
    "many fields": "/tree/x?" + "a=1&" * 10_000,
    "60 kB": "/" + "x" * 60_000,
    "full-width digits": "/tree/\uff11?problem=\u0663",
}


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_unknown_path_returns_4xx_with_a_reason(port: int, target: str) -> None:
    status, page = get(port, target)
    assert 400 <= status < 500
    assert "<p>" in page and "<script" not in page and len(page) < 6000


@pytest.mark.parametrize(
    "query",
    ["?page=-1", "?page=99999999999999999999", "?page=\u0663", "?page=x&show=<b>", "?show=%00", "?&&=&;", "?page=1e9"],
)
def test_invalid_query_shows_the_listing(port: int, query: str) -> None:
    status, page = get(port, "/?" + query)
    assert status == 200 and page.count('name="a" value=') == 1
    status, page = get(port, problems_of(port) + "&" + query[1:])
    assert status == 200 and page.count("<tr><th>") == PROBLEMS + 1


def problems_of(port: int) -> str:
    return str(re.findall(r'href="(/problems[^"]+)"', get(port)[1])[0])


def test_stored_text_is_escaped_on_the_page(port: int) -> None:
    assert "<script" not in get(port)[1]
    status, page = get(port, problems_of(port))
    assert status == 200 and "<script" not in page and "alert(1)" in page
    links = [html.unescape(link) for link in re.findall(r'href="(/tree/[^"]+)"', page)]
    assert len(links) == 2 * PROBLEMS
    status, tree = get(port, links[0])
    assert status == 200 and "<script>alert" not in tree


def answer(port: int, target: str, *lines: str, method: str = "GET") -> http.client.HTTPResponse:
    head = [f"{method} {target} HTTP/1.1", "Host: localhost", *lines, "", ""]
    with connect(port) as sock:
        sock.sendall("\r\n".join(head).encode())
        found = http.client.HTTPResponse(sock)
        found.begin()
        found.read()
    return found


def test_pages_require_the_printed_token(port: int) -> None:
    name, _, token = COOKIES[port].partition("=")
    for target in ("/", problems_of(port), "/plot/x", f"/?token={token[:-1]}", "/?token="):
        assert answer(port, target).status == 401
        assert answer(port, target, f"Cookie: {name}={token[:-1]}").status == 401
    opened = answer(port, f"/?token={token}")
    cookie = str(opened.headers["Set-Cookie"])
    assert (opened.status, opened.headers["Location"]) == (303, "/") and "HttpOnly; SameSite=Strict" in cookie
    assert answer(port, "/", f"Cookie: other=1; {cookie.partition(';')[0]}").status == 200


@pytest.mark.parametrize("target", ["/", "/nothing", "/problems?a={key}", "/tree/{key}?problem={problem}"])
def test_html_answers_have_the_policy_as_a_header(port: int, target: str) -> None:
    [key] = re.findall(r'name="a" value="([^"]+)"', get(port)[1])
    filled = target.format(key=key, problem=quote(f"{EVIL}/0"))
    got = answer(port, filled, f"Cookie: {COOKIES[port]}")
    policies = [got, answer(port, filled), answer(port, filled, method="POST")]
    assert {one.headers["Content-Security-Policy"] for one in policies} == {page_policy()}


def test_picture_answers_have_a_policy_without_scripts(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the index has pictures with the extra 'plot'")
    fill(tmp_path / "runs.db")
    with served(tmp_path / "runs.db") as port:
        [key] = re.findall(r'name="a" value="([^"]+)"', get(port)[1])
        got = answer(port, f"/plot/{key}", f"Cookie: {COOKIES[port]}")
    assert got.status == 200 and got.headers["Content-Type"].startswith("image/svg+xml")
    assert got.headers["Content-Security-Policy"] == DRAWING_POLICY


@pytest.mark.parametrize("field", ["seed", "planner", "task", "mas"])
def test_markup_in_any_field_of_a_store_is_escaped(field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, evil = tmp_path / "runs.db", '<meta http-equiv="refresh" content="0;url=//evil.example">'
    fill(file)
    runs = search.Store.runs

    def changed(self: search.Store) -> list[search.RunInfo]:
        places = {"seed": "config", "planner": "facts", "task": "facts", "mas": "facts"}
        name = places[field]
        return [replace(run, **{name: {**getattr(run, name), field: evil}}) for run in runs(self)]

    monkeypatch.setattr(search.Store, "runs", changed)
    pages = Pages(file)
    index = pages.page("/", {})
    [key] = re.findall(r'name="a" value="([^"]+)"', index)
    for page in (index, pages.page("/problems", {"a": key})):
        assert '<meta http-equiv="refresh' not in page


def test_problem_list_shows_the_reference_answer(port: int) -> None:
    page = get(port, problems_of(port))[1]
    assert page.count('<td data-name="Reference">1</td>') == PROBLEMS


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "192.168.0.1", "", "[", "localhost@evil"])
def test_foreign_host_header_is_rejected(port: int, host: str) -> None:
    assert get(port, host=host)[0] == 403


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://localhost.evil.example"])
def test_foreign_origin_is_rejected(port: int, origin: str) -> None:
    status, page = get(port, "/", f"Origin: {origin}")
    assert status == 403 and "Origin" in page
    assert get(port, "/", f"Origin: http://127.0.0.1:{port}")[0] == 200


@pytest.mark.parametrize(
    "raw",
    [
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n",
        b"\x1b[2J / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
)
def test_invalid_request_returns_an_error_status(port: int, raw: bytes) -> None:
    status, page = exchange(port, raw)
    assert 400 <= status < 600 and "Traceback" not in page and "\x1b" not in page
    assert get(port)[0] == 200


def test_connection_without_a_request_is_closed(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view._Handler, "timeout", 0.2)
    with connect(port) as sock:
        sock.sendall(b"GET / HT")
        assert sock.recv(4096) == b""


def test_early_disconnects_do_not_affect_others(port: int) -> None:
    for _ in range(20):
        with connect(port) as sock:
            sock.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    assert get(port)[0] == 200


def test_repeated_request_reads_the_store_only_after_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, read = tmp_path / "runs.db", []
    outcomes = search.Store.outcomes

    def counted(self: search.Store, run: str, *names: str) -> Iterator[Outcome]:
        read.append(run)
        return outcomes(self, run, *names)

    monkeypatch.setattr(search.Store, "outcomes", counted)
    for seed in range(2):
        fill(file, seed)
    pages = Pages(file)
    first = pages.page("/", {})
    assert len(read) == 2 and first == pages.page("/", {}) and len(read) == 2
    fill(file, 2)
    assert pages.page("/", {}) != first
    fill(file, 2, PROBLEMS + 1)
    assert f">{PROBLEMS + 1} S1*</td>" in pages.page("/", {})


def test_problems_with_equal_ids_in_two_tasks_show_different_questions(tmp_path: Path) -> None:
    file = tmp_path / "runs.db"
    policy = ScriptedPolicy(lambda request, seed: "Final Answer: 1", name="one")
    for name in ("first", "second"):
        task = ProblemTask.of([Problem("row/1", f"The question of {name}?", "1", "number")], name=name)
        list(search.run("sc:2", task, mas="rpsv", policy=policy, seed=len(name), store=str(file)))
    pages = Pages(file)
    a, b = re.findall(r'name="a" value="([^"]+)"', pages.page("/", {}))
    one, other = (pages.page("/problems", {"a": key}) for key in (a, b))
    assert ("of first" in one) != ("of second" in one) and ("of first" in other) != ("of first" in one)
    assert "of first" in (both := pages.page("/problems", {"a": a, "b": b})) and "of second" in both


def test_damaged_search_is_reported_and_the_others_are_shown(tmp_path: Path) -> None:
    file = tmp_path / "runs.db"
    fill(file)
    with contextlib.closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("UPDATE searches SET correct = 1 - correct WHERE problem = ?", (f"{EVIL}/3",))
    pages = Pages(file)
    page = pages.page("/", {})
    assert "damaged" in page and 'class="failed"' in page and f">{PROBLEMS - 1}</td>" in page
    [key] = re.findall(r'name="a" value="([^"]+)"', page)
    assert pages.page("/problems", {"a": key}).count("/tree/") == PROBLEMS - 1


def test_problem_list_is_paginated() -> None:
    from search.report.store_pages import PAGE, ListingQuery, StoredRow, problems_page
    from search.results.summary import summarize

    [result] = summarize([Outcome("single", "", 1, "p", correct=True, tokens=1)])
    outcomes = {f"task/{'9' * (i % 5000)}{i}": {1: Outcome("single", "", 1, "p", True)} for i in range(2000)}
    page = problems_page("x", ListingQuery((StoredRow("key", "setting", result, {1: "run"}, outcomes),), page=3))
    assert page.count("<tr><th>") == PAGE + 1
