"""One search in progress: its planner, its calls to the engines, its state and its usage."""

from __future__ import annotations

import math
import random
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, NamedTuple, SupportsIndex

from mas_gym.envs.critic_base import finite_values
from mas_gym.errors import BudgetError, CriticError, ExhaustedError, PolicyError, SearchError
from mas_gym.internal.user_files import place_of
from mas_gym.policies.base import Sample, SamplingReply, SamplingRequest
from mas_gym.policies.seeds import derive_seed
from mas_gym.programs import Runner
from mas_gym.systems.graph import Agent
from mas_gym.systems.prompts import ChatMessage, chat_messages
from mas_gym.systems.state import Action, MASState
from mas_gym.tasks.base import Problem
from search.budget import Budget
from search.grading import ProblemGrader
from search.plan import Plan, checked_plan
from search.protocol import (
    Arm,
    Arms,
    Evaluate,
    Extract,
    Peers,
    PlanGenerator,
    Propose,
    Remaining,
    Request,
    Reward,
    Scores,
    ScoringContext,
    planner_name,
)
from search.recorded_world import RecordedWorld
from search.sampling import SampleRecord, Sampling, sample_seeds
from search.setup import Setup
from search.tree import Proposal
from search.usage import ArmUsage, Usage

_RNG = b"planner"
_TURN = -1
"""Used in place of a sample number, for the seed that chooses the first arm at a state."""
_NO_BUDGET = Budget()

_REFUSALS = 8
"""Maximum number of requests rejected after the search's time is up, before the search fails."""

MAX_LOCAL_ROUNDS = 100_000
"""Maximum number of consecutive rounds without policy or critic requests, to detect endless planners."""

Messages = tuple[ChatMessage, ...]
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

    grader: ProblemGrader
    texts: list[str]


class ProgramStep(NamedTuple):
    """A request to continue a program from a state with a reply; a ``state`` of None starts the program."""

    state: MASState | None
    text: str


Call = PolicyCall | CriticCall | GradingCall | ProgramStep


def agent_calls(calls: Iterable[Call]) -> int:
    """Return the number of agent calls among the calls of a search."""
    return sum(len(call.request.seeds) for call in calls if isinstance(call, PolicyCall))


@dataclass
class Account:
    """The total cost of a scheduler's searches, including failed and cancelled ones, and the run's limits."""

    budget: Budget = _NO_BUDGET
    usage: Usage = field(default_factory=Usage)


class ActiveSearch:
    """One planner on one problem.

    `begin` runs the planner up to its first requests. Requests that need a policy, critic or grader are returned as
    calls. `take` processes the outcome of each call, and returns the next calls when no call is open.

    Attributes:
        setup: The search's settings.
        problem: The problem.
        spent: The cost so far, excluding elapsed time.
        waiting: Number of open calls.
        samples: The origin of each message, by its state's digest and its text.
        session: The states of an agent program; None for a MAS.
        world: The recorded messages to draw in place of a policy's messages; None if a policy writes the messages.
        plan: The graded plan, once the search has ended.
        failure: The exception that made the search fail.
    """

    def __init__(
        self,
        setup: Setup,
        problem: Problem,
        grader: ProblemGrader,
        account: Account,
        runner: Runner | None = None,
        world: RecordedWorld | None = None,
        on_message: Callable[[str, Usage], None] = lambda agent, usage: None,
        arms: Callable[[str], tuple[str, ...]] = lambda agent: (),
    ) -> None:
        """Prepare a search; the planner and the agent program do not start yet.

        Args:
            setup: The search's settings.
            problem: The problem.
            grader: Grades the answers.
            account: The total cost of all searches.
            runner: Runs the agent program; None for a MAS.
            world: See the attribute.
            on_message: Called with the agent and the usage so far when a message arrives.
            arms: Returns the arms of an agent (`mas_gym.policies.PolicyBase.arms`).
        """
        self.setup, self.problem, self.grader, self.world = setup, problem, grader, world
        self.waiting = 0
        self.plan: Plan | None = None
        self.failure: BaseException | None = None
        self.samples: dict[tuple[bytes, str], SampleRecord] = {}
        self.session = runner.session(problem.question) if runner is not None else None
        self._root: MASState | None = None
        if runner is None:
            self._root = setup.dynamics.initial_state(problem.question) if world is None else world.root
        self._account, self._on_message, self._arms = account, on_message, arms
        self._generator: PlanGenerator | None = None
        self._requests: Sequence[Request] = []
        self._replies: list[Any] = []
        self._drawn: dict[bytes, int] = {}
        self._orders: dict[bytes, list[Proposal]] = {}
        self._texts: dict[str, str] = {}
        self._values: dict[bytes, float] = {}
        self._to_score: list[MASState] = []
        self._fresh: set[tuple[bytes, str]] = set()
        self._leaf_answers: list[str | None] = []
        self.spent = Usage()
        self._stopped: str | None = None
        self._last_messages = setup.dynamics.max_depth
        self._started = perf_counter()
        self._found: Plan | None = None
        self._ended: float | None = None
        self._billed = Usage()

    @property
    def usage(self) -> Usage:
        """The cost so far."""
        # Grading does not count towards a search's time.
        end = perf_counter() if self._ended is None else self._ended
        return replace(self.spent, seconds=end - self._started)

    @property
    def _usd(self) -> float | None:
        return None if self.setup.rate is None else self.setup.rate.usd(self.usage)

    def _spend(self, usage: Usage) -> None:
        self.spent += usage
        self._account.usage += usage

    @property
    def deadline(self) -> float | None:
        """The time at which the search's time limit expires, on the clock of `time.perf_counter`."""
        seconds = self.setup.budget.seconds
        return None if seconds is None else self._started + seconds

    def begin(self) -> list[Call] | None:
        """Start the clock and the planner; return the first calls, or None if the search has ended."""
        self._started = perf_counter()
        if self._root is not None:
            return self._advance()
        self.waiting = 1
        return [ProgramStep(None, "")]

    def take(self, call: Call, outcome: object) -> list[Call] | None:
        """Process the outcome of a call; if no other call is open, run the planner until its next requests.

        An error as the outcome, or an invalid reply, ends this search.

        Returns:
            The next calls, possibly none while others are open; None if the search has ended.
        """
        self.waiting -= 1
        steps: list[ProgramStep] = []
        try:
            if isinstance(outcome, Exception):
                raise outcome
            match call:
                case PolicyCall():
                    steps = self._take_samples(call, outcome)
                    self._on_message(call.request.agent, self.spent)
                case CriticCall():
                    self._take_scores(outcome)
                case ProgramStep():
                    self._take_state(call, outcome)
        except Exception as error:
            self.fail(error)
            return None
        return [*steps] if self.waiting else self._advance()

    def _advance(self) -> list[Call] | None:
        """Run the planner up to its next calls; None if the search has ended. An error ends this search."""
        if self._found is not None:
            self._finish(self._found)
            return None
        try:
            refusal: BudgetError | None = None
            for _ in range(MAX_LOCAL_ROUNDS):
                self._requests = self._next_requests(refusal)
                refusal = self._refusal(self._requests)
                calls = self._prepare() if refusal is None else []
                self.waiting = len(calls)
                if calls:
                    return calls
            raise SearchError(
                f"planner {self._planner_name}: expected a request to the policy or critic, got {MAX_LOCAL_ROUNDS:,} "
                "consecutive rounds without a new request; return a search.Plan to end the search"
            )
        except StopIteration as end:
            return self._grade_first(end.value)
        except Exception as error:
            self.fail(error)
        return None

    def _grade_first(self, plan: object) -> list[Call] | None:
        """Finish with a plan; if the grader is slow, first return the call that grades the plan's messages."""
        self._ended = perf_counter()
        try:
            assert self._root is not None
            dynamics, name = self.setup.dynamics, self._planner_name
            self._found = checked_plan(plan, self._root, dynamics, name, self._proposal_of)
        except Exception as error:
            self.fail(error)
            return None
        calls = self._grading(self.grader.texts(self._found))
        if calls:
            self.waiting = 1
            return calls
        self._finish(self._found)
        return None

    def _grading(self, texts: Iterable[str]) -> list[Call]:
        """Return a list with the call that grades ungraded messages; empty if the grader is fast."""
        wanted = self.grader.ungraded(texts) if self.grader.threads else []
        return [GradingCall(self.grader, wanted)] if wanted else []

    @property
    def measured(self) -> bool:
        """Whether the planner has ended and only grades are missing."""
        return self._found is not None

    @property
    def _planner_name(self) -> str:
        return planner_name(self.setup.planner)

    def _next_requests(self, refusal: BudgetError | None) -> Sequence[Request]:
        """Send the planner the replies to its last requests, or the error that rejects them."""
        if self._generator is None:
            self._generator = self._begin()
            return _checked(next(self._generator))
        if refusal is not None:
            return _checked(self._generator.throw(refusal))
        self._settle()
        return _checked(self._generator.send(self._replies))

    def _refusal(self, requests: Sequence[Request]) -> BudgetError | None:
        """Return the error if the requests exceed the budget or no recorded message is left, else None.

        Raises:
            BudgetError: The requests exceed the budget again after a `BudgetError`.
        """
        reason = self._over_budget(requests)
        if reason is not None:
            if self._stopped:
                raise BudgetError(reason)
            self._stopped = reason
            return BudgetError(reason)
        asked = [request for request in requests if isinstance(request, Propose)]
        if self.world is None or not asked or any(self._left(request.state) for request in asked):
            return None
        self._spend(Usage(unrecorded=sum(request.n for request in asked)))
        return ExhaustedError(f"no recorded message is left at the state after turn {asked[0].state.depth}")

    def _begin(self) -> PlanGenerator:
        assert self._root is not None
        rng = random.Random(derive_seed(self.setup.seed, self.problem.id, _RNG, 0))
        generator: object = self.setup.planner.plan(self.session or self.setup.dynamics, self._root, rng)
        if not isinstance(generator, Generator):
            raise SearchError(
                f"planner {self._planner_name}: expected plan() to be a generator, got {type(generator).__name__}"
            )
        return generator

    def _over_budget(self, requests: Sequence[Request]) -> str | None:
        wanted = sum(request.n for request in requests if isinstance(request, Propose))
        budget = self.setup.budget
        if not wanted or budget == _NO_BUDGET:
            return None
        if self._stopped and wanted == 1 and self._last_messages:
            # Finishing a search's only path may exceed the token budget.
            self._last_messages -= 1
            budget = replace(budget, tokens=None, usd=None)
        return budget.spent(self.usage, wanted)

    def stop(self, reason: str) -> list[Call] | None:
        """End the search early: open calls are dropped, and the planner may return its best plan so far.

        Returns:
            The grading calls; None if the search has ended.
        """
        self._stopped, self.waiting = self._stopped or reason, 0
        if self._generator is None:
            self.fail(BudgetError(reason))
            return None
        try:
            # A planner may catch the error at several requests before it returns its best plan.
            for _ in range(_REFUSALS):
                self._generator.throw(BudgetError(reason))
        except StopIteration as end:
            return self._grade_first(end.value)
        except Exception as error:
            self.fail(error)
        else:
            self.fail(BudgetError(reason))
        return None

    def close(self) -> None:
        """Drop the search: the planner ends without a plan."""
        self.waiting = 0
        if self.session is not None:
            self.session.close()
        if self._generator is not None:
            # Ignore further requests and errors of a planner that is being closed.
            with suppress(Exception):
                self._generator.close()

    def _prepare(self) -> list[Call]:
        """Answer requests that need no engine and return calls for the others, merging equal prompts."""
        self._replies = [[] for _ in self._requests]
        self._to_score = []
        self._fresh.clear()
        merged: dict[Prompt, tuple[list[int], list[Share]]] = {}
        scoring: dict[bytes, ScoringContext] = {}
        rewarded: list[str] = []
        for slot, request in enumerate(self._requests):
            match request:
                case Propose(state=state, n=n) if self.world is not None:
                    self._replies[slot] = self._draw(self.world, state, n)
                case Propose(state=state, n=n, arm=arm):
                    prompt, start = self._prompt(state), self._drawn.get(state.digest, 0)
                    seeds = self._seeds(state, n)
                    if self.setup.program and prompt[2].temperature == 0 and self._drawn[state.digest] > 1:
                        self.setup.program.report_greedy(prompt[1].name)
                    self._replies[slot] = [None] * n
                    for name, places in self._shared_out(state, prompt[1].name, arm, start, n):
                        entry = merged.setdefault((*prompt, name), ([], []))
                        entry[0].extend(seeds[places])
                        entry[1].append(Share(slot, state, places))
                case Arms(state=state):
                    self._replies[slot] = self._arms_at(state)
                case Evaluate(states=states):
                    self._collect(states, scoring)
                case Extract(states=states):
                    self._replies[slot] = [self.grader.extract(self._said(state)) for state in states]
                case Reward(states=states):
                    rewarded += self._rewarded(states)
                case Remaining():
                    self._replies[slot] = self.setup.budget.messages_left(self.spent)
                case _:
                    raise SearchError(
                        "expected a list of Propose, Evaluate, Extract, Reward, Remaining or Arms from the planner, "
                        f"got a list with {request!r:.200}"
                    )
        calls = self._grading(rewarded)
        calls += [PolicyCall(_sampling_request(prompt, seeds), shares) for prompt, (seeds, shares) in merged.items()]
        # This comes last because the scheduler scores with free critics immediately.
        return [*calls, CriticCall([*scoring.values()])] if scoring else calls

    def _left(self, state: MASState) -> int:
        """Return how many recorded messages are left at a state."""
        assert self.world is not None
        self._check_open(state)
        return len(self.world.at(state)) - self._drawn.get(state.digest, 0)

    def _draw(self, world: RecordedWorld, state: MASState, n: int) -> list[Proposal]:
        """Return up to ``n`` recorded messages not yet drawn at a state, in seeded order."""
        order = self._orders.get(state.digest)
        if order is None:
            order = [*world.at(state)]
            random.Random(derive_seed(self.setup.seed, self.problem.id, state.digest, 0)).shuffle(order)
            self._orders[state.digest] = order
        start = self._drawn.get(state.digest, 0)
        drawn = order[start : start + n]
        self._drawn[state.digest] = start + len(drawn)
        tokens = sum(proposal.tokens for proposal in drawn)
        self._spend(Usage(agent_calls=len(drawn), generated_tokens=tokens, unrecorded=n - len(drawn)))
        for proposal in drawn:
            self.samples.setdefault((state.digest, proposal.action.text), SampleRecord(proposal, None))
        return drawn

    def _check_open(self, state: MASState) -> None:
        if state.acting == self.setup.dynamics.mas.sink:
            raise SearchError("the planner proposed at a terminal state; check model.is_terminal(state) first")

    def _arms_at(self, state: MASState) -> tuple[Arm, ...]:
        self._check_open(state)
        rate = self.setup.rate
        names = () if self.world is not None else self._arms(self.setup.dynamics.mas.agents[state.acting].name)
        return tuple(Arm(name, None if rate is None else rate.generated(name)) for name in names or ("",))

    def _shared_out(
        self, state: MASState, agent: str, arm: str, start: int, n: int
    ) -> Iterator[tuple[str, slice[int | None, None, int]]]:
        """Yield the arms that write ``n`` messages at a state, each with the positions of its messages."""
        arms = self._arms(agent)
        if arm in arms or (not arm and not arms):
            yield arm, slice(None, None, 1)
            return
        if arm:
            known = f"the arms {', '.join(arms)}" if arms else "a policy without arms"
            raise SearchError(
                f"planner {self._planner_name}: expected an arm of the agent {agent!r}, got {arm!r}; the agent has "
                f"{known}; request search.Arms(state) for the names"
            )
        # The order differs between states, so that planners that draw once per state use every arm.
        first = derive_seed(self.setup.seed, self.problem.id, state.digest, _TURN) + start
        for place in range(min(n, len(arms))):
            yield arms[(first + place) % len(arms)], slice(place, None, len(arms))

    def _prompt(self, state: MASState) -> tuple[Messages, Agent, Sampling, str]:
        mas = self.setup.dynamics.mas
        self._check_open(state)
        agent = mas.agents[state.acting]
        sampling = self.setup.sampling.for_agent(agent)
        if self.session is None:
            return chat_messages(mas, state), agent, sampling, ""
        call = self.session.call(state)
        cap = min(call.max_tokens or sampling.limit, sampling.limit)
        return call.messages, agent, replace(sampling, max_new_tokens=cap, **call.settings), call.extra_body

    def _seeds(self, state: MASState, n: int) -> tuple[int, ...]:
        start = self._drawn.get(state.digest, 0)
        self._drawn[state.digest] = start + n
        return sample_seeds(self.setup.seed, self.problem.id, state, start, n)

    def _collect(self, states: Sequence[MASState], scoring: dict[bytes, ScoringContext]) -> None:
        critic = self.setup.critic
        if critic is None:
            raise CriticError("the planner requests values, but the run has no critic; pass critic=load_critic(...)")
        hits = 0
        reads = critic.reads_peers
        answers = self._all_answers(states) if reads else ()
        for state in states:
            if critic.terminal_only and not self.setup.dynamics.is_terminal(state):
                raise CriticError(
                    f"the outcome critic {critic.name!r} scores terminal states only, got a non-terminal state at turn "
                    f"{state.depth}; use a process critic with this planner"
                )
            if self.setup.dynamics.failure(state) is not None:
                # The true reward needs no critic.
                self._values[state.digest] = -1.0
            elif state.digest in self._values or state.digest in scoring:
                hits += 1
            else:
                peers = self._peers(state, states, answers) if reads else None
                scoring[state.digest] = self._context(state)._replace(peers=peers)
                self._to_score.append(state)
        if hits and not critic.free:
            self._spend(Usage(reward_hits=hits))

    def _answer(self, state: MASState) -> str | None:
        return self.grader.extract(self.grader.key(state)) if self.setup.dynamics.is_terminal(state) else None

    def _peers(self, state: MASState, states: Sequence[MASState], answers: tuple[str | None, ...]) -> Peers:
        alike = {other.digest: other for other in states if other.parent == state.parent and other != state}
        return Peers(self._answer(state), answers, tuple(alike.values()))

    def _all_answers(self, states: Sequence[MASState]) -> tuple[str | None, ...]:
        """Add the answers of the terminal ``states``; return the answers of all terminal states submitted so far."""
        self._leaf_answers += [self._answer(state) for state in states if self.setup.dynamics.is_terminal(state)]
        return tuple(self._leaf_answers)

    def _context(self, state: MASState) -> ScoringContext:
        return ScoringContext(state, self.setup.dynamics.mas, self._proposal_of(state))

    def _proposal_of(self, state: MASState) -> Proposal | None:
        """Return the proposal that led to a state; None if its message was not written by a policy."""
        record = self.samples.get((state.parent.digest, state.text)) if state.parent is not None else None
        return record.proposal if record is not None else None

    def _rewarded(self, states: Sequence[MASState]) -> list[str]:
        """Return the messages to grade for the true reward of terminal states."""
        if not self.setup.training:
            raise SearchError("the true reward is unavailable during evaluation; for training runs, pass training=True")
        for state in states:
            if not self.setup.dynamics.is_terminal(state):
                raise SearchError(
                    "the true reward is defined on terminal states only, got a non-terminal state at turn "
                    f"{state.depth}"
                )
        return [self._said(state) for state in states]

    def _said(self, state: MASState) -> str:
        return self.grader.key(state) if self.setup.dynamics.is_terminal(state) else state.text

    def _check_counted(self, reply: SamplingReply) -> None:
        budgets = self.setup.budget, self._account.budget
        limited = any(budget.tokens is not None or budget.usd is not None for budget in budgets)
        if limited and any(sample.text and not sample.tokens for sample in reply.samples):
            raise BudgetError(
                "a budget in tokens or USD: expected replies with token counts, got none, because the server reports "
                "no usage; name the model's tokenizer with tokenizer=FOLDER in the policy, or limit calls"
            )

    def _take_samples(self, call: PolicyCall, outcome: object) -> list[ProgramStep]:
        """Process the policy's reply; return the program steps to run before the planner resumes.

        Raises:
            PolicyError: The reply does not match the request.
        """
        wanted = len(call.request.seeds)
        if not isinstance(outcome, SamplingReply) or len(outcome.samples) != wanted:
            got = len(outcome.samples) if isinstance(outcome, SamplingReply) else type(outcome).__name__
            raise PolicyError(f"agent {call.request.agent!r}: expected {wanted} samples from the policy, got {got}")
        self._check_counted(outcome)
        tokens, arm = sum(sample.tokens for sample in outcome.samples), call.request.arm
        by_arm = ArmUsage(arm, wanted, tokens, outcome.prompt_tokens, outcome.cached_tokens)
        self._spend(
            Usage(
                agent_calls=wanted,
                generated_tokens=tokens,
                prompt_tokens=outcome.prompt_tokens,
                cached_tokens=outcome.cached_tokens,
                dropped_tokens=outcome.dropped_tokens,
                arms=(by_arm,) if arm else (),
            )
        )
        records = [self._record(*pair, arm) for pair in zip(outcome.samples, call.request.seeds, strict=True)]
        rest = iter(records)
        for slot, state, places in call.shares:
            reply = self._replies[slot]
            for place in range(*places.indices(len(reply))):
                record = next(rest)
                reply[place] = record.proposal
                self._keep(state, record)
        return [] if self.session is None else self._steps(call, records)

    def _keep(self, state: MASState, record: SampleRecord) -> None:
        """Store a message by its state and text; of equal messages, keep the one from the earliest round.

        Within a round, the message of the alphabetically first arm is kept, so that the order of replies does not
        matter.
        """
        key = (state.digest, record.proposal.action.text)
        known = self.samples.get(key)
        if known is None or (key in self._fresh and record.proposal.arm < known.proposal.arm):
            self.samples[key] = record
            self._fresh.add(key)

    def _steps(self, call: PolicyCall, records: Sequence[SampleRecord]) -> list[ProgramStep]:
        """Return the program steps that have not run yet."""
        assert self.session is not None
        places = [s.state for s in call.shares for _ in range(*s.places.indices(len(self._replies[s.slot])))]
        steps = {ProgramStep(s, record.proposal.action.text) for s, record in zip(places, records, strict=True)}
        fresh = [step for step in steps if step.state is not None and not self.session.knows(step.state, step.text)]
        self.waiting += len(fresh)
        return fresh

    def _take_state(self, step: ProgramStep, outcome: object) -> None:
        """Store the state reached by the program."""
        assert isinstance(outcome, MASState)
        if step.state is None:
            self._root = outcome
        elif outcome.text != step.text:
            # The last message of a program may contain its answer.
            key = step.state.digest
            self.samples.setdefault((key, outcome.text), self.samples[key, step.text])

    def _record(self, sample: Sample, seed: int, arm: str) -> SampleRecord:
        text = self._texts.setdefault(sample.text, sample.text)
        logprob = sample.logprob if sample.logprob is not None and math.isfinite(sample.logprob) else None
        action = Action(text, self.setup.dynamics.mas.ALL)
        proposal = Proposal(action, sample.tokens, logprob, sample.finish_reason, sample.certainty, arm)
        return SampleRecord(proposal, seed)

    def _take_scores(self, outcome: object) -> None:
        """Process the critic's values of the submitted states.

        Raises:
            CriticError: A value is not finite.
        """
        critic = self.setup.critic
        assert isinstance(outcome, Scores) and critic is not None
        # Record the cost before checking the values, because invalid values also cost.
        if not critic.free:
            self._spend(Usage(reward_calls=len(self._to_score) * critic.calls))
        tokens, read, unread = outcome.cost()
        if tokens or read or unread:
            self._spend(Usage(critic_tokens=tokens, critic_prompt_tokens=read, unread_verdicts=unread))
        for state, value in zip(self._to_score, finite_values(critic, self._to_score, outcome), strict=True):
            self._values[state.digest] = value

    def _settle(self) -> None:
        """Fill in the replies to `Evaluate` and `Reward`; all their values are available by now."""
        for slot, request in enumerate(self._requests):
            if isinstance(request, Evaluate):
                self._replies[slot] = [self._values[state.digest] for state in request.states]
            elif isinstance(request, Reward):
                self._replies[slot] = [self.grader.reward(self._said(state)) for state in request.states]

    def _finish(self, plan: Plan) -> None:
        try:
            graded = self.grader.graded(plan, self.spent.agent_calls, self.spent.generated_tokens)
        except Exception as error:
            self.fail(error)
        else:
            self._bill_grades()
            self._spend(self._chosen(graded))
            requests = {} if self.session is None else self._requests_on_path(graded)
            varied = self.session is not None and self.session.order_varied
            self.plan = replace(
                graded,
                usage=self.usage,
                usd=self._usd,
                stopped=self._stopped or graded.stopped,
                requests=requests,
                order_varied=varied,
            )

    def _requests_on_path(self, plan: Plan) -> dict[int, Messages]:
        """Return a program's requests on the chosen path, by the node of each reply."""
        assert self.session is not None
        node = plan.best.node if plan.best is not None else None
        found: dict[int, Messages] = {}
        while node and plan.tree is not None:
            parent = plan.tree[node].parent
            found[node] = self.session.call(plan.tree.states[parent]).messages
            node = parent
        return found

    def _chosen(self, plan: Plan) -> Usage:
        """Return how many messages of the chosen answer each arm wrote."""
        path = [] if plan.best is None else plan.best.state.path()[1:]
        written = Counter(proposal.arm for state in path if (proposal := self._proposal_of(state)) is not None)
        return Usage(arms=tuple(ArmUsage(arm, chosen=n) for arm, n in sorted(written.items()) if arm))

    def _bill_grades(self) -> None:
        cost = self.grader.cost
        self._spend(cost - self._billed)
        self._billed = cost

    def fail(self, error: BaseException) -> None:
        """End the search with an error."""
        self.close()
        self._bill_grades()
        self.failure = error
        reason, place = str(error) or type(error).__name__, place_of(error)
        if place and not reason.endswith(f"({place})"):
            reason = f"{reason} ({place})"
        self.plan = Plan(
            problem_id=self.problem.id,
            correct=False,
            usage=self.usage,
            usd=self._usd,
            stopped=self._stopped,
            error=f"{type(error).__name__}: {reason}",
            error_details="".join(traceback.format_exception(error)),
        )


def _sampling_request(prompt: Prompt, seeds: list[int]) -> SamplingRequest:
    messages, agent, sampling, extra, arm = prompt
    cap = min(agent.max_new_tokens, sampling.limit)
    settings = (cap, sampling.temperature, sampling.top_p, agent.name, extra)
    return SamplingRequest(messages, tuple(seeds), *settings, arm=arm)


def _checked(requests: object) -> Sequence[Request]:
    if not isinstance(requests, list | tuple):
        raise SearchError(
            "expected a list of Propose, Evaluate, Extract, Reward, Remaining or Arms from the planner, got "
            f"{type(requests).__name__}; write `yield [request]` for a single request"
        )
    for request in requests:
        if isinstance(request, Propose) and (not isinstance(request.n, SupportsIndex) or request.n < 1):
            raise SearchError(f"expected Propose with an integer n >= 1 from the planner, got n={request.n!r:.80}")
    return requests
