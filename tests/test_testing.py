"""The compliance suite: it passes valid components and names every violation."""

import random
import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest

import mas_gym
from mas_gym.errors import BudgetError, ComplianceError, ConfigError, MASGymError, PolicyError
from mas_gym.policies import Sample, SamplingReply, ScriptedPolicy
from mas_gym.systems.state import MASState
from mas_gym.testing import check_critic, check_mas, check_planner, check_policy, planner_checks


def breaches(check, *args, **kwargs) -> str:
    with pytest.raises(ComplianceError) as caught:
        check(*args, **kwargs)
    assert isinstance(caught.value, AssertionError)
    assert isinstance(caught.value, MASGymError)
    assert all(fault in str(caught.value) for fault in caught.value.faults)
    return str(caught.value)


# ------------------------------------------------------------------------------------------ systems


@pytest.mark.parametrize("name", mas_gym.mas_names())
def test_shipped_systems_pass_the_check(name: str) -> None:
    assert check_mas(name) == mas_gym.load_mas(name)


def system(*edges: list[Any]) -> dict[str, Any]:
    return {"agents": [{"name": name, "system_prompt": name} for name in "ABC"], "edges": [[-1, 0], *edges]}


def test_invalid_configs_raise_config_error() -> None:
    with pytest.raises(ConfigError):
        check_mas(system([0, 9]))


def test_agents_that_can_never_act_are_reported() -> None:
    both = system([0, 1], [0, 2, "contains:x"], [1, 2, "regex:^\\d{40}$"])
    assert "agents[2] 'C' acted in none of 50 episodes" in breaches(check_mas, both)
    check_mas(both, texts=["x", "7" * 40], episodes=400)


# ------------------------------------------------------------------------------------------ policies


def words(request, seed: int) -> str:
    return f"{request.agent} {seed % 3}".strip()


class Careful:
    """A policy that keeps its contract; the cases below break it in one place each."""

    name: Any = "careful"
    max_batch: Any = 8

    def sample(self, requests):
        return [self.reply(request) for request in requests]

    def reply(self, request):
        return SamplingReply(tuple(self.one(request, seed) for seed in request.seeds), 5)

    def one(self, request, seed):
        return Sample(words(request, seed), 2, -2.0, "stop")


class Async:
    name, max_concurrency = "async", 4

    async def sample_async(self, request):
        return Careful().reply(request)


def policy(**changes):
    return type("Changed", (Careful,), {"revision": 1, **changes})()


def test_valid_policies_pass_the_check() -> None:
    check_policy(Careful())
    check_policy(ScriptedPolicy(words))
    check_policy(Async())
    check_policy(policy(one=lambda self, r, s: Sample("ok", 1, None, "length")))


def test_policies_may_reject_unusual_prompts() -> None:
    def reply(self, request):
        if "\ud800" in request.messages[-1].content:
            raise PolicyError("cannot encode this")
        return Careful().reply(request)

    check_policy(policy(reply=reply))


noise = random.Random(0)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"name": ""}, "name: expected a non-empty str, got ''"),
        ({"max_batch": 0}, "batch size: expected an int from 1 on, got 0"),
        ({"sample": 3}, "expected a policy with sample(requests)"),
        ({"sample": lambda self, r: []}, "replies, got 0"),
        ({"sample": lambda self, r: Careful().sample(r)[:-1] if r else []}, "expected 2 replies, got 1"),
        ({"reply": lambda self, r: "text"}, "expected a SamplingReply, got 'text'"),
        ({"reply": lambda self, r: SamplingReply(())}, "3 seeds got 0 samples"),
        ({"reply": lambda self, r: Careful().reply(r)._replace(prompt_tokens=-1)}, "prompt_tokens: expected an int"),
        ({"one": lambda self, r, s: "text"}, "expected a Sample, got 'text'"),
        ({"one": lambda self, r, s: Sample(None, 1, -1.0, "stop")}, "text: expected a str, got None"),
        ({"one": lambda self, r, s: Sample(" a", 1, -1.0, "stop")}, "text: expected it stripped"),
        ({"one": lambda self, r, s: Sample("a", 17, -1.0, "stop")}, "tokens: expected at most the cap of 16, got 17"),
        ({"one": lambda self, r, s: Sample("a", -1, -1.0, "stop")}, "tokens: expected at most the cap"),
        ({"one": lambda self, r, s: Sample("a", 1, 0.5, "stop")}, "logprob: expected None or a finite float up to 0"),
        ({"one": lambda self, r, s: Sample("a", 1, float("nan"), "stop")}, "logprob: expected None or a finite"),
        ({"one": lambda self, r, s: Sample("a", 1, -1.0, "eos")}, "finish_reason: expected 'stop' or 'length'"),
        (
            {"one": lambda self, r, s: Sample(str(noise.random()), 1, -1.0, "stop")},
            "the same requests gave different",
        ),
        (
            {
                "sample": lambda self, rs: [
                    SamplingReply(tuple(Sample(f"{i} {s}", 1, -1.0, "stop") for s in r.seeds)) for i, r in enumerate(rs)
                ]
            },
            "the order of a batch changes the samples",
        ),
        (
            {
                "sample": lambda self, rs: [
                    SamplingReply(tuple(Sample(f"{len(rs)} {s}", 1, -1.0, "stop") for s in r.seeds)) for r in rs
                ]
            },
            "a request gets different samples alone and in a batch",
        ),
        ({"reply": lambda self, r: Careful().reply(r) if r.messages[1].content else 1 / 0}, "raised ZeroDivision"),
    ],
)
def test_invalid_policies_fail_the_check(changes, expected: str) -> None:
    assert expected in breaches(check_policy, policy(**changes))


class Streaming(Careful):
    """A session that answers one request per step."""

    revision = 1
    twist = ""

    def open(self):
        policy, queue = self, []

        class Session:
            pending = property(lambda self: sum(len(request.seeds) for _, request in queue))

            def submit(self, key, request):
                queue.append((key, request))

            def step(self):
                if not queue:
                    return []
                key, request = queue.pop()
                reply = policy.reply(request)
                first = reply.samples[0]._replace(text=reply.samples[0].text + policy.twist)
                return [(key, reply._replace(samples=(first, *reply.samples[1:])))]

            def close(self):
                queue.clear()

        return Session()


def test_policy_check_requires_the_same_samples_from_sessions_and_sample() -> None:
    check_policy(Streaming())
    twisted = Streaming()
    twisted.twist = "!"
    assert "its session and sample() return different samples" in breaches(check_policy, twisted)


def test_objects_that_are_not_policies_fail_the_check() -> None:
    assert "expected a policy with sample(requests)" in breaches(check_policy, object())


def test_policies_that_ignore_seeds_can_be_checked_as_not_reproducible() -> None:
    drifting = policy(one=lambda self, r, s: Sample(str(noise.random()), 1, -1.0, "stop"))
    check_policy(drifting, reproducible=False)


# ------------------------------------------------------------------------------------------ critics


class Length:
    """Likes long transcripts."""

    name: Any = "length"
    terminal_only: Any = False
    free: Any = True

    def score(self, contexts):
        return [self.value(context) for context in contexts]

    def value(self, context):
        return len(context.state.transcript) / 10 + len(context.state.text) / 1e6


def critic(**changes):
    return type("Changed", (Length,), {"revision": 1, **changes})()


def test_valid_critics_pass_the_check() -> None:
    check_critic(Length())
    check_critic(critic(terminal_only=True))
    check_critic(critic(value=lambda self, c: c.proposal.mean_logprob), mas="dylan")
    check_critic(critic(score=lambda self, cs: [1e-6 * len(cs) for _ in cs]))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"name": None}, "name: expected a non-empty str"),
        ({"free": 1}, "free: expected a bool, got 1"),
        ({"terminal_only": "no"}, "terminal_only: expected a bool"),
        ({"score": None}, "it has no method score"),
        ({"max_batch": 0}, "max_batch: expected an int from 1 on, got 0"),
        ({"concurrent": "yes"}, "concurrent: expected a bool"),
        ({"scores_actions": 1}, "scores_actions: expected a bool"),
        (
            {"identity": lambda self: threading.Lock()},
            "no run with store= accepts it: Changed.identity(): ",
        ),
        ({"score": lambda self, cs: [0.0]}, "values, got 1"),
        ({"value": lambda self, c: float("inf")}, "a state has no value: expected a finite number, got inf"),
        ({"value": lambda self, c: "0.1"}, "a state has no value: expected a finite number, got '0.1'"),
        ({"value": lambda self, c: 1 / 0}, "states raised ZeroDivisionError"),
        ({"value": lambda self, c: noise.random()}, "called again with the same states, it returned different values"),
        ({"score": lambda self, cs: [i / 10 for i, _ in enumerate(cs)]}, "the order of a batch changes the values"),
        ({"score": lambda self, cs: [float(len(cs)) for _ in cs]}, "a state has different values alone"),
    ],
)
def test_invalid_critics_fail_the_check(changes, expected: str) -> None:
    assert expected in breaches(check_critic, critic(**changes))


# ------------------------------------------------------------------------------------------ planners


@dataclass
class Propose:
    state: MASState
    n: int = 1


@dataclass
class Evaluate:
    states: list[MASState]


@dataclass
class Reward:
    states: list[MASState]


@dataclass
class Extract:
    states: list[MASState]


class Found(NamedTuple):
    state: MASState
    score: float | None = None


class Plan(NamedTuple):
    candidates: tuple[Found, ...] = ()


class Greedy:
    """Nothing here comes from the search package: the check identifies requests by their names."""

    def plan(self, model, root, rng):
        state = root
        while not model.is_terminal(state):
            [proposals] = yield [Propose(state, n=4)]
            states = [model.transition(state, p.action) for p in proposals]
            [values] = yield [Evaluate(states)]
            state = states[max(range(len(values)), key=values.__getitem__)]
        yield [Extract([state])]
        return Plan((Found(state),))


def test_valid_planners_pass_the_check() -> None:
    check_planner(Greedy())
    check_planner(Greedy(), systems=mas_gym.mas_names())


def test_shipped_planners_pass_the_check() -> None:
    search = pytest.importorskip("search")
    for planner in (
        search.SinglePass(),
        search.SelfConsistency(3),
        search.BestOfN(3),
        search.StepBeamSearch(3, 2),
        search.MCTS(n_simulations=6, max_children=3),
    ):
        check_planner(planner)


class Rewarded(Greedy):
    def plan(self, model, root, rng):
        plan = yield from super().plan(model, root, rng)
        yield [Reward([plan.candidates[0].state])]
        return plan


def test_true_reward_outside_training_fails_the_check() -> None:
    check_planner(Rewarded(), training=True)
    assert "it requested the true reward outside training" in breaches(check_planner, Rewarded())


class Prepared(Greedy):
    ready, revision = False, 1

    def for_run(self, critic, training):
        prepared = Prepared()
        prepared.ready = critic.terminal_only is False and training is False
        return prepared

    def plan(self, model, root, rng):
        assert self.ready
        return (yield from super().plan(model, root, rng))


def test_check_planner_prepares_the_planner_for_the_run() -> None:
    check_planner(Prepared())


def loose(text: str):
    """Return a planner whose plan has the given body."""
    lines = "\n    ".join(text.split("\n"))
    scope = {**globals(), "np": np}
    exec(f"def plan(self, model, root, rng):\n    {lines}\n", scope)
    return type("Loose", (Greedy,), {"plan": scope["plan"]})()


FIRST = "[[p]] = yield [Propose(root)]\n"
GO_ON = "return (yield from Greedy.plan(self, model, root, rng))"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("yield Propose(root)\nreturn 1", "expected a list"),
        ("yield [3]\n" + GO_ON, "it requested 3: expected a search request"),
        ("yield [Propose(root, n=0)]\n" + GO_ON, "Propose(n=0): expected an integer of at least 1"),
        ("yield [Evaluate(['root'])]\n" + GO_ON, "expected states of its own search"),
        ("yield [Evaluate([model.initial_state('?')])]\n" + GO_ON, "expected states of its own search"),
        (FIRST + "return Plan((Found(model.transition(root, p.action)),))", "expected a terminal state of its search"),
        (FIRST + "return Plan()", "expected a plan with candidates"),
        (FIRST + "return None", "it returned None: expected a plan with candidates"),
        (
            "plan = yield from Greedy.plan(self, model, root, rng)\n"
            "yield [Propose(plan.candidates[0].state)]\nreturn plan",
            "messages at a terminal state",
        ),
        ("while True:\n    yield [Propose(root)]", "a search did not end within"),
        ("raise KeyError('x')\nyield", "it raised KeyError"),
        ("import random\nyield [Propose(root, n=1 + int(random.random() * 3))]\n" + GO_ON, "a global generator"),
        ("yield [Propose(root, n=1 + np.random.randint(3))]\n" + GO_ON, "a global generator"),
        (
            "self.count = getattr(self, 'count', 0) + 1\nyield [Propose(root, n=self.count)]\n" + GO_ON,
            "two searches with one seed and the same replies differ",
        ),
        ("try:\n    yield [Propose(root)]\nexcept Exception:\n    pass\n" + GO_ON, "it continued after BudgetError"),
        (
            "plan = yield from Greedy.plan(self, model, root, rng)\nends = plan.candidates[0].state\n"
            "return Plan((Found(ends, 0.1), Found(ends, 0.2), Found(ends, 0.3)))",
            "the candidates after the first are not ranked",
        ),
    ],
)
def test_invalid_planners_fail_the_check(body: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner_checks, "_MAX_ROUNDS", 200)
    assert expected in breaches(check_planner, loose(body))


def test_objects_that_are_not_planners_fail_the_check() -> None:
    assert "it has no method plan" in breaches(check_planner, object())
    assert issubclass(BudgetError, MASGymError)


# --------------------------------------------------------------------------------------- identities


class Counting(Length):
    def __init__(self):
        self.calls = 0

    def score(self, contexts):
        self.calls += 1
        return super().score(contexts)

    def identity(self):
        return self.calls


def test_changing_identity_fails_the_check() -> None:
    assert "its identity changed during use: leave counters" in breaches(check_critic, Counting())
    check_critic(type("Clean", (Counting,), {"identity": lambda self: None})())


def test_missing_identity_fails_the_check() -> None:
    one = Length()
    one.lock = threading.Lock()
    assert "no run with store= accepts it: Length: " in breaches(check_critic, one)
