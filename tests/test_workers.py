"""Comparisons in worker processes: the same rows, Ctrl-C, processes that die, what does not pickle."""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
from search_worlds import HashCritic, chain, problems, talk, talker
from typer.testing import CliRunner

import search
from mas_gym.cli import app
from mas_gym.cli.worker_processes import read_workers
from mas_gym.errors import ConfigError, SearchError
from mas_gym.internal.parallel_jobs import run_jobs
from mas_gym.policies import ScriptedPolicy
from search.compare.comparison_runs import Row, measure
from search.compare.worker_runs import Workers, measure_in_workers
from search.plan import Plan
from search.planners import MCTS
from search.results.outcomes import Outcome
from search.setup import RunSpec


def critic_maker(spec: str) -> Callable[[], HashCritic]:
    return HashCritic


def workers(processes: int = 2, make_policy: Callable[[], Any] = talker) -> Workers:
    return Workers(processes, make_policy, critic_maker)


def rows() -> list[Row]:
    mcts = Row("mcts:4,2", search.load_planner("mcts:4,2"), HashCritic(), "hash", "hash")
    return [Row("single", search.load_planner("single")), Row("sc:3", search.load_planner("sc:3")), mcts]


SEEDS = (1, 2)


def spec(**settings: Any) -> RunSpec:
    return RunSpec(**{"problems": problems(6), "mas": chain(3), "policy": talker(), "concurrency": 8, **settings})


def untimed(outcomes: list[Outcome]) -> list[Outcome]:
    return [outcome._replace(seconds=0.0) for outcome in outcomes]


def dies_at(path: Path, question: str) -> ScriptedPolicy:
    """Kills its process at the first request for a question."""

    def talk_or_die(request: Any, seed: int) -> str:
        if question in request.messages[-1].content and not path.exists():
            path.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return talk(request, seed)

    talk_or_die.revision = 1  # type: ignore[attr-defined]
    return ScriptedPolicy(talk_or_die, "talker", 1)


def fails() -> ScriptedPolicy:
    raise RuntimeError("no model here")


@dataclass(frozen=True)
class Unpicklable(MCTS):
    pass


Unpicklable.__qualname__ = "nowhere"


def test_workers_give_the_same_rows_as_one_process(tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    seen: list[tuple[str, str]] = []
    done: dict[tuple[str, int], int] = {}

    def look(row: Row, plan: Plan) -> None:
        seen.append((row.label, plan.problem_id))

    def listen(label: str, seed: int, now: search.Progress) -> None:
        done[label, seed] = now.done

    alone, _ = measure(rows(), spec(), SEEDS)
    shared, stop = measure_in_workers(workers(), rows(), spec(policy=None, store=store), SEEDS, look, listen)
    assert stop is None
    assert untimed(shared) == untimed(alone)
    assert len(seen) == 36 and set(done.values()) == {6} and len(done) == 6
    stored: list[int] = []
    again, stop = measure(rows(), spec(store=store), SEEDS, listen=lambda label, seed, now: stored.append(now.stored))
    assert stop is None and untimed(again) == untimed(alone) and stored[-1] == 6


def test_ctrl_c_ends_all_processes_and_keeps_finished_searches(tmp_path: Path) -> None:
    seen: list[str] = []

    def look(row: Row, plan: Plan) -> None:
        seen.append(plan.problem_id)
        if len(seen) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    store = tmp_path / "runs.db"
    long = spec(problems=problems(400), policy=None, store=store)
    outcomes, stop = measure_in_workers(workers(), rows(), long, SEEDS, look)
    assert isinstance(stop, KeyboardInterrupt)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert 3 <= len(outcomes) == len(seen) < 2400
    # Which process is the first to finish searches depends on the machine.
    finished = Counter(outcome.seed for outcome in outcomes)
    seed, count = finished.most_common(1)[0]
    stored: dict[str, int] = {}
    _, stop = measure(
        rows()[2:],
        replace(long, policy=talker(), seed=seed),
        listen=lambda a, s, now: stored.update(a=now.stored),
    )
    assert stop is None and stored["a"] >= count


def test_dead_process_is_reported_and_repeating_the_call_resumes(tmp_path: Path) -> None:
    mark, store = tmp_path / "died", tmp_path / "runs.db"
    deadly = workers(make_policy=partial(dies_at, mark, "what is 5 modulo"))
    outcomes, stop = measure_in_workers(deadly, rows(), spec(policy=None, store=store, concurrency=1), SEEDS)
    assert isinstance(stop, SearchError) and "killed by signal 9" in str(stop) and "to resume" in str(stop)
    assert len(outcomes) >= 5
    again, stop = measure_in_workers(deadly, rows(), spec(policy=None, store=store), SEEDS)
    assert stop is None
    assert untimed(again) == untimed(measure(rows(), spec(), SEEDS)[0])


def test_worker_error_contains_the_original_error() -> None:
    outcomes, stop = measure_in_workers(workers(make_policy=fails), rows(), spec(policy=None), SEEDS)
    assert outcomes == [] and isinstance(stop, SearchError)
    assert "RuntimeError: no model here" in str(stop) and "in fails" in stop.__notes__[0]


@pytest.fixture
def no_server() -> Iterator[None]:
    """The process that others are forked from is started by the test, and gone after it."""
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    yield
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


def says_what_it_has() -> Callable[..., None]:
    known = "wave" in sys.modules
    return lambda job, report: report((known, os.environ.get("MAS_GYM_WAVE"), os.getpid()))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, each process does its own imports")
@pytest.mark.usefixtures("no_server")
def test_workers_share_imports_and_see_the_current_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    for value in ("first", "second"):
        monkeypatch.setenv("MAS_GYM_WAVE", value)
        stop = run_jobs([0, 1, 2], says_what_it_has, 2, lambda index, message: found.append(message), ["wave"])
        assert stop is None
    assert [(known, value) for known, value, _ in found] == [(True, "first")] * 3 + [(True, "second")] * 3
    assert "wave" not in sys.modules and len({process for *_, process in found}) >= 3


def test_concurrency_limit_is_divided_among_worker_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[RunSpec] = []

    def run_none(jobs: Any, prepare: Any, *rest: Any) -> None:
        seen.append(prepare.args[0])

    monkeypatch.setattr(sys.modules["search.compare.worker_runs"], "run_jobs", run_none)
    for concurrency in (64, 1):
        measure_in_workers(workers(4), rows(), spec(policy=None, concurrency=concurrency), SEEDS)
    assert [shared.concurrency for shared in seen] == [16, 1]


def test_unpicklable_components_are_rejected() -> None:
    with pytest.raises(ConfigError, match="pickle"):
        measure_in_workers(workers(), [Row("mine", Unpicklable(4, 2), HashCritic(), "hash", "hash")], spec(), SEEDS)
    with pytest.raises(ConfigError, match="name of a critic"):
        measure_in_workers(
            workers(), [Row("mcts", search.load_planner("mcts:4,2"), HashCritic(), "hash")], spec(), SEEDS
        )


def test_small_local_models_use_one_process_per_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mas_gym.cli.worker_processes._cores", lambda: 4)
    rows = [Row("single", search.load_planner("single")), Row("sc:3", search.load_planner("sc:3"))] * 3

    def count(policy: Any, problems: int = 200, wanted: int | None = None, rows: list[Row] = rows) -> int:
        found = read_workers(wanted, policy, rows, problems)
        return 1 if found is None else found.processes

    assert count("tiny") == 4 and count("tiny", problems=20) == 2 and count("tiny", problems=2) == 1
    assert count("openai:m@http://localhost/v1") == count({"*": "tiny"}) == count("transformers:no/such") == 1
    assert count("tiny", wanted=9) == 6 and count("tiny", wanted=1) == 1
    guided = Row("mcts:4,2", search.load_planner("mcts:4,2"), HashCritic(), "hash", "vllm:large")
    assert count("tiny", rows=[*rows, guided]) == 1
    assert count("tiny", rows=[*rows, replace(guided, critic_spec="tiny-masprm")]) == 4
    own = Row("mine", Unpicklable(4, 2), HashCritic(), "hash", "tiny-orm")
    assert count("tiny", rows=[*rows, own]) == 1


def test_eval_rejects_workers_with_single_process_options() -> None:
    command = ["eval", "-n", "2", "--workers", "2", "--cache", "replies.db", "--policy", "tiny"]
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, command)
    said = " ".join(result.output.split())
    assert result.exit_code != 0 and "--workers: cannot be combined with --cache" in said
