"""`SearchModel`: what one search explores, as the scheduler and planners see it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from mas_gym.errors import SearchError
from mas_gym.policies.base import AsyncPolicy, Messages, Policy, PolicyBase, SamplingReply, SamplingRequest
from mas_gym.systems.graph import MAS
from mas_gym.systems.prompts import chat_messages
from mas_gym.systems.state import MASState
from mas_gym.tasks.base import Grade, Problem
from search.costs import Usage
from search.plan import Plan
from search.protocol import REQUESTS, Model, Propose, Request, Tag, Tags
from search.setup import Setup
from search.tree import Proposal

SampleFrom = Callable[[SamplingRequest], Awaitable[SamplingReply]]
Report = Callable[[str, Usage], None]
"""Takes the agent that wrote a message, or ``""``, and the usage to charge to the search."""


class SampleOrigin(NamedTuple):
    """The origin of a message: the policy's proposal and the sampling seed, which is None for recorded messages."""

    proposal: Proposal
    seed: int | None


@dataclass
class SearchModel(ABC):
    """The states and messages of one search: the root of its question, the successors of a state, and its local view.

    Planners receive only `dynamics`.

    Attributes:
        setup: The search's settings.
        problem: The problem.
        report: Charges usage to the search.
        origins: The origin of each message, by its state's digest and its text.
        generates: Whether messages are written during the search, so that each one is an agent call of the run.
        grades: Known outcomes of terminal states, by digest; None if answers are graded.
        tags: Returns the tags of an agent (`mas_gym.policies.PolicyBase.tags`).
    """

    setup: Setup
    problem: Problem
    report: Report
    origins: dict[tuple[bytes, str], SampleOrigin] = field(default_factory=dict)
    generates: bool = True
    grades: Mapping[bytes, Grade] | None = None
    tags: Callable[[str], tuple[str, ...]] = lambda agent: ()

    def __post_init__(self) -> None:
        self._drawn: dict[bytes, int] = {}
        self.mas: MAS = self.setup.dynamics.mas

    @property
    def dynamics(self) -> Model:
        """The transitions between states, which planners receive as their model."""
        return self.setup.dynamics

    async def root(self) -> MASState:
        """Return the state of the question."""
        return self.setup.dynamics.initial_state(self.problem.question)

    @abstractmethod
    async def successors(self, requests: Sequence[Propose]) -> list[list[Proposal]]:
        """Return the messages of each request, and charge their usage.

        Raises:
            ExhaustedError: None of the states has another message.
        """

    def view(self, state: MASState) -> Messages:
        """Return the acting agent's local view as the chat messages that it would be sent."""
        return chat_messages(self.mas, state)

    def reply(self, request: Request) -> object:
        """Answer `Tags`. Raises `SearchError` for any other request."""
        if not isinstance(request, Tags):
            raise SearchError(f"expected a list of {REQUESTS} from the planner, got a list with {request!r:.200}")
        self.count_draws(request.state, 0)
        names = self.tags(self.mas.agents[request.state.acting].name) or ("",)
        return tuple(Tag(name, self.setup.budget.tag_cost(name)) for name in names)

    def proposal_of(self, state: MASState) -> Proposal | None:
        """Return the proposal that led to a state; None if its message was not written by a policy."""
        origin = self.origins.get((state.parent.digest, state.text)) if state.parent is not None else None
        return origin.proposal if origin is not None else None

    def completed(self, plan: Plan) -> Plan:
        """Return a graded plan with further facts of the model."""
        return plan

    def close(self) -> None:  # noqa: B027 - most models hold nothing
        """Release the search's resources."""

    def count_draws(self, state: MASState, n: int) -> int:
        """Count ``n`` more messages at a state; return how many were drawn there before.

        Raises:
            SearchError: The state is terminal.
        """
        if state.acting == self.mas.sink:
            raise SearchError("the planner proposed at a terminal state; check model.is_terminal(state) first")
        start = self._drawn.get(state.digest, 0)
        self._drawn[state.digest] = start + n
        return start


MakeModel = Callable[[Setup, Problem, Report], SearchModel]
"""Returns the model of a search."""


class SearchSource(ABC):
    """What a run searches in place of a system played by its policy, such as an agent program or a recorded run.

    Attributes:
        mas: The system of its states.
        policy: Wrote its messages; None if the run's policy writes them.
        problems: Its problems; None if it has none.
        name: The name of its problems; empty if it has none.
        stated: What determines results besides the run's other settings, by its name in the run's identity.
    """

    mas: MAS
    policy: Policy | AsyncPolicy | None = None
    problems: Sequence[Problem] | None = None
    name: str = ""
    stated: Mapping[str, object] = MappingProxyType({})

    @abstractmethod
    def opened(self, policy: PolicyBase, sample: SampleFrom) -> AbstractContextManager[MakeModel]:
        """Open what the models of a scheduler share; ``sample`` samples from the policy."""
