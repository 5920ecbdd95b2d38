"""Overhead of tree search: a policy without work, branching 3, depth 4, one core.

    python benchmarks/planner_overhead.py             # speed, 1e4 to 1e6 simulations, and a chain 10,000 deep
    python benchmarks/planner_overhead.py --memory    # also bytes per node at 1,000,000 nodes (minutes)

Speeds are simulations per CPU second, the best of three. The baseline is a plain UCT loop over `__slots__` nodes in
this file, without states, protocol and records.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mas_gym import MAS, Action, Agent, Dynamics, Edge
from mas_gym.tasks.base import Problem
from search import MCTS, Plan, Proposal, Propose, Remaining, Tree
from search.store.resume import RunRecord

BRANCHING, DEPTH, C_UCT = 3, 4, 2.0


def chain(depth: int) -> Dynamics:
    agents = tuple(Agent(f"agent{i}", "Say something.", 8) for i in range(depth))
    return Dynamics(MAS(f"chain{depth}", agents, (Edge(-1, 0), *(Edge(i, i + 1) for i in range(depth - 1)))))


def drive(planner: MCTS, model: Dynamics, branching: int) -> Plan:
    """Answer a planner's requests with fixed messages and random values."""
    proposals = [Proposal(Action(text, model.mas.ALL), 1, -1.0) for text in "abcdefgh"[:branching]]
    rng, generator = random.Random(0), planner.plan(model, model.initial_state("q"), random.Random(0))
    replies: Any = None

    def answer(request: Any) -> Any:
        if isinstance(request, Remaining):
            return None
        return proposals[: request.n] if isinstance(request, Propose) else [rng.random() for _ in request.states]

    try:
        while True:
            requests = generator.send(replies)
            replies = [answer(request) for request in requests]
    except StopIteration as end:
        plan: Plan = end.value
        return plan


class Node:
    """A node of the baseline."""

    __slots__ = ("children", "n", "parent", "terminal", "value", "w")

    def __init__(self, parent: Node | None, terminal: bool, value: float) -> None:
        self.parent, self.terminal, self.value = parent, terminal, value
        self.children: list[Node] = []
        self.n, self.w = 1, value


def plain_uct(simulations: int) -> Node:
    """Plain UCT by Eq. 1 with virtual visits and rollouts to a leaf."""
    rng, log, sqrt = random.Random(0), math.log, math.sqrt
    root = Node(None, False, 0.0)
    for _ in range(simulations):
        node, depth = root, 0
        while not node.terminal:
            if not node.children:
                node.children = [Node(node, depth + 1 == DEPTH, rng.random()) for _ in range(BRANCHING)]
            total, best = 0, -math.inf
            for child in node.children:
                total += child.n
            spread = log(1 + total)
            for child in node.children:
                score = child.w / child.n + C_UCT * sqrt(spread / (1 + child.n))
                if score > best:
                    best, chosen = score, child
            node, depth = chosen, depth + 1
        value = node.value
        while node.parent is not None:
            node.n += 1
            node.w += value
            node = node.parent
    return root


def rate(work: Callable[[], object], amount: int) -> float:
    """Return how much is done per CPU second, the best of three."""
    best = 0.0
    for _ in range(3):
        started = time.process_time()
        work()
        best = max(best, amount / (time.process_time() - started))
    return best


def speed() -> None:
    model = chain(DEPTH)
    print(f"branching {BRANCHING}, depth {DEPTH}; simulations per CPU second")
    print(f"{'simulations':>12} {'rollout':>10} {'bootstrap':>10} {'training':>10} {'plain loop':>11} {'ratio':>6}")
    for count in (10_000, 100_000, 1_000_000):
        planners = [MCTS(count, 3, C_UCT), MCTS(count, 3, C_UCT, "bootstrap"), MCTS(count, 3, C_UCT, values="reward")]
        rates = [rate(lambda p=planner: drive(p, model, BRANCHING), count) for planner in planners]  # type: ignore[misc]
        plain = rate(lambda n=count: plain_uct(n), count)  # type: ignore[misc]
        shown = " ".join(f"{value:>10,.0f}" for value in rates)
        print(f"{count:>12,} {shown} {plain:>11,.0f} {rates[0] / plain:>6.2f}")


def deep() -> None:
    model = chain(10_000)
    started = time.process_time()
    plan = drive(MCTS(10, 1), model, 1)
    searched = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        record = RunRecord(Path(folder) / "deep.db", {"mas": model.mas.to_dict()}, {"planner": "", "started": ""}, None)
        record.save(Problem("deep", "q", "1"), plan, {})
        stored = time.process_time()
        back = record.load(Problem("deep", "q", "1"))
        record.close()
    loaded = time.process_time()
    assert plan.tree is not None and back is not None and back.tree is not None
    assert Tree.from_dict(json.loads(json.dumps(plan.tree.to_dict())), model).to_dict() == back.tree.to_dict()
    times = (searched - started, stored - searched, loaded - stored)
    shown = "searched in {:.2f} s, stored in {:.2f} s, loaded in {:.2f} s".format(*times)
    print(f"chain of {plan.candidates[0].state.depth:,} turns: {shown}")


def memory(nodes: int) -> None:
    # A bootstrap simulation expands one state, so this many simulations make about this many nodes.
    model, planner = chain(16), MCTS(nodes // 3, 3, 2.0, "bootstrap")
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    tree = drive(planner, model, 3).tree
    gc.collect()
    spent = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert tree is not None
    print(f"{len(tree):,} nodes: {spent / len(tree):.0f} bytes per node, states included, texts shared")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", action="store_true", help="measure bytes per node at 1,000,000 nodes")
    arguments = parser.parse_args()
    speed()
    deep()
    if arguments.memory:
        memory(1_000_000)


if __name__ == "__main__":
    main()
