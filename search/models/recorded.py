"""A recorded run as the source of a search's messages."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from mas_gym.errors import ExhaustedError
from mas_gym.policies.base import derive_seed
from mas_gym.systems.prompts import chat_messages
from mas_gym.systems.state import MASState
from search.models.base import Messages, SampleOrigin, SearchModel
from search.protocol import Propose, Request, Tag, Tags
from search.recorded_tree import RecordedTree
from search.tree import Proposal
from search.usage import Usage


@dataclass
class RecordedModel(SearchModel):
    """The recorded messages of a problem; each is drawn once per search."""

    generates: bool = False
    world: RecordedTree = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        """Start without drawn messages."""
        super().__post_init__()
        self.grades = self.world.grades
        self._orders: dict[bytes, list[Proposal]] = {}

    async def root(self) -> MASState:
        """Return the recorded root."""
        return self.world.root

    def view(self, state: MASState) -> Messages:
        """Return the chat messages of the acting agent."""
        return chat_messages(self.mas, state)

    async def successors(self, requests: Sequence[Propose]) -> list[list[Proposal]]:
        """Return recorded messages not yet drawn, in seeded order."""
        if not any(len(self.world.at(one.state)) > self.draw(one.state, 0) for one in requests):
            self.report("", Usage(unrecorded=sum(request.n for request in requests)))
            raise ExhaustedError(f"no recorded message is left at the state after turn {requests[0].state.depth}")
        return [self._take(request.state, request.n) for request in requests]

    def _take(self, state: MASState, n: int) -> list[Proposal]:
        order = self._orders.get(state.digest)
        if order is None:
            order = [*self.world.at(state)]
            random.Random(derive_seed(self.setup.seed, self.problem.id, state.digest, 0)).shuffle(order)
            self._orders[state.digest] = order
        start = self.draw(state, 0)
        drawn = order[start : start + n]
        self.draw(state, len(drawn))
        tokens = sum(proposal.tokens for proposal in drawn)
        self.report("", Usage(agent_calls=len(drawn), generated_tokens=tokens, unrecorded=n - len(drawn)))
        for proposal in drawn:
            self.samples.setdefault((state.digest, proposal.action.text), SampleOrigin(proposal, None))
        return drawn

    def reply(self, request: Request) -> object:
        """Answer `Tags`: a recorded run has one."""
        if isinstance(request, Tags):
            self.draw(request.state, 0)
            return (Tag("", self.setup.budget.tag_cost("")),)
        return super().reply(request)
