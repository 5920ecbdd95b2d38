"""One seed, one result, whether one search is open or 256, on the engines that promise it (docs/engines.md)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import mas_gym
import search
from mas_gym.policies import load_policy

TASK = mas_gym.load_task("arithmetic", split="test")
CONCURRENCY = 256


def results(spec: str, problems: int, concurrency: int, policy: Any, critic: Any = None) -> dict[str, Any]:
    """All content of a plan, except seconds, cached tokens and the last bits of log-probabilities."""
    critic = critic or search.PolicyLikelihood()
    run = search.run(spec, TASK[:problems], mas="rpsv", policy=policy, critic=critic, seed=7, concurrency=concurrency)
    plans = {plan.problem_id: plan for plan in run}
    assert all(plan.error is None for plan in plans.values())
    return {
        name: (
            plan.answer,
            [candidate.text for candidate in plan.candidates],
            [(node.state.text, node.visits) for node in plan.tree or ()],
            (plan.usage.agent_calls, plan.usage.generated_tokens, plan.usage.prompt_tokens),
        )
        for name, plan in plans.items()
    }


@pytest.fixture
def server() -> Iterator[str]:
    pytest.importorskip("openai", reason="the openai package is not installed")
    pytest.importorskip("fastapi", reason="the fastapi package is not installed")
    from loopback import hash_policy, make_app, serving

    with serving(make_app(hash_policy())) as base:
        yield base


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "problems"), [("sc:8", 8), ("mcts:6,3", 10)])
def test_bundled_model_results_are_independent_of_concurrency(spec: str, problems: int) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    policy = load_policy("tiny")
    assert results(spec, problems, 1, policy) == results(spec, problems, CONCURRENCY, policy)


@pytest.mark.slow
def test_learned_critic_results_are_independent_of_concurrency() -> None:
    pytest.importorskip("transformers", reason="learned critics need the extra 'train'")
    from rewardmodels import load_critic

    policy = load_policy("tiny")
    first, second = (load_critic("tiny-masprm", device="cpu", concurrent=beside) for beside in (False, True))
    assert results("mcts:4,3", 8, 1, policy, first) == results("mcts:4,3", 8, CONCURRENCY, policy, second)


@pytest.mark.slow
def test_server_results_with_seeds_are_independent_of_concurrency(server: str) -> None:
    policy = load_policy(f"openai:served@{server}/v1", max_concurrency=CONCURRENCY)
    assert results("mcts:4,2", 32, 1, policy) == results("mcts:4,2", 32, CONCURRENCY, policy)
