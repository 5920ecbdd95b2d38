"""The check for critics, and a critic that knows the reference answers."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from mas_gym.dynamics import Dynamics
from mas_gym.errors import CriticError
from mas_gym.graph import MAS
from mas_gym.loading import MASSource, load_mas
from mas_gym.state import Action, MASState
from mas_gym.tasks.base import Problem, Task
from mas_gym.testing.checks import (
    HOSTILE,
    ORDINARY,
    Findings,
    ProposalLike,
    check_apart,
    check_steady,
    describe,
    stated,
    walk,
)


class ContextLike(NamedTuple):
    """Stands in for the driver's `ScoringContext`."""

    state: MASState
    mas: MAS
    proposal: ProposalLike | None


class CriticLike(Protocol):
    """The part of `search.Critic` that is checked."""

    name: str
    terminal_only: bool
    free: bool

    def score(self, contexts: Any) -> Sequence[float]:
        """Return one value per state, in order."""


def check_critic(
    critic: CriticLike,
    *,
    mas: MASSource = "rpsv",
    question: str = "Maya has 3 apples and buys 4 more. How many apples does she have?",
    tolerance: float = 1e-4,
    seed: int = 0,
    other: CriticLike | None = None,
) -> None:
    """Check a critic: the type and order of its values, its identity, and that a value depends only on its state.

    Args:
        critic: The critic.
        mas: The system whose states it scores.
        question: A question suitable for the critic.
        tolerance: Maximum change of a value caused by batching.
        seed: Seed of the episodes.
        other: Another instance, such as one with other weights. If its values differ, it must state another
            identity, because a run store treats two critics with one identity as the same.

    Raises:
        ComplianceError: Lists every violation.
    """
    name = getattr(critic, "name", None)
    findings = Findings(f"critic {name!r}")
    findings.expect(isinstance(name, str) and bool(name), f"name: expected a non-empty str, got {describe(name)}")
    for flag in ("terminal_only", "free"):
        value = getattr(critic, flag, None)
        findings.expect(isinstance(value, bool), f"{flag}: expected a bool, got {describe(value)}")
    _check_optional(findings, critic)
    if not findings.expect(callable(getattr(critic, "score", None)), "it has no method score(contexts)"):
        findings.settle()
    contexts = _contexts(load_mas(mas), question, bool(getattr(critic, "terminal_only", False)), seed)
    identity = stated(findings, critic)
    values = _score(findings, critic, contexts)
    if values is not None:
        _compare(
            findings,
            values,
            _score(findings, critic, contexts),
            0.0,
            "called again with the same states, it returned other values",
        )
        mirrored = _score(findings, critic, contexts[::-1])
        _compare(findings, values, mirrored and mirrored[::-1], tolerance, "the order of a batch changes the values")
        alone = [_score(findings, critic, [context]) for context in contexts[:4]]
        singles = [value[0] for value in alone if value]
        _compare(findings, values[:4], singles, tolerance, "a state has another value alone than in a batch")
        if other is not None:
            alike = _score(Findings("other"), other, contexts) == values
            check_apart(findings, identity, stated(findings, other), alike, "the difference between the two instances")
    _score(findings, critic, [])
    check_steady(findings, critic, identity)
    findings.settle()


def _check_optional(findings: Findings, critic: CriticLike) -> None:
    size = getattr(critic, "max_batch", 1)
    findings.expect(isinstance(size, int) and size >= 1, f"max_batch: expected an int from 1 on, got {describe(size)}")
    for flag in ("concurrent", "scores_actions"):
        value = getattr(critic, flag, False)
        findings.expect(isinstance(value, bool), f"{flag}: expected a bool, got {describe(value)}")


def _contexts(mas: MAS, question: str, terminal_only: bool, seed: int) -> list[ContextLike]:
    model, rng = Dynamics(mas), random.Random(seed)
    contexts = []
    for texts in (ORDINARY, ORDINARY, (*HOSTILE, *ORDINARY)):
        states = walk(model, question, texts, rng)
        for state in states[-1:] if terminal_only else states[1:]:
            proposal = ProposalLike(Action(state.text, mas.ALL), 5, -1.0 - rng.random(), "stop")
            contexts.append(ContextLike(state, mas, proposal))
    return contexts


def _score(findings: Findings, critic: CriticLike, contexts: list[ContextLike]) -> list[float] | None:
    try:
        values = list(critic.score(contexts))
    except Exception as error:
        findings.expect(False, f"{len(contexts)} states raised {type(error).__name__}: {describe(str(error))}")
        return None
    got = f"{len(contexts)} states got {len(values)} values: expected one each, in order"
    fine = findings.expect(len(values) == len(contexts), got)
    for value in values:
        number = isinstance(value, float | int) and not isinstance(value, bool) and math.isfinite(value)
        fine &= findings.expect(number, f"a value: expected a finite float, got {describe(value)}")
    return values if fine else None


def _compare(
    findings: Findings, values: Sequence[float], others: Sequence[float] | None, tolerance: float, fault: str
) -> None:
    if others is not None:
        same = len(values) == len(others) and all(abs(a - b) <= tolerance for a, b in zip(values, others, strict=True))
        findings.expect(same, fault)


# ------------------------------------------------------------------ oracle


class ScoredState(Protocol):
    """The part of `search.ScoringContext` that the oracle reads."""

    @property
    def state(self) -> MASState:
        """The state to score."""

    @property
    def mas(self) -> MAS:
        """The MAS that it belongs to."""


class OracleCritic:
    """Scores terminal states by the true reward and rejects all others; for tests of planners.

    `rewardmodels.load_critic` cannot load it, so no spec, command or config can use it. A test
    constructs it with the answers that it may use.

    Args:
        task: Grades the final messages.
        answers: The reference answer of each problem that it may score, by problem id.

    Raises:
        CriticError: An answer differs from the task's reference.
    """

    name = "oracle"
    terminal_only = True
    free = True

    def __init__(self, task: Task, answers: Mapping[str, str]) -> None:
        """Index the problems by question."""
        self._task, self._answers = task, dict(answers)
        self._problems: dict[str, Problem] = {}
        for name, answer in answers.items():
            problem = task.problem(name)
            if answer != problem.answer:
                raise CriticError(f"expected the reference answer of {name!r}, got {answer!r}; pass problem.answer")
            self._problems[problem.question] = problem

    def identity(self) -> Any:
        """Return the answers and the task that grades."""
        return {"answers": self._answers, "task": self._task}

    def score(self, contexts: Sequence[ScoredState]) -> list[float]:
        """Return +1.0 or -1.0 per terminal state.

        Raises:
            CriticError: A state is not terminal, or its question belongs to no problem in ``answers``.
        """
        return [self._reward(context) for context in contexts]

    def _reward(self, context: ScoredState) -> float:
        problem = self._problems.get(context.state.question)
        if problem is None:
            raise CriticError(
                f"the oracle has no answer to the question {context.state.question[:60]!r}; add it to answers"
            )
        if context.state.acting != context.mas.sink:
            raise CriticError("the oracle scores terminal states only; use a learned critic for others")
        return 1.0 if self._task.grade(problem, context.state.text).correct else -1.0
