"""Searches with an ask/tell library: TreeQuest's algorithms with this project's dynamics, policies and scheduler."""

from __future__ import annotations

from typing import Any

import pytest
from search_worlds import HashCritic, World, by_problem, chain, problems, talker, way

import mas_gym
import search
from mas_gym.errors import ConfigError
from mas_gym.policies import load_policy
from search import AskTell

treequest = pytest.importorskip("treequest")

ALGORITHMS = {
    "mcts": lambda: treequest.StandardMCTS(samples_per_action=3),
    "tree of thoughts": lambda: treequest.TreeOfThoughtsBFSAlgo(breadth_limit=2, size_limit=3),
    "ab-mcts": lambda: treequest.ABMCTSA(),
}


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("batch", [1, 3])
def test_ask_tell_trials_form_a_tree(name: str, batch: int) -> None:
    world = World(3)
    plan = world.plan(AskTell(ALGORITHMS[name](), 24, batch))
    assert plan.tree is not None
    assert plan.candidates
    assert all(world.model.is_terminal(candidate.state) for candidate in plan.candidates)
    assert plan.candidates[0].score == max(c.score for c in plan.candidates if c.score is not None)
    assert world.calls <= 24 + 3
    assert len(set(world.evaluated)) == len(world.evaluated) == len(plan.tree) - 1
    assert plan.tree.visits[0] == 24


def test_library_selects_the_node_to_expand() -> None:
    # Only messages "a" are good, so a search of breadth one never extends another.
    world = World(3, value=lambda path: 0.9 if set(path) <= set("a/") else -0.9)
    plan = world.plan(AskTell(treequest.TreeOfThoughtsBFSAlgo(breadth_limit=1, size_limit=3), 9))
    assert plan.tree is not None
    grown = [way(state) for node, state in enumerate(plan.tree.states) if list(plan.tree.children(node))]
    assert all(set(path) <= set("a/") for path in grown)
    assert plan.best is not None
    assert set(way(plan.best.state)) <= set("a/")


def test_search_continues_until_a_state_is_terminal() -> None:
    world = World(4)
    plan = world.plan(AskTell(treequest.StandardMCTS(samples_per_action=3), 1))
    assert len(plan.candidates) == 1
    assert world.calls == 4


def test_equal_messages_share_one_child() -> None:
    world = World(2, messages=lambda path, index: "same")
    plan = world.plan(AskTell(treequest.StandardMCTS(samples_per_action=3), 9))
    assert plan.tree is not None
    assert len(plan.tree) == 3
    assert len(plan.candidates) == 1


def test_ask_tell_result_is_independent_of_concurrency() -> None:
    def run(concurrency: int) -> dict[str, dict[str, Any]]:
        planner = AskTell(treequest.StandardMCTS(samples_per_action=2), 12)
        run_ = search.run(
            planner, problems(6), mas=chain(3), policy=talker(), critic=HashCritic(), concurrency=concurrency
        )
        return by_problem(run_)

    assert run(1) == run(6)


@pytest.mark.slow
def test_ask_tell_solves_word_problems_with_tiny_agents() -> None:
    task = mas_gym.load_task("arithmetic", limit=4)
    planner = AskTell(treequest.StandardMCTS(samples_per_action=3), 20)
    plans = list(
        search.run(planner, task, mas="rpsv", policy=load_policy("tiny"), critic=search.PolicyLikelihood(), seed=1)
    )
    assert [plan.error for plan in plans] == [None] * 4
    assert all(plan.answer is not None and plan.usage.agent_calls <= 24 for plan in plans)


def test_settings_and_critics_are_validated() -> None:
    with pytest.raises(ConfigError, match="n_trials"):
        AskTell(treequest.StandardMCTS(), 0)
    with pytest.raises(ConfigError, match="needs a critic"):
        AskTell(treequest.StandardMCTS()).for_run(None, False)
