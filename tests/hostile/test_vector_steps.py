"""Vector environments given wrong actions, and policies and critics that fail for one of the copies."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from mas_gym.envs.wrappers import CandidateFeatures, DenseReward
from mas_gym.errors import (
    CriticError,
    EngineUnavailableError,
    EpisodeOverError,
    IllegalActionError,
    MASGymError,
    PolicyError,
)
from mas_gym.policies import SamplingRequest, ScriptedPolicy
from mas_gym.tasks import Problem, ProblemTask

SUMS = ProblemTask.of([Problem(f"sum/{n}", f"What is {n} + {n}?", str(2 * n)) for n in range(1, 6)])


def guess(request: SamplingRequest, seed: int) -> str:
    return f"{request.agent} says. Final Answer: {seed % 5}"


def copies(policy: Any, **options: Any) -> Any:
    return gym.make_vec("MAS-Custom-v0", num_envs=5, task=SUMS, mas="rpsv", policy=policy, n=2, **options)


class Moody:
    """Fails on the question about 4 from the second agent on."""

    name, max_batch, max_concurrency = "moody", 64, 64

    def __init__(self, kind: type[Exception] = PolicyError) -> None:
        self.kind = kind

    def reply(self, request: SamplingRequest) -> Any:
        if "What is 4" in request.messages[-1].content and request.agent == "Planner":
            raise self.kind("the prompt is too long")
        return ScriptedPolicy(guess).sample([request])[0]


class Batch(Moody):
    def sample(self, requests: Sequence[SamplingRequest]) -> list[Any]:
        return [self.reply(request) for request in requests]


class Async(Moody):
    async def sample_async(self, request: SamplingRequest) -> Any:
        return self.reply(request)


@pytest.mark.parametrize("shape", [Batch, Async])
def test_policy_error_truncates_only_its_sub_environment(shape: Any) -> None:
    envs = copies(shape(), wrap=None)
    failing = envs.reset(seed=1)[1]["problem_id"] == "sum/4"
    assert 0 < failing.sum() < 5
    _, rewards, terminated, truncated, infos = envs.step([0] * 5)
    assert (truncated == failing).all() and not terminated.any() and not rewards.any()
    assert (
        set(infos["error"][failing]) == {"PolicyError: the prompt is too long"} and (infos["_error"] == failing).all()
    )
    # The next step starts the copy's next episode, and the others continue.
    _, _, _, truncated, infos = envs.step([0] * 5)
    assert not truncated.any() and "error" not in infos
    assert [env.unwrapped.state.depth for env in envs.envs] == [0 if failed else 2 for failed in failing]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        envs.close()


@pytest.mark.parametrize("kind", [ZeroDivisionError, EngineUnavailableError])
def test_other_errors_are_raised_and_require_a_full_reset(kind: type[Exception]) -> None:
    envs = copies(Batch(kind))
    envs.reset(seed=1)
    with pytest.raises(kind, match="too long"):
        envs.step([0] * 5)
    with pytest.raises(EpisodeOverError, match="a step has failed"):
        envs.step([0] * 5)
    with pytest.raises(EpisodeOverError, match="without reset_mask"):
        envs.reset(options={"reset_mask": np.arange(5) == 0})
    # Only the step is lost; the environment continues.
    envs.reset(options={"problem_id": "sum/1"})
    for _ in range(4):
        terminated = envs.step([0] * 5)[2]
    assert terminated.all()


def test_policy_with_too_few_completions_fails_the_reset() -> None:
    class Fewer(Batch):
        def sample(self, requests: Sequence[SamplingRequest]) -> list[Any]:
            return super().sample(requests)[1:]

    class Shorter(Batch):
        def reply(self, request: SamplingRequest) -> Any:
            reply = super().reply(request)
            return reply._replace(samples=reply.samples[:1]) if "What is 4" in request.messages[-1].content else reply

    for policy, said in ((Fewer(), "expected"), (Shorter(), "expected 2 samples, got 1")):
        with pytest.raises(PolicyError, match=said) as caught:
            copies(policy).reset(seed=1)
        assert caught.value.__notes__[0].endswith("of 5")


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "0.5", CriticError("no verdict")])
@pytest.mark.parametrize("wrapper", [CandidateFeatures, DenseReward])
def test_critic_error_truncates_only_its_sub_environment(value: Any, wrapper: Any, mode: str) -> None:
    class Blind:
        def score(self, contexts: Sequence[Any]) -> list[Any]:
            blind = ["What is 4" in c.state.question and c.state.depth == 2 for c in contexts]
            if any(blind) and isinstance(value, Exception):
                raise value
            return [value if one else 0.5 for one in blind]

    envs = copies(ScriptedPolicy(guess), wrap=lambda env: wrapper(env, Blind()), autoreset_mode=mode)
    failing = envs.reset(seed=1)[1]["problem_id"] == "sum/4"
    for _ in range(2):
        _, _, terminated, truncated, infos = envs.step([0] * 5)
        if truncated.any():
            break
    assert 0 < failing.sum() < 5 and (truncated == failing).all() and not terminated.any()
    for error in (infos["final_info"] if mode == "SameStep" else infos)["error"][failing]:
        assert error.startswith("CriticError: ") and ("verdict" in error or "finite number" in error)
    assert not envs.step([0] * 5)[3][~failing].any()


def test_critic_that_raises_or_returns_too_few_values_fails_the_reset() -> None:
    class Short:
        def score(self, contexts: Sequence[Any]) -> list[float]:
            return [0.0]

    class Gone:
        def score(self, contexts: Sequence[Any]) -> list[float]:
            raise CriticError("the server is gone")

    for critic, said in ((Short(), "expected 2 values, got 1"), (Gone(), "gone")):
        with pytest.raises(MASGymError, match=said):
            copies(ScriptedPolicy(guess), wrap=lambda env, c=critic: CandidateFeatures(env, c)).reset()


def test_critic_error_in_every_sub_environment_is_raised() -> None:
    class Late:
        def score(self, contexts: Sequence[Any]) -> list[float]:
            if any(context.state.depth > 1 for context in contexts):
                raise CriticError("the server is gone")
            return [0.0] * len(contexts)

    envs = copies(ScriptedPolicy(guess), wrap=lambda env: CandidateFeatures(env, Late()))
    envs.reset()
    with pytest.raises(CriticError, match="gone") as caught:
        envs.step([0] * 5)
    assert caught.value.__notes__ == ["in environment 0 of 5"]


WRONG = [[0], [0] * 6, [[0] * 5], 0, None, "abcde", [0.0] * 5, [0, 0, [0], 0, 0], [0, 0, 9, 0, 0], [-1] * 5]


@pytest.mark.parametrize("actions", WRONG)
def test_invalid_actions_step_no_sub_environment(actions: Any) -> None:
    envs = copies(ScriptedPolicy(guess))
    envs.reset(seed=0)
    with pytest.raises(IllegalActionError, match="expected"):
        envs.step(actions)
    assert not any(env.unwrapped.state.depth for env in envs.envs)
    envs.step([0] * 5)


@pytest.mark.parametrize("actions", [(("a",), np.array([5])), 3, None, ("ab", 5), (("a", "b"),)])
def test_invalid_texts_are_rejected(actions: Any) -> None:
    envs = gym.make_vec("MAS-Custom-v0", num_envs=2, task=SUMS, mas="rpsv")
    envs.reset(seed=0)
    with pytest.raises(IllegalActionError, match="expected"):
        envs.step(actions)
