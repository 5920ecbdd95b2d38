"""The machinery of simulations: descend, expand, back up, decode; see `search.planners.mcts` for the rules."""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from mas_gym.state import Action, MASState
from search.plan import AnytimePoint, Plan
from search.planners.common import Steps, append, evaluate, moment, path_scores, ranked
from search.protocol import Model, Proposal, Propose, Request, Reward, ValueKind
from search.tree import TERMINAL, Tree

if TYPE_CHECKING:
    from search.planners.mcts import MCTS

TRAINING_C_UCT = 4.0
INFERENCE_C_UCT = 2.0


class Simulation:
    """A tree with what selection needs beside it; subclasses change how it descends."""

    def __init__(self, planner: MCTS, model: Model, root: MASState) -> None:
        """Start with the root alone."""
        kind: ValueKind = "process" if planner.values == "auto" else planner.values
        self.planner, self.model, self.kind = planner, model, kind
        self.tree = Tree(root)
        self.steps = kind in ("process", "likelihood")
        self.virtual = self.steps if planner.virtual_visits is None else planner.virtual_visits
        self.bootstrap = planner.leaf == "bootstrap"
        default = TRAINING_C_UCT if kind == "reward" else INFERENCE_C_UCT
        self.c_uct = default if planner.c_uct is None else planner.c_uct
        # The sum of N over a node's children is N of the node, plus this, plus their virtual visits.
        self.shift = -1 if self.bootstrap else 0
        self.tree.visits[0] = 1 if self.virtual else 0
        self.shift -= 1 if self.virtual else 0
        self.log_term: list[float] = []
        self.inverse: list[float] = []
        self.leads = bytearray(1)
        self.terminals: list[int] = []
        self.calls = self.tokens = 0
        self.moments: list[AnytimePoint] = []

    def _lengthen(self, number: int) -> None:
        """Make the tables of c sqrt(ln(1 + n)) and 1 / sqrt(1 + n) hold ``number`` and half as many more."""
        numbers = range(len(self.inverse), number + number // 2 + 64)
        self.log_term += [self.c_uct * math.sqrt(math.log1p(n)) for n in numbers]
        self.inverse += [1 / math.sqrt(1 + n) for n in numbers]

    def simulate(self) -> Steps:
        """Run Alg. 1 or Alg. 2, according to the leaf rule."""
        tree = self.tree
        visits, totals, values, first = tree.visits, tree.totals, tree.values, tree.first
        descend = self.descend
        for _ in range(self.planner.n_simulations):
            path = [0]
            node = descend(path)
            value = values[node]
            if first[node] != TERMINAL or value != value:
                if self.bootstrap and not self._affordable(node):
                    return
                self._note()
                value = yield from self._reach(path)
            for step in path:
                visits[step] += 1
                totals[step] += value

    def simulate_from(self, path: list[int]) -> Steps:
        """Run one simulation that starts at the end of ``path``."""
        node = self.descend(path)
        value = self.tree.values[node]
        if not self.tree.is_terminal(node) or math.isnan(value):
            self._note()
            value = yield from self._reach(path)
        for step in path:
            self.tree.visits[step] += 1
            self.tree.totals[step] += value

    def descend(self, path: list[int]) -> int:
        """Follow Eq. 1 from the last node of ``path``, which grows, to a node without children; return it."""
        tree = self.tree
        first, last, visits, totals = tree.first, tree.last, tree.visits, tree.totals
        log_term, inverse, shift, virtual = self.log_term, self.inverse, self.shift, self.virtual
        node = path[-1]
        while True:
            low = first[node]
            if low <= 0:
                return node
            high = last[node]
            count = visits[node] + shift
            if virtual:
                count += high - low
            elif count < high - low:
                node = low + count
                path.append(node)
                continue
            # No child has more visits than there are at all, so this covers the other table too.
            if count >= len(inverse):
                self._lengthen(count)
            scale, best = log_term[count], -math.inf
            for child in range(low, high):
                n = visits[child]
                score = totals[child] / n + scale * inverse[n]
                if score > best:
                    best, node = score, child
            path.append(node)

    def _reach(self, path: list[int]) -> Generator[list[Request], list[Any], float]:
        """Expand from the end of ``path`` as the leaf rule says and return the simulation's value."""
        tree, node = self.tree, path[-1]
        while not tree.is_terminal(node):
            yield from self.expand(path, self.planner.max_children)
            if self.bootstrap:
                return self._frontier_value(node)
            node = self.descend(path)
        if math.isnan(tree.values[node]):
            yield from self._score(path)
        return tree.values[node]

    def _score(self, path: list[int]) -> Steps:
        """Ask for the value of the terminal state at the end of ``path``."""
        tree, node = self.tree, path[-1]
        if self.kind == "reward":
            [[tree.values[node]]] = yield [Reward([tree.states[node]])]
        else:
            yield from evaluate(tree, [node])
        self._found(path, node)

    def _frontier_value(self, node: int) -> float:
        """Return V(s) of an expanded state, or the best candidate's likelihood (App. "Policy likelihood guidance")."""
        values = self.tree.values
        if self.kind == "likelihood":
            return max(values[child] for child in self.tree.children(node))
        # The root is no successor, so nothing has scored it; its simulation has no edge to back up to either.
        return 0.0 if node == 0 else values[node]

    def expand(self, path: list[int], count: int) -> Steps:
        """Sample candidates at the end of ``path`` and add one child per distinct message."""
        tree, node = self.tree, path[-1]
        [proposals] = yield [Propose(tree.states[node], count)]
        self.calls += len(proposals)
        self.tokens += sum(proposal.tokens for proposal in proposals)
        distinct: dict[Action, Proposal] = {}
        for proposal in proposals:
            distinct.setdefault(proposal.action, proposal)
        fresh = [append(tree, self.model, node, proposal) for proposal in distinct.values()]
        self.leads.extend(bytes(len(fresh)))
        if self.steps:
            yield from evaluate(tree, fresh)
        for child in fresh:
            if self.virtual:
                tree.visits[child] = 1
                tree.totals[child] = tree.values[child]
            if self.steps and tree.is_terminal(child):
                self._found([*path, child], child)

    def _found(self, path: list[int], terminal: int) -> None:
        """Keep a scored terminal state, and mark the way to it for decoding."""
        self.terminals.append(terminal)
        for step in path:
            self.leads[step] = 1

    def _note(self) -> None:
        """Record the answer that decoding gives at the present cost, if it is another than at a lower one.

        Called before more is spent, when all simulations at this cost are done, and at the end.
        """
        if not self.calls:
            return
        if self.moments and self.moments[-1].agent_calls == self.calls:
            self.moments.pop()
        node = self.decode()
        if not self.moments or self.moments[-1].node != node:
            self.moments.append(moment(self.tree, self.calls, self.tokens, node))

    def _affordable(self, node: int, in_work: int = 0) -> bool:
        """Return whether a bootstrap expansion, beside those in work, leaves enough calls for an answer."""
        if self.leads[0] or node == 0:
            return True
        depth: int = getattr(self.model, "max_depth", 1)
        planner = self.planner
        return (
            self.calls + (in_work + 1) * planner.max_children + depth - 1
            <= planner.n_simulations * planner.max_children
        )

    def complete(self) -> Steps:
        """Give a bootstrap search without terminal states one, by single messages from the greedy path's end."""
        if self.leads[0]:
            return
        self._note()
        path = [0]
        while (best := self._greedy(path[-1], all_children=True)) is not None:
            path.append(best)
        while not self.tree.is_terminal(path[-1]):
            yield from self.expand(path, 1)
            path.append(self.tree.children(path[-1])[0])

    def _greedy(self, node: int, all_children: bool = False) -> int | None:
        """Return the child of maximal Q, the oldest among equals; None if none qualifies.

        Children with N = 0 have no Q; their value counts where no sibling has been visited.
        """
        tree, leads = self.tree, self.leads
        best, best_key = None, (False, -math.inf)
        for child in tree.children(node):
            if all_children or leads[child]:
                n = tree.visits[child]
                key = (n > 0, tree.totals[child] / n if n else tree.values[child])
                if key > best_key:
                    best, best_key = child, key
        return best

    def decode(self) -> int | None:
        """Return the terminal node that maximal Q leads to; None while there is none."""
        node = 0
        while (best := self._greedy(node)) is not None:
            node = best
        return node if self.tree.is_terminal(node) else None

    def finish(self) -> Plan:
        """Rank the terminal states and hand over the tree."""
        self._note()
        tree, chosen = self.tree, self.decode()
        tree.visits[0] = sum(tree.visits[child] for child in tree.children(0))
        tree.totals[0] = math.fsum(tree.totals[child] for child in tree.children(0))
        if self.planner.rank == "leaf":
            scores = {node: tree.totals[node] / tree.visits[node] for node in self.terminals if tree.visits[node]}
        else:
            scores = path_scores(tree, self.terminals, self.kind)
        return Plan(ranked(tree, self.terminals, scores, chosen), tree, tuple(self.moments))
