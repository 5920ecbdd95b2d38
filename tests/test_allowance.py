"""Budgets of a run: searches start only if the rest of the budget pays for them, and as many at once as it pays for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from search_worlds import HashCritic, by_problem, chain, problems, talk, talker

import search
from mas_gym.errors import PolicyError
from mas_gym.policies import ScriptedPolicy
from search import Budget, Propose
from search.costs import Allowance, Cost, Usage

MAS = chain(4)


class Watched(ScriptedPolicy):
    """Remembers the most searches that one batch had requests of."""

    def __init__(self) -> None:
        super().__init__(talk, "talker", 1000)
        self.most = 0

    def identity(self) -> str:
        return "talker"

    def sample(self, requests: Any) -> Any:
        self.most = max(self.most, sum(request.messages[-1].content.startswith("Question") for request in requests))
        return super().sample(requests)


class Passes:
    """Makes as many passes as the number in the question."""

    def __init__(self, passes: dict[int, int], usual: int = 1) -> None:
        self.passes, self.usual = passes, usual

    def plan(self, model: Any, root: Any, rng: Any) -> Any:
        number = int(root.question.split(":")[0].removeprefix("Question "))
        leaves = []
        for _ in range(self.passes.get(number, self.usual)):
            state = root
            while not model.is_terminal(state):
                [[proposal]] = yield [Propose(state)]
                state = model.transition(state, proposal.action)
            leaves.append(state)
        return search.Plan(tuple(search.Candidate(state) for state in leaves))


def run(planner: Any, count: int, **options: Any) -> search.Run:
    return search.run(planner, problems(count), **{"mas": MAS, "policy": talker(), **options})


@pytest.mark.parametrize("concurrency", [1, 5, 64])
@pytest.mark.parametrize(("limit", "expected"), [(150, 12), (144, 12), (12, 1), (11, 0), (288, 24)])
def test_run_budget_completes_the_searches_it_covers(concurrency: int, limit: int, expected: int) -> None:
    plans = run("sc:3", 24, run_budget=Budget(calls=limit), concurrency=concurrency)
    found = by_problem(plans)
    assert len(found) == expected and plans.usage.agent_calls <= limit
    assert (plans.stopped is None) == (expected == 24)
    assert expected == 24 or f"budget of {limit} calls spent" in str(plans.stopped)
    assert limit != 150 or ": 6 left" in str(plans.stopped)
    everything = by_problem(run("sc:3", 24))
    assert found.items() <= everything.items()


def test_searches_covered_by_the_run_budget_run_concurrently(tmp_path: Path) -> None:
    policy = Watched()
    options: dict[str, Any] = {"policy": policy, "store": tmp_path / "runs.db"}
    list(run("sc:3", 40, run_budget=Budget(calls=150), **options))
    assert policy.most >= 5
    # A resumed run estimates the cost of the next searches from the stored ones.
    policy.most = 0
    assert len(list(run("sc:3", 40, run_budget=Budget(calls=390), **options))) == 32
    assert policy.most >= 15


def test_bounded_searches_start_together_if_the_run_budget_covers_them() -> None:
    policy = Watched()
    options: dict[str, Any] = {"policy": policy, "budget": Budget(calls=12)}
    assert len(list(run("sc:3", 24, run_budget=Budget(calls=150), **options))) == 12
    assert policy.most == 12


def test_loose_search_bound_does_not_block_the_first_search() -> None:
    plans = run("sc:3", 24, budget=Budget(calls=1000), run_budget=Budget(calls=150))
    assert len(list(plans)) == 12


@pytest.mark.parametrize("concurrency", [2, 64])
def test_expensive_search_does_not_use_the_share_of_others(concurrency: int) -> None:
    plans = run(Passes({3: 50}), 40, run_budget=Budget(calls=100), concurrency=concurrency)
    found = by_problem(plans)
    assert "toy/3" not in found and len(found) > 10
    assert plans.usage.agent_calls <= 100 and "budget of 100 calls spent" in str(plans.stopped)


def test_searches_that_exceed_their_grant_use_the_unspent_budget() -> None:
    # After the first, each is expected to make 4 calls and makes 8.
    plans = run(Passes({0: 1}, usual=2), 40, run_budget=Budget(calls=84))
    found = list(plans)
    assert len(found) == 11 and plans.usage.agent_calls <= 84
    assert all(plan.error is None for plan in found)


def test_run_that_drops_a_search_reports_the_spent_budget() -> None:
    plans = run(Passes({1: 9}), 2, run_budget=Budget(calls=20))
    assert [plan.problem_id for plan in plans] == ["toy/0"]
    assert plans.stopped is not None and "budget of 20 calls spent" in plans.stopped


def test_run_budget_of_tokens_is_spent_and_ends_the_run(tmp_path: Path) -> None:
    plans = run("mcts:5,2", 40, critic=HashCritic(), run_budget=Budget(tokens=2000))
    found = list(plans)
    spent = sum(plan.usage.generated_tokens for plan in found)
    largest = max(plan.usage.generated_tokens for plan in found)
    assert spent >= 2000 - 2 * largest and "tokens spent" in str(plans.stopped)


def test_failed_searches_do_not_lower_the_expected_cost() -> None:
    def script(request: Any, seed: int) -> str:
        if "Question 0:" in request.messages[-1].content:
            raise PolicyError("broken")
        return talk(request, seed)

    plans = list(run("sc:3", 24, policy=ScriptedPolicy(script, "t", 4), run_budget=Budget(calls=150)))
    assert len([plan for plan in plans if plan.error is None]) >= 12 - 1


def test_remaining_budget_is_granted_once() -> None:
    allowance = Allowance(Budget(calls=100), Budget())
    assert allowance.pays(allowance.rest(Usage(), []), 1, alone=True)
    assert not allowance.pays(allowance.rest(Usage(), []), 1, alone=False)
    for calls, tokens in ((10, 50), (8, 70)):
        allowance.learn_cost(Cost(calls, tokens))
    assert allowance.expected == Cost(10, 70) and allowance.grant == Cost(15, 105)
    rest = allowance.rest(Usage(agent_calls=45), [(Cost(10, 70), Cost(4, 9)), (Cost(10, 70), Cost(12, 9))])
    assert rest.calls == 49
    assert allowance.pays(rest, 3, alone=False) and not allowance.pays(rest, 4, alone=False)
