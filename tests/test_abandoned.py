"""Abandoned runs are closed at interpreter exit and print nothing; a run that fails to start leaves nothing open."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from search_worlds import chain, problems, talker

import search
from mas_gym.errors import ConfigError, PolicyError
from mas_gym.policies.base import SamplingRequest
from mas_gym.policies.batch_queue import as_policy
from mas_gym.systems.prompts import ChatMessage

HEAD = """
import asyncio, builtins, sys, threading
import search
from search_worlds import chain, problems, talker

class Waits:
    name, max_concurrency = "talker", 64
    def identity(self):
        return "talker"
    async def sample_async(self, request):
        await asyncio.sleep(0.001)
        return talker().sample([request])[0]

def start(policy=None, **options):
    options = {"mas": chain(4), "policy": policy or talker(), "store": sys.argv[1], "concurrency": 4, **options}
    return search.run("sc:3", problems(500), **options)
"""
# torch keeps modules alive until the interpreter clears their names, which `__del__` then misses.
WITH_TORCH = ("kept to the end", "of a thread that is at work")
FORMS = {
    "kept to the end": "builtins.kept = start(); next(builtins.kept)",
    "with a bar": "builtins.kept = start(progress=True); next(builtins.kept)",
    "in a generator": "def plans():\n    yield from start()\nbuiltins.kept = plans(); next(builtins.kept)",
    "in the traceback of an error": (
        "def fail():\n    run = start(); next(run); 1 / 0\n"
        "try:\n    fail()\nexcept ZeroDivisionError as error:\n    builtins.kept = error"
    ),
    "in executed code": "space = {'start': start}; exec('run = start(); next(run)', space); builtins.kept = space",
    "of a thread that has ended": (
        "def work():\n    builtins.kept = start(); next(builtins.kept)\n"
        "thread = threading.Thread(target=work); thread.start(); thread.join()"
    ),
    "of a thread that is at work": (
        "ready = threading.Event()\n"
        "def work():\n    for plan in start(Waits()):\n        ready.set()\n"
        "threading.Thread(target=work, daemon=True).start(); ready.wait()"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_abandoned_run_prints_nothing_at_exit(form: str, tmp_path: Path) -> None:
    head = HEAD
    if form in WITH_TORCH:
        pytest.importorskip("torch")
        head = "import torch" + HEAD
    store = tmp_path / "runs.db"
    here = Path(__file__).parent
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), str(here.parent)])}
    command = [sys.executable, "-c", head + FORMS[form], str(store)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    assert "searches" in done.stderr if "bar" in form else done.stderr == ""
    assert "Exception" not in done.stderr
    # The run was closed: its cost is stored, and its lock is released.
    assert [path.name for path in tmp_path.iterdir() if "lock" in path.name] == []
    with search.open_store(store) as opened:
        assert opened.find().spent.agent_calls >= 12


class Refuses:
    """An iterable of problems that cannot be read."""

    def __iter__(self) -> Iterator[Any]:
        raise ConfigError("no problems")


@pytest.mark.parametrize("problems_", [Refuses(), 7])
def test_run_that_fails_to_start_prints_nothing_and_releases_the_store(
    problems_: Any, tmp_path: Path, capsys: Any
) -> None:
    store = tmp_path / "runs.db"
    options: dict[str, Any] = {"mas": chain(4), "policy": talker(), "store": store}
    with pytest.raises((ConfigError, TypeError)):
        search.run("single", problems_, progress=True, **options)
    assert capsys.readouterr().err == ""
    assert len(list(search.run("single", problems(2), **options))) == 2


def test_journal_error_releases_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tmp_path / "runs.db"
    options: dict[str, Any] = {"mas": chain(4), "policy": talker(), "store": store}

    def broken(*arguments: Any, **more: Any) -> None:
        raise RuntimeError("broken")

    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="broken"):
        patched.setattr("search.runs.Journal", broken)
        search.run("single", problems(2), **options)
    assert len(list(search.run("single", problems(2), **options))) == 2


class Silent:
    name, max_concurrency = "silent", 8

    async def sample_async(self, request: SamplingRequest) -> Any:
        if "Question 1" in request.messages[-1].content:
            await asyncio.sleep(60)
        return talker().sample([request])[0]


def test_stop_on_another_thread_ends_a_waiting_run() -> None:
    plans = search.run("single", problems(2), mas=chain(1), policy=Silent())
    first = next(plans)
    stopper = threading.Timer(0.05, plans.stop)
    stopper.start()
    assert first.error is None and list(plans) == [] and plans.stopped == "stopped"
    stopper.join(60)
    assert not stopper.is_alive()


class Session:
    def __init__(self, owner: Any) -> None:
        self.owner, self.pending = owner, 0

    def submit(self, key: Any, request: Any) -> None:
        raise PolicyError("broken")

    def step(self) -> list[Any]:
        return []

    def close(self) -> None:
        self.owner.closed += 1
        raise RuntimeError("broken, too")


class Streams:
    name, max_batch = "streams", 8
    closed = 0

    def sample(self, requests: Any) -> Any:
        raise AssertionError("not used")

    def open(self) -> Session:
        return Session(self)


def test_failed_session_is_closed_and_every_request_fails() -> None:
    policy = Streams()
    request = SamplingRequest((ChatMessage("user", "14 + 3?"),), (1,), 8, 1.0, 1.0)
    view = as_policy(policy)

    async def both() -> list[Any]:
        calls = [view.sample_async(request) for _ in range(3)]
        return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 60)

    assert [str(error) for error in asyncio.run(both())] == ["broken"] * 3
    assert policy.closed >= 1
