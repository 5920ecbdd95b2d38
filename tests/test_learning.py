"""Wrappers for reinforcement learners: shaped rewards, features, masks."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.wrappers import TimeLimit

import mas_gym
from mas_gym.envs.env import MASEnv
from mas_gym.envs.wrappers import FEATURES, CandidateChoice, CandidateFeatures, DenseReward
from mas_gym.errors import ConfigError, CriticError, EpisodeOverError, IllegalActionError, PolicyError
from mas_gym.policies import ScriptedPolicy
from mas_gym.tasks import Problem, ProblemTask
from rewardmodels import load_critic
from search.protocol import Scores

SUMS = ProblemTask.of([Problem(f"sum/{n}", f"What is {n} + {n}?", str(2 * n)) for n in range(1, 6)])


class Likes:
    """Values a state by the last digit of its message."""

    name = "likes"

    def __init__(self, worst: float = -1.0) -> None:
        self.batches: list[int] = []
        self.worst = worst

    def score(self, contexts: Sequence[Any]) -> list[float]:
        self.batches.append(len(contexts))
        assert all(context.proposal is None or context.proposal.text == context.state.text for context in contexts)
        return [self.worst + int(context.state.text[-1]) / 5 for context in contexts]


def choices(mas: str = "rpsv", n: int = 5) -> CandidateChoice:
    policy = ScriptedPolicy(lambda request, seed: f"{request.agent} says. Final Answer: {seed % 7}")
    return CandidateChoice(MASEnv(SUMS, mas), policy, n, seed=3)


@pytest.mark.parametrize("mas", mas_gym.mas_names())
def test_wrapped_env_passes_the_gymnasium_checker(mas: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*different from the unwrapped version.*")
        warnings.filterwarnings("ignore", message=".*Box.*infinity.*")
        check_env(CandidateFeatures(DenseReward(choices(mas), Likes()), Likes()), skip_render_check=True)


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_shaping_is_potential_based(gamma: float) -> None:
    env = DenseReward(choices(), Likes(), gamma)
    for seed in range(5):
        env.reset(seed=seed)
        terminated, shaped, plain, values = False, [], [], [0.0]
        while not terminated:
            _, reward, terminated, _, info = env.step(int(np.argmax(env.get_wrapper_attr("action_masks")())))
            shaped.append(reward)
            plain.append(info["reward"])
            values.append(0.0 if terminated else int(env.mas_env.state.text[-1]) / 5 - 1)
            assert info["potential"] == pytest.approx(values[-1])
        for t, (ours, own) in enumerate(zip(shaped, plain, strict=True)):
            assert ours == pytest.approx(own + gamma * values[t + 1] - values[t])
        if gamma == 1:
            assert sum(shaped) == pytest.approx(sum(plain)) and sum(plain) in (1.0, -1.0)


def test_potential_is_restored_with_the_state() -> None:
    env = DenseReward(choices(), Likes())
    env.reset(seed=1)
    env.step(0)
    snapshot = env.env.clone_state()  # type: ignore[attr-defined]
    once = env.step(0)[1]
    env.step(0)
    env.env.restore_state(snapshot)  # type: ignore[attr-defined]
    assert env.step(0)[1] == once


def test_features_describe_the_candidates() -> None:
    critic = Likes()
    env = CandidateFeatures(choices(), critic)
    table, info = env.reset(seed=2)
    turn = 0
    while True:
        assert table.shape == (5, len(FEATURES) + 4) and table.dtype == np.float32
        samples = env.choice.samples
        assert table[:, 0].tolist() == info["action_mask"].tolist() == env.choice.action_masks().tolist()
        assert table[:, 2] == pytest.approx([sample.tokens / 100 for sample in samples])
        assert table[:, 1] == pytest.approx([(sample.logprob or 0) / sample.tokens for sample in samples])
        assert table[:, 3] == pytest.approx([turn / 4] * 5)
        assert table[:, 4] == pytest.approx([int(sample.text[-1]) / 5 - 1 for sample in samples], abs=1e-6)
        assert table[:, len(FEATURES) :].tolist() == [[float(turn == agent) for agent in range(4)]] * 5
        best = int(np.argmax(np.where(table[:, 0] > 0, table[:, 4], -9)))
        table, _, terminated, _, info = env.step(best)
        turn += 1
        if terminated:
            break
    assert not table.any() and critic.batches == [5] * 4
    assert env.get_wrapper_attr("action_masks")().tolist() == [True] * 5


@pytest.mark.parametrize("features", [False, True])
def test_policy_likelihood_can_be_reward_and_feature(features: bool) -> None:
    likelihood = load_critic("policy-likelihood")
    inner = CandidateFeatures(choices(), likelihood) if features else choices()
    env = DenseReward(inner, likelihood)
    env.reset(seed=4)
    before, terminated, gained = 0.0, False, 0.0
    # The script's words have a log-probability of -1 each.
    expected = 1 / (1 + np.exp(1))
    while not terminated:
        _, reward, terminated, _, info = env.step(2)
        assert info["potential"] == (0.0 if terminated else pytest.approx(expected))
        assert reward == pytest.approx(info["reward"] + info["potential"] - before)
        before, gained = info["potential"], gained + reward
    assert gained == pytest.approx(info["reward"])


def test_likelihood_is_a_feature_column() -> None:
    table, _ = CandidateFeatures(choices(), load_critic("policy-likelihood")).reset(seed=1)
    assert table[:, 4] == pytest.approx(1 / (1 + np.exp(-table[:, 1])))


def test_chosen_sample_is_found_through_wrappers_and_after_a_restore() -> None:
    seen: list[Any] = []

    class Watching(Likes):
        def score(self, contexts: Sequence[Any]) -> list[float]:
            seen.extend(context.proposal for context in contexts)
            return super().score(contexts)

    env = DenseReward(TimeLimit(CandidateFeatures(choices()), 9), Watching())
    choice = env.env.env.choice  # type: ignore[attr-defined]
    env.reset(seed=1)
    picked = [choice.samples[1]]
    env.step(1)
    snapshot = choice.clone_state()
    picked.append(choice.samples[2])
    env.step(2)
    assert seen == picked and choice.chosen == picked[-1]
    choice.restore_state(snapshot)
    env._known = b"", 0.0
    env.step(2)
    assert seen == [*picked, *picked]
    env.reset()
    assert choice.chosen is None


def test_likelihood_without_candidates_is_rejected() -> None:
    env = DenseReward(MASEnv(SUMS, "rpsv"), load_critic("policy-likelihood"))
    env.reset(seed=0)
    with pytest.raises(CriticError, match="policy-likelihood"):
        env.step(("text 1", env.mas_env.ALL))


def test_policy_error_truncates_the_episode() -> None:
    asked: list[int] = []

    def script(request: Any, seed: int) -> str:
        asked.append(seed)
        if len(asked) > 5:
            raise PolicyError("the engine is gone")
        return "text 1"

    env = CandidateChoice(MASEnv(SUMS, "rpsv"), ScriptedPolicy(script), 3)
    env.reset(seed=0)
    with pytest.raises(PolicyError, match="gone"):
        env.step(0)
    with pytest.raises(EpisodeOverError, match="ended by an error"):
        env.step(0)


@pytest.mark.parametrize("action", [-1, 5, 1.0, None, "0", [0], np.array([0, 1]), np.array([0]), 10**30])
def test_invalid_action_index_is_rejected(action: Any) -> None:
    env = DenseReward(CandidateFeatures(choices()), Likes())
    env.reset(seed=0)
    with pytest.raises(IllegalActionError, match="from 0 to 4"):
        env.step(action)
    env.step(np.int64(4))
    env.step(np.array(1))


def test_incompatible_arguments_are_rejected() -> None:
    class Outcome(Likes):
        terminal_only = True

    class Short(Likes):
        def score(self, contexts: Sequence[Any]) -> list[float]:
            return super().score(contexts)[1:]

    class Unread(Likes):
        def score(self, contexts: Sequence[Any]) -> list[float]:
            return Scores([float("nan")] * len(contexts), reasons=["the judge said nothing"] * len(contexts))

    with pytest.raises(ConfigError, match="unfinished"):
        DenseReward(choices(), Outcome())
    with pytest.raises(ConfigError, match="load_critic"):
        DenseReward(choices(), "tiny-masprm")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="gamma"):
        DenseReward(choices(), Likes(), 1.5)
    with pytest.raises(ConfigError, match="CandidateChoice"):
        CandidateFeatures(MASEnv(SUMS, "rpsv"))
    for critic in (load_critic("agreement"), load_critic("ensemble:policy-likelihood,agreement")):
        with pytest.raises(ConfigError, match="by itself"):
            DenseReward(choices(), critic)
        with pytest.raises(ConfigError, match="by itself"):
            CandidateFeatures(choices(), critic)
    with pytest.raises(ConfigError, match="unfinished"):
        CandidateFeatures(choices(), Outcome())
    with pytest.raises(ConfigError, match="CandidateChoice"):
        CandidateFeatures(MASEnv(SUMS, "rpsv"))
    unscored = CandidateFeatures(choices(), Unread())
    with pytest.raises(CriticError, match="the judge said nothing"):
        unscored.reset(seed=1)
    for wrong in (Likes(float("nan")), Likes(float("inf")), Short()):
        with pytest.raises(CriticError, match=r"finite|expected 5 values, got 4"):
            CandidateFeatures(choices(), wrong).reset(seed=1)
    broken = DenseReward(choices(), Likes(float("nan")))
    broken.reset(seed=1)
    with pytest.raises(CriticError, match="finite"):
        broken.step(0)


@pytest.mark.slow
def test_critics_of_another_graph_are_rejected() -> None:
    critic = load_critic("tiny-masprm")
    for wrapper in (DenseReward, CandidateFeatures):
        with pytest.raises(CriticError, match="trained on rpsv"):
            wrapper(choices("logic"), critic)
