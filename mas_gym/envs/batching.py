"""Requests from an environment's step to a policy or a critic, executed individually or in batches.

The wrappers implement their steps as generators that yield requests. A single environment executes its requests
immediately. A vector environment collects the requests of all its sub-environments and sends each engine one batch::

    sub-environment 0        sub-environment 1          vector environment
    yield SampleRequest  ->  yield SampleRequest  ->    one batch for the policy
                                                  <-    SamplingReply, SamplingReply
    yield Scoring        ->  yield Scoring        ->    one batch for the critic
                                                  <-    [0.1, 0.7], [-0.2, 0.3]
    return step              return step                one batch of observations
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple, TypeVar

import gymnasium as gym
from gymnasium.core import ActType, ObsType

from mas_gym.critics import Critic, Scores, ScoringContext, finite_values, score_batch
from mas_gym.envs.env import Info
from mas_gym.errors import CriticError, EngineUnavailableError, PolicyError
from mas_gym.internal.adapter import Adapter
from mas_gym.internal.event_loop import engine_loop
from mas_gym.policies import AsyncPolicy, Policy, SamplingReply, SamplingRequest, SamplingSession, open_session

T = TypeVar("T")

Step = tuple[Any, float, bool, bool, Info]


class SampleRequest(NamedTuple):
    """A request to a policy for messages; the reply is a `SamplingReply`."""

    policy: Policy | AsyncPolicy
    request: SamplingRequest


class Scoring(NamedTuple):
    """A request to a critic for values; the reply is a list of finite floats."""

    critic: Critic
    contexts: Sequence[ScoringContext]


Question = SampleRequest | Scoring
Asking = Generator[Question, Any, T]
"""A generator that yields requests, receives the replies, and returns a result."""


class AskingWrapper(gym.Wrapper[Any, Any, Any, Any]):
    """A wrapper that implements `reset` and `step` as generators of requests: ``resetting`` and ``stepping``."""

    def resetting(self, seed: int | None, options: Mapping[str, object] | None) -> Asking[tuple[Any, Info]]:
        """Start an episode; returns what `reset` returns."""
        raise NotImplementedError

    def stepping(self, action: Any) -> Asking[Step]:
        """Take a step and return what `step` returns."""
        raise NotImplementedError

    def reset(self, *, seed: int | None = None, options: Mapping[str, object] | None = None) -> tuple[object, Info]:
        """Start an episode and execute its requests immediately."""
        return answered(self.resetting(seed, options))

    def step(self, action: object) -> Step:
        """Take a step and execute its requests immediately."""
        return answered(self.stepping(action))


def resetting(
    env: gym.Env[ObsType, ActType], seed: int | None, options: Mapping[str, object] | None
) -> Asking[tuple[Any, Info]]:
    """Reset an environment as part of a larger step."""
    # If a subclass overrides `reset`, call the override, which executes its requests immediately.
    if isinstance(env, AskingWrapper) and type(env).reset is AskingWrapper.reset:
        return (yield from env.resetting(seed, options))
    return env.reset(seed=seed, options=None if options is None else dict(options))


def stepping(env: gym.Env[ObsType, ActType], action: Any) -> Asking[Step]:
    """Step an environment as part of a larger step."""
    if isinstance(env, AskingWrapper) and type(env).step is AskingWrapper.step:
        return (yield from env.stepping(action))
    observation, reward, terminated, truncated, info = env.step(action)
    return observation, float(reward), terminated, truncated, info


def answered(step: Asking[T]) -> T:
    """Run a step and execute its requests one by one."""
    with closing(Together()) as together:
        return together.run([step])[0]


def score(critic: Critic, contexts: Mapping[int, Sequence[ScoringContext]]) -> dict[int, list[float] | Exception]:
    """Return the critic's values for each environment's states, or the error if the critic cannot score them.

    Environments are scored together, in batches of about ``critic.max_batch`` states.

    Raises:
        EngineUnavailableError: The critic's engine is down.
    """
    answers: dict[int, list[float] | Exception] = {}
    waiting: dict[int, Sequence[ScoringContext]] = {}

    def flush() -> None:
        for place, outcome in zip(waiting, score_batch(critic, waiting), strict=True):
            answers[place] = _values(critic, waiting[place], outcome[1])
        waiting.clear()

    for place, part in contexts.items():
        if waiting and sum(map(len, waiting.values())) + len(part) > critic.max_batch:
            flush()
        waiting[place] = part
    flush()
    return answers


def _values(critic: Critic, contexts: Sequence[ScoringContext], outcome: Scores | Exception) -> list[float] | Exception:
    if isinstance(outcome, EngineUnavailableError):
        raise outcome
    if isinstance(outcome, Exception):
        return outcome
    try:
        return finite_values(critic, [context.state for context in contexts], outcome)
    except CriticError as error:
        return error


class Together:
    """Executes the requests of several environments together, and keeps one session open per policy.

    If a request fails, the error is raised inside the step that yielded it. If a step raises an error, a note with the
    environment's number is added to the error.
    """

    def __init__(self) -> None:
        """Start with no open session."""
        self._sessions: dict[int, tuple[Policy, SamplingSession]] = {}

    def run(self, steps: Sequence[Asking[T]]) -> list[T]:
        """Run the steps to completion and return their results, in order.

        Raises:
            Exception: The error of the first failing step, with a note that names the environment.
        """
        results: dict[int, T] = {}
        answers: dict[int, Any] = dict.fromkeys(range(len(steps)))
        while answers:
            questions: dict[int, Question] = {}
            for place, answer in answers.items():
                try:
                    step = steps[place]
                    questions[place] = step.throw(answer) if isinstance(answer, Exception) else step.send(answer)
                except StopIteration as end:
                    results[place] = end.value
                except Exception as error:
                    if len(steps) > 1:
                        error.add_note(f"in environment {place} of {len(steps)}")
                    raise
            answers = self._answers(questions)
        return [results[place] for place in range(len(steps))]

    def close(self) -> None:
        """Close the sessions."""
        for _, session in self._sessions.values():
            session.close()
        self._sessions.clear()

    def _answers(self, questions: Mapping[int, Question]) -> dict[int, Any]:
        """Return the replies in the order of the requests; for a failed request, its error."""
        answers: dict[int, Any] = dict.fromkeys(questions)
        requests: dict[int, dict[int, SamplingRequest]] = {}
        contexts: dict[int, dict[int, Sequence[ScoringContext]]] = {}
        parts = {_part_id(question[0]): question[0] for question in questions.values()}
        for place, question in questions.items():
            if isinstance(question, SampleRequest):
                requests.setdefault(_part_id(question.policy), {})[place] = question.request
            else:
                contexts.setdefault(_part_id(question.critic), {})[place] = question.contexts
        for number, asked in requests.items():
            policy: Any = parts[number]
            answers |= _await_all(policy, asked) if isinstance(policy, AsyncPolicy) else self._sample(policy, asked)
        for number, wanted in contexts.items():
            critic: Any = parts[number]
            answers |= score(critic, wanted)
        return answers

    def _sample(
        self, policy: Policy, requests: Mapping[int, SamplingRequest]
    ) -> Mapping[int, SamplingReply | Exception]:
        replies: dict[Any, SamplingReply | Exception] = {}
        # A session that raised, or was interrupted, is not used again.
        session = self._sessions.pop(id(policy))[1] if id(policy) in self._sessions else open_session(policy)
        try:
            for place, request in requests.items():
                session.submit(place, request)
            while session.pending:
                replies |= session.step()
        except EngineUnavailableError:
            raise
        except Exception as error:
            if len(requests) == 1:
                return dict.fromkeys(requests, error)
            # The failing request is unknown, so each request is executed separately.
            alone = [self._sample(policy, {place: request}) for place, request in requests.items()]
            return {place: reply for part in alone for place, reply in part.items()}
        self._sessions[id(policy)] = policy, session
        missing = PolicyError(f"policy {policy.name!r}: expected a reply to every request, got {len(replies)}")
        return {place: replies.get(place, missing) for place in requests}


def _part_id(part: object) -> int:
    """Return a number that identifies a policy or critic."""
    return id(part.identical_to if isinstance(part, Adapter) else part)


def _await_all(
    policy: AsyncPolicy, requests: Mapping[int, SamplingRequest]
) -> dict[int, SamplingReply | BaseException]:
    async def all_of_them() -> list[SamplingReply | BaseException]:
        room = asyncio.Semaphore(max(1, policy.max_concurrency))

        async def one(request: SamplingRequest) -> SamplingReply:
            async with room:
                return await policy.sample_async(request)

        return await asyncio.gather(*map(one, requests.values()), return_exceptions=True)

    replies = asyncio.run_coroutine_threadsafe(all_of_them(), engine_loop()).result()
    return dict(zip(requests, replies, strict=True))
