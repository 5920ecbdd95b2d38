"""Vector environments whose copies ask together: the same results as single ones, and one call of each engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import AutoresetMode

import mas_gym
from mas_gym.envs.env import MASEnv
from mas_gym.envs.vector import MASVectorEnv
from mas_gym.envs.wrappers import CandidateChoice, CandidateFeatures, DenseReward
from mas_gym.errors import ConfigError, EpisodeOverError, PolicyError
from mas_gym.policies import SamplingRequest, ScriptedPolicy, load_policy
from mas_gym.tasks import Problem, ProblemTask
from search.critics import PolicyLikelihood

SUMS = ProblemTask.of([Problem(f"sum/{n}", f"What is {n} + {n}?", str(2 * n)) for n in range(1, 6)])


def guess(request: SamplingRequest, seed: int) -> str:
    return f"{request.agent} says {'so ' * (seed % 3)}. Final Answer: {seed % 5}"


class Counting(ScriptedPolicy):
    """Remembers how many requests came with each call."""

    def __init__(self, max_batch: int = 256) -> None:
        super().__init__(guess, max_batch=max_batch)
        self.batches: list[int] = []

    def sample(self, requests: Sequence[SamplingRequest]) -> list[Any]:
        self.batches.append(len(requests))
        return super().sample(requests)


class Async:
    """The same behind an asynchronous door."""

    name, max_concurrency = "async", 2

    async def sample_async(self, request: SamplingRequest) -> Any:
        return ScriptedPolicy(guess).sample([request])[0]


class Length:
    """Values a state by the length of its message."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def score(self, contexts: Sequence[Any]) -> list[float]:
        self.batches.append(len(contexts))
        return [len(context.state.text) / 100 for context in contexts]


def wrapped(critic: Any) -> Any:
    return lambda env: DenseReward(CandidateFeatures(env, critic), PolicyLikelihood(), 0.9)


def alike(batch: Any, place: int, single: Any) -> bool:
    if isinstance(single, dict):
        return batch.keys() == single.keys() and all(batch[key][place] == single[key] for key in single)
    return np.array_equal(batch[place], single)


def equal_to_singles(envs: MASVectorEnv, singles: list[Any], steps: int, seed: int = 3) -> int:
    """Step both with the same actions and compare all that they give; return how many episodes ended."""
    same_step = envs.autoreset_mode == AutoresetMode.SAME_STEP
    observations, infos = envs.reset(seed=seed)
    alone = [env.reset(seed=seed + i) for i, env in enumerate(singles)]
    over, ends, rng = [False] * len(singles), 0, np.random.default_rng(0)
    for _ in range(steps):
        for i, (observation, info) in enumerate(alone):
            assert alike(observations, i, observation)
            for key, value in info.items():
                assert infos[f"_{key}"][i] and np.array_equal(infos[key][i], value), key
        picks = [int(rng.integers(envs.single_action_space.n)) for _ in singles]  # type: ignore[attr-defined]
        observations, rewards, terminated, truncated, infos = envs.step(picks)
        for i, env in enumerate(singles):
            if over[i]:
                alone[i], expected, over[i] = env.reset(), 0.0, False
            else:
                observation, expected, over[i], _, info = env.step(picks[i])
                alone[i], ends = (observation, info), ends + over[i]
            assert (rewards[i], terminated[i], truncated[i]) == (expected, over[i], False)
            if over[i] and same_step:
                assert data_equivalence(infos["final_obs"][i], alone[i][0])
                assert infos["final_info"]["correct"][i] == alone[i][1]["correct"]
                alone[i], over[i] = env.reset(), False
    return ends


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
@pytest.mark.parametrize("view", ["text", "numbers"])
def test_sub_environments_equal_single_environments(view: str, mode: AutoresetMode) -> None:
    wrap = wrapped(Length()) if view == "numbers" else None
    envs = gym.make_vec(
        "MAS-Custom-v0", num_envs=5, task=SUMS, mas="dylan", policy=Counting(), n=3, wrap=wrap, autoreset_mode=mode
    )
    assert isinstance(envs, MASVectorEnv) and envs.metadata["autoreset_mode"] == mode
    make = wrap or (lambda env: env)
    singles = [make(CandidateChoice(MASEnv(SUMS, "dylan"), Counting(), 3)) for _ in range(5)]
    assert equal_to_singles(envs, singles, 12) >= 10
    envs.close()


@pytest.mark.slow
def test_tiny_agents_give_the_same_replies_alone_and_in_batches() -> None:
    policy = load_policy("tiny")
    envs = gym.make_vec("MAS-Arithmetic-v0", num_envs=2, policy=policy, n=2, seed=1)
    singles = [CandidateChoice(MASEnv("arithmetic", "rpsv"), policy, 2, seed=1) for _ in range(2)]
    assert equal_to_singles(envs, singles, 4) == 2  # type: ignore[arg-type]
    envs.close()


def test_each_engine_receives_one_batch_per_step() -> None:
    policy, critic = Counting(), Length()
    envs = MASVectorEnv([lambda: wrapped(critic)(CandidateChoice(MASEnv(SUMS, "rpsv"), policy, 2))] * 8)
    envs.reset(seed=0)
    for _ in range(5):
        envs.step(np.zeros(8, dtype=np.int64))
    # The fourth step ends every episode, and the fifth begins the next.
    assert policy.batches == [8] * 5
    assert critic.batches == [16] * 5
    small = Counting(max_batch=4)
    gym.make_vec("MAS-Custom-v0", num_envs=5, task=SUMS, mas="rpsv", policy=small, n=2).reset(seed=0)
    assert small.batches == [2, 2, 1]


def test_sub_environments_may_use_different_or_asynchronous_policies() -> None:
    policies = [Async(), ScriptedPolicy(guess)]
    envs = MASVectorEnv([lambda p=p: CandidateChoice(MASEnv(SUMS, "rpsv"), p, 3) for p in policies])
    singles = [CandidateChoice(MASEnv(SUMS, "rpsv"), Counting(), 3) for _ in policies]
    assert equal_to_singles(envs, singles, 6) == 2


def test_gymnasium_wrappers_work_outside_and_inside_candidate_choice() -> None:
    policy = Counting()

    def make() -> gym.Env[Any, Any]:
        inner = gym.wrappers.TimeLimit(MASEnv(SUMS, "rpsv"), 2)
        return gym.wrappers.RecordEpisodeStatistics(CandidateChoice(inner, policy, 2))

    envs = MASVectorEnv([make] * 2)
    envs.reset(seed=0)
    envs.step([0, 0])
    _, _, terminated, truncated, infos = envs.step([0, 0])
    assert truncated.all() and not terminated.any()
    assert infos["episode"]["l"].tolist() == [2, 2]
    # Another wrapper above the choice sends its own requests.
    assert set(policy.batches) == {1}


def test_step_overridden_in_a_subclass_is_called() -> None:
    class Last(CandidateChoice):
        def step(self, action: Any) -> Any:
            return super().step(self.n - 1)

    envs = MASVectorEnv([lambda: Last(MASEnv(SUMS, "rpsv"), Counting(), 3)])
    observations, _ = envs.reset(seed=0)
    expected = observations["candidates"][0][2].text
    assert envs.step([0])[0]["transcript"][0][-1].text == expected


def test_vector_env_without_a_policy_takes_text_actions() -> None:
    envs = gym.make_vec("MAS-Arithmetic-Single-v0", num_envs=2)
    assert isinstance(envs, MASVectorEnv)
    envs.reset(seed=0)
    action = (("Final Answer: 1", "no"), np.array([2, 2]))
    kept, rewards, terminated, _, _ = envs.step(action)
    assert terminated.all() and rewards.tolist() == [-1.0, -1.0]
    observations, rewards, terminated, _, _ = envs.step(action)
    assert observations["transcript"] == ((), ()) and not terminated.any() and not rewards.any()
    assert kept["transcript"][1][0].text == "no"


def test_reset_accepts_seeds_and_masks() -> None:
    envs = gym.make_vec("MAS-Custom-v0", num_envs=3, task=SUMS, mas="rpsv", policy=Counting(), n=2)
    first = envs.reset(seed=7)[1]["problem_id"].tolist()
    assert envs.reset(seed=[7, 8, 9])[1]["problem_id"].tolist() == first
    envs.reset(seed=[None, 3, None])
    observations, _, _, _, _ = envs.step([0, 0, 0])
    options = {"reset_mask": np.array([False, True, False]), "problem_id": "sum/4"}
    again, infos = envs.reset(options=options)
    assert [len(rows) for rows in again["transcript"]] == [1, 0, 1]
    assert observations["transcript"][1] and infos["_problem_id"].tolist() == [False, True, False]
    assert infos["problem_id"][1] == "sum/4" and "reset_mask" in options


def test_make_vec_seed_sets_the_messages_and_reset_seed_sets_the_questions() -> None:
    def started(made: int, reset: int, problem: str | None = None) -> tuple[list[str], Any]:
        envs = gym.make_vec("MAS-Custom-v0", num_envs=4, task=SUMS, mas="rpsv", policy=Counting(), n=4, seed=made)
        observations, infos = envs.reset(seed=reset, options={"problem_id": problem} if problem else None)
        envs.close()
        return infos["problem_id"].tolist(), observations["candidates"]

    questions, messages = started(made=0, reset=7)
    assert started(made=0, reset=7) == (questions, messages)
    other_questions, other_messages = started(made=1, reset=7)
    assert other_questions == questions and other_messages != messages
    assert started(made=0, reset=8)[0] != questions
    assert started(made=0, reset=7, problem="sum/2") == started(made=0, reset=8, problem="sum/2")


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
@pytest.mark.parametrize("options", [{}, {"policy": Counting(), "n": 3}, {"vectorization_mode": "sync"}])
def test_every_mask_of_a_vector_env_can_be_sampled(mode: AutoresetMode, options: dict[str, Any]) -> None:
    of_class = (
        {"vector_kwargs": {"autoreset_mode": mode}} if "vectorization_mode" in options else {"autoreset_mode": mode}
    )
    envs = gym.make_vec("MAS-Custom-v0", num_envs=2, task=SUMS, mas="dylan", **of_class, **options)
    _, infos = envs.reset(seed=0)
    rng, ended = np.random.default_rng(0), 0
    for _ in range(20):
        masks = infos["action_mask"]
        picks = np.array([rng.choice(len(mask), p=mask / mask.sum()) for mask in masks])
        _, _, terminated, _, infos = envs.step(picks if "policy" in options else (("VERDICT: AGREE",) * 2, picks))
        ended += terminated.sum()
    assert ended > 2


def test_mask_of_a_truncated_sub_environment_can_be_sampled() -> None:
    def fail(request: SamplingRequest, seed: int) -> str:
        if "What is 1 + 1?" in request.messages[-1].content and request.agent != "Reader":
            raise PolicyError("no")
        return guess(request, seed)

    envs = MASVectorEnv([lambda: CandidateChoice(MASEnv(SUMS, "rpsv"), ScriptedPolicy(fail), 2)] * 5)
    envs.reset(seed=3)
    truncated, masks = np.zeros(5, dtype=bool), []
    for _ in range(8):
        _, _, _, cut, infos = envs.step([0] * 5)
        truncated |= cut
        masks.append(infos["action_mask"])
    assert truncated.any() and np.stack(masks).any(axis=2).all()


def test_disabled_autoreset_does_not_restart_episodes() -> None:
    envs = MASVectorEnv(
        [lambda: CandidateChoice(MASEnv(SUMS, "single"), Counting(), 2)] * 2, autoreset_mode=AutoresetMode.DISABLED
    )
    envs.reset(seed=0)
    terminated = envs.step([0, 0])[2]
    with pytest.raises(EpisodeOverError, match=r"environments \[0, 1\] have ended"):
        envs.step([0, 0])
    envs.reset(options={"reset_mask": terminated})
    assert envs.step([1, 1])[2].all()


def test_invalid_arguments_are_rejected() -> None:
    for count in (0, -1, 2.0, True, "8"):
        with pytest.raises(ConfigError, match="num_envs: expected an integer of at least 1"):
            gym.make_vec("MAS-Arithmetic-v0", num_envs=count, policy=Counting())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="n: expected policy="):
        gym.make_vec("MAS-Arithmetic-v0", num_envs=2, n=3)
    with pytest.raises(ConfigError, match="autoreset_mode: expected one of 'NextStep'"):
        gym.make_vec("MAS-Arithmetic-v0", num_envs=2, autoreset_mode="next")
    with pytest.raises(ConfigError, match="env_fns"):
        MASVectorEnv([])
    envs = gym.make_vec("MAS-Custom-v0", num_envs=2, task=SUMS, mas="rpsv", policy=Counting(), n=2)
    with pytest.raises(EpisodeOverError, match="no episode has started"):
        envs.step([0, 0])
    for wrong in ({"seed": [1]}, {"options": {"reset_mask": [True, False]}}, {"options": {"problem": "sum/1"}}):
        with pytest.raises(ConfigError):
            envs.reset(**wrong)


def test_mas_vector_env_is_exported_by_mas_gym() -> None:
    assert mas_gym.MASVectorEnv is MASVectorEnv


def numbers(num_envs: int = 3, **options: Any) -> MASVectorEnv:
    critic = Length()
    usual = {"autoreset_mode": "SameStep", "wrap": lambda env: DenseReward(CandidateFeatures(env, critic), critic)}
    choice = {"task": SUMS, "mas": "dylan", "policy": Counting(), "n": 3}
    envs = gym.make_vec("MAS-Custom-v0", num_envs=num_envs, **choice, **(usual | options))
    assert isinstance(envs, MASVectorEnv)
    return envs


@pytest.mark.slow
def test_sb3_adapter_returns_the_same_steps_as_the_vector_environment() -> None:
    pytest.importorskip("sb3_contrib", reason="the adapter needs Stable-Baselines3")
    from sb3_contrib import MaskablePPO
    from sb3_contrib.common.maskable.utils import get_action_masks, is_masking_supported
    from stable_baselines3.common.vec_env import VecMonitor

    from mas_gym.envs.sb3 import SB3VecEnv

    ours, theirs = numbers(), SB3VecEnv(numbers())
    theirs.seed(5)
    observations, _ = ours.reset(seed=5)
    assert np.array_equal(theirs.reset(), observations)
    assert [info["problem_id"] for info in theirs.reset_infos] == list(ours.get_attr("problem_id"))
    for _ in range(9):
        assert is_masking_supported(theirs)
        assert np.array_equal(get_action_masks(theirs), np.stack(ours.call("action_masks")))
        observations, rewards, terminated, _, infos = ours.step([1, 0, 2])
        seen, paid, ended, each = theirs.step(np.array([1, 0, 2]))
        assert np.array_equal(seen, observations) and np.array_equal(ended, terminated)
        assert paid == pytest.approx(rewards)
        for place in np.flatnonzero(ended):
            assert np.array_equal(each[place]["terminal_observation"], infos["final_obs"][place])
            assert each[place]["correct"] == infos["final_info"]["correct"][place]
            assert each[place]["TimeLimit.truncated"] is False
    assert theirs.env_is_wrapped(CandidateFeatures) == [True] * 3 and not any(theirs.env_is_wrapped(VecMonitor))
    theirs.set_options({"problem_id": "sum/2"})
    theirs.reset()
    assert theirs.get_attr("problem_id", [0, 2]) == ["sum/2"] * 2
    learner = MaskablePPO("MlpPolicy", VecMonitor(SB3VecEnv(numbers())), n_steps=8, batch_size=8, seed=0)
    learner.learn(48)
    assert learner.ep_info_buffer and learner.num_timesteps == 48
    with pytest.raises(ConfigError, match="SameStep"):
        SB3VecEnv(numbers(autoreset_mode="NextStep"))
    with pytest.raises(ConfigError, match="CandidateFeatures"):
        SB3VecEnv(numbers(wrap=None))
