"""A multi-agent system played by a policy."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from mas_gym.errors import PolicyError, SearchError
from mas_gym.internal.event_loop import together
from mas_gym.policies.base import PolicyBase, SamplingReply, SamplingRequest
from mas_gym.policies.base import Sample as Sampled
from mas_gym.policies.seeds import derive_seed
from mas_gym.systems.graph import Agent
from mas_gym.systems.prompts import chat_messages
from mas_gym.systems.state import Action, MASState
from mas_gym.tasks.base import Problem
from search.models.base import Messages, Models, Report, Sample, SearchModel
from search.plan import Plan
from search.protocol import Arm, Arms, Propose, Request, planner_name
from search.sampling import SampleRecord, Sampling, sample_seeds
from search.setup import Setup
from search.tree import Proposal
from search.usage import ArmUsage, Usage

_TURN = -1
"""Used in place of a sample number, for the seed that chooses the first arm at a state."""

Prompt = tuple[Messages, Agent, Sampling, str, str]
"""Messages, agent, sampling, extra body and arm. Requests with equal prompts are merged into one call."""


class Share(NamedTuple):
    """The samples of a call for one of the planner's requests.

    Attributes:
        slot: Position of the planner's request.
        state: The request's state.
        places: Positions of the samples in the reply to the request.
    """

    slot: int
    state: MASState
    places: range


@dataclass
class PlayedModel(SearchModel):
    """A system with messages sampled from a policy.

    Attributes:
        sample: Samples messages from the policy.
        arms: Returns the arms of an agent (`mas_gym.policies.PolicyBase.arms`).
    """

    sample: Sample = None  # type: ignore[assignment]
    arms: Callable[[str], tuple[str, ...]] = lambda agent: ()

    def __post_init__(self) -> None:
        """Start without messages."""
        super().__post_init__()
        self._texts: dict[str, str] = {}

    def view(self, state: MASState) -> Messages:
        """Return the chat messages of the acting agent."""
        return chat_messages(self.mas, state)

    def prompt(self, state: MASState) -> tuple[Messages, Agent, Sampling, str]:
        """Return the prompt at a state, without an arm."""
        agent = self.mas.agents[state.acting]
        return self.view(state), agent, self.setup.sampling.for_agent(agent), ""

    async def successors(self, requests: Sequence[Propose]) -> list[list[Proposal]]:
        """Sample the messages; equal prompts share one call."""
        merged: dict[Prompt, tuple[list[int], list[Share]]] = {}
        for slot, (state, n, arm) in enumerate((one.state, one.n, one.arm) for one in requests):
            start = self.draw(state, n)
            prompt = self.prompt(state)
            seeds = sample_seeds(self.setup.seed, self.problem.id, state, start, n)
            for name, places in self._shared_out(state, prompt[1].name, arm, start, n):
                entry = merged.setdefault((*prompt, name), ([], []))
                entry[0].extend(seeds[place] for place in places)
                entry[1].append(Share(slot, state, places))
        replies: list[list[Proposal]] = [[None] * request.n for request in requests]  # type: ignore[list-item]
        fresh: set[tuple[bytes, str]] = set()
        calls = [self._call(prompt, seeds, shares, replies, fresh) for prompt, (seeds, shares) in merged.items()]
        if len(calls) == 1:
            await calls[0]
        else:
            await together(calls)
        return replies

    async def _call(
        self,
        prompt: Prompt,
        seeds: Sequence[int],
        shares: Sequence[Share],
        replies: list[list[Proposal]],
        fresh: set[tuple[bytes, str]],
    ) -> None:
        """Sample from one prompt, and fill in the samples of each request that shares it."""
        messages, agent, sampling, extra, arm = prompt
        cap = min(agent.max_new_tokens, sampling.limit)
        settings = (cap, sampling.temperature, sampling.top_p, agent.name, extra)
        outcome: object = await self.sample(SamplingRequest(messages, tuple(seeds), *settings, arm=arm))
        if not isinstance(outcome, SamplingReply) or len(outcome.samples) != len(seeds):
            got = len(outcome.samples) if isinstance(outcome, SamplingReply) else type(outcome).__name__
            raise PolicyError(f"agent {agent.name!r}: expected {len(seeds)} samples from the policy, got {got}")
        self.setup.budget.check_counted(outcome.samples)
        tokens = sum(sample.tokens for sample in outcome.samples)
        by_arm = ArmUsage(arm, len(seeds), tokens, outcome.prompt_tokens, outcome.cached_tokens)
        usage = Usage(
            agent_calls=len(seeds),
            generated_tokens=tokens,
            prompt_tokens=outcome.prompt_tokens,
            cached_tokens=outcome.cached_tokens,
            dropped_tokens=outcome.dropped_tokens,
            # An end token alone is an empty reply.
            reasoning_only=sum(sample.tokens > 1 and not sample.text for sample in outcome.samples),
            arms=(by_arm,) if arm else (),
        )
        records = [self._record(*pair, arm) for pair in zip(outcome.samples, seeds, strict=True)]
        placed = [(share, place) for share in shares for place in share.places]
        for (share, place), record in zip(placed, records, strict=True):
            replies[share.slot][place] = record.proposal
            self._keep(share.state, record, fresh)
        self.report(agent.name, usage)
        await self.reached(
            [(share.state, record.proposal.action.text) for (share, _), record in zip(placed, records, strict=True)]
        )

    async def reached(self, messages: Sequence[tuple[MASState, str]]) -> None:
        """Compute the states after new messages, for models whose transitions take time."""

    def _record(self, sample: Sampled, seed: int, arm: str) -> SampleRecord:
        text = self._texts.setdefault(sample.text, sample.text)
        logprob = sample.logprob if sample.logprob is not None and math.isfinite(sample.logprob) else None
        action = Action(text, self.mas.ALL)
        return SampleRecord(Proposal(action, sample.tokens, logprob, sample.finish_reason, sample.certainty, arm), seed)

    def _keep(self, state: MASState, record: SampleRecord, fresh: set[tuple[bytes, str]]) -> None:
        """Store a message by its state and text; of equal messages, keep the one from the earliest round.

        Within a round, the message of the alphabetically first arm is kept, so that the order of replies does not
        matter.
        """
        key = (state.digest, record.proposal.action.text)
        known = self.samples.get(key)
        if known is None or (key in fresh and record.proposal.arm < known.proposal.arm):
            self.samples[key] = record
            fresh.add(key)

    # ---- arms

    def reply(self, request: Request) -> object:
        """Answer `Arms`."""
        return self._arms_at(request.state) if isinstance(request, Arms) else super().reply(request)

    def _arms_at(self, state: MASState) -> tuple[Arm, ...]:
        self.draw(state, 0)
        rate = self.setup.rate
        names = self.arms(self.mas.agents[state.acting].name) or ("",)
        return tuple(Arm(name, None if rate is None else rate.generated(name)) for name in names)

    def _shared_out(self, state: MASState, agent: str, arm: str, start: int, n: int) -> Iterator[tuple[str, range]]:
        """Yield the arms that write ``n`` messages at a state, each with the positions of its messages."""
        arms = self.arms(agent)
        if arm in arms or (not arm and not arms):
            yield arm, range(n)
            return
        if arm:
            known = f"the arms {', '.join(arms)}" if arms else "a policy without arms"
            raise SearchError(
                f"planner {planner_name(self.setup.planner)}: expected an arm of the agent {agent!r}, got {arm!r}; the "
                f"agent has {known}; request search.Arms(state) for the names"
            )
        # The order differs between states, so that planners that draw once per state use every arm.
        first = derive_seed(self.setup.seed, self.problem.id, state.digest, _TURN) + start
        for place in range(min(n, len(arms))):
            yield arms[(first + place) % len(arms)], range(place, n, len(arms))

    def completed(self, plan: Plan) -> Plan:
        """Add how many messages of the chosen answer each arm wrote."""
        path = [] if plan.best is None else plan.best.state.path()[1:]
        written = Counter(proposal.arm for state in path if (proposal := self.proposal_of(state)) is not None)
        chosen = Usage(arms=tuple(ArmUsage(arm, chosen=n) for arm, n in sorted(written.items()) if arm))
        if chosen.arms:
            self.report("", chosen)
            plan = replace(plan, usage=plan.usage + chosen)
        return plan


class PlayedModels(Models):
    """Models of a system and a policy."""

    def __init__(self, policy: PolicyBase, sample: Sample) -> None:
        """Store the policy and the function that samples from it."""
        self._policy, self._sample = policy, sample

    def model(self, setup: Setup, problem: Problem, report: Report) -> PlayedModel:
        """Return the model of a search."""
        return PlayedModel(setup, problem, report, sample=self._sample, arms=self._policy.arms)
