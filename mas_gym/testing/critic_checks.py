"""Checks of critics."""

from __future__ import annotations

import random
from collections.abc import Sequence

from mas_gym.critics import Critic, Proposal, ScoringContext, as_critic, scores_of
from mas_gym.errors import ComplianceError, shown
from mas_gym.internal.adapter import describe_type, has_method
from mas_gym.systems.dynamics import Dynamics
from mas_gym.systems.graph import MAS
from mas_gym.systems.loading import MASSource, load_mas
from mas_gym.systems.state import Action
from mas_gym.testing.shared_checks import HOSTILE, ORDINARY, QUESTION, Findings, check_steady, stated, walk

_TOLERANCE = 1e-4
"""Maximum change in a value caused by batching."""


def check_critic(critic: object, *, mas: MASSource = "rpsv") -> None:
    """Check a critic: the type and order of its values, its identity, and that a value depends only on its state.

    Args:
        critic: The critic.
        mas: The system of the states to score.

    Raises:
        ComplianceError: Lists every violation.
    """
    if not has_method(critic, "score"):
        raise ComplianceError(f"critic {describe_type(critic)}: it has no method score(contexts)")
    critic = as_critic(critic)
    findings = Findings(f"critic {critic.name!r}")
    _check_attributes(findings, critic)
    contexts = _contexts(load_mas(mas), bool(critic.terminal_only))
    identity = stated(findings, critic)
    values = _score(findings, critic, contexts)
    if values is not None:
        again = _score(findings, critic, contexts)
        _compare(findings, values, again, 0.0, "called again with the same states, it returned different values")
        mirrored = _score(findings, critic, contexts[::-1])
        _compare(findings, values, mirrored and mirrored[::-1], _TOLERANCE, "the order of a batch changes the values")
        alone = [_score(findings, critic, [context]) for context in contexts[:4]]
        singles = [value[0] for value in alone if value]
        _compare(findings, values[:4], singles, _TOLERANCE, "a state has different values alone and in a batch")
    _score(findings, critic, [])
    check_steady(findings, critic, identity)
    findings.settle()


def _check_attributes(findings: Findings, critic: Critic) -> None:
    name, size = critic.name, critic.max_batch
    findings.expect(isinstance(name, str) and bool(name), f"name: expected a non-empty str, got {shown(name)}")
    findings.expect(isinstance(size, int) and size >= 1, f"max_batch: expected an int from 1 on, got {shown(size)}")
    for flag in ("terminal_only", "free", "concurrent", "scores_actions", "reads_peers"):
        value = getattr(critic, flag)
        findings.expect(isinstance(value, bool), f"{flag}: expected a bool, got {shown(value)}")


def _contexts(mas: MAS, terminal_only: bool) -> list[ScoringContext]:
    model, rng = Dynamics(mas), random.Random(0)
    contexts = []
    for texts in (ORDINARY, ORDINARY, (*HOSTILE, *ORDINARY)):
        states = walk(model, QUESTION, texts, rng)
        for state in states[-1:] if terminal_only else states[1:]:
            proposal = Proposal(Action(state.text, mas.ALL), 5, -1.0 - rng.random(), "stop")
            contexts.append(ScoringContext(state, mas, proposal))
    return contexts


def _score(findings: Findings, critic: Critic, contexts: list[ScoringContext]) -> list[float] | None:
    try:
        scores = scores_of(critic, contexts)
    except Exception as error:
        findings.expect(False, f"{len(contexts)} states raised {type(error).__name__}: {shown(str(error))}")
        return None
    faults = [findings.expect(not reason, f"a state has no value: {reason:.200}") for reason in scores.reasons]
    return list(scores) if all(faults) else None


def _compare(
    findings: Findings, values: Sequence[float], others: Sequence[float] | None, tolerance: float, fault: str
) -> None:
    if others is not None:
        same = len(values) == len(others) and all(abs(a - b) <= tolerance for a, b in zip(values, others, strict=True))
        findings.expect(same, fault)
