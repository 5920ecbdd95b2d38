"""One search in progress: its planner, its open requests, what it remembers and what it has spent."""

from __future__ import annotations

import math
import random
import traceback
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, NamedTuple

from mas_gym.envs.scoring import finite_values
from mas_gym.errors import BudgetError, CriticError, ExhaustedError, PolicyError, SearchError
from mas_gym.plugins import place_of
from mas_gym.policies.base import SamplingReply, SamplingRequest, derive_seed
from mas_gym.programs import Runner
from mas_gym.systems.graph import Agent
from mas_gym.systems.prompts import ChatMessage, chat_messages
from mas_gym.systems.state import Action, MASState
from mas_gym.tasks.base import Problem
from search.budget import Budget
from search.grading import Grader
from search.plan import Plan, chosen_requests
from search.protocol import (
    Evaluate,
    Extract,
    PeerContext,
    PlanGenerator,
    Propose,
    Remaining,
    Request,
    Reward,
    Scores,
    ScoringContext,
    planner_name,
)
from search.recorded import RecordedWorld
from search.setup import SampleRecord, Sampling, Setup
from search.tree import Proposal, Tree
from search.usage import Usage

_RNG = b"planner"
_NO_BUDGET = Budget()

MAX_LOCAL_ROUNDS = 100_000
"""Rounds in a row that ask neither policy nor critic, after which a planner counts as endless."""

Messages = tuple[ChatMessage, ...]
Prompt = tuple[Messages, Agent, Sampling, str]


class PolicyCall(NamedTuple):
    """A request to the policy, and the planner's requests that share its samples.

    Attributes:
        request: The request.
        shares: For each share, in order: the position of the planner's request, its state, its number of samples.
    """

    request: SamplingRequest
    shares: list[tuple[int, MASState, int]]


class ProgramStep(NamedTuple):
    """A reply that a program is run with, at a state; no state means its start."""

    state: MASState | None
    text: str


class GradingCall(NamedTuple):
    """Messages to be graded elsewhere, because their grader is slow."""

    texts: list[str]


@dataclass
class Work:
    """What one yield of a planner, or the grading of its plan, needs from others."""

    sampling: list[PolicyCall] = field(default_factory=list)
    scoring: list[ScoringContext] = field(default_factory=list)
    steps: list[ProgramStep] = field(default_factory=list)
    grading: GradingCall | None = None

    @property
    def wanted(self) -> int:
        """Agent calls among the requests."""
        return sum(len(call.request.seeds) for call in self.sampling)


@dataclass
class Account:
    """What all searches of a scheduler have spent, failed and cancelled ones included."""

    usage: Usage = field(default_factory=Usage)


class ActiveSearch:
    """One planner at work on one problem.

    `advance` runs the planner to its next requests. What needs no engine is answered at
    once; the rest is returned as `Work`, and its outcomes go to `take_samples` and `take_scores`.
    When `waiting` is 0 the planner can be advanced again.

    Attributes:
        setup: The search's settings.
        problem: The problem.
        spent: What has been spent so far, but for the seconds.
        waiting: Outcomes that the planner waits for.
        samples: Where each message came from, by the digest of the state it was written at and its text.
        session: The states of an agent program; None for a MAS.
        world: The recorded messages that it draws from, in place of the policy's; None if a policy writes them.
        plan: The graded plan, once the search has ended.
        failure: The exception that failed the search.
    """

    def __init__(
        self,
        setup: Setup,
        problem: Problem,
        grader: Grader,
        account: Account,
        runner: Runner | None = None,
        world: RecordedWorld | None = None,
    ) -> None:
        """Prepare a search; nothing of the planner, or of the program that ``runner`` runs, starts yet."""
        self.setup, self.problem, self.grader, self.world = setup, problem, grader, world
        self.waiting = 0
        self.plan: Plan | None = None
        self.failure: BaseException | None = None
        self.samples: dict[tuple[bytes, str], SampleRecord] = {}
        self.session = runner.session(problem.question) if runner is not None else None
        self._root = None if runner is not None else self._initial_state()
        self._account = account
        self._generator: PlanGenerator | None = None
        self._requests: Sequence[Request] = []
        self._replies: list[Any] = []
        self._drawn: dict[bytes, int] = {}
        self._orders: dict[bytes, list[Proposal]] = {}
        self._texts: dict[str, str] = {}
        self._values: dict[bytes, float] = {}
        self._to_score: list[MASState] = []
        self._leaf_answers: list[str | None] = []
        self.spent = Usage()
        self._stopped: str | None = None
        self._last_messages = setup.dynamics.max_depth
        self._started = perf_counter()
        self._found: Plan | None = None
        self._ended: float | None = None
        self._billed = Usage()

    def _initial_state(self) -> MASState:
        return self.setup.dynamics.initial_state(self.problem.question) if self.world is None else self.world.root

    def start(self) -> None:
        """Start the clock; a search that waits for admission spends no time."""
        self._started = perf_counter()

    @property
    def usage(self) -> Usage:
        """What has been spent so far."""
        # Grading is no part of a search's time.
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
        """When the search's seconds are spent, on the clock of `time.perf_counter`."""
        seconds = self.setup.budget.seconds
        return None if seconds is None else self._started + seconds

    def advance(self) -> Work | None:
        """Run the planner until it needs an engine; None when the search has ended.

        Whatever the planner or the grading raises ends this search alone.
        """
        if self._root is None:
            self.waiting = 1
            return Work(steps=[ProgramStep(None, "")])
        if self._found is not None:
            self._finish(self._found)
            return None
        try:
            for _ in range(MAX_LOCAL_ROUNDS):
                self._requests = self._next_requests()
                work = self._prepare()
                if self.waiting:
                    return work
            raise SearchError(
                f"planner {self._planner_name}: {MAX_LOCAL_ROUNDS:,} rounds in a row asked neither policy nor critic "
                "for anything new; return a search.Plan to end the search"
            )
        except StopIteration as end:
            return self._grade_first(end.value)
        except Exception as error:
            self.fail(error)
        return None

    def _grade_first(self, plan: object) -> Work | None:
        """Finish with a plan, or ask for the grades of its messages before that if its grader is slow."""
        self._ended = perf_counter()
        try:
            self._found = self._checked(plan)
        except Exception as error:
            self.fail(error)
            return None
        call = self._grading(self.grader.texts(self._found))
        if call is None:
            self._finish(self._found)
            return None
        self.waiting = 1
        return Work(grading=call)

    def _grading(self, texts: Iterable[str]) -> GradingCall | None:
        """Return what has to be graded elsewhere; None if there is nothing, or if it is graded in no time."""
        wanted = self.grader.ungraded(texts) if self.grader.threads else []
        return GradingCall(wanted) if wanted else None

    @property
    def measured(self) -> bool:
        """Whether the planner has ended, so that only grades are missing."""
        return self._found is not None

    def take_grades(self, outcome: object) -> None:
        """Learn that messages have been graded, or why not.

        Raises:
            Exception: The outcome is an error; the search fails with it.
        """
        self.waiting -= 1
        if isinstance(outcome, Exception):
            raise outcome

    @property
    def _planner_name(self) -> str:
        return planner_name(self.setup.planner)

    def _next_requests(self) -> Sequence[Request]:
        if self._generator is None:
            self._generator = self._begin()
            requests = _checked(next(self._generator))
        else:
            self._settle()
            requests = _checked(self._generator.send(self._replies))
        for _ in range(MAX_LOCAL_ROUNDS):
            refusal = self._refusal(requests)
            if refusal is None:
                return requests
            requests = _checked(self._generator.throw(refusal))
        raise SearchError(f"planner {self._planner_name}: it repeats requests that no recorded message answers")

    def _refusal(self, requests: Sequence[Request]) -> BudgetError | None:
        """Return the error that answers requests: the budget does not pay for them, or no recorded message is left.

        Raises:
            BudgetError: The planner asks for more although it was told that the budget is spent.
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
            # The end of a search's only path is paid for though its tokens are spent.
            self._last_messages -= 1
            budget = replace(budget, tokens=None, usd=None)
        return budget.spent(self.usage, wanted)

    def stop(self, reason: str) -> Work | None:
        """End the search early: the planner may return the best it has; open requests are not waited for.

        Returns:
            What grading needs from others; None if the search has ended.
        """
        self._stopped, self.waiting = self._stopped or reason, 0
        if self._generator is None:
            self.fail(BudgetError(reason))
            return None
        try:
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
            # A planner that answers its end with another request, or with an error, is over all the same.
            with suppress(Exception):
                self._generator.close()

    def _prepare(self) -> Work:
        """Answer what needs no engine and turn the rest into work; equal prompts become one request."""
        self._replies = [[] for _ in self._requests]
        self._to_score = []
        merged: dict[Prompt, tuple[list[int], list[tuple[int, MASState, int]]]] = {}
        scoring: dict[bytes, ScoringContext] = {}
        rewarded: list[str] = []
        for slot, request in enumerate(self._requests):
            match request:
                case Propose(state=state, n=n) if self.world is not None:
                    self._replies[slot] = self._draw(self.world, state, n)
                case Propose(state=state, n=n):
                    prompt, seeds = self._prompt(state), list(self._seeds(state, n))
                    if self.setup.program and prompt[2].temperature == 0 and self._drawn[state.digest] > 1:
                        self.setup.program.report_greedy(prompt[1].name)
                    entry = merged.setdefault(prompt, ([], []))
                    entry[0].extend(seeds)
                    entry[1].append((slot, state, n))
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
                        "expected a list of Propose, Evaluate, Extract, Reward or Remaining from the planner, got one "
                        f"with {request!r:.200}"
                    )
        sampling = [PolicyCall(_sampling_request(prompt, seeds), shares) for prompt, (seeds, shares) in merged.items()]
        grading = self._grading(rewarded)
        self.waiting = len(sampling) + bool(scoring) + (grading is not None)
        return Work(sampling, list(scoring.values()), grading=grading)

    def _left(self, state: MASState) -> int:
        """Return how many recorded messages are left at a state."""
        assert self.world is not None
        self._check_open(state)
        return len(self.world.at(state)) - self._drawn.get(state.digest, 0)

    def _draw(self, world: RecordedWorld, state: MASState, n: int) -> list[Proposal]:
        """Return up to ``n`` recorded messages that this search has not drawn at a state, in seeded order."""
        order = self._orders.get(state.digest)
        if order is None:
            order = [*world.at(state)]
            random.Random(derive_seed(self.setup.seed, self.problem.id, state.digest, 0)).shuffle(order)
            self._orders[state.digest] = order
        start = self._drawn.get(state.digest, 0)
        drawn = order[start : start + _at_least_one(n)]
        self._drawn[state.digest] = start + len(drawn)
        tokens = sum(proposal.tokens for proposal in drawn)
        self._spend(Usage(agent_calls=len(drawn), generated_tokens=tokens, unrecorded=n - len(drawn)))
        for proposal in drawn:
            self.samples.setdefault((state.digest, proposal.action.text), SampleRecord(proposal, None))
        return drawn

    def _check_open(self, state: MASState) -> None:
        if state.acting == self.setup.dynamics.mas.sink:
            raise SearchError("the planner proposed at a terminal state; check model.is_terminal(state) first")

    def _prompt(self, state: MASState) -> Prompt:
        mas = self.setup.dynamics.mas
        self._check_open(state)
        agent, sampling = mas.agents[state.acting], self.setup.sampling
        if self.session is None:
            return chat_messages(mas, state), agent, sampling, ""
        call = self.session.call(state)
        cap = min(call.max_tokens or sampling.max_new_tokens, sampling.max_new_tokens)
        return call.messages, agent, replace(sampling, max_new_tokens=cap, **call.settings), call.extra_body

    def _seeds(self, state: MASState, n: int) -> Iterator[int]:
        start = self._drawn.get(state.digest, 0)
        self._drawn[state.digest] = start + _at_least_one(n)
        return (derive_seed(self.setup.seed, self.problem.id, state.digest, start + i) for i in range(n))

    def _collect(self, states: Sequence[MASState], scoring: dict[bytes, ScoringContext]) -> None:
        critic = self.setup.critic
        if critic is None:
            raise CriticError("the planner asks for values and the run has no critic: pass critic=load_critic(...)")
        hits = 0
        reads = critic.reads_peers
        answers = self._all_answers(states) if reads else ()
        for state in states:
            if critic.terminal_only and not self.setup.dynamics.is_terminal(state):
                raise CriticError(
                    f"the outcome critic {critic.name!r} scores terminal states only, got one at turn {state.depth}; "
                    "use a process critic with this planner"
                )
            if self.setup.dynamics.failure(state) is not None:
                # The reward is known without a critic.
                self._values[state.digest] = -1.0
            elif state.digest in self._values or state.digest in scoring:
                hits += 1
            else:
                context = self._context(state)
                if reads:
                    context = self._with_peers(context, states, answers)
                scoring[state.digest] = context
                self._to_score.append(state)
        if hits and not critic.free:
            self._spend(Usage(reward_hits=hits))

    def _answer(self, state: MASState) -> str | None:
        return self.grader.extract(self.grader.key(state)) if self.setup.dynamics.is_terminal(state) else None

    def _with_peers(
        self, context: ScoringContext, states: Sequence[MASState], answers: tuple[str | None, ...]
    ) -> PeerContext:
        state, peers = context.state, PeerContext(*context)
        alike = {other.digest: other for other in states if other.parent == state.parent and other != state}
        peers.answer, peers.answers, peers.siblings = self._answer(state), answers, tuple(alike.values())
        return peers

    def _all_answers(self, states: Sequence[MASState]) -> tuple[str | None, ...]:
        """Add the answers of the terminal ones among ``states``; return those of all that were to be scored so far."""
        self._leaf_answers += [self._answer(state) for state in states if self.setup.dynamics.is_terminal(state)]
        return tuple(self._leaf_answers)

    def _context(self, state: MASState) -> ScoringContext:
        return ScoringContext(state, self.setup.dynamics.mas, self._proposal_of(state))

    def _proposal_of(self, state: MASState) -> Proposal | None:
        """Return the proposal whose message led to a state; None if no policy wrote it."""
        record = self.samples.get((state.parent.digest, state.text)) if state.parent is not None else None
        return record.proposal if record is not None else None

    def _rewarded(self, states: Sequence[MASState]) -> list[str]:
        """Return the messages whose grades are the true reward of terminal states."""
        if not self.setup.training:
            raise SearchError("the true reward is not available at evaluation; training runs set training=True")
        for state in states:
            if not self.setup.dynamics.is_terminal(state):
                raise SearchError(f"the true reward is defined on terminal states only, got one at turn {state.depth}")
        return [self._said(state) for state in states]

    def _said(self, state: MASState) -> str:
        return self.grader.key(state) if self.setup.dynamics.is_terminal(state) else state.text

    def take_samples(self, call: PolicyCall, outcome: object) -> list[ProgramStep]:
        """Take the policy's reply, or its error; return what the program is to be run with before the planner goes on.

        Raises:
            Exception: The outcome is an error, or a reply that does not fit; the search fails with it.
        """
        self.waiting -= 1
        if isinstance(outcome, Exception):
            raise outcome
        wanted = len(call.request.seeds)
        if not isinstance(outcome, SamplingReply) or len(outcome.samples) != wanted:
            got = len(outcome.samples) if isinstance(outcome, SamplingReply) else type(outcome).__name__
            raise PolicyError(f"agent {call.request.agent!r}: expected {wanted} samples from the policy, got {got}")
        self._spend(
            Usage(
                agent_calls=wanted,
                generated_tokens=sum(sample.tokens for sample in outcome.samples),
                prompt_tokens=outcome.prompt_tokens,
                cached_tokens=outcome.cached_tokens,
                dropped_tokens=outcome.dropped_tokens,
            )
        )
        records = [self._record(*pair) for pair in zip(outcome.samples, call.request.seeds, strict=True)]
        start = 0
        for slot, state, n in call.shares:
            share = records[start : start + n]
            start += n
            self._replies[slot] = [record.proposal for record in share]
            for record in share:
                self.samples.setdefault((state.digest, record.proposal.action.text), record)
        return [] if self.session is None else self._steps(call, records)

    def _steps(self, call: PolicyCall, records: Sequence[SampleRecord]) -> list[ProgramStep]:
        """Return the steps of the program that no earlier one has taken."""
        assert self.session is not None
        places = [state for _, state, n in call.shares for _ in range(n)]
        steps = {ProgramStep(s, record.proposal.action.text) for s, record in zip(places, records, strict=True)}
        fresh = [step for step in steps if step.state is not None and not self.session.knows(step.state, step.text)]
        self.waiting += len(fresh)
        return fresh

    def take_state(self, step: ProgramStep, outcome: object) -> None:
        """Take the state that the program has reached, or its error.

        Raises:
            Exception: The outcome is an error; the search fails with it.
        """
        self.waiting -= 1
        if isinstance(outcome, Exception):
            raise outcome
        assert isinstance(outcome, MASState)
        if step.state is None:
            self._root = outcome
        elif outcome.text != step.text:
            # The last message of a program may end with its answer.
            key = step.state.digest
            self.samples.setdefault((key, outcome.text), self.samples[key, step.text])

    def _record(self, sample: Any, seed: int) -> SampleRecord:
        text = self._texts.setdefault(sample.text, sample.text)
        logprob = sample.logprob if sample.logprob is not None and math.isfinite(sample.logprob) else None
        action = Action(text, self.setup.dynamics.mas.ALL)
        return SampleRecord(Proposal(action, sample.tokens, logprob, sample.finish_reason, sample.certainty), seed)

    def take_scores(self, outcome: object) -> None:
        """Take the critic's values of the submitted states, or its error.

        Raises:
            Exception: The outcome is an error, or a value is not finite; the search fails with it.
        """
        self.waiting -= 1
        if isinstance(outcome, Exception):
            raise outcome
        critic = self.setup.critic
        assert isinstance(outcome, Scores) and critic is not None
        # Before the values are checked: what a value cost is spent, whatever the value is.
        if not critic.free:
            self._spend(Usage(reward_calls=len(self._to_score)))
        tokens, read, unread = outcome.cost()
        if tokens or read or unread:
            self._spend(Usage(critic_tokens=tokens, critic_prompt_tokens=read, unread_verdicts=unread))
        for state, value in zip(self._to_score, finite_values(critic, self._to_score, outcome), strict=True):
            self._values[state.digest] = value

    def _settle(self) -> None:
        """Fill in the replies to `Evaluate` and `Reward`; what they need is known by now."""
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
            requests = {} if self.session is None else chosen_requests(graded, self.session.call)
            varied = self.session is not None and self.session.order_varied
            self.plan = replace(
                graded,
                usage=self.usage,
                usd=self._usd,
                stopped=self._stopped or graded.stopped,
                requests=requests,
                order_varied=varied,
            )

    def _bill_grades(self) -> None:
        cost = self.grader.cost
        self._spend(cost - self._billed)
        self._billed = cost

    def _checked(self, plan: object) -> Plan:
        name = self._planner_name
        if not isinstance(plan, Plan):
            raise SearchError(f"planner {name}: expected plan() to return a search.Plan, got {type(plan).__name__}")
        if not plan.candidates:
            raise SearchError(f"planner {name}: expected at least one terminal candidate in its plan, got none")
        for candidate in plan.candidates:
            if candidate.state.path()[0] != self._root:
                raise SearchError(
                    f"planner {name}: expected candidates that start at the root of the search, got others"
                )
            if not self.setup.dynamics.is_terminal(candidate.state):
                raise SearchError(
                    f"planner {name}: expected terminal candidates, got a state at turn {candidate.state.depth}; "
                    "an intermediate message is no answer"
                )
        return replace(self._with_nodes(plan), mas=self.setup.dynamics.mas)

    def _with_nodes(self, plan: Plan) -> Plan:
        """Fill in the nodes of candidates and of the curve; paths that the tree lacks are added to it."""
        assert self._root is not None
        tree = Tree(self._root) if plan.tree is None else plan.tree
        if not isinstance(tree, Tree) or tree.states[0] != self._root:
            got = f"one of {tree.states[0]!r:.80}" if isinstance(tree, Tree) else type(tree).__name__
            name = self._planner_name
            raise SearchError(f"planner {name}: expected the plan's tree to be a search.Tree(root), got {got}")
        index: dict[MASState, int] = {}
        for node, state in enumerate(tree.states):
            index.setdefault(state, node)

        def place(node: int | None, state: MASState) -> int:
            if node is not None and 0 <= node < len(tree) and tree.states[node] == state:
                return node
            for step in state.path()[1:]:
                if step not in index:
                    parent, terminal = index[step.parent], self.setup.dynamics.is_terminal(step)  # type: ignore[index]
                    index[step] = tree.add(parent, step, self._proposal_of(step), terminal)
            return index[state]

        candidates = tuple(replace(one, node=place(one.node, one.state)) for one in plan.candidates)
        anytime = tuple(
            point if point.state is None else point._replace(node=place(point.node, point.state))
            for point in plan.anytime
        )
        return replace(plan, tree=tree, candidates=candidates, anytime=anytime)

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


def _at_least_one(n: int) -> int:
    if n < 1:
        raise SearchError(f"expected Propose with n >= 1, got n={n}")
    return n


def _sampling_request(prompt: Prompt, seeds: list[int]) -> SamplingRequest:
    messages, agent, sampling, extra = prompt
    cap = min(agent.max_new_tokens, sampling.max_new_tokens)
    return SamplingRequest(messages, tuple(seeds), cap, sampling.temperature, sampling.top_p, agent.name, extra)


def _checked(requests: object) -> Sequence[Request]:
    if not isinstance(requests, list | tuple):
        raise SearchError(
            "expected a list of Propose, Evaluate, Extract, Reward or Remaining from the planner, got "
            f"{type(requests).__name__}; write `yield [request]` for a single one"
        )
    for request in requests:
        if isinstance(request, Propose) and not hasattr(request.n, "__index__"):
            raise SearchError(f"expected the n of Propose from the planner to be a whole number, got {request.n!r:.80}")
    return requests
