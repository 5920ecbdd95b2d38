"""Calls of a search to the policy, the critic, the grader, the agent program and the allocation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from mas_gym.envs.critic_base import ScoringContext
from mas_gym.policies.base import SamplingRequest
from mas_gym.systems.state import MASState
from search.grading import Grader


class Share(NamedTuple):
    """The samples of a call that belong to one of the planner's requests.

    Attributes:
        slot: The position of the planner's request.
        state: Its state.
        places: The places of the samples in its reply.
    """

    slot: int
    state: MASState
    places: slice[int | None, None, int]


class PolicyCall(NamedTuple):
    """A request to the policy, and the planner's requests that share its samples, in order."""

    request: SamplingRequest
    shares: list[Share]


class CriticCall(NamedTuple):
    """States to be scored."""

    contexts: list[ScoringContext]


class GradingCall(NamedTuple):
    """Messages to be graded on another thread, because their grader is slow."""

    grader: Grader
    texts: list[str]


class ProgramStep(NamedTuple):
    """A reply that a program is run with, at a state; no state means its start."""

    state: MASState | None
    text: str


class Pause(NamedTuple):
    """A search with an answer waits for the run's allocation; the outcome is that of `search.protocol.Continue`."""

    gain: float


Call = PolicyCall | CriticCall | GradingCall | ProgramStep | Pause


def agent_calls(calls: Iterable[Call]) -> int:
    """Return the number of agent calls among the calls of a search."""
    return sum(len(call.request.seeds) for call in calls if isinstance(call, PolicyCall))
