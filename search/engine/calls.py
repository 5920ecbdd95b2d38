"""Calls of a search to the policy, the critic, the grader, the agent program and the allocation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from mas_gym.envs.critic_base import ScoringContext
from mas_gym.policies.base import SamplingRequest
from mas_gym.systems.state import MASState
from search.grading import Grader


class Share(NamedTuple):
    """The samples of a call for one of the planner's requests.

    Attributes:
        slot: Position of the planner's request.
        state: The request's state.
        places: Positions of the samples in its reply.
    """

    slot: int
    state: MASState
    places: slice[int | None, None, int]


class PolicyCall(NamedTuple):
    """A request to the policy, and the planner's requests that share its samples, in order."""

    request: SamplingRequest
    shares: list[Share]


class CriticCall(NamedTuple):
    """A request to score states."""

    contexts: list[ScoringContext]


class GradingCall(NamedTuple):
    """A request to grade messages on another thread, for slow graders."""

    grader: Grader
    texts: list[str]


class ProgramStep(NamedTuple):
    """A request to run a program with a reply at a state; None starts the program."""

    state: MASState | None
    text: str


class Pause(NamedTuple):
    """A wait for the run's allocation; the outcome is the reply to `search.protocol.Continue`."""

    gain: float


Call = PolicyCall | CriticCall | GradingCall | ProgramStep | Pause


def agent_calls(calls: Iterable[Call]) -> int:
    """Return the number of agent calls among the calls of a search."""
    return sum(len(call.request.seeds) for call in calls if isinstance(call, PolicyCall))
