"""Monte Carlo tree search over messages (paper, Eq. 1, Alg. 1 and Alg. 2).

`MCTS` contains the settings and `Search` the algorithm: `Search.simulate` is the body of the
paper's loop and `Search.select` is Eq. 1. `ParallelSearch` runs several simulations in one
tree concurrently.

Notation, as in the paper: ``N`` visits and ``W`` total value of a child (of the edge that
leads to it), ``V`` the critic's value of a state, ``D`` the scheduled depth.

The paper does not specify the following:

* Eq. 1 ranks children with N > 0. Children with N = 0, which exist only without virtual
  visits, are visited first, in sample order. Ties are resolved in favor of the oldest child.
* Candidates are a set: equal messages at one state are one child, and ``same`` defines
  which messages are equal. Each sample counts in AC and TOK.
* With ``leaf="rollout"``, a simulation expands and selects by Eq. 1 until it reaches a
  terminal state. AC <= sum over d of min(C^d, n) C for n simulations of C children,
  which is 69 for MCTS(10, 3) at D = 4.
* With ``leaf="bootstrap"``, a simulation expands one state, so AC <= n C.
* Decoding follows the largest Q among the children that have a scored terminal state below
  them, so it never ends in a non-terminal state. If a bootstrap search found no terminal
  state, the greedy path is completed with one message per agent. Until the tree has a
  terminal state, expansions that would leave too few calls for this path are skipped, so
  AC <= n C still holds (for n C >= C + D - 1, and dynamics whose ``max_depth`` is the true
  bound).
* With an outcome critic, each terminal state is scored once: RC is the number of distinct
  terminal leaves, at most one per simulation.
* The simulations end when the budget is exhausted. Until the tree has a terminal state, an
  expansion samples fewer messages if the budget would otherwise be exhausted before the path
  ends.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from mas_gym.critics import Proposal
from mas_gym.errors import BudgetError, ConfigError
from mas_gym.internal.suggestions import choice
from mas_gym.systems.state import MASState
from mas_gym.tasks.base import Same, same_rule
from search.plan import AnytimePoint, Plan
from search.planners.stop_rules import Stop, StopChecks, read_stop, stop_for_run
from search.planners.tree_growth import append_distinct, evaluate, path_scores, ranked
from search.protocol import (
    Critic,
    Model,
    PlanGenerator,
    Planner,
    Propose,
    Remaining,
    Request,
    Reward,
    Steps,
    ValueKind,
    check_at_least,
    planner_name,
    value_kind,
)
from search.tree import TERMINAL, Tree

Flight = Steps[bool]
TRAINING_C_UCT = 4.0
INFERENCE_C_UCT = 2.0


@dataclass(frozen=True)
class MCTS(Planner):
    """MCTS(N_sim, C_max) with UCT selection.

    Attributes:
        n_simulations: Number of simulations.
        max_children: Samples drawn when a state is expanded.
        c_uct: Exploration constant; by default 4.0 with the true reward (App. "MASPRM
            training data generation") and 2.0 otherwise.
        leaf: ``"rollout"`` or ``"bootstrap"``; see the module.
        virtual_visits: Whether new children start with N = 1 and W = their value; by
            default exactly when intermediate states have values.
        values: ``"process"``: a critic for any state; ``"likelihood"``: policy likelihood;
            ``"outcome"``: a critic for terminal states; ``"reward"``: the true reward;
            ``"auto"``: the kind that the run provides.
        rank: The order of the candidates after the chosen one: by ``"path"``, the path score,
            or by ``"leaf"``, the terminal child's Q. Candidates without a Q come last.
        answer: The chosen candidate: by ``"decode"``, the terminal state reached by following the
            largest Q, or by ``"best"``, the first in the order of ``rank``.
        same: Defines when two messages are the same action: the name of a rule of `mas_gym.tasks.base`, such as
            ``"opening"``, or a function ``same(a, b)``. None if only identical texts are the same action.
        parallel: Simulations in flight at once. A larger number needs fewer rounds of replies; virtual loss separates
            the simulations (see `ParallelSearch`).
        stop: Rule for stopping once the answer is settled; see `search.planners.stop_rules`. None never stops.
        horizon: ``"fixed"``: constant exploration; ``"budget"``: ``c_uct`` and the samples per expansion shrink with
            the remaining share of the budget or of the simulations, whichever is less. The search explores widely at
            first and goes deep at the end. This adapts the budget-dependent selection of Li et al. (2026,
            arXiv:2603.12634) to UCT.
    """

    size_setting = "n_simulations"
    serial: ClassVar[bool] = False
    """Whether the planner has no virtual loss, so that it runs one simulation at a time."""

    n_simulations: int = 10
    max_children: int = 3
    c_uct: float | None = None
    leaf: Literal["rollout", "bootstrap"] = "rollout"
    virtual_visits: bool | None = None
    values: ValueKind | Literal["auto"] = "auto"
    rank: Literal["path", "leaf"] = "path"
    answer: Literal["decode", "best"] = "decode"
    parallel: int = 1
    same: str | Same | None = None
    stop: Stop = None
    horizon: Literal["fixed", "budget"] = "fixed"

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", read_stop(self.stop))
        check_at_least(
            self, 1, n_simulations=self.n_simulations, max_children=self.max_children, parallel=self.parallel
        )
        c = self.c_uct
        if c is not None and (not isinstance(c, int | float) or isinstance(c, bool) or not 0 <= c < math.inf):
            raise ConfigError(f"MCTS: expected c_uct to be a finite number >= 0, got {c!r}")
        allowed: tuple[tuple[str, str, tuple[str, ...]], ...] = (
            ("leaf", self.leaf, ("rollout", "bootstrap")),
            ("values", self.values, ("auto", "process", "outcome", "likelihood", "reward")),
            ("rank", self.rank, ("path", "leaf")),
            ("answer", self.answer, ("decode", "best")),
            ("horizon", self.horizon, ("fixed", "budget")),
        )
        for name, value, choices in allowed:
            choice(f"MCTS: {name}", value, choices)
        if self.parallel > 1 and (self.serial or self.horizon == "budget"):
            raise ConfigError(
                f"{planner_name(self)}: expected parallel=1, got {self.parallel}: only MCTS has virtual loss, and only "
                "with horizon='fixed'"
            )
        if self.same is not None:
            same_rule(self.same)
        terminal_only = self.values in ("outcome", "reward")
        if terminal_only and self.leaf == "bootstrap":
            raise ConfigError(f"MCTS: values={self.values!r} are defined on terminal states only: use leaf='rollout'")
        if terminal_only and self.virtual_visits:
            raise ConfigError(
                f"MCTS: expected no virtual visits with values={self.values!r}, because new children have no value; "
                "leave out virtual_visits"
            )

    def for_run(self, critic: Critic | None, training: bool) -> MCTS:
        """Return the planner with the kind of values that the run provides."""
        kind = value_kind(critic, training)
        if kind is None:
            raise ConfigError("MCTS needs a critic: pass critic=load_critic(...), or training=True for the true reward")
        stop = stop_for_run(self, self.stop, critic, training)
        return replace(self, values=kind if self.values == "auto" else self.values, stop=stop)

    def plan(self, model: Model, root: MASState, rng: random.Random) -> PlanGenerator:
        """Run the simulations and decode; the budget can end the simulations early."""
        search = self.search(model, root)
        [left] = yield [Remaining()]
        search.limited = left is not None
        try:
            yield from search.run()
            yield from search.complete()
        except BudgetError:
            yield from search.complete()
        return search.finish()

    def search(self, model: Model, root: MASState) -> Search:
        """Return a new search from ``root``."""
        return Search(self, model, root) if self.parallel == 1 else ParallelSearch(self, model, root)


class Search:
    """The tree of one search and the steps that grow it.

    Subclasses override `run` (the order of simulations) and `select` (the descent).

    Attributes:
        tree: The tree.
        same: The rule for equal messages; None if only identical texts are equal.
        limited: Whether the search has a budget of calls or tokens.
        c_uct: The exploration constant; ``horizon="budget"`` changes it during the search.
        ceiling: Maximum number of agent calls in simulations before there is a terminal state.
        leads: Whether a scored terminal state was found at or below each node.
        in_flight: Nodes that simulations are expanding or scoring.
    """

    def __init__(self, planner: MCTS, model: Model, root: MASState) -> None:
        kind: ValueKind = "process" if planner.values == "auto" else planner.values
        self.planner, self.model, self.kind = planner, model, kind
        self.tree = Tree(root)
        self.scores_steps = kind in ("process", "likelihood")
        self.virtual = self.scores_steps if planner.virtual_visits is None else planner.virtual_visits
        self.bootstrap = planner.leaf == "bootstrap"
        default = TRAINING_C_UCT if kind == "reward" else INFERENCE_C_UCT
        self.c_uct = self.first_c = default if planner.c_uct is None else planner.c_uct
        self.width = planner.max_children
        self.paced, self.begun = planner.horizon == "budget", 0
        self.same = None if planner.same is None else same_rule(planner.same)
        self.limited = False
        self.ceiling = planner.n_simulations * planner.max_children if self.bootstrap else math.inf
        self.tree.visits[0] = int(self.virtual)
        self.leads = bytearray(1)
        self.in_flight: set[int] = set()
        self.terminals: list[int] = []
        self.calls = self.tokens = 0
        self.curve: list[AnytimePoint] = []
        self.checks = None if planner.stop is None else StopChecks(planner.stop, self.tree, not self.scores_steps)

    def run(self) -> Steps[None]:
        """Run the simulations one after another."""
        for _ in range(self.planner.n_simulations):
            if not (yield from self.simulate([0])) or (yield from self.settled()):
                return

    def settled(self) -> Flight:
        """Return whether the stop rule ends the search; called between simulations."""
        if self.checks is None:
            return False
        return (yield from self.checks.check(self.chosen(), self.terminals))

    def simulate(self, path: list[int]) -> Flight:
        """Run one simulation of Alg. 1 (rollout) or Alg. 2 (bootstrap) from the end of ``path``.

        An empty request list means that it waits for another simulation.

        Returns:
            False if the simulation was abandoned because too few calls would be left for an answer.
        """
        if self.paced:
            yield from self.pace()
        tree, node = self.tree, self.descend(path)
        value = tree.values[node]
        if not self.in_flight and (tree.first[node] != TERMINAL or math.isnan(value)):
            self.note()
        while tree.first[node] != TERMINAL or math.isnan(value):
            if node in self.in_flight:
                yield []
            else:
                self.in_flight.add(node)
                if tree.is_terminal(node):
                    yield from self.score(path)
                elif not (yield from self.expand(path)):
                    self.in_flight.discard(node)
                    return False
                self.in_flight.discard(node)
                if self.bootstrap or tree.is_terminal(node):
                    value = tree.values[node] if tree.is_terminal(node) else self.frontier_value(node)
                    break
            node = self.descend(path)
            value = tree.values[node]
        for step in path:
            tree.visits[step] += 1
            tree.totals[step] += value
        return True

    def pace(self) -> Steps[None]:
        """Scale exploration and width by the remaining share of the budget before a simulation."""
        [left] = yield [Remaining()]
        share = 1 - self.begun / self.planner.n_simulations
        if left is not None:
            share = min(share, left / max(left + self.calls, 1))
        self.begun += 1
        self.c_uct = self.first_c * share
        self.width = max(1, math.ceil(self.planner.max_children * share))

    def descend(self, path: list[int]) -> int:
        """Extend ``path`` by selected children down to a node without children, and return this node."""
        node, first = path[-1], self.tree.first
        while first[node] > 0:
            node = self.select(node)
            path.append(node)
        return node

    def select(self, node: int) -> int:
        """Return the child with the largest Q + c sqrt(ln(1 + sum of N) / (1 + N)) (Eq. 1)."""
        tree, c, sqrt = self.tree, self.c_uct, math.sqrt
        low, high = tree.first[node], tree.last[node]
        visits = tree.visits[low:high]
        log_visits = math.log(1 + sum(visits))
        best, best_score = low, -math.inf
        for child, n in enumerate(visits, low):
            if n == 0:
                return child
            score = tree.totals[child] / n + c * sqrt(log_visits / (1 + n))
            if score > best_score:
                best, best_score = child, score
        return best

    def expand(self, path: list[int], count: int | None = None) -> Flight:
        """Sample candidates at the end of ``path`` and add one child per distinct message.

        Draw ``count`` samples, by default ``width``, or fewer if the budget is short; return whether it allowed any.
        """
        tree, node = self.tree, path[-1]
        count = self.width if count is None else count
        proposals: list[Proposal] = []
        while len(proposals) < count and (
            room := (yield from self.room(node, count - len(proposals), drawn=bool(proposals)))
        ):
            [more] = yield [Propose(tree.states[node], room)]
            self.calls += len(more)
            self.tokens += sum(proposal.tokens for proposal in more)
            proposals += more
            if len(more) < room:
                break
        if not proposals:
            return False
        fresh = append_distinct(tree, self.model, node, proposals, self.same)
        self.leads.extend(bytes(len(fresh)))
        if self.scores_steps:
            yield from evaluate(tree, fresh)
        for child in fresh:
            if self.virtual:
                tree.visits[child] = 1
                tree.totals[child] = tree.values[child]
            if self.scores_steps and tree.is_terminal(child):
                self.found([*path, child])
        return True

    def room(self, node: int, count: int, drawn: bool) -> Steps[int]:
        """Return how many of ``count`` messages ``node`` may sample if enough calls must remain for an answer."""
        if self.leads[0]:
            return count
        depth = self.model.max_depth
        others = len(self.in_flight - {node}) * self.planner.max_children
        if node and self.calls + others + count + depth - 1 > self.ceiling:
            return 0
        if not self.limited:
            return count
        [left] = yield [Remaining()]
        # A rollout continues from here; a bootstrap search may have to complete an answer from any child of the root.
        spare: int = left - (depth - 1) + (0 if self.bootstrap else self.tree.states[node].depth)
        if self.bootstrap and node and spare < count:
            return 0
        return min(count, max(spare, 0 if drawn else 1))

    def score(self, path: list[int]) -> Steps[None]:
        """Request the value of the terminal state at the end of ``path``."""
        tree, node = self.tree, path[-1]
        if self.kind == "reward":
            [[tree.values[node]]] = yield [Reward([tree.states[node]])]
        else:
            yield from evaluate(tree, [node])
        self.found(path)

    def frontier_value(self, node: int) -> float:
        """Return V(s) of an expanded state, or the best candidate's likelihood (App. "Policy likelihood guidance")."""
        values = self.tree.values
        if self.kind == "likelihood":
            return max(values[child] for child in self.tree.children(node))
        # No action leads to the root, so it has no value, and its simulation has no edge to back up to.
        return 0.0 if node == 0 else values[node]

    def found(self, path: list[int]) -> None:
        """Record the scored terminal state at the end of ``path``, and mark the path for decoding."""
        self.terminals.append(path[-1])
        for step in path:
            self.leads[step] = 1

    def note(self) -> None:
        """Add a point to the anytime curve if the answer has changed since the last one.

        Call this after all simulations at the current cost, before the cost increases, and at the end.
        """
        if not self.calls:
            return
        if self.curve and self.curve[-1].agent_calls == self.calls:
            self.curve.pop()
        node = self.chosen()
        if not self.curve or self.curve[-1].node != node:
            state = None if node is None else self.tree.states[node]
            self.curve.append(AnytimePoint(self.calls, self.tokens, state, node))

    def complete(self) -> Steps[None]:
        """Complete the greedy path with single messages if the tree has no scored terminal state."""
        if self.leads[0]:
            return
        self.note()
        self.limited, self.ceiling = False, math.inf
        path = [0]
        while (best := self.greedy(path[-1], all_children=True)) is not None:
            path.append(best)
        while not self.tree.is_terminal(path[-1]):
            yield from self.expand(path, 1)
            path.append(self.tree.children(path[-1])[-1])
        if not self.leads[0]:
            yield from self.score(path)

    def greedy(self, node: int, all_children: bool = False) -> int | None:
        """Return the child with the largest Q among those that lead to a scored terminal state; ties go to the oldest.

        Children with N = 0 have no Q. They come after all visited siblings and are ranked by value.
        """
        tree, leads = self.tree, self.leads
        best, best_key = None, (False, -math.inf)
        for child in tree.children(node):
            if all_children or leads[child]:
                n = tree.visits[child]
                key = (n > 0, tree.totals[child] / n if n else tree.values[child])
                if best is None or key > best_key:
                    best, best_key = child, key
        return best

    def decode(self) -> int | None:
        """Return the terminal node reached by following the largest Q; None if there is none yet."""
        node = 0
        while (best := self.greedy(node)) is not None:
            node = best
        return node if self.tree.is_terminal(node) else None

    def chosen(self) -> int | None:
        """Return the chosen terminal node; None if there is none yet."""
        if self.planner.answer == "decode":
            return self.decode()
        scores = self.scores()
        return max(self.terminals, key=lambda node: (scores.get(node, -math.inf), -node), default=None)

    def scores(self) -> Mapping[int, float]:
        """Return the ranking scores of terminal nodes; an unscored node has no entry."""
        tree = self.tree
        if self.planner.rank == "leaf":
            return {node: tree.totals[node] / tree.visits[node] for node in self.terminals if tree.visits[node]}
        return path_scores(tree, self.terminals, self.kind)

    def finish(self) -> Plan:
        """Return the plan: ranked terminal states, the tree and the anytime curve."""
        self.note()
        tree, chosen = self.tree, self.chosen()
        tree.visits[0] = sum(tree.visits[child] for child in tree.children(0))
        tree.totals[0] = math.fsum(tree.totals[child] for child in tree.children(0))
        candidates = ranked(tree, self.terminals, self.scores(), chosen)
        return Plan(candidates, tree, tuple(self.curve), stopped=None if self.checks is None else self.checks.stopped)


class ParallelSearch(Search):
    """Concurrent simulations in one tree, separated by virtual loss (Chaslot et al., 2008).

    Up to ``parallel`` simulations are in flight and advance in rounds: each round sends the requests of all
    simulations. Each simulation in flight adds one visit with the worst value to every edge on its path, so the next
    simulation prefers another path. A simulation waits at a state that another simulation is expanding or scoring, so
    no state is expanded twice and the bounds on AC and RC stay the same. Rounds depend only on the replies: the same
    seed gives the same plan. With a budget of calls or tokens, simulations run one at a time, so that no simulation is
    dropped before it completes.

    The worst value is -1 if only terminal states have values, otherwise the smallest value in the tree so far.
    ``tree.visits`` and ``tree.totals`` contain no virtual losses.
    """

    def __init__(self, planner: MCTS, model: Model, root: MASState) -> None:
        super().__init__(planner, model, root)
        self.worst = math.inf if self.scores_steps else -1.0
        self.losses: Counter[int] = Counter()
        self.spent = False

    def run(self) -> Steps[None]:
        """Run the simulations in rounds; within a round, simulations advance in the order in which they started."""
        left, at_once = self.planner.n_simulations, 1 if self.limited else self.planner.parallel
        flights: list[tuple[Flight, list[Request]]] = []
        try:
            while True:
                started = len(flights)
                while left and len(flights) < at_once and not self.spent:
                    left -= 1
                    flights += _resume(self.simulate([0]), None)
                if not flights:
                    return
                if len(flights) > started:
                    self.note()
                wanted = [request for _, requests in flights for request in requests]
                replies = iter((yield wanted) if wanted else ())
                answers = [[next(replies) for _ in requests] for _, requests in flights]
                going: list[tuple[Flight, list[Request]]] = []
                for (flight, _), answer in zip(flights, answers, strict=True):
                    going += _resume(flight, answer)
                # Simulations in flight end, and no more are started.
                if len(going) < len(flights) and left and (yield from self.settled()):
                    left = 0
                flights = going
        finally:
            for flight, _ in flights:
                flight.close()

    def simulate(self, path: list[int]) -> Flight:
        """Run one simulation, and remove its virtual losses."""
        try:
            done = yield from super().simulate(path)
        finally:
            self.losses.subtract(path[1:])
        self.spent = self.spent or not done
        return done

    def expand(self, path: list[int], count: int | None = None) -> Flight:
        """Expand, and update the worst value."""
        done = yield from super().expand(path, count)
        if done and self.scores_steps:
            self.worst = min(self.worst, *(self.tree.values[child] for child in self.tree.children(path[-1])))
        return done

    def descend(self, path: list[int]) -> int:
        """Select children down to a state that has no children or is in flight; add a virtual loss to each edge."""
        node = path[-1]
        while self.tree.first[node] > 0 and node not in self.in_flight:
            node = self.select(node)
            self.losses[node] += 1
            path.append(node)
        return node

    def select(self, node: int) -> int:
        """Return the child selected by Eq. 1 with virtual losses."""
        tree, losses = self.tree, self.losses
        children = tree.children(node)
        visits = [tree.visits[child] + losses[child] for child in children]
        log_visits = math.log(1 + sum(visits))
        best, best_score = -1, -math.inf
        for child, n in zip(children, visits, strict=True):
            if n == 0:
                return child
            q = (tree.totals[child] + self.worst * losses[child]) / n
            score = q + self.c_uct * math.sqrt(log_visits / (1 + n))
            if score > best_score:
                best, best_score = child, score
        return best


def _resume(flight: Flight, answer: list[Any] | None) -> list[tuple[Flight, list[Request]]]:
    """Run a simulation up to its next requests; an empty list means that it has ended."""
    try:
        return [(flight, flight.send(answer))]  # type: ignore[arg-type]
    except StopIteration:
        return []
