"""The scheduler: futures of plans from any thread, each search on its own, the same plans as `search.run`."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import itertools
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, wait
from pathlib import Path
from typing import Any

import pytest
from search_worlds import HashCritic, WholeBatches, by_problem, chain, comparable, problems, talk, talker

import search
from mas_gym.errors import ConfigError, CriticError, EngineUnavailableError, PolicyError, SearchError
from mas_gym.policies import SamplingReply, SamplingRequest, ScriptedPolicy
from mas_gym.tasks.base import Problem
from search import MCTS, Budget, Sampling, SinglePass
from search.costs import AMOUNTS
from search.engine import one_search
from search.engine.one_search import ActiveSearch
from search.engine.scheduler import Scheduler, Searched
from search.setup import RunSpec, make_setup

RPSV = chain(4)


class GatedPolicy:
    """Replies as the talker does; requests of the held questions wait until the gate opens."""

    name, max_concurrency = "talker", 4096

    def __init__(self, *held: int) -> None:
        self.gate = threading.Event()
        self.held = tuple(f"Question {number}:" for number in held)
        self.open = 0

    async def sample_async(self, request: SamplingRequest) -> SamplingReply:
        self.open += 1
        try:
            while any(question in request.messages[-1].content for question in self.held) and not self.gate.is_set():
                await asyncio.sleep(0.002)
            return talker().sample([request])[0]
        finally:
            self.open -= 1


class Background:
    """A scheduler whose event loop runs on another thread, as in the service."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler, self.loop = scheduler, asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()

    def submit(self, problem: Problem, **changed: Any) -> Future[Searched]:
        return asyncio.run_coroutine_threadsafe(self.scheduler.search(problem, **changed), self.loop)

    def __enter__(self) -> Background:
        return self

    def __exit__(self, *exc: object) -> None:
        asyncio.run_coroutine_threadsafe(self.scheduler.close(), self.loop).result(30)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(30)
        self.loop.close()


def scheduler_of(planner: Any = None, policy: Any = None, *, critic: Any = None, **options: Any) -> Scheduler:
    spec = RunSpec((), RPSV, policy or talker(), planner or MCTS(6, 2), critic or HashCritic(), **options)
    return Scheduler(make_setup(spec))


def background(*parts: Any, **options: Any) -> Background:
    return Background(scheduler_of(*parts, **options))


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


def expected(planner: Any, count: int, **options: Any) -> dict[str, Any]:
    return by_problem(search.run(planner, problems(count), mas=RPSV, policy=talker(), critic=HashCritic(), **options))


# ---- the same plans, from any thread


@pytest.mark.parametrize("policy", [talker, GatedPolicy])
def test_scheduled_searches_equal_those_of_a_run(policy: Any) -> None:
    clean = {seed: expected(MCTS(6, 2), 8, seed=seed) for seed in (1, 2)}
    with background(policy=policy(), concurrency=5) as scheduler:
        futures = [(seed, scheduler.submit(problem, seed=seed)) for problem in problems(8) for seed in (1, 2)]
        for seed, future in futures:
            plan = future.result(30).plan
            assert comparable(plan) == clean[seed][plan.problem_id]


def test_sampling_and_budget_apply_per_search() -> None:
    seen: set[tuple[float, int]] = set()

    class Listening(ScriptedPolicy):
        def sample(self, requests: Any) -> Any:
            seen.update((request.temperature, request.max_new_tokens) for request in requests)
            return super().sample(requests)

    with background(SinglePass(), Listening(talk)) as scheduler:
        first, second = problems(2)
        scheduler.submit(first, sampling=Sampling(temperature=0.25, max_new_tokens=7)).result(30)
        assert seen == {(0.25, 7)}
        short = scheduler.submit(second, budget=Budget(calls=2)).result(30).plan
        assert short.usage.agent_calls == 2
        assert scheduler.submit(second).result(30).plan.usage.agent_calls == 4


def test_submissions_from_several_threads_all_finish() -> None:
    clean = expected(SinglePass(), 500)
    futures: list[Future[Searched]] = []
    with background(SinglePass(), concurrency=16) as scheduler:

        def submit(share: list[Problem]) -> None:
            futures.extend(scheduler.submit(problem) for problem in share)

        threads = [threading.Thread(target=submit, args=(problems(500)[start::5],)) for start in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wait(futures, 60)
        assert by_problem(future.result(0).plan for future in futures) == clean
        assert scheduler.scheduler.active == 0
        assert scheduler.scheduler.usage.agent_calls == 2000


def test_searches_report_each_message() -> None:
    steps: list[tuple[str, search.Usage]] = []
    scheduler = scheduler_of(SinglePass())

    async def ask() -> search.Plan:
        found = await scheduler.search(problems(1)[0], lambda agent, usage: steps.append((agent, usage)))
        await scheduler.close()
        return found.plan

    plan = asyncio.run(ask())
    assert [agent for agent, _ in steps] == ["agent0", "agent1", "agent2", "agent3"]
    assert [usage.agent_calls for _, usage in steps] == [1, 2, 3, 4]
    assert steps[-1][1].generated_tokens == plan.usage.generated_tokens


def test_open_searches_are_bounded_by_concurrency() -> None:
    policy = GatedPolicy(*range(12))
    with background(SinglePass(), policy, concurrency=3) as scheduler:
        futures = [scheduler.submit(problem) for problem in problems(12)]
        # `submit` returns before the scheduler's thread has counted the search.
        wait_for(lambda: policy.open == scheduler.scheduler.active == 3)
        policy.gate.set()
        assert all(future.result(30).plan.error is None for future in futures)


def test_usage_is_summed_by_field() -> None:
    count = len(AMOUNTS)
    assert {*AMOUNTS, "tags"} == {field.name for field in dataclasses.fields(search.Usage)}
    first, second = search.Usage(*range(count)), search.Usage(*range(1, count + 1))
    assert first + second == search.Usage(*range(1, 2 * count, 2))
    assert (first + second) - first == second


# ---- cancellation


@pytest.mark.parametrize("concurrency", [2, 8])
def test_cancelling_does_not_affect_other_searches(concurrency: int) -> None:
    clean, policy = expected(MCTS(6, 2), 6), GatedPolicy(0, 3)
    with background(policy=policy, concurrency=concurrency) as scheduler:
        futures = [scheduler.submit(problem) for problem in problems(6)]
        wait_for(lambda: policy.open > 0)
        assert futures[0].cancel() and futures[3].cancel()
        others = by_problem(futures[i].result(30).plan for i in (1, 2, 4, 5))
        assert others == {name: plan for name, plan in clean.items() if name in others}
        wait_for(lambda: policy.open == 0)
        assert not futures[1].cancel() and futures[0].cancelled()
        with pytest.raises(CancelledError):
            futures[0].result(0)
        # A cancelled problem can be searched again.
        policy.gate.set()
        assert comparable(scheduler.submit(problems(1)[0]).result(30).plan) == clean["toy/0"]


def test_search_cancelled_as_the_scheduler_closes_ends_as_cancelled() -> None:
    scheduler = scheduler_of(policy=GatedPolicy(0))

    async def cancel() -> None:
        task = asyncio.ensure_future(scheduler.search(problems(1)[0]))
        while not scheduler.active:
            await asyncio.sleep(0)
        task.cancel()
        await scheduler.close()
        assert task.cancelled()

    asyncio.run(cancel())


def test_cancelled_search_is_released_from_memory_and_engine() -> None:
    def alive() -> int:
        gc.collect()
        return sum(type(thing) is ActiveSearch for thing in gc.get_objects())

    before, policy = alive(), GatedPolicy(*range(20))
    with background(policy=policy, concurrency=10) as scheduler:
        futures = [scheduler.submit(problem) for problem in problems(20)]
        wait_for(lambda: policy.open == 10)
        for future in futures:
            future.cancel()
        wait_for(lambda: policy.open == scheduler.scheduler.active == 0)
        # A cancelled future holds the traceback of its task.
        del futures, future
        wait_for(lambda: alive() <= before)


def test_cancelled_search_is_removed_from_engine_batches() -> None:
    asked: list[str] = []

    class Listening(ScriptedPolicy):
        def sample(self, requests: Any) -> Any:
            asked.extend(request.messages[-1].content for request in requests)
            return super().sample(requests)

    class Slow(Listening):
        def sample(self, requests: Any) -> Any:
            if len(asked) == 1:
                # The first request is answered, two more are with the engine.
                futures[3].cancel()
            return super().sample(requests)

    futures: list[asyncio.Task[Searched]] = []

    async def ask() -> None:
        scheduler = scheduler_of(SinglePass(), Slow(talk, max_batch=1))
        futures.extend(asyncio.create_task(scheduler.search(problem)) for problem in problems(5))
        await asyncio.wait(futures)
        await scheduler.close()

    asyncio.run(ask())
    assert len(asked) == 4 * 4 and not any("Question 3:" in content for content in asked)


def test_states_of_a_cancelled_search_are_not_scored() -> None:
    critic = HashCritic()

    class Cancels(ScriptedPolicy):
        def sample(self, requests: Any) -> Any:
            if len(scored) == 1:
                scored[0].cancel()
            return super().sample(requests)

    scored: list[asyncio.Task[Searched]] = []

    async def ask() -> None:
        scheduler = scheduler_of(search.SelfConsistency(1, "critic"), critic=critic, policy=Cancels(talk, max_batch=1))
        scored.append(asyncio.create_task(scheduler.search(problems(1)[0])))
        await asyncio.wait(scored)
        await scheduler.close()

    asyncio.run(ask())
    assert scored[0].cancelled() and critic.batches == []


# ---- faults


def test_exceptions_affect_one_search_and_keep_their_traceback() -> None:
    class Fragile(MCTS):
        def plan(self, model: Any, root: Any, rng: Any) -> Any:
            if "Question 2:" in root.question:
                raise ZeroDivisionError("planner bug")
            return super().plan(model, root, rng)

    clean = expected(MCTS(6, 2), 5)
    with background(Fragile(6, 2)) as scheduler:
        futures = {problem.id: scheduler.submit(problem) for problem in problems(5)}
        failed = futures.pop("toy/2")
        assert {name: comparable(future.result(30).plan) for name, future in futures.items()} == {
            name: plan for name, plan in clean.items() if name != "toy/2"
        }
        plan = failed.result(30).plan
    assert re.fullmatch(r"ZeroDivisionError: planner bug \(test_scheduler.py, line \d+\)", str(plan.error))
    assert isinstance(failed.result(30).failure, ZeroDivisionError)
    assert plan.error_details is not None
    assert "Traceback" in plan.error_details and "test_scheduler.py" in plan.error_details


def test_progress_callback_that_raises_fails_only_its_search() -> None:
    def broken(agent: str, usage: search.Usage) -> None:
        raise RuntimeError("callback bug")

    with background(SinglePass()) as scheduler:
        first, second = scheduler.submit(problems(2)[0], on_message=broken), scheduler.submit(problems(2)[1])
        assert "callback bug" in (first.result(30).plan.error or "") and second.result(30).plan.error is None


@pytest.mark.parametrize("error", [EngineUnavailableError("the server is gone"), RuntimeError("out of memory")])
def test_engine_failure_ends_open_searches_and_later_ones_run(error: Exception) -> None:
    class Flaky(ScriptedPolicy):
        broken = True

        def sample(self, requests: Any) -> Any:
            if self.broken:
                raise error
            return super().sample(requests)

        def open(self) -> Any:
            return Session(self)

    class Session(WholeBatches):
        def close(self) -> None:
            if policy.broken:
                raise RuntimeError("the engine cannot close either")
            super().close()

    policy = Flaky(talk)
    with background(SinglePass(), policy) as scheduler:
        futures = [scheduler.submit(problem) for problem in problems(3)]
        for future in futures:
            with pytest.raises(type(error), match=str(error)):
                future.result(30)
        policy.broken = False
        assert comparable(scheduler.submit(problems(1)[0]).result(30).plan) == expected(SinglePass(), 1)["toy/0"]


def test_deadlines_apply_per_search() -> None:
    policy = GatedPolicy(0, 1)
    with background(SinglePass(), policy) as scheduler:
        short, long = (
            scheduler.submit(problem, budget=Budget(seconds=seconds))
            for problem, seconds in zip(problems(2), (0.2, 60.0), strict=True)
        )
        assert "budget of 0.2 seconds spent" in (short.result(30).plan.error or "")
        wait_for(lambda: policy.open == 1)
        assert not long.done()
        policy.gate.set()
        assert long.result(30).plan.error is None


@pytest.mark.parametrize("planner", ["bon:9", "mcts:9,3", "adaptive:9", "cascade:single>bon:9@1"])
def test_clock_jump_ends_only_the_open_search(planner: str, monkeypatch: Any) -> None:
    ahead, asked = 0.0, 0

    def jumping(request: Any, seed: int) -> str:
        nonlocal ahead, asked
        asked += 1
        ahead = 3600.0 if asked > 60 else 0.0
        return talk(request, seed)

    monkeypatch.setattr(one_search, "perf_counter", lambda: time.perf_counter() + ahead)
    options: dict[str, Any] = {"mas": chain(3), "critic": HashCritic(), "concurrency": 1}
    policy = ScriptedPolicy(jumping, "talker", 1)
    plans = list(search.run(planner, problems(6), policy=policy, budget=Budget(seconds=600), **options))
    assert [plan.stopped for plan in plans].count("budget of 600 seconds spent") == 1
    for plan in plans:
        # A search without an answer by then has a clear error.
        assert plan.answer is not None or plan.error == "BudgetError: budget of 600 seconds spent"
    assert len(plans) == 6 and sum(plan.error is not None for plan in plans) <= 1


# ---- ends


def test_closing_ends_open_and_waiting_searches() -> None:
    policy = GatedPolicy(*range(6))
    with background(SinglePass(), policy, concurrency=2) as scheduler:
        futures = [scheduler.submit(problem) for problem in problems(6)]
        wait_for(lambda: policy.open == 2)
        for _ in range(2):
            asyncio.run_coroutine_threadsafe(scheduler.scheduler.close(), scheduler.loop).result(30)
        for future in futures:
            with pytest.raises(SearchError, match="closed"):
                future.result(30)
        assert scheduler.scheduler.active == 0
        wait_for(lambda: policy.open == 0)
        with pytest.raises(SearchError, match="expected an open scheduler"):
            scheduler.submit(problems(1)[0]).result(30)


def test_run_works_inside_a_running_event_loop(tmp_path: Path) -> None:
    async def cell() -> dict[str, Any]:
        return expected(MCTS(6, 2), 8, store=tmp_path / "runs.db")

    assert asyncio.run(cell()) == expected(MCTS(6, 2), 8)


def test_synchronous_policies_and_critics_may_run_their_own_event_loop() -> None:
    async def later(work: Any) -> Any:
        await asyncio.sleep(0)
        return work()

    class Nested(ScriptedPolicy):
        def sample(self, requests: Any) -> Any:
            return asyncio.run(later(lambda: super(Nested, self).sample(requests)))

    class Scoring(HashCritic):
        def score(self, contexts: Any) -> Any:
            return asyncio.run(later(lambda: super(Scoring, self).score(contexts)))

    plans = search.run(MCTS(6, 2), problems(3), mas=RPSV, policy=Nested(talk, "talker"), critic=Scoring())
    assert by_problem(plans) == expected(MCTS(6, 2), 3)


# ---- problems


def test_iterator_error_ends_the_run() -> None:
    def source() -> Iterator[Problem]:
        yield from problems(1)
        raise OSError("the file is gone")

    with pytest.raises(OSError, match="the file is gone"):
        list(search.run(SinglePass(), source(), mas=RPSV, policy=talker()))


def test_stored_problems_can_be_searched_again(tmp_path: Path) -> None:
    run = search.run(SinglePass(), problems(3), mas=RPSV, policy=talker(), store=tmp_path / "runs.db")
    assert len(list(run)) == 3
    with search.open_store(tmp_path / "runs.db") as store:
        plans = list(search.run(SinglePass(), store.problems(), mas=RPSV, policy=talker()))
    assert sorted(plan.problem_id for plan in plans) == ["toy/0", "toy/1", "toy/2"]


# ---- errors that are raised, and what breaks the protocol


def test_plan_errors_can_be_raised(tmp_path: Path) -> None:
    def script(request: Any, seed: int) -> str:
        if "Question 1:" in request.messages[-1].content:
            raise PolicyError("no more")
        return talk(request, seed)

    options: dict[str, Any] = {"mas": RPSV, "policy": ScriptedPolicy(script, "talker", 1), "concurrency": 1}
    run = search.run(SinglePass(), problems(3), store=tmp_path / "runs.db", raise_errors=True, **options)
    assert next(run).problem_id == "toy/0"
    with pytest.raises(PolicyError, match="no more") as caught:
        next(run)
    assert any(entry.name == "script" for entry in caught.traceback)
    assert run.stopped == "no more" and list(run) == []
    with search.open_store(tmp_path / "runs.db") as store:
        errors = {plan.problem_id: plan.error for plan in store.plans(failed=True)}
    assert errors.keys() == {"toy/0", "toy/1"} and errors["toy/0"] is None
    assert str(errors["toy/1"]).startswith("PolicyError: no more (test_scheduler.py, line ")


def test_critic_with_only_a_score_method_gets_defaults() -> None:
    class Plain:
        def score(self, contexts: Any) -> list[float]:
            return [0.0 for _ in contexts]

    [plan] = search.run(MCTS(2, 2), problems(1), mas=RPSV, policy=talker(), critic=Plain())  # type: ignore[arg-type]
    assert plan.error is None and plan.usage.reward_calls > 0
    for part, got in ((object(), "got object"), (Plain, "got the class Plain"), ("tiny-masprm", "load_critic")):
        with pytest.raises(ConfigError, match=got):
            search.run(MCTS(2, 2), problems(1), mas=RPSV, policy=talker(), critic=part)  # type: ignore[arg-type]


def test_error_for_a_none_score_names_the_expected_value() -> None:
    class Mute(HashCritic):
        def score(self, contexts: Any) -> Any:
            return [None for _ in contexts]

    with pytest.raises(CriticError, match="no value for the state after turn 1: expected a finite number, got None"):
        list(search.run(MCTS(2, 2), problems(1), mas=RPSV, policy=talker(), critic=Mute(), raise_errors=True))


class Loop:
    """A planner that yields the same requests for ever."""

    def __init__(self, requests: Callable[[Any], Any]) -> None:
        self.requests = requests

    def plan(self, model: Any, root: Any, rng: Any) -> Any:
        for _ in itertools.count():
            yield self.requests(root)


def test_yielding_a_request_outside_a_list_raises_an_error_that_suggests_a_fix() -> None:
    [plan] = search.run(Loop(search.Propose), problems(1), mas=RPSV, policy=talker())
    assert "got Propose; write `yield [request]`" in (plan.error or "")


@pytest.mark.parametrize("requests", [lambda root: [], lambda root: [search.Extract([root])]])
def test_search_without_new_requests_ends_with_an_error(requests: Any) -> None:
    plans = list(search.run(Loop(requests), problems(2), mas=RPSV, policy=talker()))
    assert all("100,000 consecutive rounds without a new request" in (plan.error or "") for plan in plans)
