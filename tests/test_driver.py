"""Runs: results independent of concurrent searches, exact usage, and isolated errors."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from search_worlds import HashCritic, by_problem, chain, comparable, problems, talk, talker

import search
from mas_gym.errors import ConfigError, DataError, EngineUnavailableError, PolicyError
from mas_gym.internal.event_loop import from_thread
from mas_gym.policies import Sample, SamplingReply, SamplingRequest, ScriptedPolicy
from mas_gym.policies.batch_queue import as_policy, sample_all
from mas_gym.systems.prompts import ChatMessage
from mas_gym.systems.state import Action
from mas_gym.tasks.base import Problem
from search import (
    MCTS,
    PUCT,
    REBASE,
    AdaptiveBranching,
    BestOfN,
    Budget,
    ConstantCritic,
    PolicyLikelihood,
    SelfConsistency,
    SinglePass,
    StepBeamSearch,
)
from search.engine.scheduler import Scheduler

RPSV = chain(4)
PLANNERS: list[Any] = [
    SinglePass(),
    SelfConsistency(5),
    SelfConsistency(5, "critic"),
    BestOfN(3),
    StepBeamSearch(5, 3),
    MCTS(10, 3),
    MCTS(10, 3, leaf="bootstrap"),
    PUCT(10, 3),
    REBASE(6),
    AdaptiveBranching(12),
]


class AsyncTalker:
    """The talker behind awaits of uneven length, so that replies overtake each other."""

    name = "talker"

    def __init__(self, max_concurrency: int = 7) -> None:
        self.max_concurrency, self.open, self.most = max_concurrency, 0, 0

    async def sample_async(self, request: Any) -> SamplingReply:
        self.open += 1
        self.most = max(self.most, self.open)
        await asyncio.sleep(random.random() * 0.002)
        self.open -= 1
        return talker().sample([request])[0]


class StreamingTalker:
    """The talker with a continuous session that answers a few requests per step, newest first."""

    name = "talker"

    def __init__(self, max_batch: int = 8) -> None:
        self.max_batch, self.steps, self.rows, self.open_sessions = max_batch, 0, 0, 0

    def sample(self, requests: Sequence[Any]) -> list[SamplingReply]:
        return talker().sample(requests)

    def open(self) -> Any:
        return _Session(self)


class Counting(ScriptedPolicy):
    """Remembers the requests and replies of each batch."""

    def __init__(self, script: Any = talk, max_batch: int = 16) -> None:
        super().__init__(script, "talker", max_batch)
        self.batches: list[Sequence[Any]] = []
        self.replies: list[SamplingReply] = []

    def sample(self, requests: Any) -> Any:
        replies = super().sample(requests)
        self.batches.append(requests)
        self.replies += replies
        return replies


class _Session:
    def __init__(self, policy: StreamingTalker) -> None:
        self._policy, self._queue, self.pending = policy, [], 0
        policy.open_sessions += 1

    def submit(self, key: Any, request: Any) -> None:
        self._queue.append((key, request))
        self.pending += len(request.seeds)

    def step(self) -> list[Any]:
        self._policy.steps += 1
        done = [self._queue.pop() for _ in range(min(3, len(self._queue)))]
        self.pending -= sum(len(request.seeds) for _, request in done)
        self._policy.rows += sum(len(request.seeds) for _, request in done)
        return [(key, talker().sample([request])[0]) for key, request in done]

    def close(self) -> None:
        self._queue.clear()
        self._policy.open_sessions -= 1


def run(planner: Any, count: int = 12, *, policy: Any = None, critic: Any = None, **options: Any) -> search.Run:
    critic = HashCritic() if critic is None else critic
    options.setdefault("mas", RPSV)
    return search.run(planner, problems(count), policy=policy or talker(), critic=critic, **options)


# ---- results independent of concurrent searches


@pytest.mark.parametrize("planner", PLANNERS, ids=str)
def test_results_are_independent_of_concurrent_searches(planner: Any) -> None:
    reference = by_problem(run(planner, concurrency=1, policy=talker(1)))
    others = [
        run(planner, concurrency=64, policy=talker(256)),
        run(planner, concurrency=5, policy=talker(3)),
        run(planner, concurrency=9, policy=StreamingTalker()),
        run(planner, concurrency=16, policy=AsyncTalker()),
        run(planner, concurrency=16, critic=HashCritic(max_batch=1)),
        run(planner, concurrency=16, critic=HashCritic(concurrent=True)),
        run(planner, concurrency=16, critic=HashCritic(concurrent=True), policy=AsyncTalker(64)),
    ]
    for other in others:
        assert by_problem(other) == reference


def test_problems_do_not_influence_each_other() -> None:
    whole = by_problem(run(MCTS(10, 3), 12))
    alone = by_problem(
        search.run(MCTS(10, 3), problems(12)[5:6], mas=RPSV, policy=talker(), critic=HashCritic(), concurrency=1)
    )
    assert alone["toy/5"] == whole["toy/5"]


def test_results_differ_by_seed_and_problem() -> None:
    a, b = by_problem(run(SinglePass(), seed=1)), by_problem(run(SinglePass(), seed=2))
    assert a != b
    assert len({plan["tree"]["texts"][-1] for plan in a.values()}) > 1


def test_planners_receive_equal_samples_for_equal_requests() -> None:
    single = by_problem(run(SinglePass()))
    five = by_problem(run(SelfConsistency(5)))
    for name, plan in single.items():
        assert plan["tree"]["texts"][0] in five[name]["tree"]["texts"]


def test_repeated_proposals_at_a_state_give_new_samples() -> None:
    seen: list[list[str]] = []

    class Again(SinglePass):
        def plan(self, model: Any, root: Any, rng: Any) -> Any:
            for n in (2, 3):
                [proposals] = yield [search.Propose(root, n)]
                seen.append([p.action.text for p in proposals])
            [first, second] = yield [search.Propose(root, 2), search.Propose(root, 1)]
            seen.append([p.action.text for p in [*first, *second]])
            return (yield from super().plan(model, root, rng))

    policy = Counting()
    list(run(Again(), 1, policy=policy))
    seeds = [seed for batch in policy.batches for request in batch for seed in request.seeds]
    assert [len(texts) for texts in seen] == [2, 3, 3]
    assert len(seeds) == len(set(seeds)) == 8 + 4


# ---- usage


@pytest.mark.parametrize("planner", PLANNERS, ids=str)
def test_usage_is_exact(planner: Any) -> None:
    policy, critic = Counting(), HashCritic()
    plans = list(run(planner, policy=policy, critic=critic))
    total = sum((plan.usage for plan in plans), search.Usage())
    tokens = [sample.tokens for reply in policy.replies for sample in reply.samples]
    assert (total.agent_calls, total.generated_tokens) == (len(tokens), sum(tokens))
    assert total.reward_calls == sum(critic.batches)
    last = [plan.anytime[-1] for plan in plans]
    assert all(m.agent_calls <= plan.usage.agent_calls for m, plan in zip(last, plans, strict=True))


@pytest.mark.parametrize(
    "planner", [SelfConsistency(5, "critic"), StepBeamSearch(5, 3), StepBeamSearch(5, 1), BestOfN(5)], ids=str
)
def test_agent_calls_equal_reward_calls_plus_duplicates(planner: Any) -> None:
    for plan in run(planner):
        assert plan.usage.reward_calls + plan.usage.reward_hits == plan.usage.agent_calls


def test_merged_duplicates_are_counted_in_usage() -> None:
    policy = ScriptedPolicy(lambda request, seed: "Final Answer: 1")
    [plan] = run(MCTS(10, 3), 1, policy=policy)
    assert plan.usage.agent_calls == 12
    assert plan.usage.generated_tokens == 36
    assert plan.usage.reward_calls == 4


def test_policy_likelihood_costs_no_calls_and_equals_its_formula() -> None:
    [plan] = run(BestOfN(2), 1, critic=PolicyLikelihood())
    assert plan.usage.reward_calls == 0 and plan.tree is not None
    assert plan.tree[1].value == pytest.approx(0.2689414)


def test_outcome_critic_scores_only_terminal_states() -> None:
    class Outcome(HashCritic):
        terminal_only = True

        def score(self, contexts: Any) -> list[float]:
            assert all(context.mas.sink == context.state.acting for context in contexts)
            return super().score(contexts)

    for plan in run(MCTS(10, 3), critic=Outcome()):
        assert plan.error is None and plan.usage.reward_calls <= 10
    for plan in run(SelfConsistency(5, "critic"), critic=Outcome()):
        assert plan.usage.reward_calls + plan.usage.reward_hits == 5


def test_equal_prompts_of_one_search_share_a_request() -> None:
    policy = Counting(lambda request, seed: "same", max_batch=64)
    [plan] = run(SelfConsistency(5), 1, policy=policy)
    assert len(policy.replies) == 4 and plan.usage.agent_calls == 20


# ---- full engines


def test_batches_are_full_while_requests_are_pending() -> None:
    policy = Counting(max_batch=24)
    list(run(MCTS(10, 3), 64, policy=policy, concurrency=32))
    sizes = [sum(len(request.seeds) for request in batch) for batch in policy.batches]
    assert sum(size for size in sizes if size == 24) > 0.9 * sum(sizes)


def test_states_of_many_searches_share_a_critic_batch() -> None:
    critic = HashCritic()
    list(run(MCTS(10, 3), 64, critic=critic, concurrency=64, policy=talker(64)))
    assert sum(critic.batches) / len(critic.batches) > 30


def test_generation_continues_while_a_critic_scores() -> None:
    class Slow(HashCritic):
        concurrent, scoring = True, False

        def score(self, contexts: Any) -> list[float]:
            self.scoring = True
            time.sleep(0.01)
            values = super().score(contexts)
            self.scoring = False
            return values

    class Watching(AsyncTalker):
        async def sample_async(self, request: Any) -> SamplingReply:
            during.append(critic.scoring)
            return await super().sample_async(request)

    during: list[bool] = []
    critic = Slow()
    list(run(StepBeamSearch(3, 2), 24, policy=Watching(8), critic=critic, concurrency=24))
    # A single search requests at most six values at a time.
    assert during.count(True) > 10 and sum(critic.batches) / len(critic.batches) > 6


def test_open_searches_are_bounded_by_concurrency() -> None:
    policy = AsyncTalker(5)
    seen: list[int] = []
    list(run(MCTS(4, 2), 20, policy=policy, concurrency=3, progress=lambda p: seen.append(p.open)))
    assert max(seen) <= 3 and policy.most <= 5


def test_problems_are_read_lazily_as_searches_start() -> None:
    taken = 0

    def source() -> Any:
        nonlocal taken
        for problem in problems(1000):
            taken += 1
            yield problem

    plans = search.run(SinglePass(), source(), mas=RPSV, policy=talker(), concurrency=4)
    next(plans)
    plans.close()
    assert taken <= 5


# ---- what must not be reached


class Peek:
    """A planner that wants to know the true reward."""

    def plan(self, model: Any, root: Any, rng: Any) -> Any:
        state = root
        while not model.is_terminal(state):
            [[proposal]] = yield [search.Propose(state)]
            state = model.transition(state, proposal.action)
        [[reward]] = yield [search.Reward([state])]
        return search.Plan.single(state, reward)


def test_planners_do_not_receive_the_true_reward_at_evaluation() -> None:
    for plan in run(Peek(), 3):
        assert plan.error is not None and "unavailable during evaluation" in plan.error
    for plan in run(MCTS(5, 2, values="reward"), 2):
        assert plan.error is not None and "unavailable during evaluation" in plan.error
    for plan in run(Peek(), 3, training=True):
        assert plan.best is not None and plan.best.score == (1.0 if plan.correct else -1.0)


def test_planners_do_not_receive_the_reference() -> None:
    secret = "reference-7319"
    held: list[Any] = []

    class Collect(SinglePass):
        def plan(self, model: Any, root: Any, rng: Any) -> Any:
            held.extend([vars(model), root.to_dict(), rng.getstate()])
            [answers] = yield [search.Extract([root])]
            held.append(answers)
            return (yield from super().plan(model, root, rng))

    list(search.run(Collect(), [Problem("p", "What?", secret)], mas=RPSV, policy=talker()))
    assert secret not in repr(held)


def test_training_rewards_are_graded_by_the_task() -> None:
    for plan in run(MCTS(40, 3), 4, critic=ConstantCritic(), training=True):
        assert plan.tree is not None
        values = {node.state.text[-1]: node.value for node in plan.tree if node.value is not None}
        answer = str(int(plan.problem_id.split("/")[1]) % 4)
        assert values and all((value == 1.0) == (text == answer) for text, value in values.items())


# ---- isolated errors


def only(problem: int, error: Callable[[], BaseException]) -> Callable[[Any, int], str]:
    def script(request: Any, seed: int) -> str:
        if f"Question {problem}:" in request.messages[-1].content:
            raise error()
        return talk(request, seed)

    return script


@pytest.mark.parametrize("shape", ["batch", "async"])
def test_failed_request_fails_only_its_search(shape: str) -> None:
    clean = by_problem(run(MCTS(6, 2)))
    broken: Any = ScriptedPolicy(only(3, lambda: PolicyError("no more")), "talker", 16)
    if shape == "async":
        inner = broken

        class Async:
            name, max_concurrency = "talker", 8

            async def sample_async(self, request: Any) -> Any:
                return inner.sample([request])[0]

        broken = Async()
    plans = by_problem(run(MCTS(6, 2), policy=broken))
    failed = plans.pop("toy/3")
    assert "no more" in failed["error"] and failed["correct"] is False
    del clean["toy/3"]
    assert plans == clean


@pytest.mark.parametrize(
    ("critic", "message"),
    [
        (lambda state: float("nan"), "finite number, got nan"),
        (lambda state: 1 / 0, "division"),
    ],
)
@pytest.mark.parametrize("concurrent", [False, True])
def test_critic_error_fails_only_its_search(critic: Any, message: str, concurrent: bool) -> None:
    class Faulty(HashCritic):
        def score(self, contexts: Any) -> Any:
            return [
                critic(c.state) if "Question 3:" in c.state.question and c.state.depth == 2 else value
                for c, value in zip(contexts, super().score(contexts), strict=True)
            ]

    clean = by_problem(run(MCTS(6, 2)))
    plans = by_problem(run(MCTS(6, 2), critic=Faulty(concurrent=concurrent)))
    assert message in plans.pop("toy/3")["error"]
    del clean["toy/3"]
    assert plans == clean


def test_critic_with_too_few_values_fails_the_search() -> None:
    class Short(HashCritic):
        def score(self, contexts: Any) -> list[float]:
            return super().score(contexts)[1:]

    assert all("expected" in (plan.error or "") for plan in run(MCTS(2, 2), 3, critic=Short()))


def test_policy_likelihood_requires_logprobs() -> None:
    mute = ScriptedPolicy(lambda request, seed: Sample("Final Answer: 1", 3, None, "stop"))
    assert all(
        "policy-likelihood" in (p.error or "") for p in run(BestOfN(2), 2, policy=mute, critic=PolicyLikelihood())
    )

    class Own:
        def plan(self, model: Any, root: Any, rng: Any) -> Any:
            yield [search.Evaluate([model.transition(root, Action("mine", model.mas.ALL))])]

    assert all("policy-likelihood" in (p.error or "") for p in run(Own(), 2, critic=PolicyLikelihood()))


class Bad:
    """Planners that break the protocol, each in its own way."""

    def __init__(self, body: Callable[[Any, Any], Any]) -> None:
        self.body = body

    def plan(self, model: Any, root: Any, rng: Any) -> Any:
        return self.body(model, root)


def _yields(what: Any) -> Any:
    def body(model: Any, root: Any) -> Any:
        yield what(model, root) if callable(what) else what

    return body


def _intermediate(model: Any, root: Any) -> Any:
    [[proposal]] = yield [search.Propose(root)]
    return search.Plan.single(model.transition(root, proposal.action))


def _returns(what: Any) -> Any:
    def body(model: Any, root: Any) -> Any:
        yield [search.Propose(root)]
        return what

    return body


def _raises(model: Any, root: Any) -> Any:
    yield [search.Propose(root)]
    raise ZeroDivisionError("planner bug")


def _illegal(model: Any, root: Any) -> Any:
    [[proposal]] = yield [search.Propose(root)]
    model.transition(root, Action(proposal.action.text, 99))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (_yields(["what?"]), "expected a list of Propose"),
        (_yields(None), "NoneType"),
        (_yields(lambda m, r: [search.Propose(r, 0)]), "n >= 1"),
        (_returns(None), "expected plan() to return a search.Plan"),
        (_returns(search.Plan()), "at least one terminal candidate"),
        (_intermediate, "an intermediate message is not an answer"),
        (_raises, "planner bug"),
        (_illegal, "cannot route to 99"),
        (lambda m, r: [], "expected plan() to be a generator"),
        (lambda m, r: 1 / 0, "division"),
        (_yields(lambda m, r: [search.Propose(r, "4")]), "integer n >= 1 from the planner, got n='4'"),
    ],
)
def test_planner_error_is_stored_in_the_plan(body: Any, message: str) -> None:
    plans = list(run(Bad(body), 3))
    assert len(plans) == 3
    assert all(message in (plan.error or "") for plan in plans), plans[0].error


def test_evaluate_request_without_critic_fails() -> None:
    class Ask(SinglePass):
        def plan(self, model: Any, root: Any, rng: Any) -> Any:
            yield [search.Evaluate([root])]

    [plan] = search.run(Ask(), problems(1), mas=RPSV, policy=talker())
    assert "has no critic" in (plan.error or "")


@pytest.mark.parametrize(
    "reply",
    [
        lambda request: SamplingReply(()),
        lambda request: SamplingReply((Sample("x", 1, -1.0, "stop"),) * (len(request.seeds) + 1)),
        lambda request: "text",
    ],
)
def test_malformed_policy_replies_fail_the_search(reply: Any) -> None:
    class Wrong:
        name, max_batch = "wrong", 8

        def sample(self, requests: Any) -> Any:
            return [reply(request) for request in requests]

    assert all("samples from the policy" in (plan.error or "") for plan in run(SinglePass(), 3, policy=Wrong()))


def test_nan_logprobs_count_as_unknown() -> None:
    policy = ScriptedPolicy(lambda request, seed: Sample("Final Answer: 1", 3, float("nan"), "stop"))
    [plan] = run(SinglePass(), 1, policy=policy)
    assert plan.tree is not None and plan.tree[1].logprob is None


# ---- ends


def dies_after(calls: int, error: Callable[[], BaseException]) -> ScriptedPolicy:
    class Dies(ScriptedPolicy):
        left = calls

        def sample(self, requests: Any) -> Any:
            self.left -= 1
            if self.left < 0:
                raise error()
            return super().sample(requests)

    return Dies(talk, "talker", 8)


@pytest.mark.parametrize("error", [EngineUnavailableError("the server is gone"), RuntimeError("out of memory")])
def test_unreachable_engine_ends_the_run_with_finished_plans(error: Exception) -> None:
    plans = run(SinglePass(), 40, policy=dies_after(12, lambda: error), concurrency=10)
    got = []
    with pytest.raises(type(error), match=str(error)):
        for plan in plans:
            got.append(plan)
    assert got and all(plan.error is None for plan in got)
    assert plans.stopped and str(error) in plans.stopped
    assert list(plans) == []


def test_ctrl_c_keeps_finished_plans() -> None:
    plans = run(MCTS(6, 2), 40, policy=dies_after(60, KeyboardInterrupt), concurrency=8)
    got = []
    with pytest.raises(KeyboardInterrupt):
        for plan in plans:
            got.append(plan)
    got += list(plans)
    clean = by_problem(run(MCTS(6, 2), 40))
    assert got and len(got) < 40
    assert all(clean[plan.problem_id] == comparable(plan) for plan in got)
    assert plans.stopped == "interrupted"


@pytest.mark.parametrize("place", ["planner", "critic"])
def test_ctrl_c_within_a_search_is_raised_once_and_closes_the_run(place: str, caplog: pytest.LogCaptureFixture) -> None:
    turns = itertools.count(1)

    def interrupt(here: str) -> None:
        if here == place and next(turns) == 7:
            raise KeyboardInterrupt

    class Interrupted(MCTS):
        def plan(self, model: Any, root: Any, rng: Any) -> Any:
            interrupt("planner")
            return (yield from super().plan(model, root, rng))

    class Critic(HashCritic):
        concurrent, free, max_batch = False, False, 2

        def score(self, contexts: Any) -> Any:
            interrupt("critic")
            return super().score(contexts)

    class Server:
        name, max_concurrency = "server", 64

        async def sample_async(self, request: Any) -> Any:
            await asyncio.sleep(0.004 * random.random())
            return talker().sample([request])[0]

    plans = run(Interrupted(6, 2), 20, policy=Server(), critic=Critic(), concurrency=8)
    with pytest.raises(KeyboardInterrupt):
        list(plans)
    assert plans.stopped == "interrupted"
    del plans
    gc.collect()
    assert not caplog.records


class Panic(BaseException):
    """Libraries in Rust raise such exceptions."""


@pytest.mark.parametrize("error", [Panic, SystemExit, asyncio.CancelledError])
@pytest.mark.parametrize("part", ["policy", "asynchronous policy", "critic", "concurrent critic"])
def test_exception_that_is_no_error_hangs_no_run(part: str, error: type[BaseException]) -> None:
    class Critic(HashCritic):
        concurrent, free = part.startswith("concurrent"), False

        def score(self, contexts: Any) -> Any:
            if "critic" in part:
                raise error("gone")
            return super().score(contexts)

    class Policy(ScriptedPolicy):
        def sample(self, requests: Any) -> Any:
            if part == "policy":
                raise error("gone")
            return super().sample(requests)

    class Server:
        name, max_concurrency = "server", 8

        async def sample_async(self, request: Any) -> Any:
            raise error("gone")

    policy = Server() if part.startswith("async") else Policy(talk)
    plans = run(MCTS(4, 2), 2, policy=policy, critic=Critic())
    try:
        assert [bool(plan.error) for plan in plans] == [True, True]
    except (RuntimeError, error) as ended:
        assert "gone" in str(ended)


@pytest.mark.skipif(os.name == "nt", reason="needs signals")
def test_ctrl_c_ends_the_calls_of_a_thread_that_waits_for_them() -> None:
    calls = 0

    class Counts:
        name, max_concurrency = "counts", 2

        async def sample_async(self, request: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 4:
                threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT)).start()
            await asyncio.sleep(0.05)
            return talker().sample([request])[0]

    prompt = (ChatMessage("user", "How many?"),)
    requests = [SamplingRequest(prompt, (seed,), 5, 1.0, 1.0) for seed in range(100)]
    with pytest.raises(KeyboardInterrupt):
        sample_all(as_policy(Counts()), requests)
    # The calls end on the loop's thread.
    from_thread(asyncio.sleep(0.01))
    made = calls
    from_thread(asyncio.sleep(0.2))
    assert calls == made < 100


@pytest.mark.skipif(os.name == "nt", reason="needs signals")
def test_ctrl_c_ends_a_wait_for_an_engine() -> None:
    class Stuck:
        name, max_concurrency = "stuck", 64

        async def sample_async(self, request: Any) -> Any:
            # Started here, so that the signal cannot come before the block that expects it.
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            await asyncio.sleep(60)

    plans = run(SinglePass(), 1, policy=Stuck())
    with pytest.raises(KeyboardInterrupt):
        next(plans)
    assert plans.stopped == "interrupted"


def test_search_that_ends_as_the_run_is_stopped_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    admitted, ended = Scheduler._admitted, []

    async def then_stop(self: Any, *arguments: Any) -> Any:
        ended.append(await admitted(self, *arguments))
        # As `Run.stop` on another thread, one turn before the end of this search is noticed.
        plans._reason = "stopped"
        plans._changed.set()
        return ended[-1]

    monkeypatch.setattr(Scheduler, "_admitted", then_stop)
    plans = run(SinglePass(), 4, concurrency=1)
    assert list(plans) == [searched.plan for searched in ended] != []


def test_closed_run_has_closed_its_session() -> None:
    policy = StreamingTalker()
    with run(SinglePass(), 20, policy=policy, concurrency=4) as plans:
        next(plans)
        assert policy.open_sessions == 1
    assert policy.open_sessions == 0


def test_run_can_be_stopped() -> None:
    with run(SinglePass(), 40, concurrency=4) as plans:
        first = next(plans)
        plans.stop("enough")
        assert first.error is None and plans.stopped == "enough"
        assert len(list(plans)) < 40


@pytest.mark.parametrize("planner", [MCTS(50, 3), MCTS(50, 3, 0.1, "bootstrap")], ids=str)
def test_search_at_its_call_budget_returns_the_best_answer(planner: Any) -> None:
    for plan in run(planner, 8, budget=Budget(calls=20)):
        assert plan.usage.agent_calls <= 20
        # A bootstrap search may end by itself, in the state that it likes best.
        assert plan.stopped == "budget of 20 calls spent" or (planner.leaf == "bootstrap" and plan.error is None)
        # A bootstrap search may not have met a terminal state yet.
        assert plan.best is not None or (planner.leaf == "bootstrap" and plan.error is not None)


def test_budget_too_small_for_an_answer_fails_the_search() -> None:
    for plan in run(MCTS(50, 3), 4, budget=Budget(tokens=100)):
        assert plan.error is None and 100 <= plan.usage.generated_tokens < 200
    for plan in run(SinglePass(), 4, budget=Budget(calls=2)):
        assert plan.error == "BudgetError: budget of 2 calls spent"
        assert plan.usage.agent_calls == 2


def test_budget_of_seconds_ends_a_waiting_search() -> None:
    release = threading.Event()

    class Slow:
        name, max_concurrency = "slow", 64

        async def sample_async(self, request: Any) -> Any:
            while "Question 1:" in request.messages[-1].content and not release.is_set():
                await asyncio.sleep(0.01)
            return talker().sample([request])[0]

    # On a busy machine, the others may need more than the first budget.
    for seconds in (0.5, 16.0):
        release.clear()
        plans = {p.problem_id: p for p in run(SinglePass(), 3, policy=Slow(), budget=Budget(seconds=seconds))}
        release.set()
        assert f"budget of {seconds:g} seconds spent" in (plans["toy/1"].error or "")
        if plans["toy/0"].error is None is plans["toy/2"].error:
            break
    assert plans["toy/0"].error is None is plans["toy/2"].error


def test_exactly_sufficient_budget_does_not_end_a_search() -> None:
    plans = run(StepBeamSearch(3, 1), 5, run_budget=Budget(calls=60), budget=Budget(calls=12))
    assert len(list(plans)) == 5 and plans.stopped is None and plans.usage.agent_calls == 60


def test_run_budget_of_seconds_ends_the_run() -> None:
    class Stuck:
        name, max_concurrency = "stuck", 64

        async def sample_async(self, request: Any) -> Any:
            await asyncio.sleep(60)

    plans = run(SinglePass(), 3, policy=Stuck(), run_budget=Budget(seconds=0.3))
    assert list(plans) == [] and plans.stopped == "budget of 0.3 seconds spent"


def test_critic_threads_end_with_the_run() -> None:
    list(run(MCTS(3, 2), 3, critic=HashCritic(concurrent=True)))

    def alive() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name == "mas-gym-critic"]

    until = time.monotonic() + 60
    while alive() and time.monotonic() < until:
        time.sleep(0.01)
    assert not alive()


# ---- invalid arguments, rejected before the run


@pytest.mark.parametrize(
    "options",
    [
        {"concurrency": 0},
        {"policy": object()},
        {"progress": "bar"},
        {"budget": lambda: Budget(calls=0)},
        {"budget": lambda: Budget(seconds=-1)},
        {"sampling": lambda: search.Sampling(temperature=-1)},
        {"sampling": lambda: search.Sampling(top_p=0)},
        {"sampling": lambda: search.Sampling(max_new_tokens=0)},
        {"planner": object()},
        {"planner": MCTS(), "critic": False},
    ],
)
def test_invalid_arguments_are_rejected(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        options = {key: value() if callable(value) else value for key, value in options.items()}
        planner = options.pop("planner", SinglePass())
        critic = options.pop("critic", None) or None
        search.run(planner, problems(1), **{"mas": RPSV, "policy": talker(), "critic": critic, **options})


@pytest.mark.parametrize("name", ["toy", "\ud800"])
@pytest.mark.parametrize("stored", [False, True])
def test_duplicate_problem_ids_are_rejected(name: str, stored: bool, tmp_path: Path) -> None:
    found = [replace(problem, id=f"{name}{i}") for i, problem in enumerate(problems(3))]
    options: dict[str, Any] = {"mas": RPSV, "policy": talker(), "concurrency": 2}
    options |= {"store": tmp_path / "runs.db"} if stored else {}
    assert len(list(search.run(SinglePass(), found, **options))) == 3
    with pytest.raises(DataError, match="distinct"):
        list(search.run(SinglePass(), found * 2, **options))


def test_run_accepts_a_planner_spec_and_a_system_name() -> None:
    plans = list(search.run("sc:3", problems(2), mas="rpsv", policy=talker()))
    assert [plan.usage.agent_calls for plan in plans] == [12, 12]


def test_search_with_a_lost_request_ends_at_its_time_budget() -> None:
    class Forgetful:
        name, max_batch = "forgetful", 8

        def sample(self, requests: Any) -> Any:
            raise AssertionError("not used")

        def open(self) -> Any:
            session = _Session(StreamingTalker())
            session.step = list  # type: ignore[method-assign]
            session.submit = lambda key, request: None  # type: ignore[method-assign]
            return session

    plans = run(SinglePass(), 1, policy=Forgetful(), budget=Budget(seconds=0.2))
    assert "seconds" in (next(plans).error or "")


# ---- progress


def test_progress_counts_searches_and_usage(capsys: Any) -> None:
    seen: list[search.Progress] = []
    plans = run(SinglePass(), 6, policy=ScriptedPolicy(only(2, lambda: PolicyError("x")), "t", 4), progress=seen.append)
    list(plans)
    last = seen[-1]
    assert (last.total, last.done, last.failed, last.open) == (6, 6, 1, 0)
    assert "6/6 searches" in str(last) and "1 failed" in str(last)
    list(run(SinglePass(), 3, progress=True))
    assert "3/3 searches" in capsys.readouterr().err


def test_run_usage_includes_failed_searches() -> None:
    plans = run(MCTS(6, 2), 6, policy=ScriptedPolicy(only(2, lambda: PolicyError("x")), "t", 4))
    done = list(plans)
    assert plans.usage.agent_calls == sum(plan.usage.agent_calls for plan in done)


def test_third_party_plans_have_a_tree() -> None:
    class Greedy:
        def plan(self, model: Any, root: Any, rng: Any) -> Any:
            state = root
            while not model.is_terminal(state):
                [proposals] = yield [search.Propose(state, n=4)]
                states = [model.transition(state, p.action) for p in proposals]
                [values] = yield [search.Evaluate(states)]
                state = states[max(range(len(values)), key=values.__getitem__)]
            return search.Plan.single(state)

    for plan in run(Greedy(), 3):
        assert plan.error is None and plan.tree is not None and plan.best is not None
        assert plan.best.node == 4 and plan.tree[4].tokens > 0 and plan.usage.agent_calls == 16
