"""One search: a coroutine that drives a planner's generator and awaits the replies to its requests."""

from __future__ import annotations

import asyncio
import random
import traceback
import weakref
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Protocol, SupportsIndex, TypeVar

from mas_gym.critics import Proposal, finite_values
from mas_gym.errors import BudgetError, CriticError, ExhaustedError, SearchError
from mas_gym.internal.event_loop import together
from mas_gym.internal.user_files import place_of
from mas_gym.policies.base import derive_seed
from mas_gym.systems.state import MASState
from mas_gym.tasks.base import Problem
from search.costs import Budget, Usage
from search.grading import ProblemGrader
from search.models.base import MakeModel
from search.plan import Plan, checked_plan
from search.protocol import (
    REQUESTS,
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
)
from search.setup import Setup

T = TypeVar("T")

_RNG = b"planner"
_NO_BUDGET = Budget()

_REFUSALS = 8
"""Maximum number of requests rejected after the search's time is up, before the search fails."""

MAX_LOCAL_ROUNDS = 100_000
"""Maximum number of consecutive rounds without policy or critic requests, to detect endless planners."""


class Services(Protocol):
    """Services that a search uses; implemented by `search.engine.scheduler.Scheduler`."""

    async def afford(self, search: ActiveSearch, wanted: int) -> None:
        """Return once the run's budget covers more agent calls of a search, and count them."""

    async def score(self, search: ActiveSearch, contexts: Sequence[ScoringContext]) -> Scores:
        """Return the critic's values. Raises `CriticError`."""

    async def grade(self, grader: ProblemGrader, keys: Iterable[str]) -> None:
        """Grade the messages with these keys; the grader caches the grades."""

    def spend(self, usage: Usage) -> None:
        """Add to the cost of all searches."""


class ActiveSearch:
    """One planner on one problem; `run` searches it.

    Attributes:
        setup: The search's settings.
        problem: The problem.
        grader: Grades the answers.
        model: What the search explores.
        spent: The cost so far, excluding elapsed time.
        failure: The exception that made the search fail.
        asked: The agent calls made so far, including those without a reply.
    """

    def __init__(
        self,
        setup: Setup,
        problem: Problem,
        make_model: MakeModel,
        services: Services,
        on_message: Callable[[str, Usage], None] = lambda agent, usage: None,
    ) -> None:
        """Prepare a search; the planner does not start yet.

        Args:
            setup: The search's settings.
            problem: The problem.
            make_model: Creates the search's model.
            services: The scheduler.
            on_message: Called with the agent and the usage so far when a message arrives.
        """
        self.setup, self.problem = setup, problem
        # No reference cycle: it would keep the texts of a finished search until the garbage collector runs.
        search: ActiveSearch = weakref.proxy(self)
        self.model = make_model(setup, problem, lambda agent, usage: search._report(agent, usage))
        self.grader = ProblemGrader(setup.problems, problem, setup.mas.final_text, self.model.grades)
        self.spent, self.asked = Usage(), 0
        self.failure: BaseException | None = None
        self._services, self._on_message = services, on_message
        self._generator: PlanGenerator | None = None
        self._values: dict[bytes, float] = {}
        self._leaf_answers: list[str | None] = []
        self._stopped: str | None = None
        self._late = False
        self._last_messages = setup.dynamics.max_depth
        self._started = perf_counter()
        self._ended: float | None = None
        self._billed = Usage()

    @property
    def usage(self) -> Usage:
        """The cost so far."""
        # Grading does not count towards a search's time.
        end = perf_counter() if self._ended is None else self._ended
        return replace(self.spent, seconds=end - self._started)

    def _spend(self, usage: Usage) -> None:
        self.spent += usage
        self._services.spend(usage)

    def _report(self, agent: str, usage: Usage) -> None:
        self._spend(usage)
        if agent:
            self._on_message(agent, self.spent)

    async def run(self) -> Plan:
        """Search, grade, and return the plan; an error becomes the plan's ``error``."""
        self._started = perf_counter()
        try:
            root = await self._in_time(self.model.root())
            found = await self._plan(root)
            self._ended = perf_counter()
            plan = checked_plan(found, root, self.setup.dynamics, self.model.proposal_of)
            await self._grade(self.grader.keys(plan))
            return self._finished(plan)
        except Exception as error:
            return self._failed(error)
        finally:
            self.model.close()
            if self._generator is not None:
                # Ignore further requests and errors of a planner that is being closed.
                with suppress(Exception):
                    self._generator.close()

    # ---- the planner

    async def _plan(self, root: MASState) -> object:
        """Run the planner to its end and return its plan."""
        rng = random.Random(derive_seed(self.setup.seed, self.problem.id, _RNG, 0))
        generator: object = self.setup.planner.plan(self.model.dynamics, root, rng)
        if not isinstance(generator, Generator):
            raise SearchError(f"planner: expected plan() to be a generator, got {type(generator).__name__}")
        self._generator = generator
        resume: Callable[[], object] = partial(next, generator)
        idle = refused = 0
        while idle < MAX_LOCAL_ROUNDS and refused <= _REFUSALS:
            try:
                requests = _checked(resume())
            except StopIteration as end:
                return end.value
            refusal = self._refusal(requests)
            if refusal is None:
                try:
                    replies, awaited = await self._replies(requests)
                except BudgetError as error:
                    if not self._late and not isinstance(error, ExhaustedError):
                        raise
                    refusal, awaited = error, False
                else:
                    resume = partial(generator.send, replies)
            if refusal is not None:
                resume = partial(generator.throw, refusal)
            idle = 0 if refusal is None and awaited else idle + 1
            refused += self._late
        if refused:
            raise BudgetError(self._stopped)
        raise SearchError(
            f"planner: expected a request to the policy or critic, got {MAX_LOCAL_ROUNDS:,} consecutive rounds "
            "without a new request; return a search.Plan to end the search"
        )

    def _refusal(self, requests: Sequence[Request]) -> BudgetError | None:
        """Return the error if the requests exceed the budget, else None.

        Raises:
            BudgetError: The requests exceed the budget again after a `BudgetError`.
        """
        if self._late:
            return BudgetError(self._stopped)
        wanted = sum(request.n for request in requests if isinstance(request, Propose))
        budget = self.setup.budget
        if not wanted or budget == _NO_BUDGET:
            return None
        if self._stopped and wanted == 1 and self._last_messages:
            # Finishing a search's only path may exceed the budget, except its number of calls and its time.
            self._last_messages -= 1
            budget = budget.without_cost()
        reason = budget.reached(self.usage, wanted)
        if reason is None:
            return None
        if self._stopped:
            raise BudgetError(reason)
        self._stopped = reason
        return BudgetError(reason)

    async def _in_time(self, work: Awaitable[T]) -> T:
        """Await ``work`` within the search's time limit. Raises `BudgetError`; further requests are then rejected."""
        seconds = self.setup.budget.seconds
        if seconds is None:
            return await work
        try:
            async with asyncio.timeout(seconds - self.usage.seconds) as limit:
                return await work
        except TimeoutError:
            if not limit.expired():
                raise
            self._late, self._stopped = True, self._stopped or f"budget of {seconds:g} seconds spent"
            raise BudgetError(f"budget of {seconds:g} seconds spent") from None

    async def _replies(self, requests: Sequence[Request]) -> tuple[list[object], bool]:
        """Return the replies to one list of requests, and whether they needed an engine.

        The replies that need no engine come first; then messages, values and grades are awaited together and filled in.
        """
        proposing = [request for request in requests if isinstance(request, Propose)]
        wanted = sum(request.n for request in proposing) if self.model.generates else 0
        replies = [self._local_reply(request) for request in requests]
        contexts = self._unscored(requests)
        rewarded = self._rewarded(requests)
        rewarded = self.grader.ungraded(rewarded) if self.grader.threads else []
        proposed: list[list[Proposal]] = []

        async def propose() -> None:
            proposed.extend(await self.model.successors(proposing))

        if wanted:
            await self._services.afford(self, wanted)
        work = [propose()] if proposing else []
        work += [self._score(contexts)] if contexts else []
        work += [self._grade(rewarded)] if rewarded else []
        if work:
            await self._in_time(work[0] if len(work) == 1 else together(work))
        messages = iter(proposed)
        for slot, request in enumerate(requests):
            if isinstance(request, Propose):
                replies[slot] = next(messages)
            elif isinstance(request, Evaluate):
                replies[slot] = [self._values[state.digest] for state in request.states]
            elif isinstance(request, Reward):
                replies[slot] = [self.grader.reward(self._said(state)) for state in request.states]
        return replies, bool(wanted or contexts or rewarded)

    def _local_reply(self, request: Request) -> object:
        """Return the reply to a request that needs no engine; None for the others."""
        match request:
            case Propose() | Evaluate() | Reward():
                return None
            case Extract(states=states):
                return [self.grader.extract(self._said(state)) for state in states]
            case Remaining():
                return self.setup.budget.messages_left(self.spent)
        return self.model.reply(request)

    # ---- values

    def _unscored(self, requests: Sequence[Request]) -> list[ScoringContext]:
        """Return the states of `Evaluate` requests without a value, each once."""
        scoring: dict[bytes, ScoringContext] = {}
        for request in requests:
            if isinstance(request, Evaluate):
                self._collect(request.states, scoring)
        return [*scoring.values()]

    def _collect(self, states: Sequence[MASState], scoring: dict[bytes, ScoringContext]) -> None:
        critic, dynamics = self.setup.critic, self.setup.dynamics
        if critic is None:
            raise CriticError("the planner requests values, but the run has no critic; pass critic=load_critic(...)")
        hits, reads = 0, critic.reads_peers
        if reads:
            self._leaf_answers += [self._answer(state) for state in states if dynamics.is_terminal(state)]
        for state in states:
            if critic.terminal_only and not dynamics.is_terminal(state):
                raise CriticError(
                    f"the outcome critic {critic.name!r} scores terminal states only, got a non-terminal state at turn "
                    f"{state.depth}; use a process critic with this planner"
                )
            if dynamics.failure(state) is not None:
                # The true reward needs no critic.
                self._values[state.digest] = -1.0
            elif state.digest in self._values or state.digest in scoring:
                hits += 1
            else:
                peers = self._peers(state, states) if reads else None
                proposal = self.model.proposal_of(state)
                scoring[state.digest] = ScoringContext(state, dynamics.mas, proposal, peers)
        if hits and not critic.free:
            self._spend(Usage(reward_hits=hits))

    def _peers(self, state: MASState, states: Sequence[MASState]) -> Peers:
        alike = {other.digest: other for other in states if other.parent == state.parent and other != state}
        return Peers(self._answer(state), tuple(self._leaf_answers), tuple(alike.values()))

    def _answer(self, state: MASState) -> str | None:
        return self.grader.extract(self.grader.key(state)) if self.setup.dynamics.is_terminal(state) else None

    def _said(self, state: MASState) -> str:
        return self.grader.key(state) if self.setup.dynamics.is_terminal(state) else state.text

    async def _score(self, contexts: Sequence[ScoringContext]) -> None:
        """Store the critic's values of states. Raises `CriticError` if a value is not finite."""
        critic = self.setup.critic
        assert critic is not None
        scores = await self._services.score(self, contexts)
        # Record the cost before checking the values, because invalid values also cost.
        tokens, read, unread = scores.cost()
        calls = 0 if critic.free else len(contexts) * critic.calls
        if calls or tokens or read or unread:
            usage = Usage(reward_calls=calls, critic_tokens=tokens, critic_prompt_tokens=read, unread_verdicts=unread)
            self._spend(usage)
        states = [context.state for context in contexts]
        for state, value in zip(states, finite_values(critic, states, scores), strict=True):
            self._values[state.digest] = value

    def _rewarded(self, requests: Sequence[Request]) -> list[str]:
        states = [state for request in requests if isinstance(request, Reward) for state in request.states]
        if states and not self.setup.training:
            raise SearchError("the true reward is unavailable during evaluation; for training runs, pass training=True")
        for state in states:
            if not self.setup.dynamics.is_terminal(state):
                raise SearchError(
                    "the true reward is defined on terminal states only, got a non-terminal state at turn "
                    f"{state.depth}"
                )
        return [self._said(state) for state in states]

    # ---- the end

    async def _grade(self, keys: Iterable[str]) -> None:
        """Grade messages on other threads, if the grader is slow."""
        wanted = self.grader.ungraded(keys) if self.grader.threads else []
        if wanted:
            await self._services.grade(self.grader, wanted)

    def _bill_grades(self) -> None:
        cost = self.grader.cost
        self._spend(cost - self._billed)
        self._billed = cost

    def _finished(self, plan: Plan) -> Plan:
        graded = self.grader.graded(plan, self.spent.agent_calls, self.spent.generated_tokens)
        self._bill_grades()
        plan = replace(graded, usage=self.usage, stopped=self._stopped or graded.stopped)
        return self.model.completed(plan)

    def _failed(self, error: Exception) -> Plan:
        self._bill_grades()
        self.failure = error
        reason, place = str(error) or type(error).__name__, place_of(error)
        if place and not reason.endswith(f"({place})"):
            reason = f"{reason} ({place})"
        return Plan(
            problem_id=self.problem.id,
            correct=False,
            usage=self.usage,
            stopped=self._stopped,
            error=f"{type(error).__name__}: {reason}",
            error_details="".join(traceback.format_exception(error)),
        )


def _checked(requests: object) -> Sequence[Request]:
    if not isinstance(requests, list | tuple):
        raise SearchError(
            f"expected a list of {REQUESTS} from the planner, got {type(requests).__name__}; write `yield [request]` "
            "for a single request"
        )
    for request in requests:
        if isinstance(request, Propose) and (not isinstance(request.n, int | SupportsIndex) or request.n < 1):
            raise SearchError(f"expected Propose with an integer n >= 1 from the planner, got n={request.n!r:.80}")
    return requests
