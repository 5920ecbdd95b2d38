"""Checks of policies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mas_gym.errors import ComplianceError, ConfigError, PolicyError, shown
from mas_gym.internal.adapter import has_method
from mas_gym.policies import AsyncPolicy, Policy, Sample, SamplingReply, SamplingRequest
from mas_gym.policies.batch_queue import BatchedPolicy, as_policy, sample_all
from mas_gym.systems.dynamics import Dynamics
from mas_gym.systems.loading import load_mas
from mas_gym.systems.prompts import ChatMessage, chat_messages
from mas_gym.testing.shared_checks import HOSTILE, ORDINARY, QUESTION, Findings, check_steady, stated

_CAP = 16


def check_policy(policy: Policy | AsyncPolicy, *, reproducible: bool = True) -> None:
    """Check a policy: its replies, seeds, token limits, batching, handling of unusual prompts, and identity.

    The policy samples about forty messages of at most 16 tokens.

    Args:
        policy: The policy.
        reproducible: Whether the same request must get the same reply in every batch; False for engines without seeds.

    Raises:
        ComplianceError: Lists every violation.
    """
    try:
        policy = as_policy(policy)
    except ConfigError as error:
        raise ComplianceError(f"policy: {error}") from None
    name = policy.name
    findings = Findings(f"policy {name!r}")
    findings.expect(isinstance(name, str) and bool(name), f"name: expected a non-empty str, got {shown(name)}")
    size = policy.local_batch or policy.max_concurrency
    findings.expect(isinstance(size, int) and size >= 1, f"batch size: expected an int from 1 on, got {shown(size)}")
    requests, identity = _requests(), stated(findings, policy)
    try:
        replies = _ask(policy, requests)
        for request, reply in zip(requests, replies, strict=False):
            _check_reply(findings, request, reply)
        if not findings.faults and reproducible:
            _check_seeds(findings, policy, requests, replies)
    except Exception as error:
        findings.expect(False, f"ordinary requests raised {type(error).__name__}: {shown(str(error))}")
    _check_odd_prompts(findings, policy)
    check_steady(findings, policy, identity)
    findings.settle()


def _check_seeds(
    findings: Findings, policy: AsyncPolicy, requests: list[SamplingRequest], replies: list[SamplingReply]
) -> None:
    # Compare samples only: the number of cached prompt tokens may change between calls.
    said = [reply.samples for reply in replies]
    again = [reply.samples for reply in _ask(policy, requests)]
    findings.expect(
        again == said,
        "the same requests gave different samples the second time: derive them only from a request's seeds",
    )
    mirrored = [reply.samples for reply in _ask(policy, requests[::-1])]
    findings.expect(mirrored[::-1] == said, "the order of a batch changes the samples")
    alone = [reply.samples for request in requests[:2] for reply in _ask(policy, [request])]
    findings.expect(alone == said[:2], "a request gets different samples alone and in a batch")
    if isinstance(policy, BatchedPolicy) and has_method(policy.identical_to, "open"):
        whole = [reply.samples for reply in policy.identical_to.sample(requests)]
        findings.expect(whole == said, "its session and sample() return different samples")


def _requests() -> list[SamplingRequest]:
    system = load_mas("rpsv")
    model = Dynamics(system)
    state = model.initial_state(QUESTION)
    requests = []
    while not model.is_terminal(state):
        seeds = tuple(1_000 * state.depth + i for i in range(3))
        agent = system.agents[state.acting]
        requests.append(SamplingRequest(chat_messages(system, state), seeds, _CAP, agent=agent.name))
        state = model.transition(state, (ORDINARY[state.depth], system.ALL))
    return requests


def _ask(policy: AsyncPolicy, requests: Sequence[SamplingRequest]) -> list[SamplingReply]:
    replies: list[SamplingReply] = []
    for outcome in sample_all(policy, requests):
        if isinstance(outcome, Exception):
            raise outcome
        replies.append(outcome)
    return replies


def _check_reply(findings: Findings, request: SamplingRequest, reply: Any) -> None:
    got = f"a reply: expected a SamplingReply, got {shown(reply)}"
    if not findings.expect(isinstance(reply, SamplingReply), got):
        return
    got = f"{len(request.seeds)} seeds got {len(reply.samples)} samples: expected one per seed, in order"
    findings.expect(len(reply.samples) == len(request.seeds), got)
    counts = {"prompt": reply.prompt_tokens, "cached": reply.cached_tokens, "dropped": reply.dropped_tokens}
    for field, count in counts.items():
        fine = isinstance(count, int) and count >= 0
        findings.expect(fine, f"{field}_tokens: expected an int from 0 on, got {shown(count)}")
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


def _check_odd_prompts(findings: Findings, policy: AsyncPolicy) -> None:
    for text in (*HOSTILE, "word " * 3_000):
        request = SamplingRequest((ChatMessage("system", "Speak."), ChatMessage("user", text)), (7,), _CAP)
        try:
            replies = _ask(policy, [request])
        except PolicyError:
            # A PolicyError is a valid answer; any other exception would end a run.
            continue
        except Exception as error:
            fault = f"a prompt with {shown(text)} raised {type(error).__name__}: return a reply or raise PolicyError"
            findings.expect(False, fault)
            continue
        for reply in replies:
            _check_reply(findings, request, reply)
