"""The tree: its columns, its size, its JSON form, and chains longer than any recursion."""

from __future__ import annotations

import gc
import json
import random
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from search_worlds import World, chain, drive, noise

from mas_gym.errors import DataError
from mas_gym.systems.dynamics import Dynamics
from mas_gym.systems.loading import load_mas
from mas_gym.systems.state import Action
from search import MCTS, Proposal, SinglePass, Tree


def small() -> tuple[Tree, Dynamics]:
    model = Dynamics(chain(2))
    tree = Tree(model.initial_state("q"))
    for text in "ab":
        state = model.transition(tree.states[0], Action(text, model.mas.ALL))
        tree.add(0, state, Proposal(Action(text, model.mas.ALL), 3, -0.5, "length" if text == "b" else "stop"))
    last = model.transition(tree.states[1], Action("c", model.mas.ALL))
    tree.add(1, last, None, terminal=True)
    tree.visits[1], tree.totals[1], tree.values[1] = 4, 3.0, 0.25
    return tree, model


def test_entries_are_read_unchanged() -> None:
    tree, _ = small()
    root, a, b, c = tree
    assert (root.parent, root.q, root.value, root.logprob) == (-1, None, None, None)
    assert (a.visits, a.total, a.q, a.value, a.tokens, a.logprob) == (4, 3.0, 0.75, 0.25, 3, -0.5)
    assert (a.finish_reason, b.finish_reason, c.finish_reason) == ("stop", "length", "stop")
    assert [list(tree.children(i)) for i in range(4)] == [[1, 2], [3], [], []]
    assert tree.is_terminal(3) and not tree.is_terminal(0)
    assert tree.path(3) == [0, 1, 3]
    assert tree[-1].id == 3
    with pytest.raises(IndexError):
        tree[4]


def test_children_added_late_are_found() -> None:
    tree, model = small()
    late = model.transition(tree.states[0], Action("z", model.mas.ALL))
    assert tree.add(0, late) == 4
    assert list(tree.children(0)) == [1, 2, 4]


def test_tree_states_share_the_state_of_their_parent() -> None:
    world = World(4)
    tree = world.plan(MCTS(20, 3)).tree
    assert tree is not None
    for node in range(1, len(tree)):
        assert tree.states[node].parent is tree.states[tree.parents[node]]


def test_node_needs_less_than_200_bytes() -> None:
    world = World(12)
    texts = [Proposal(Action(text, world.model.mas.ALL), 5, -1.0) for text in "abc"]
    rng = random.Random(1)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    reply = lambda r: texts if hasattr(r, "n") else [rng.random() for _ in r.states]  # noqa: E731
    tree = drive(MCTS(400, 3, 2.0), world.model, reply, rng).tree
    assert tree is not None
    gc.collect()
    spent = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert len(tree) > 5_000
    assert spent / len(tree) < 200


@given(st.integers(0, 10**6))
def test_tree_survives_json(seed: int) -> None:
    world = World(
        3, lambda path, i: f"{'ab'[i % 2]} {int(3 * noise(seed, path, i))}\ud800", value=lambda p: noise(seed, p)
    )
    tree = world.plan(MCTS(8, 3)).tree
    assert tree is not None
    data = json.loads(json.dumps(tree.to_dict()))
    back = Tree.from_dict(data, world.model)
    assert back.to_dict() == tree.to_dict()
    assert back.states == tree.states
    assert [list(back.children(i)) for i in range(len(back))] == [list(tree.children(i)) for i in range(len(tree))]
    assert [back.is_terminal(i) for i in range(len(back))] == [tree.is_terminal(i) for i in range(len(tree))]


def test_tree_of_a_dynamic_schedule_survives_json() -> None:
    world = World(2, lambda path, i: ["VERDICT: AGREE", "VERDICT: DISAGREE", "?"][i])
    world.model = Dynamics(load_mas("dylan"))
    tree = world.plan(MCTS(20, 3)).tree
    assert tree is not None
    assert Tree.from_dict(tree.to_dict(), world.model).states == tree.states


@pytest.mark.parametrize(
    "spoil",
    [
        lambda d: d.update(schema=99),
        lambda d: d.pop("texts"),
        lambda d: d["visits"].pop(),
        lambda d: d.update(text=[99] * len(d["text"])),
        lambda d: d.update(recipients=[[7]] * len(d["text"])),
        lambda d: d.update(parent=[-1, 5, 0, 1]),
        lambda d: d.update(root={"schema": 1}),
    ],
)
def test_damaged_tree_is_rejected(spoil: Any) -> None:
    tree, model = small()
    data = tree.to_dict()
    spoil(data)
    with pytest.raises(DataError, match="to_dict"):
        Tree.from_dict(data, model)


@pytest.mark.parametrize("data", [None, [], "x", {}])
def test_data_that_is_not_a_tree_is_rejected(data: Any) -> None:
    with pytest.raises(DataError, match="expected a tree"):
        Tree.from_dict(data, Dynamics(chain(1)))


@pytest.mark.parametrize("planner", [SinglePass(), MCTS(3, 1), MCTS(3, 1, leaf="bootstrap")], ids=str)
def test_chain_of_ten_thousand_turns_is_supported(planner: Any) -> None:
    world = World(10_000, value=lambda path: 0.5)
    proposal = Proposal(Action("on", world.model.mas.ALL), 1, -1.0)
    reply = lambda r: [proposal] * r.n if hasattr(r, "n") else [0.5] * len(r.states)  # noqa: E731
    plan = drive(planner, world.model, reply, random.Random(0))
    assert plan.best is not None and plan.best.state.depth == 10_000 and plan.tree is not None
    data = json.loads(json.dumps(plan.tree.to_dict()))
    assert len(Tree.from_dict(data, world.model)) == 10_001
