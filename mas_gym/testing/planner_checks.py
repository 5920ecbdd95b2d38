"""Checks of planners, which run whole searches against scripted replies without an engine."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Generator, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, cast

import numpy as np

from mas_gym.critics import Critic, Proposal, ScoringContext
from mas_gym.errors import BudgetError, shown
from mas_gym.internal.adapter import has_method
from mas_gym.systems.dynamics import Dynamics
from mas_gym.systems.loading import MASSource, load_mas
from mas_gym.systems.state import Action, MASState
from mas_gym.testing.shared_checks import QUESTION, Findings, addressed, check_steady, stated

_MAX_ROUNDS = 100_000
"""Rounds of requests after which a search counts as endless."""


class _Tag(NamedTuple):
    """The only tag at a state, like `search.Tag`."""

    name: str = ""
    cost: float | None = None


class PlannerLike(Protocol):
    """The part of `search.Planner` that is checked."""

    def plan(self, model: Dynamics, root: MASState, rng: random.Random) -> Generator[list[Any], list[Any], object]:
        """Search from the root."""


class _ScriptedCritic(Critic):
    """The attributes of the run's critic that a planner may read in ``for_run``."""

    name = "scripted"

    def score(self, contexts: Sequence[ScoringContext]) -> list[float]:
        raise NotImplementedError


def check_planner(
    planner: PlannerLike,
    *,
    systems: Iterable[MASSource] = ("rpsv", "single", "dylan"),
    training: bool = False,
) -> None:
    """Check a planner: its requests, its plan, its identity, and that it draws random numbers only from its ``rng``.

    Args:
        planner: The planner.
        systems: The systems to search in.
        training: Whether the planner may request the true reward.

    Raises:
        ComplianceError: Lists every violation.
    """
    findings = Findings(f"planner {type(planner).__name__}")
    if not findings.expect(has_method(planner, "plan"), "it has no method plan(model, root, rng)"):
        findings.settle()
    if has_method(planner, "for_run"):
        planner = cast(Any, planner).for_run(_ScriptedCritic(), training)
    before_all = stated(findings, planner)
    for source in systems:
        model = Dynamics(load_mas(source))
        searches = [_Search(findings, planner, model, training, s) for s in (0, 0, 1)]
        before = _global_generators()
        _run_together(findings, searches[1:])
        _run_together(findings, searches[:1])
        findings.expect(before == _global_generators(), "it draws from a global generator: use the rng of plan()")
        alone, beside, _ = searches
        findings.expect(
            alone.asked == beside.asked and alone.outcome() == beside.outcome(),
            "two searches with one seed and the same replies differ: keep all state inside plan()",
        )
        _check_budget(findings, planner, model, training)
    check_steady(findings, planner, before_all)
    findings.settle()


def _candidates(plan: object) -> Sequence[Any] | None:
    """Return the candidates of a plan; None if the object is none."""
    found: Sequence[Any] | None = getattr(plan, "candidates", None)
    return found


_SCORED = ("Evaluate", "Extract", "Reward")
"""Requests that contain several states."""


class _Search:
    """One search with its replies, which depend on state digests and not on timing."""

    def __init__(self, findings: Findings, planner: PlannerLike, model: Dynamics, training: bool, seed: int) -> None:
        self.findings, self.model, self.training, self.seed = findings, model, training, seed
        self.root = model.initial_state(QUESTION)
        self.asked: list[str] = []
        self.plan: object = None
        self.over = False
        self._drawn: dict[MASState, int] = {}
        self._generator = planner.plan(model, self.root, random.Random(seed))
        self._replies: list[object] | None = None
        self._left: int | None = None

    def advance(self) -> None:
        """Send the replies to the last requests and compute the replies to the next ones."""
        try:
            requests = self._generator.send(self._replies)  # type: ignore[arg-type]
        except StopIteration as end:
            self.over, self.plan = True, end.value
            self._check_plan()
            return
        except Exception as error:
            self.over = True
            self.findings.expect(False, f"it raised {type(error).__name__}: {shown(str(error))}")
            return
        if not self.findings.expect(isinstance(requests, list), f"it yielded {shown(requests)}: expected a list"):
            self.over = True
            self._generator.close()
            return
        self._replies = [self._reply(request) for request in requests]

    def outcome(self) -> list[str]:
        """Return the candidates of the plan, for comparison."""
        return [candidate.state.digest.hex() for candidate in _candidates(self.plan) or ()]

    def spend(self) -> object:
        """Raise `BudgetError` in the search; return its plan or the error that it propagated.

        Like the scheduler, this still executes single-message requests, which complete one path.
        """
        messages, self._left = self.model.max_depth, 0
        try:
            requests = self._generator.throw(BudgetError("the budget is spent"))
            for _ in range(10 * self.model.max_depth):
                wanted = sum(request.n for request in requests if type(request).__name__ == "Propose")
                messages -= wanted
                if wanted > 1 or messages < 0:
                    return None
                requests = self._generator.send([self._reply(request) for request in requests])
        except StopIteration as end:
            return end.value
        except BudgetError as error:
            return error
        return None

    def _reply(self, request: Any) -> object:
        kind = type(request).__name__
        if kind == "Remaining":
            return self._left
        if kind == "Tags":
            return (_Tag(),)
        proposes = kind == "Propose"
        states = [request.state] if proposes else list(request.states) if kind in _SCORED else []
        for state in states:
            mine = isinstance(state, MASState) and state.question == self.root.question
            if not self.findings.expect(mine, f"{kind} of {shown(state)}: expected states of its own search"):
                return [0.0 for _ in states]
        self.asked.append(f"{kind}:{request.n if proposes else ''}:{','.join(s.digest.hex() for s in states)}")
        if proposes:
            return self._propose(request)
        if kind == "Evaluate":
            return [self._draw(state, "value") for state in states]
        if kind == "Extract":
            return [state.text.split()[-1] if state.text else None for state in states]
        if self.findings.expect(kind == "Reward", f"it requested {shown(request)}: expected a search request"):
            self.findings.expect(self.training, "it requested the true reward outside training")
            terminal = all(self.model.is_terminal(state) for state in states)
            self.findings.expect(terminal, "it requested the reward of a state that is not terminal")
        return [1.0 if self._draw(state, "reward") > 0 else -1.0 for state in states]

    def _propose(self, request: Any) -> list[Proposal]:
        state = request.state
        fine = isinstance(request.n, int) and request.n >= 1
        self.findings.expect(fine, f"Propose(n={shown(request.n)}): expected an integer of at least 1")
        if not self.findings.expect(not self.model.is_terminal(state), "it requested messages at a terminal state"):
            return []
        first = self._drawn.get(state, 0)
        self._drawn[state] = first + request.n
        replies = []
        for i in range(first, first + request.n):
            # Few distinct texts, because real proposals repeat too.
            number = int(4 * abs(self._draw(state, f"text {i}")))
            text = addressed(self.model.mas, state, f"Step. Final Answer: {number}", number)
            replies.append(Proposal(Action(text, self.model.mas.ALL), 4, -2.0, "stop"))
        return replies

    def _draw(self, state: MASState, what: str) -> float:
        return random.Random(f"{self.seed} {what} {state.digest.hex()}").uniform(-1.0, 1.0)

    def _check_plan(self) -> None:
        candidates = _candidates(self.plan) or ()
        returned = shown(self.plan)
        if not self.findings.expect(bool(candidates), f"it returned {returned}: expected a plan with candidates"):
            return
        for candidate in candidates:
            state: object = getattr(candidate, "state", None)
            terminal = isinstance(state, MASState) and state.path()[0] == self.root and self.model.is_terminal(state)
            self.findings.expect(terminal, f"a candidate at {shown(state)}: expected a terminal state of its search")
        self._check_tree(getattr(self.plan, "tree", None), candidates)
        scores = [candidate.score for candidate in candidates[1:]]
        ranked = [score for score in scores if score is not None]
        self.findings.expect(ranked == sorted(ranked, reverse=True), "the candidates after the first are not ranked")

    def _check_tree(self, tree: Any, candidates: Sequence[Any]) -> None:
        """Check that a store can write the tree and read it back."""
        if tree is None:
            return
        try:
            stored = type(tree).from_dict(json.loads(json.dumps(tree.to_dict())), self.model)
        except Exception as error:
            self.findings.expect(False, f"its tree cannot be stored and read back: {shown(str(error))}")
            return
        self.findings.expect(stored.states == tree.states, "its tree differs after storing and reading it back")
        for one in candidates:
            node = one.node
            same = node is None or (isinstance(node, int) and 0 <= node < len(tree) and tree.states[node] == one.state)
            self.findings.expect(
                same, f"a candidate's node is {shown(node)}: expected the node of its state in the tree, or None"
            )


def _global_generators() -> bytes:
    return pickle.dumps((random.getstate(), np.random.get_state()))


def _run_together(findings: Findings, searches: list[_Search]) -> None:
    for _ in range(_MAX_ROUNDS):
        running = [search for search in searches if not search.over]
        if not running:
            return
        for search in running:
            search.advance()
    findings.expect(False, f"a search did not end within {_MAX_ROUNDS} rounds of requests")


def _check_budget(findings: Findings, planner: PlannerLike, model: Dynamics, training: bool) -> None:
    """Check that a planner returns a plan after a `BudgetError`, completing one path if necessary, or raises it."""
    for rounds in (1, 2, 5):
        search = _Search(findings, planner, model, training, 0)
        for _ in range(rounds):
            if not search.over:
                search.advance()
        if search.over:
            continue
        ended = search.spend()
        stopped = isinstance(ended, BudgetError) or _candidates(ended) is not None
        findings.expect(
            stopped,
            "it continued after BudgetError: return the best plan so far, completing one path with single messages "
            "if none has ended, or let the error propagate",
        )
