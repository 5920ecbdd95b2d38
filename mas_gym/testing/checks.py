"""Checks of MAS configs and policies, and shared parts of all checks: findings, test messages, episodes, identities."""

from __future__ import annotations

import asyncio
import json
import math
import random
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

from mas_gym.errors import ComplianceError, ConfigError, IdentityError, IllegalActionError, PolicyError, shown
from mas_gym.internal.event_loop import engine_loop
from mas_gym.internal.identity import digest_of, identity_of
from mas_gym.policies import AsyncPolicy, Policy, Sample, SamplingReply, SamplingRequest, StreamingPolicy
from mas_gym.policies.base import as_policy, mean_logprob
from mas_gym.systems.dynamics import Dynamics
from mas_gym.systems.graph import MAS
from mas_gym.systems.loading import MASSource, load_mas
from mas_gym.systems.prompts import ChatMessage, chat_messages
from mas_gym.systems.recipient_names import nameable
from mas_gym.systems.state import Action, MASState
from mas_gym.tasks import Problem, ProblemTask

HOSTILE = ("", " \n\t", "\ud800", "نص من اليمين إلى اليسار", "\u202eesrever", "\x00\x1b[31m", "Final Answer: " * 50)
ORDINARY = (
    "Facts: 3 and 4.",
    "3 + 4 = 7",
    "VERDICT: DISAGREE\nRecount.",
    "VERDICT: AGREE",
    "Final Answer: 7",
)


class ArmLike(NamedTuple):
    """The only arm of an agent, like `search.Arm`."""

    name: str = ""
    price: float | None = None


class ProposalLike(NamedTuple):
    """A substitute for the scheduler's proposal of one sampled message."""

    action: Action
    tokens: int
    logprob: float | None
    finish_reason: str
    certainty: None = None
    arm: str = ""

    @property
    def mean_logprob(self) -> float | None:
        """Length-normalised log-likelihood, in nats per token."""
        return mean_logprob(self.logprob, self.tokens)


class Findings:
    """Collects violations; `settle` raises them all."""

    def __init__(self, subject: str) -> None:
        """Start without violations; ``subject`` names the component in messages."""
        self.subject = subject
        self.faults: list[str] = []

    def expect(self, holds: bool, fault: str) -> bool:
        """Record a violation, once, unless the expectation is met; return whether it is met."""
        if not holds and fault not in self.faults:
            self.faults.append(fault)
        return holds

    def settle(self) -> None:
        """Raise `ComplianceError` if anything was found."""
        if self.faults:
            count = len(self.faults)
            head = f"{self.subject} breaks its contract in {count} way{'s' if count > 1 else ''}:"
            raise ComplianceError("\n".join([head, *(f"  {f}" for f in self.faults)]), tuple(self.faults))


def addressed(mas: MAS, state: MASState, text: str, number: int) -> str:
    """Return a text that names one of the recipients, chosen by a number, if the acting agent must name one."""
    legal = nameable(mas, state)
    return f"{text}\n-> {mas.node_name(legal[number % len(legal)])}" if legal else text


def walk(model: Dynamics, question: str, texts: Sequence[str], rng: random.Random) -> list[MASState]:
    """Return the states of one random episode, from the initial to the terminal one."""
    states = [model.initial_state(question)]
    while not model.is_terminal(states[-1]):
        text = rng.choice(texts)
        if nameable(model.mas, states[-1]) and rng.random() < 0.5:
            text = addressed(model.mas, states[-1], text, rng.randrange(len(model.mas.agents) + 1))
        legal = model.legal_recipients(states[-1])
        # Policies always use ALL, so half of the messages go there.
        recipient = model.mas.ALL if rng.random() < 0.5 else rng.choice(legal)
        try:
            states.append(model.transition(states[-1], Action(text, recipient)))
        except IllegalActionError:
            states.append(model.transition(states[-1], Action(text, model.mas.ALL)))
    return states


# -------------------------------------------------------------- identities


def stated(findings: Findings, part: object) -> str:
    """Return the digest of a component's identity; record a violation and return "" if it has none."""
    try:
        return digest_of(identity_of(part))
    except IdentityError as error:
        findings.expect(False, f"no run with store= accepts it: {error}")
        return ""


def check_steady(findings: Findings, part: object, before: str) -> None:
    """Check that a component's identity is the same before and after its work."""
    if before:
        fault = "its identity changed during use: leave counters, caches and generators out of identity()"
        findings.expect(stated(findings, part) == before, fault)


def check_apart(findings: Findings, first: str, second: str, alike: bool) -> None:
    """Check that two instances with different behaviour have different identities."""
    if first and second and not alike:
        fault = "the two instances have different results but one identity: include the difference in identity()"
        findings.expect(first != second, fault)


_QUESTION = "Maya has 3 apples and 4 pears. How many pieces of fruit?"


def check_mas(source: MASSource, *, texts: Sequence[str] = (), episodes: int = 50, seed: int = 0) -> MAS:
    """Check a MAS config: it is valid, its episodes end, every agent can act, and its environment works.

    Args:
        source: An argument of `mas_gym.load_mas`.
        texts: Messages that meet the conditions of your edges; patterns of ``contains:`` are tried automatically.
        episodes: Number of random episodes to play.
        seed: Seed of the episodes.

    Returns:
        The system.

    Raises:
        ConfigError: The config is not valid.
        ComplianceError: The config is valid but violates a contract.
    """
    mas = load_mas(source)
    findings = Findings(f"MAS {mas.name!r}")
    findings.expect(
        load_mas(json.loads(json.dumps(mas.to_dict()))) == mas, "its dict form does not load back as an equal object"
    )
    model = Dynamics(mas)
    patterns = [e.condition.pattern for e in mas.edges if e.condition and e.condition.kind.endswith("contains")]
    rng = random.Random(seed)
    says = [*ORDINARY, *HOSTILE, *patterns, *texts]
    acted: set[int] = set()
    for _ in range(episodes):
        states = walk(model, _QUESTION, says, rng)
        acted.update(turn.speaker for turn in states[-1].turns)
        for state in states:
            _check_state(findings, model, state)
    for i, agent in enumerate(mas.agents):
        findings.expect(
            i in acted,
            f"agents[{i}] {agent.name!r} acted in none of {episodes} episodes: its conditions may exclude each other, "
            "or need a message that you should pass in texts=",
        )
    _check_env(findings, mas)
    findings.settle()
    return mas


def _check_state(findings: Findings, model: Dynamics, state: MASState) -> None:
    findings.expect(state.depth <= model.max_depth, f"an episode is longer than {model.max_depth} turns")
    again = model.state_from_dict(json.loads(json.dumps(state.to_dict())))
    findings.expect(again == state, "a state does not survive its JSON form")
    if not model.is_terminal(state):
        name = model.mas.agents[state.acting].name
        findings.expect(model.mas.ALL in model.legal_recipients(state), f"{name} cannot send to ALL")


def _check_env(findings: Findings, mas: MAS) -> None:
    from gymnasium.utils.env_checker import check_env

    from mas_gym.envs.env import MASEnv

    env = MASEnv(ProblemTask.of([Problem("check/0", _QUESTION, "7"), Problem("check/1", "1 + 1?", "2")]), mas)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_env(env, skip_render_check=True)
    for warning in caught:
        findings.expect(False, f"gymnasium's checker warns: {warning.message}")


_CAP = 16
_MOST_STEPS = 100_000


def check_policy(
    policy: Policy | AsyncPolicy,
    *,
    mas: MASSource = "rpsv",
    question: str = "Maya has 3 apples and buys 4 more. How many apples does she have?",
    reproducible: bool = True,
    batch_invariant: bool = True,
    other: Policy | AsyncPolicy | None = None,
) -> None:
    """Check a policy: its replies, seeds, token caps, batching, unusual prompts, and its identity.

    The policy samples about forty messages of at most 16 tokens.

    Args:
        policy: The policy.
        mas: The system that defines the prompts.
        question: A question suitable for the policy.
        reproducible: Whether the same request must get the same reply; False for engines without seeds.
        batch_invariant: Whether a reply must not depend on the other requests of its batch.
        other: Another instance, such as one with other weights. If its replies differ, it must have another
            identity, because a run store treats two policies with one identity as the same.

    Raises:
        ComplianceError: Lists every violation.
    """
    try:
        policy, other = as_policy(policy), None if other is None else as_policy(other)
    except ConfigError as error:
        raise ComplianceError(f"policy: {error}") from None
    name = policy.name
    findings = Findings(f"policy {name!r}")
    findings.expect(isinstance(name, str) and bool(name), f"name: expected a non-empty str, got {shown(name)}")
    size = policy.max_concurrency if isinstance(policy, AsyncPolicy) else policy.max_batch
    findings.expect(isinstance(size, int) and size >= 1, f"batch size: expected an int from 1 on, got {shown(size)}")
    requests, identity = _requests(mas, question), stated(findings, policy)
    try:
        replies = _ask(findings, policy, requests)
        for request, reply in zip(requests, replies, strict=False):
            _check_reply(findings, request, reply)
        if not findings.faults and reproducible:
            _check_seeds(findings, policy, requests, replies, batch_invariant)
        findings.expect(_ask(findings, policy, []) == [], "an empty batch should get no replies")
        if other is not None and reproducible and not findings.faults:
            samples = [reply.samples for reply in _ask(Findings("other"), other, requests)]
            alike = samples == [reply.samples for reply in replies]
            check_apart(findings, identity, stated(findings, other), alike)
    except Exception as error:
        findings.expect(False, f"ordinary requests raised {type(error).__name__}: {shown(str(error))}")
    _check_odd_prompts(findings, policy)
    check_steady(findings, policy, identity)
    findings.settle()


def _check_seeds(
    findings: Findings,
    policy: Policy | AsyncPolicy,
    requests: list[SamplingRequest],
    replies: list[SamplingReply],
    batch_invariant: bool,
) -> None:
    # Compare samples only: the number of cached prompt tokens may change between calls.
    said = [reply.samples for reply in replies]
    again = [reply.samples for reply in _ask(findings, policy, requests)]
    findings.expect(
        again == said,
        "the same requests gave different samples the second time: derive them only from a request's seeds",
    )
    if batch_invariant:
        mirrored = [reply.samples for reply in _ask(findings, policy, requests[::-1])]
        findings.expect(mirrored[::-1] == said, "the order of a batch changes the samples")
        alone = [reply.samples for request in requests[:2] for reply in _ask(findings, policy, [request])]
        findings.expect(alone == said[:2], "a request gets different samples alone and in a batch")
    if isinstance(policy, StreamingPolicy):
        streamed = _stream(findings, policy, requests)
        findings.expect(streamed == said, "its session and sample() return different samples")


def _stream(findings: Findings, policy: StreamingPolicy, requests: list[SamplingRequest]) -> list[object]:
    """Return the samples of a session in which requests join while others are being generated."""
    session = policy.open()
    samples: list[object] = [None] * len(requests)
    waiting = list(enumerate(requests))
    for _ in range(_MOST_STEPS):
        if waiting:
            session.submit(*waiting.pop(0))
        for key, outcome in session.step():
            samples[key] = outcome.samples if isinstance(outcome, SamplingReply) else outcome  # type: ignore[call-overload]
        if not waiting and not session.pending:
            break
    findings.expect(not session.pending, f"its session still has pending requests after {_MOST_STEPS} steps")
    session.close()
    return samples


def _requests(mas: MASSource, question: str) -> list[SamplingRequest]:
    """Return one request per turn of an episode, with the prompts of the agents."""
    system = load_mas(mas)
    model = Dynamics(system)
    state = model.initial_state(question)
    requests = []
    while not model.is_terminal(state):
        seeds = tuple(1_000 * state.depth + i for i in range(3))
        agent = system.agents[state.acting]
        requests.append(SamplingRequest(chat_messages(system, state), seeds, _CAP, agent=agent.name))
        text = addressed(system, state, ORDINARY[state.depth % len(ORDINARY)], state.depth)
        state = model.transition(state, (text, system.ALL))
    return requests


def _ask(findings: Findings, policy: Policy | AsyncPolicy, requests: Sequence[SamplingRequest]) -> list[SamplingReply]:
    if isinstance(policy, AsyncPolicy):

        async def all_at_once() -> list[SamplingReply]:
            return list(await asyncio.gather(*(policy.sample_async(request) for request in requests)))

        return asyncio.run_coroutine_threadsafe(all_at_once(), engine_loop()).result()
    replies = list(policy.sample(requests))
    got = f"{len(requests)} requests got {len(replies)} replies: expected one each, in order"
    findings.expect(len(replies) == len(requests), got)
    return replies


def _check_reply(findings: Findings, request: SamplingRequest, reply: Any) -> None:
    got = f"a reply: expected a SamplingReply, got {shown(reply)}"
    if not findings.expect(isinstance(reply, SamplingReply), got):
        return
    got = f"{len(request.seeds)} seeds got {len(reply.samples)} samples: expected one per seed, in order"
    findings.expect(len(reply.samples) == len(request.seeds), got)
    counts = {"prompt_tokens": reply.prompt_tokens, "cached_tokens": reply.cached_tokens}
    for field, count in {**counts, "dropped_tokens": reply.dropped_tokens}.items():
        fine = isinstance(count, int) and count >= 0
        findings.expect(fine, f"{field}: expected an int from 0 on, got {shown(count)}")
    for sample in reply.samples:
        _check_sample(findings, request, sample)


def _check_sample(findings: Findings, request: SamplingRequest, sample: Any) -> None:
    if not findings.expect(isinstance(sample, Sample), f"a sample: expected a Sample, got {shown(sample)}"):
        return
    text, tokens, logprob, reason, certainty, trace = sample
    if findings.expect(isinstance(text, str), f"text: expected a str, got {shown(text)}"):
        findings.expect(text == text.strip(), f"text: expected it stripped, got {shown(text)}")
    findings.expect(
        isinstance(tokens, int) and 0 <= tokens <= request.max_new_tokens,
        f"tokens: expected at most the cap of {request.max_new_tokens}, got {shown(tokens)}",
    )
    if logprob is not None:
        fine = isinstance(logprob, float) and math.isfinite(logprob) and logprob <= 1e-6
        findings.expect(fine, f"logprob: expected None or a finite float up to 0, got {shown(logprob)}")
    findings.expect(reason in ("stop", "length"), f"finish_reason: expected 'stop' or 'length', got {shown(reason)}")
    for value in certainty or ():
        fine = value is None or (isinstance(value, float) and math.isfinite(value))
        findings.expect(fine, f"certainty: expected None or finite floats, got {shown(value)}")
    findings.expect(trace is None, f"trace: expected None, because the request is not traced, got {shown(trace)}")


def _check_odd_prompts(findings: Findings, policy: Policy | AsyncPolicy) -> None:
    for text in (*HOSTILE, "word " * 3_000):
        request = SamplingRequest((ChatMessage("system", "Speak."), ChatMessage("user", text)), (7,), _CAP)
        try:
            replies = _ask(findings, policy, [request])
        except PolicyError:
            # A PolicyError is a valid answer; any other exception would end a run.
            continue
        except Exception as error:
            fault = f"a prompt with {shown(text)} raised {type(error).__name__}: return a reply or raise PolicyError"
            findings.expect(False, fault)
            continue
        for reply in replies:
            _check_reply(findings, request, reply)
