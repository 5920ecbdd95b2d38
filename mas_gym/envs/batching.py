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

from collections.abc import Generator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import gymnasium as gym
from gymnasium.core import ActType, ObsType

from mas_gym.critics import Critic, ScoringContext, finite_values, score_batch
from mas_gym.envs.env import Info
from mas_gym.errors import CriticError, EngineUnavailableError
from mas_gym.internal.adapter import Adapter
from mas_gym.policies import AsyncPolicy, SamplingRequest
from mas_gym.policies.batch_queue import sample_all

T = TypeVar("T")

Step = tuple[Any, float, bool, bool, Info]


class SampleRequest(NamedTuple):
    """A request to a policy for messages; the reply is a `SamplingReply`."""

    policy: AsyncPolicy
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
    return run_together([step])[0]


def run_together(steps: Sequence[Asking[T]]) -> list[T]:
    """Run the steps of several environments to completion and return their results, in order.

    The environments' requests are executed together. If a request fails, the error is raised inside the step that
    yielded it.

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
        answers = _answers(questions)
    return [results[place] for place in range(len(steps))]


def _answers(questions: Mapping[int, Question]) -> dict[int, Any]:
    """Return the replies in the order of the requests; for a failed request, its error."""
    groups: dict[tuple[type, int], dict[int, Any]] = {}
    for place, question in questions.items():
        groups.setdefault((type(question), _part_id(question[0])), {})[place] = question
    answers: dict[int, Any] = dict.fromkeys(questions)
    for (kind, _), asked in groups.items():
        [(part, _), *_] = asked.values()
        contents = [content for _, content in asked.values()]
        replies: list[Any] = sample_all(part, contents) if kind is SampleRequest else _scored(part, contents)
        for reply in replies:
            if isinstance(reply, EngineUnavailableError):
                raise reply
        answers |= zip(asked, replies, strict=True)
    return answers


def _scored(critic: Critic, shares: Sequence[Sequence[ScoringContext]]) -> list[list[float] | Exception]:
    """Return the critic's values, or its error, for each environment; in batches of about ``critic.max_batch``."""
    answers: list[list[float] | Exception] = []
    waiting: dict[int, Sequence[ScoringContext]] = {}

    def flush() -> None:
        for place, outcome in score_batch(critic, waiting):
            try:
                answers.append(
                    outcome
                    if isinstance(outcome, Exception)
                    else finite_values(critic, [context.state for context in waiting[place]], outcome)
                )
            except CriticError as error:
                answers.append(error)
        waiting.clear()

    for place, share in enumerate(shares):
        if waiting and sum(map(len, waiting.values())) + len(share) > critic.max_batch:
            flush()
        waiting[place] = share
    flush()
    return answers


def _part_id(part: object) -> int:
    """Return a number that identifies a policy or critic."""
    return id(part.identical_to if isinstance(part, Adapter) else part)
