"""What a search explores, as the scheduler and planners see it; by default, a system played by a policy."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

from mas_gym.critics import Proposal
from mas_gym.errors import PolicyError, SearchError
from mas_gym.internal.event_loop import together
from mas_gym.policies.base import (
    AsyncPolicy,
    Messages,
    Policy,
    PolicyBase,
    Sample,
    Sampling,
    SamplingReply,
    SamplingRequest,
    derive_seed,
)
from mas_gym.systems.graph import MAS, Agent
from mas_gym.systems.prompts import chat_messages
from mas_gym.systems.state import Action, MASState
from mas_gym.tasks.base import Grade, Problem
from search.costs import TagUsage, Usage
from search.plan import Plan
from search.protocol import REQUESTS, Model, Propose, Request, Tag, Tags
from search.setup import Setup

SampleFrom = Callable[[SamplingRequest], Awaitable[SamplingReply]]
Report = Callable[[str, Usage], None]
"""Takes the agent that wrote a message, or ``""``, and the usage to charge to the search."""


class SampleOrigin(NamedTuple):
    """The origin of a message: the policy's proposal and the sampling seed, which is None for recorded messages."""

    proposal: Proposal
    seed: int | None


_TURN = -1
"""Used in place of a sample number, for the seed that chooses the first tag at a state."""

CallKey = tuple[Messages, Agent, Sampling, str, str]
"""Messages, agent, sampling, extra body and tag. Requests with equal keys are merged into one call."""


class Share(NamedTuple):
    """The samples of a call for one of the planner's requests, and their positions in the reply to it."""

    slot: int
    state: MASState
    places: range


@dataclass
class SearchModel:
    """The states and messages of one search: the root of its question and the successors of a state.

    This class samples the messages of a system from a policy; subclasses have other transitions or other messages.
    Planners receive only `dynamics`.

    Attributes:
        setup: The search's settings.
        problem: The problem.
        report: Charges usage to the search.
        sample: Samples messages from the policy (`search.engine.scheduler.Scheduler` within a run).
        origins: The origin of each message, by its state's digest and its text.
        generates: Whether messages are written during the search, so that each one is an agent call of the run.
        grades: Known outcomes of terminal states, by digest; None if answers are graded.
        tags: Returns the tags of an agent (`mas_gym.policies.PolicyBase.tags`).
    """

    setup: Setup
    problem: Problem
    report: Report
    sample: SampleFrom
    origins: dict[tuple[bytes, str], SampleOrigin] = field(default_factory=dict)
    generates: bool = True
    grades: Mapping[bytes, Grade] | None = None
    tags: Callable[[str], tuple[str, ...]] = lambda agent: ()

    def __post_init__(self) -> None:
        self._drawn: dict[bytes, int] = {}
        self._texts: dict[str, str] = {}
        self.mas: MAS = self.setup.dynamics.mas

    @property
    def dynamics(self) -> Model:
        """The transitions between states, which planners receive as their model."""
        return self.setup.dynamics

    async def root(self) -> MASState:
        """Return the state of the question."""
        return self.setup.dynamics.initial_state(self.problem.question)

    def prompt(self, state: MASState) -> tuple[Messages, Agent, Sampling, str]:
        """Return the prompt at a state, without a tag."""
        agent = self.mas.agents[state.acting]
        return chat_messages(self.mas, state), agent, self.setup.sampling.for_agent(agent), ""

    async def successors(self, requests: Sequence[Propose]) -> list[list[Proposal]]:
        """Return the messages of each request, and charge their usage; equal prompts share one call.

        Raises:
            ExhaustedError: None of the states has another message, in a model with a fixed number of them.
        """
        merged: dict[CallKey, tuple[list[int], list[Share]]] = {}
        for slot, (state, n, tag) in enumerate((one.state, one.n, one.tag) for one in requests):
            start = self.count_draws(state, n)
            prompt = self.prompt(state)
            seeds = sample_seeds(self.setup.seed, self.problem.id, state, start, n)
            for name, places in self._shared_out(state, prompt[1].name, tag, start, n):
                entry = merged.setdefault((*prompt, name), ([], []))
                entry[0].extend(seeds[place] for place in places)
                entry[1].append(Share(slot, state, places))
        replies: list[list[Proposal]] = [[None] * request.n for request in requests]  # type: ignore[list-item]
        fresh: set[tuple[bytes, str]] = set()
        calls = [self._call(key, seeds, shares, replies, fresh) for key, (seeds, shares) in merged.items()]
        if len(calls) == 1:
            await calls[0]
        else:
            await together(calls)
        return replies

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

    async def _call(
        self,
        key: CallKey,
        seeds: Sequence[int],
        shares: Sequence[Share],
        replies: list[list[Proposal]],
        fresh: set[tuple[bytes, str]],
    ) -> None:
        """Sample from one prompt, and fill in the samples of each request that shares it."""
        messages, agent, sampling, extra, tag = key
        cap = min(agent.max_new_tokens, sampling.limit)
        settings = (cap, sampling.temperature, sampling.top_p, agent.name, extra)
        outcome: object = await self.sample(SamplingRequest(messages, tuple(seeds), *settings, tag=tag))
        if not isinstance(outcome, SamplingReply) or len(outcome.samples) != len(seeds):
            got = len(outcome.samples) if isinstance(outcome, SamplingReply) else type(outcome).__name__
            raise PolicyError(f"agent {agent.name!r}: expected {len(seeds)} samples from the policy, got {got}")
        self.setup.budget.check_counted(outcome.samples)
        tokens = sum(sample.tokens for sample in outcome.samples)
        by_tag = TagUsage(tag, len(seeds), tokens, outcome.prompt_tokens, outcome.cached_tokens)
        usage = Usage(
            agent_calls=len(seeds),
            generated_tokens=tokens,
            prompt_tokens=outcome.prompt_tokens,
            cached_tokens=outcome.cached_tokens,
            dropped_tokens=outcome.dropped_tokens,
            # An end token alone is an empty reply.
            reasoning_only=sum(sample.tokens > 1 and not sample.text for sample in outcome.samples),
            tags=(by_tag,) if tag else (),
        )
        origins = [self._origin(*pair, tag) for pair in zip(outcome.samples, seeds, strict=True)]
        placed = [(share, place) for share in shares for place in share.places]
        for (share, place), origin in zip(placed, origins, strict=True):
            replies[share.slot][place] = origin.proposal
            self._keep(share.state, origin, fresh)
        self.report(agent.name, usage)
        await self.reached(
            [(share.state, origin.proposal.action.text) for (share, _), origin in zip(placed, origins, strict=True)]
        )

    async def reached(self, messages: Sequence[tuple[MASState, str]]) -> None:
        """Compute the states after new messages, for models whose transitions take time."""

    def _origin(self, sample: Sample, seed: int, tag: str) -> SampleOrigin:
        text = self._texts.setdefault(sample.text, sample.text)
        logprob = sample.logprob if sample.logprob is not None and math.isfinite(sample.logprob) else None
        action = Action(text, self.mas.ALL)
        return SampleOrigin(Proposal(action, sample.tokens, logprob, sample.finish_reason, sample.certainty, tag), seed)

    def _keep(self, state: MASState, origin: SampleOrigin, fresh: set[tuple[bytes, str]]) -> None:
        """Store a message by its state and text; of equal messages, keep the one from the earliest round.

        Within a round, the message of the alphabetically first tag is kept, so that the order of replies does not
        matter.
        """
        key = (state.digest, origin.proposal.action.text)
        known = self.origins.get(key)
        if known is None or (key in fresh and origin.proposal.tag < known.proposal.tag):
            self.origins[key] = origin
            fresh.add(key)

    def _shared_out(self, state: MASState, agent: str, tag: str, start: int, n: int) -> Iterator[tuple[str, range]]:
        """Yield the tags of ``n`` messages at a state, each with the positions of its messages."""
        tags = self.tags(agent)
        if tag in tags or (not tag and not tags):
            yield tag, range(n)
            return
        if tag:
            known = f"the tags {', '.join(tags)}" if tags else "a policy without tags"
            raise SearchError(
                f"planner: expected a tag of the agent {agent!r}, got {tag!r}; the agent has {known}; request "
                "search.Tags(state) for the names"
            )
        # The order differs between states, so that planners that draw once per state use every tag.
        first = derive_seed(self.setup.seed, self.problem.id, state.digest, _TURN) + start
        for place in range(min(n, len(tags))):
            yield tags[(first + place) % len(tags)], range(place, n, len(tags))

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
        """Add how many messages of the chosen answer have each tag."""
        path = [] if plan.best is None else plan.best.state.path()[1:]
        written = Counter(proposal.tag for state in path if (proposal := self.proposal_of(state)) is not None)
        chosen = Usage(tags=tuple(TagUsage(tag, chosen=n) for tag, n in sorted(written.items()) if tag))
        if chosen.tags:
            self.report("", chosen)
            plan = replace(plan, usage=plan.usage + chosen)
        return plan

    def close(self) -> None:
        """Release the search's resources."""


def sample_seeds(run_seed: int, problem_id: str, state: MASState, first: int, count: int) -> tuple[int, ...]:
    """Return the seeds of samples at a state.

    Seeds depend on the run's seed, the problem and the state, so concurrency and restarts do not change a sample.
    ``first`` is the number of samples that this search has already requested at the state.
    """
    return tuple(derive_seed(run_seed, problem_id, state.digest, place) for place in range(first, first + count))


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
