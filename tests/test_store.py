"""The run store: searches are never lost, duplicated or mixed up, even if the process or the disk fails."""

from __future__ import annotations

import dataclasses
import functools
import json
import multiprocessing
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from search_worlds import (
    HashCritic,
    World,
    by_problem,
    chain,
    comparable,
    consults,
    drive,
    execute,
    open_at_once,
    problems,
    talk,
    talker,
    write_searches,
)

import search
from mas_gym.cli.status import active_time
from mas_gym.errors import ConfigError, DataError, IdentityError, PolicyError, StoreError
from mas_gym.internal.database import Format, transaction
from mas_gym.policies import ScriptedPolicy
from mas_gym.programs import Program
from mas_gym.systems.dynamics import Dynamics
from mas_gym.systems.state import Action
from mas_gym.tasks.base import Grade, Problem
from mas_gym.tasks.grading.answers import grade
from search import MCTS, Budget, Proposal, SinglePass, StepBeamSearch, open_store
from search.store import run_writer
from search.store.run_lock import run_lock
from search.store.run_writer import RunWriter
from search.store.search_rows import read_run, searches_of
from search.store.table_schema import FORMAT

RPSV = chain(4)
PARTS = ("runs", "searches", "documents")
CLOCKS = {"seconds", "finished", "facts", "checksum"}


def run(store: Path, planner: Any = None, count: int = 12, **options: Any) -> search.Run:
    options = {"mas": RPSV, "policy": talker(), "training": True, **options}
    return search.run(planner or MCTS(8, 3), problems(count), store=store, **options)


def rows(path: Path) -> dict[str, list[Any]]:
    """Every row of every table, without the columns of times."""
    connection = sqlite3.connect(path)
    found = {}
    for table in PARTS:
        names = [row[1] for row in connection.execute(f"PRAGMA table_info({table})") if row[1] not in CLOCKS]
        found[table] = sorted(connection.execute(f"SELECT {', '.join(names)} FROM {table}").fetchall(), key=repr)
    connection.close()
    return found


# ---- what goes in comes out


@pytest.mark.parametrize(
    "planner", [SinglePass(), MCTS(8, 3), StepBeamSearch(3, 2), search.SelfConsistency(3)], ids=str
)
@pytest.mark.parametrize("mas", ["rpsv", "dylan"])
def test_stored_plans_are_loaded_unchanged(tmp_path: Path, planner: Any, mas: str) -> None:
    options: dict[str, Any] = {"mas": mas, "training": False}
    first = by_problem(run(tmp_path / "a.db", planner, critic=HashCritic(), **options))
    again = run(tmp_path / "a.db", planner, critic=HashCritic(), **options)
    assert by_problem(again) == first
    assert again.usage.agent_calls == 0
    with open_store(tmp_path / "a.db") as store:
        assert by_problem(store.plans()) == first
        assert {p.problem_id: p.answer for p in store.plans(trees=False)} == {k: v["answer"] for k, v in first.items()}
        assert [p.answer for p in store.problems()] == [str(int(p.id.split("/")[1]) % 4) for p in store.problems()]
        [info] = store.runs()
        assert info.searches == 12 and info.failed == 0 and info.mas.name == mas
        assert search.planner_spec(planner) in info.label


def test_seeds_and_tokens_of_every_message_are_stored(tmp_path: Path) -> None:
    list(run(tmp_path / "a.db", count=2))
    with open_store(tmp_path / "a.db") as store:
        seeds = dict(store.message_seeds())
        for plan in store.plans():
            assert plan.tree is not None and seeds[plan.problem_id][0] is None
            assert all(seed is not None for seed in seeds[plan.problem_id][1:]) and all(plan.tree.tokens[1:])


def test_equal_texts_are_stored_once_per_search(tmp_path: Path) -> None:
    list(run(tmp_path / "a.db", policy=ScriptedPolicy(lambda request, seed: "the same message " * 50)))
    documents = [zlib.decompress(document) for _, document in rows(tmp_path / "a.db")["documents"]]
    assert len(documents) == 12 and all(document.count(b"the same message") == 50 for document in documents)


@pytest.mark.parametrize("text", ["\ud800 lone", "\x00 nul", "", " \u202e right to left", "x" * 1_000_000])
def test_any_text_can_be_stored(tmp_path: Path, text: str) -> None:
    policy = ScriptedPolicy(functools.partial(search_sample, text))
    question = Problem("odd \ud801 id", f"What {text[:50]}?", "1")
    options: dict[str, Any] = {"mas": RPSV, "policy": policy, "store": tmp_path / "a.db"}
    [plan] = search.run(SinglePass(), [question], **options)
    [again] = search.run(SinglePass(), [question], **options)
    assert plan.error is None and plan.text == text
    assert comparable(again) == comparable(plan)


def search_sample(text: str, *_: Any) -> Any:
    from mas_gym.policies import Sample

    return Sample(text, 1, -1.0, "stop")


def test_chain_of_ten_thousand_turns_is_stored_and_loaded(tmp_path: Path) -> None:
    world = World(10_000, value=lambda path: 0.5)
    proposal = Proposal(Action("on", world.model.mas.ALL), 1, -1.0)
    reply = lambda request: [proposal] if hasattr(request, "n") else [0.5]  # noqa: E731
    plan = drive(MCTS(2, 1), world.model, reply, random.Random(0))
    config = {"mas": world.model.mas.to_dict()}
    record = RunWriter(tmp_path / "a.db", config, {"planner": "mcts:2,1", "started": "x"}, None)
    problem = Problem("deep", "q", "1")
    record.save([(problem, plan, {})])
    back = record.load(problem)
    record.close()
    assert back is not None and back.tree is not None and plan.tree is not None
    assert back.tree.to_dict() == plan.tree.to_dict()


# ---- going on


def test_resumed_run_equals_an_uninterrupted_run(tmp_path: Path) -> None:
    whole = by_problem(run(tmp_path / "whole.db"))
    for _ in range(3):
        part = run(tmp_path / "parts.db", concurrency=3)
        for _ in range(5):
            if next(part, None) is None:
                break
        part.close()
    assert by_problem(run(tmp_path / "parts.db", concurrency=7)) == whole
    assert rows(tmp_path / "parts.db") == rows(tmp_path / "whole.db")


def test_more_problems_extend_a_run(tmp_path: Path) -> None:
    list(run(tmp_path / "a.db", count=4))
    more = run(tmp_path / "a.db", count=8)
    assert len(list(more)) == 8
    with open_store(tmp_path / "a.db") as store:
        assert [info.searches for info in store.runs()] == [8]


def test_run_stores_its_number_of_problems(tmp_path: Path) -> None:
    path = tmp_path / "a.db"

    def wanted() -> tuple[int | None, int]:
        with open_store(path) as store:
            [info] = store.runs()
            return info.facts["problems"], info.searches

    part = run(path, concurrency=2)
    next(part)
    part.close()
    problems, searches = wanted()
    assert problems == 12 and 1 <= searches < 12
    list(run(path, count=20))
    assert wanted() == (20, 20)
    list(run(path, count=4))
    assert wanted() == (20, 20)
    execute(path, "UPDATE runs SET facts = json_remove(facts, '$.problems')")
    list(run(path, count=20))
    assert wanted() == (20, 20)


def test_run_over_an_iterator_stores_no_number_of_problems(tmp_path: Path) -> None:
    list(search.run(SinglePass(), iter(problems(3)), mas=RPSV, policy=talker(), store=tmp_path / "a.db"))
    with open_store(tmp_path / "a.db") as store:
        assert store.find().facts["problems"] is None


def test_spans_give_the_active_time_and_the_end_of_the_last_search(tmp_path: Path) -> None:
    before = time.time()
    list(run(tmp_path / "a.db"))
    after = time.time()
    with open_store(tmp_path / "a.db") as store:
        active, last = active_time([(row["finished"], row["seconds"]) for row in store.rows()])
    # Ends are kept to the millisecond.
    assert last is not None and before - 0.002 <= last <= after + 0.002
    assert 0 < active <= after - before + 0.004


class Flaky(ScriptedPolicy):
    """Its engine fails at one question until it is repaired, which is not part of the identity."""

    broken = True

    def identity(self) -> str:
        return "talker"


def flaky() -> Flaky:
    def say(request: Any, seed: int) -> str:
        if policy.broken and "Question 3:" in request.messages[-1].content:
            raise PolicyError("not now")
        return talk(request, seed)

    policy = Flaky(say, "talker", 16)
    return policy


def test_failed_searches_are_retried_on_resumption(tmp_path: Path) -> None:
    policy = flaky()
    assert [p.problem_id for p in run(tmp_path / "a.db", policy=policy) if p.error] == ["toy/3"]
    with open_store(tmp_path / "a.db") as store:
        assert store.runs()[0].failed == 1
        assert len(list(store.plans())) == 11 and len(list(store.plans(failed=True))) == 12
    policy.broken = False
    second = run(tmp_path / "a.db", policy=policy)
    assert all(plan.error is None for plan in second)
    list(run(tmp_path / "clean.db", policy=policy))
    assert rows(tmp_path / "a.db") == rows(tmp_path / "clean.db")


def forking() -> Any:
    """How processes start that have the imports of all searches before they begin."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["search", "mas_gym.programs", "openai"])
    return context


@contextmanager
def writer(path: Path, program: bool = False) -> Iterator[tuple[Any, Any]]:
    """A process that stores searches, and its pipe: it reports each and waits for a word, until the pipe is closed."""
    context = forking()
    here, there = context.Pipe()
    process = context.Process(target=write_searches, args=(path, program, there))
    process.start()
    there.close()
    with here:
        yield process, here
    process.join()


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="needs SIGKILL")
@pytest.mark.parametrize("program", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["mas", "program"])
def test_repeated_sigkill_neither_loses_nor_duplicates_searches(tmp_path: Path, program: bool) -> None:
    system: dict[str, Any] = {"mas": None, "program": Program(consults, agents=["Ann", "Bob", "Cleo"])}
    options = system if program else {}
    killed, rng = tmp_path / "killed.db", random.Random(7)
    done: list[int] = []
    for _ in range(20):
        with writer(killed, program) as (process, pipe):
            assert pipe.recv()
            for _ in range(rng.randint(1, 2)):
                pipe.send("on")
                assert pipe.recv()
            # Now it may be anywhere: searching, storing, or waiting for the next word.
            pipe.send("on")
            time.sleep(rng.random() * 0.01)
            process.kill()
        check = sqlite3.connect(killed)
        assert check.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        done.append(check.execute("SELECT count(*) FROM searches").fetchone()[0])
        check.close()
    assert done == sorted(done) and 20 <= done[-1] < 200
    list(run(killed, count=200, **options))
    list(run(tmp_path / "whole.db", count=200, **options))
    assert rows(killed) == rows(tmp_path / "whole.db")


# ---- several runs, several processes


def test_runs_with_different_settings_share_a_store(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    list(run(path, count=2))
    list(run(path, count=2, seed=7))
    list(run(path, MCTS(9, 3), count=2))
    list(run(path, count=2, sampling=search.Sampling(temperature=1.0)))
    list(run(path, count=2, budget=Budget(calls=999)))
    list(run(path, count=2, mas="rpsv"))
    list(run(path, count=2, policy=ScriptedPolicy(talk, "another")))
    list(run(path, count=2, training=False, critic=HashCritic(name="one")))
    list(run(path, count=2, training=False, critic=HashCritic(name="one", fingerprint="other weights")))
    with open_store(path) as store:
        runs = store.runs()
        assert len(runs) == 9 and all(info.searches == 2 for info in runs)
        with pytest.raises(StoreError, match="expected one run, found 9"):
            store.find()
        assert store.find(runs[3].run[:10]) == runs[3]


def test_named_run_rejects_different_settings(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    list(run(path, count=2, run_name="rollouts"))
    assert len(list(run(path, count=3, run_name="rollouts"))) == 3
    with pytest.raises(StoreError, match=r"different settings: seed was 42, now 7; use the same"):
        run(path, count=2, run_name="rollouts", seed=7)
    with pytest.raises(StoreError, match="mas was"):
        run(path, count=2, run_name="rollouts", mas="rpsv")
    with open_store(path) as store:
        assert store.find("rollouts").searches == 3


def test_changed_problem_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    list(run(path, count=2))
    changed = [Problem("toy/0", "Another question?", "0")]
    with pytest.raises(DataError, match="has changed since"):
        list(search.run(MCTS(8, 3), changed, mas=RPSV, policy=talker(), training=True, store=path))


def test_second_writer_of_a_run_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    first = run(path)
    next(first)
    with pytest.raises(StoreError, match="another process is writing this run"):
        run(path)
    list(run(path, seed=1))
    rest = list(first)
    assert len(rest) == 11
    list(run(path))


def test_store_is_read_while_another_process_writes(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    plans = run(path)
    for count, _ in enumerate(plans, 1):
        if count == 5:
            with open_store(path) as store:
                assert store.runs()[0].searches >= 4


def test_search_that_cannot_be_stored_loses_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = run_writer.write_search

    def refuse(connection: Any, name: str, problem: Problem, *rest: Any) -> None:
        if problem.id == problems(4)[3].id:
            raise sqlite3.DataError("string or blob too big")
        write(connection, name, problem, *rest)

    monkeypatch.setattr(run_writer, "write_search", refuse)
    plans, got = run(tmp_path / "a.db", count=6, concurrency=6), []
    with pytest.raises(StoreError, match="too big"):
        got += plans
    got += plans
    with open_store(tmp_path / "a.db") as store:
        assert {plan.problem_id for plan in store.plans()} == {plan.problem_id for plan in got}
    assert len(got) == 5


def test_writes_between_the_queries_of_a_reader_are_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.db"
    list(run(path, count=3))

    class Slow:
        """A connection; another process stores searches just before it reads a run's number of searches."""

        def __init__(self, connection: Any) -> None:
            self.connection = connection

        def execute(self, query: str, *values: Any) -> Any:
            if query.startswith("SELECT searches FROM runs"):
                list(run(path, count=4))
            return self.connection.execute(query, *values)

    def read_first(connection: Any, name: str) -> Any:
        list(run(path, count=2, seed=7))
        return read_run(connection, name)

    with open_store(path) as store:
        with monkeypatch.context() as patched:
            patched.setattr("search.store.store.read_run", read_first)
            [first] = store.runs()
        assert not store.damaged and len(store.runs()) == 2
        monkeypatch.setattr("search.store.store.searches_of", lambda one, name: searches_of(Slow(one), name))
        assert len(list(store.plans(first.run))) == 3


def test_ctrl_c_during_a_lock_wait_leaves_no_open_transaction(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    blocker = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    blocker.execute("BEGIN EXCLUSIVE")

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        blocker.execute("ROLLBACK")

    waiting = sqlite3.connect(path, isolation_level=None)
    timer = threading.Timer(0.2, interrupt)
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        with transaction(waiting):
            time.sleep(5)
    timer.join()
    assert not waiting.in_transaction
    waiting.close()
    blocker.close()


@pytest.mark.parametrize("committed", [False, True])
def test_ctrl_c_during_a_write_loses_no_other_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, committed: bool
) -> None:
    path = tmp_path / "a.db"
    calls: list[Any] = []

    @contextmanager
    def interrupted(*arguments: Any) -> Iterator[None]:
        with transaction(*arguments):
            yield
            calls.append(arguments)
            if len(calls) == 4 and not committed:
                raise KeyboardInterrupt
        if len(calls) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr("search.store.run_writer.transaction", interrupted)
    plans = run(path, count=6)
    with pytest.raises(KeyboardInterrupt):
        list(plans)
    with open_store(path) as store:
        assert len(list(store.plans())) == store.find().searches >= 2 + committed
    assert len(list(run(path, count=6))) == 6


BLOCKER = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN EXCLUSIVE")
print("locked", flush=True)
sys.stdin.readline()
"""


def test_store_locked_by_another_process_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.db"
    list(run(path, count=2))
    monkeypatch.setattr("mas_gym.internal.database.BUSY_SECONDS", 0.1)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", BLOCKER, str(path)], text=True, **pipes) as blocker:
        assert blocker.stdout is not None and blocker.stdout.readline()
        with pytest.raises(StoreError, match="locked; another process"):
            list(run(path, count=4))
        with open_store(path) as store:
            assert store.runs()[0].searches == 2
        blocker.communicate("\n")
    assert len(list(run(path, count=4))) == 4


# ---- names, locks, budgets, identities


def test_unnamed_run_can_be_named_later(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    list(run(path, count=2))
    list(run(path, count=2, run_name="rollouts"))
    with open_store(path) as store:
        assert [info.name for info in store.runs()] == ["rollouts"]
    with pytest.raises(StoreError, match="different settings: seed was 42, now 7"):
        run(path, count=2, run_name="rollouts", seed=7)
    with pytest.raises(StoreError, match="is named 'rollouts', got 'another'; use run_name='rollouts', or no run_name"):
        run(path, count=2, run_name="another")
    assert len(list(run(path, count=2))) == 2


def test_exact_name_takes_precedence_over_prefixes(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    list(run(path, count=1))
    with open_store(path) as store:
        beginning = store.find().run[:1]
    list(run(path, count=2, seed=7, run_name=beginning))
    with open_store(path) as store:
        assert store.find(beginning).searches == 2
        other = next(info for info in store.runs() if info.name is None)
        assert store.find(other.run) == other
        list(run(path, count=3, seed=8, run_name=other.run[:10]))
        assert store.find(other.run[:10]).searches == 3


TRIES = """
import sys
sys.path.insert(0, {tests!r})
import search
from mas_gym.errors import StoreError
from search_worlds import chain, problems, talker
try:
    search.run(search.MCTS(8, 3), problems(12), mas=chain(4), policy=talker(), training=True, store=sys.argv[1])
except StoreError as error:
    print(error)
"""


def another_process(path: Path) -> str:
    """The error of a second process that opens the run of `run`."""
    code = TRIES.format(tests=str(Path(__file__).parent))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code, path], env=env, capture_output=True, text=True, check=True)
    return done.stdout


def test_rejected_run_does_not_release_the_owners_lock(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    first = run(path, concurrency=2)
    next(first)
    with pytest.raises(StoreError, match="another process is writing this run"):
        run(path)
    for file in tmp_path.glob("a.db-lock*"):
        file.open("rb").close()
    assert "another process is writing this run" in another_process(path)
    assert len(list(first)) == 11
    assert another_process(path) == ""
    assert not list(tmp_path.glob("a.db-lock*")) or os.name == "nt"


def test_lock_is_held_until_its_owner_ends_despite_forks(tmp_path: Path) -> None:
    if not hasattr(os, "fork"):
        pytest.skip("forks")
    path = tmp_path / "a.db"
    lock = ExitStack()
    lock.enter_context(run_lock(path, "0" * 32))
    parent, child = os.pipe()
    if (pid := os.fork()) == 0:
        lock.close()
        os.write(child, b"closed")
        os._exit(0)
    os.read(parent, 6)
    os.waitpid(pid, 0)
    os.close(parent), os.close(child)
    with pytest.raises(StoreError), run_lock(path, "0" * 32):
        pass
    with run_lock(path, "1" * 32):
        lock.close()
    with run_lock(path, "0" * 32):
        pass


def test_leftover_lock_file_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    left = tmp_path / f"a.db-lock-{'0' * 16}"
    left.touch()
    with run_lock(path, "0" * 32):
        pass
    assert not left.exists()


def test_run_budget_includes_earlier_calls(tmp_path: Path) -> None:
    asked: list[int] = []

    def say(request: Any, seed: int) -> str:
        asked.append(seed)
        return talk(request, seed)

    say.revision = "talker"  # type: ignore[attr-defined]
    options: dict[str, Any] = {"mas": chain(2), "policy": ScriptedPolicy(say), "store": tmp_path / "a.db"}
    answered = []
    for _ in range(4):
        plans = search.run(SinglePass(), problems(9), run_budget=Budget(calls=4), concurrency=1, **options)
        answered.append(len(list(plans)))
        assert plans.stopped == "budget of 4 calls spent"
    assert len(asked) == 4 and answered == [2, 2, 2, 2]
    with open_store(tmp_path / "a.db") as store:
        assert store.find().spent.agent_calls == 4
    more = list(search.run(SinglePass(), problems(9), run_budget=Budget(calls=8), concurrency=1, **options))
    assert len(asked) == 8 and len(more) == 4


def test_usage_of_dropped_searches_is_counted(tmp_path: Path) -> None:
    options: dict[str, Any] = {"mas": chain(2), "policy": talker(), "store": tmp_path / "a.db", "concurrency": 4}
    plans = search.run("sc:5", problems(9), **options)
    first = next(plans)
    plans.stop()
    finished = sum(plan.usage.agent_calls for plan in [first, *plans])
    with open_store(tmp_path / "a.db") as store:
        assert store.find().spent.agent_calls >= plans.usage.agent_calls > finished


def test_run_stopped_by_its_progress_callback_logs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {"mas": chain(2), "policy": talker(), "store": tmp_path / "a.db"}
    plans = search.run("sc:5", problems(9), progress=lambda now: plans.stop(), **options)
    list(plans)
    assert not caplog.records


def test_run_budget_of_seconds_includes_earlier_calls(tmp_path: Path) -> None:
    options: dict[str, Any] = {"mas": RPSV, "policy": talker(), "store": tmp_path / "a.db"}
    list(search.run(SinglePass(), problems(3), **options))
    with open_store(tmp_path / "a.db") as store:
        spent = store.find().spent.seconds
    assert spent > 0
    plans = search.run(SinglePass(), problems(9), run_budget=Budget(seconds=spent), **options)
    assert len(list(plans)) <= 4 and "seconds spent" in str(plans.stopped)


class Widths:
    """A custom planner with a list among its settings."""

    def __init__(self, widths: list[int]) -> None:
        self.widths = widths

    def identity(self) -> Any:
        return self.widths

    def plan(self, model: Any, root: Any, rng: random.Random) -> Any:
        state = root
        for width in [*self.widths, 1, 1, 1, 1]:
            if model.is_terminal(state):
                break
            [proposals] = yield [search.Propose(state, width)]
            state = model.transition(state, proposals[-1].action)
        return search.Plan.single(state)


class Revised(Widths):
    def __init__(self, widths: list[int]) -> None:
        super().__init__(widths)
        self.revision = str(widths)

    identity = None  # type: ignore[assignment]


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """A minimal ask/tell library."""

    deep: bool

    def init_tree(self) -> list[Any]:
        return []

    def ask_batch(self, state: list[Any], batch_size: int, actions: list[str]) -> Any:
        parent = state[-1] if self.deep and state else None
        return state, [SimpleNamespace(trial_id=len(state), parent_state=parent)]

    def tell(self, state: list[Any], trial_id: int, result: tuple[Any, float]) -> list[Any]:
        return [*state, result[0]]


OTHERS = {
    "lists among settings": (Widths([1]), Widths([8, 8, 8, 8])),
    "revisions": (Revised([1]), Revised([8, 8])),
    "ask/tell": (search.AskTell(Algorithm(False), 6), search.AskTell(Algorithm(True), 6)),
}


@pytest.mark.parametrize("planners", OTHERS.values(), ids=OTHERS)
def test_different_planners_do_not_share_searches(tmp_path: Path, planners: Any) -> None:
    options: dict[str, Any] = {"critic": HashCritic(), "training": False, "count": 3}
    for planner in planners:
        fresh = by_problem(run(tmp_path / f"{id(planner)}.db", planner, **options))
        plans = run(tmp_path / "a.db", planner, **options)
        assert by_problem(plans) == fresh and plans.usage.agent_calls > 0
        again = run(tmp_path / "a.db", planner, **options)
        assert by_problem(again) == fresh and again.usage.agent_calls == 0


def test_different_policies_do_not_share_searches(tmp_path: Path) -> None:
    for answer in ("1", "2"):
        policy = ScriptedPolicy(functools.partial(search_sample, f"Final Answer: {answer}"))
        assert {plan.answer for plan in run(tmp_path / "a.db", count=3, policy=policy)} == {answer}


class Plain(Widths):
    identity = None  # type: ignore[assignment]


def test_component_without_identity_is_rejected_only_by_a_store(tmp_path: Path) -> None:
    planner, critic = Plain([1]), HashCritic()
    assert len(list(search.run(planner, problems(2), mas=RPSV, policy=talker()))) == 2
    with pytest.raises(IdentityError, match=r"its planner: Plain: .* with state; .*revision.* define identity\(\)"):
        run(tmp_path / "a.db", planner)
    critic.settings = {"model": threading.Lock()}
    with pytest.raises(IdentityError, match=r"its critic: HashCritic\.identity\(\)\['model'\]"):
        run(tmp_path / "a.db", critic=critic, training=False)
    with pytest.raises(IdentityError, match=r"its policy: ScriptedPolicy\.identity\(\)\['script'\]: .* \(lock\)"):
        run(tmp_path / "a.db", policy=(lambda lock: ScriptedPolicy(lambda request, seed: str(lock)))(threading.Lock()))
    assert not (tmp_path / "a.db").exists()


class Graded(list[Problem]):
    """A custom task."""

    def __init__(self, tolerance: int) -> None:
        super().__init__(problems(2))
        self.tolerance = self.revision = tolerance

    def extract(self, problem: Problem, text: str) -> str:
        return text[-1]

    def grade(self, problem: Problem, text: str) -> Grade:
        return Grade(abs(int(text[-1]) - int(problem.answer)) <= self.tolerance, text[-1], "equal")


def test_tasks_with_different_grading_do_not_share_searches(tmp_path: Path) -> None:
    options: dict[str, Any] = {"mas": RPSV, "policy": talker(), "store": tmp_path / "a.db"}
    for tolerance, right in ((9, 2), (-1, 0), (9, 2)):
        plans = list(search.run(SinglePass(), Graded(tolerance), **options))
        assert sum(bool(plan.correct) for plan in plans) == right
    with open_store(tmp_path / "a.db") as store:
        assert len(store.runs()) == 2


def test_metadata_is_loaded_unchanged(tmp_path: Path) -> None:
    choice = Problem("choice", "Which? (A) four (B) five", "B", "choice", {"options": ["four", "five"], "n": [1, {}]})
    policy = ScriptedPolicy(lambda request, seed: "Final Answer: five")
    [plan] = search.run(SinglePass(), [choice], mas=RPSV, policy=policy, store=tmp_path / "a.db")
    assert plan.correct
    with open_store(tmp_path / "a.db") as store:
        [back] = store.problems()
        assert back == choice and back.metadata == choice.metadata
        assert store.search("choice")[0].metadata == choice.metadata
        assert [grade(back, str(plan.text), "strict").correct for plan in store.plans()] == [True]


def test_unstorable_metadata_is_rejected(tmp_path: Path) -> None:
    odd = Problem("odd", "What?", "1", metadata={"lock": threading.Lock()})
    options: dict[str, Any] = {"mas": RPSV, "policy": talker()}
    assert len(list(search.run(SinglePass(), [odd], **options))) == 1
    with pytest.raises(ConfigError, match=r"'odd'.*metadata"):
        list(search.run(SinglePass(), [odd], store=tmp_path / "a.db", **options))


# ---- a full disk


TINY_DISK = """
set -e
mount -t tmpfs -o size=400k none "$1"
cd "$1"
"$2" -c "$3" small.db || true
cp small.db* "$4"
"""
FILL = """
import sys
sys.path[:0] = {paths!r}
import search
from mas_gym.errors import StoreError
from search_worlds import chain, problems, talker

options = dict(mas=chain(4), policy=talker(), training=True)
try:
    for plan in search.run(search.MCTS(8, 3), problems(60), store=sys.argv[1], **options):
        pass
except StoreError as error:
    print(error)
"""


@pytest.mark.slow
def test_full_disk_is_reported(tmp_path: Path) -> None:
    disk, kept = tmp_path / "disk", tmp_path / "kept"
    disk.mkdir(), kept.mkdir()
    code = FILL.format(paths=[str(Path(__file__).parent), *filter(None, sys.path)])
    shell = ["unshare", "--map-root-user", "--mount", "bash", "-c", TINY_DISK, "bash", str(disk), sys.executable, code]
    try:
        done = subprocess.run([*shell, str(kept)], capture_output=True, text=True, timeout=120, check=False)
    except FileNotFoundError:
        pytest.skip("unshare is not there to make a small disk with")
    if "unshare:" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no small disk can be made here: {done.stderr.strip()}")
    assert "the disk is full; free some space and run the same command again" in done.stdout, done.stderr
    with open_store(kept / "small.db") as store:
        searches = store.find().searches
    assert 0 < searches < 60
    list(run(kept / "small.db", count=60))
    list(run(tmp_path / "whole.db", count=60))
    assert rows(kept / "small.db") == rows(tmp_path / "whole.db")


def test_finished_searches_are_kept_if_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.db"
    list(run(path, count=3))
    full = FORMAT.connect(path, create=False).execute("PRAGMA page_count").fetchone()[0] + 4

    connect = Format.connect

    def small(*args: Any, **kwargs: Any) -> sqlite3.Connection:
        connection = connect(*args, **kwargs)
        # The file may not grow beyond this, and SQLite reports a full disk.
        connection.execute(f"PRAGMA max_page_count={full}")
        return connection

    monkeypatch.setattr(Format, "connect", small)
    plans = run(path, count=40)
    got = []
    with pytest.raises(StoreError, match="disk is full; free some space"):
        for plan in plans:
            got.append(plan)
    assert len(got) >= 3
    monkeypatch.undo()
    check = sqlite3.connect(path)
    assert check.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    check.close()
    list(run(path, count=40))
    list(run(tmp_path / "clean.db", count=40))
    assert rows(path) == rows(tmp_path / "clean.db")


# ---- files that are not stores


def test_files_that_are_not_stores_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no such file"):
        open_store(tmp_path / "none.db")
    text = tmp_path / "text.db"
    text.write_text("not a database, and long enough to be looked at " * 20)
    foreign = tmp_path / "foreign.db"
    execute(foreign, "CREATE TABLE t (x)")
    empty = tmp_path / "empty.db"
    empty.touch()
    for path, reason in [(text, "not a database"), (foreign, "another program"), (empty, "empty file")]:
        with pytest.raises(StoreError, match=reason):
            open_store(path)
    for path in (text, foreign, tmp_path / "no" / "folder.db"):
        before = path.read_bytes() if path.exists() else None
        with pytest.raises(StoreError):
            run(path)
        assert before is None or path.read_bytes() == before
    list(run(empty, count=1))


def test_store_of_another_schema_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    list(run(path, count=1))
    execute(path, "PRAGMA user_version=99")
    with pytest.raises(StoreError, match="expected schema 15, got 99"):
        open_store(path)
    with pytest.raises(StoreError, match="expected schema 15, got 99"):
        run(path)


# ---- export


def test_export_writes_every_search(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="exporting needs pyarrow")
    path = tmp_path / "a.db"
    plans = list(run(path))
    with open_store(path) as store:
        count = store.export(tmp_path / "a.parquet")
    table = parquet.read_table(tmp_path / "a.parquet")
    assert count == table.num_rows == sum(len(plan.tree) for plan in plans if plan.tree is not None)
    assert not list(tmp_path.glob("*.part"))
    about = json.loads(table.schema.metadata[b"mas_gym"])
    assert about["schema"] == 3 and about["config"]["seed"] == 42
    by_id = {plan.problem_id: plan.tree for plan in plans}
    for row in table.to_pylist():
        tree = by_id[row["problem"]]
        assert tree is not None
        node = tree[row["node"]]
        assert (row["visits"], row["total"], row["q"], row["value"]) == (node.visits, node.total, node.q, node.value)
        assert row["text"] == (node.state.text if row["node"] else None)
        assert row["recipients"] == list(node.state.recipients)
        assert row["speaker"] == (f"agent{node.state.speaker}" if row["node"] else None)


def test_exports_of_resumed_and_uninterrupted_runs_are_equal(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="exporting needs pyarrow")
    part = run(tmp_path / "parts.db", concurrency=2)
    next(part)
    part.close()
    list(run(tmp_path / "parts.db"))
    list(run(tmp_path / "whole.db", concurrency=1))
    tables = []
    for name in ("parts", "whole"):
        with open_store(tmp_path / f"{name}.db") as store:
            store.export(tmp_path / f"{name}.parquet")
        tables.append(parquet.read_table(tmp_path / f"{name}.parquet"))
    assert tables[0].equals(tables[1])


def test_export_loads_as_a_data_set(tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="data sets need datasets")
    list(run(tmp_path / "a.db", count=2))
    with open_store(tmp_path / "a.db") as store:
        rows = store.dataset()
    assert {"problem", "text", "q", "seed", "arm"} <= set(rows.column_names)
    assert rows[0]["question"].startswith("Question 0")


def test_dynamics_can_be_created_from_a_stored_mas(tmp_path: Path) -> None:
    list(run(tmp_path / "a.db", count=1))
    with open_store(tmp_path / "a.db") as store:
        assert Dynamics(store.find().mas).max_depth == 4


def test_concurrent_creation_of_a_store_succeeds(tmp_path: Path) -> None:
    context = forking()
    start, found = context.Barrier(3), context.Queue()
    for number in range(10):
        workers = [
            context.Process(target=open_at_once, args=(tmp_path / f"{number}.db", start, found)) for _ in range(3)
        ]
        for worker in workers:
            worker.start()
        assert [found.get(timeout=60) for _ in workers] == [""] * 3
        for worker in workers:
            worker.join()
