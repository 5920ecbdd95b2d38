"""`CandidateChoice`, and the PettingZoo view."""

import copy
import itertools
import pickle
import subprocess
import sys
import threading
import warnings
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env, data_equivalence
from gymnasium.wrappers import TimeLimit

import mas_gym
from mas_gym.envs.env import MASEnv
from mas_gym.envs.wrappers import CandidateChoice, CandidateFeatures, DenseReward
from mas_gym.errors import ConfigError, EpisodeOverError, IllegalActionError, MissingDependencyError, PolicyError
from mas_gym.policies import Sample, SamplingReply, ScriptedPolicy
from mas_gym.tasks import Problem, ProblemTask
from search.critics import PolicyLikelihood

SUMS = ProblemTask.of([Problem(f"sum/{n}", f"What is {n} + {n}?", str(2 * n)) for n in range(1, 6)])


def guess(request, seed: int) -> str:
    return f"{request.agent} says. Final Answer: {seed % 5}"


class Async:
    """The scripted policy behind an asynchronous door."""

    name, max_concurrency = "async", 4

    async def sample_async(self, request):
        return ScriptedPolicy(guess).sample([request])[0]


def choices(mas: str = "rpsv", policy=None, n: int = 6, **kwargs) -> CandidateChoice:
    return CandidateChoice(MASEnv(SUMS, mas), policy or ScriptedPolicy(guess), n, **kwargs)


@pytest.mark.parametrize("mas", mas_gym.mas_names())
@pytest.mark.parametrize("seed", [None, 7])
def test_wrapped_env_passes_the_gymnasium_checker(mas: str, seed: int | None) -> None:
    env = choices(mas, seed=seed)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*different from the unwrapped version.*")
        check_env(env, skip_render_check=True)


def test_candidate_choice_episode_gives_a_reward() -> None:
    env = choices()
    observation, info = env.reset(seed=1)
    for turn in range(4):
        assert observation in env.observation_space
        assert len(observation["candidates"]) == 6
        texts = [candidate.text for candidate in observation["candidates"]]
        firsts = [int(text not in texts[:i]) for i, text in enumerate(texts)]
        assert info["action_mask"].tolist() == firsts
        assert info["action_mask"].dtype == np.int8
        assert info["logprobs"].tolist() == [-float(c.tokens) for c in observation["candidates"]]
        pick = env.action_space.sample(mask=info["action_mask"])
        observation, reward, terminated, _, info = env.step(pick)
        assert observation["transcript"][-1].text == texts[pick]
        assert terminated == (turn == 3)
    assert reward in (1.0, -1.0)
    assert observation["candidates"] == ()
    assert observation in env.observation_space
    assert info["action_mask"].all()
    assert np.isneginf(info["logprobs"]).all()
    with pytest.raises(EpisodeOverError):
        env.step(0)


def test_candidates_depend_on_the_seed() -> None:
    def candidates(env, seed, problem="sum/1"):
        return env.reset(seed=seed, options={"problem_id": problem})[0]["candidates"]

    free, fixed = choices(), choices(seed=3)
    assert candidates(free, 1) == candidates(choices(), 1)
    assert candidates(free, 1) != candidates(free, 2)
    # With a separate seed, a problem gives one tree, for any state of the environment's generator.
    assert candidates(fixed, 1) == candidates(fixed, 2)
    assert candidates(fixed, 1) != candidates(fixed, 1, "sum/2")
    assert candidates(fixed, 1) != candidates(choices(seed=4), 1)


@pytest.mark.parametrize("shape", ["batch", "async"])
def test_synchronous_and_asynchronous_policies_are_supported(shape: str) -> None:
    env = choices(policy=Async() if shape == "async" else None, seed=3)
    observation, _ = env.reset(options={"problem_id": "sum/1"})
    expected, _ = choices(seed=3).reset(options={"problem_id": "sum/1"})
    assert observation["candidates"] == expected["candidates"]


def test_restoring_a_snapshot_makes_no_policy_call() -> None:
    asked = []

    def script(request, seed):
        asked.append(seed)
        return guess(request, seed)

    env = choices(policy=ScriptedPolicy(script))
    env.reset(seed=0)
    env.step(0)
    snapshot, seen = env.clone_state(include_rng=True), env.observe()
    first = [env.step(1), env.step(0)]
    count = len(asked)
    env.restore_state(snapshot)
    assert data_equivalence(env.observe(), seen)
    assert len(asked) == count
    assert data_equivalence([env.step(1), env.step(0)], first)
    env.restore_state(snapshot)
    assert pickle.dumps(env.clone_state(include_rng=True)) == pickle.dumps(snapshot)


def test_exhaustive_search_finds_the_best_leaf() -> None:
    env = choices(n=3, seed=1)
    env.reset(options={"problem_id": "sum/2"})

    def best() -> float:
        snapshot, (_, info) = env.clone_state(), env.observe()
        value = -1.0
        for action in np.flatnonzero(info["action_mask"]):
            env.restore_state(snapshot)
            _, reward, terminated, _, _ = env.step(int(action))
            value = max(value, reward if terminated else best())
        return value

    assert best() == 1.0


def test_copied_envs_share_the_policy() -> None:
    env = choices()
    env.reset(seed=0)
    twin = copy.deepcopy(env)
    assert twin._policy is env._policy
    assert twin.mas_env is twin.env is not env.env
    assert data_equivalence(twin.step(0), env.step(0))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: CandidateChoice(gym.make("CartPole-v1"), ScriptedPolicy(guess)), "env: expected a MASEnv"),
        (lambda: choices(policy=object()), "expected a policy with sample"),
        (lambda: choices(n=0), "n: expected an integer of at least 1"),
        (lambda: choices(seed=-1), "seed: expected an integer of at least 0"),
    ],
)
def test_invalid_arguments_are_rejected(make, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        make()


@pytest.mark.parametrize("action", [-1, 6, 100])
def test_action_out_of_range_is_rejected(action: int) -> None:
    env = choices()
    env.reset(seed=0)
    with pytest.raises(IllegalActionError, match="from 0 to 5"):
        env.step(action)


def test_broken_policy_error_names_the_policy() -> None:
    class Short:
        name, max_batch = "short", 1

        def sample(self, requests):
            return [SamplingReply((Sample("a", 1, -1.0, "stop"),)) for _ in requests]

    class Silent(Short):
        def sample(self, requests):
            return []

    with pytest.raises(PolicyError, match="'short': expected 6 samples, got 1"):
        choices(policy=Short()).reset()
    with pytest.raises(PolicyError, match="short: expected 1 replies, got 0"):
        choices(policy=Silent()).reset()


def test_overlong_proposals_become_empty_and_are_masked() -> None:
    policy = ScriptedPolicy(lambda request, seed: "x" * 100 if seed % 2 else "short")
    env = CandidateChoice(MASEnv(SUMS, "single", max_bytes=64), policy, 8)
    observation, info = env.reset(seed=0)
    texts = {candidate.text for candidate in observation["candidates"]}
    assert texts == {"", "short"}
    assert observation in env.observation_space
    long = next(i for i, candidate in enumerate(observation["candidates"]) if not candidate.text)
    assert info["action_mask"].sum() == 1
    assert not info["action_mask"][long]
    assert "at most 64 bytes, got 100" in env.step(long)[4]["invalid_action"]


def test_policies_without_logprobs_give_no_likelihoods() -> None:
    env = choices(policy=ScriptedPolicy(lambda request, seed: Sample("a", 1, None, "stop")))
    assert np.isneginf(env.reset()[1]["logprobs"]).all()


def test_policy_given_by_name_is_stored_in_the_env_spec() -> None:
    env = CandidateChoice(gym.make("MAS-Arithmetic-v0"), "recorded:none.jsonl", 2)
    spec = gym.envs.registration.EnvSpec.from_json(env.spec.to_json())
    assert spec.additional_wrappers[-1].kwargs["policy"] == "recorded:none.jsonl"
    assert isinstance(gym.make(spec), CandidateChoice)


# ------------------------------------------------------------------------------------------ PettingZoo


@pytest.mark.parametrize("mas", mas_gym.mas_names())
def test_aec_env_passes_the_pettingzoo_checker(mas: str, capsys: pytest.CaptureFixture[str]) -> None:
    testing = pytest.importorskip("pettingzoo.test")
    with warnings.catch_warnings():
        # It advises numeric spaces and names such as player_0 to everybody.
        warnings.filterwarnings("ignore", category=UserWarning)
        testing.api_test(mas_gym.aec_env(MASEnv(SUMS, mas, render_mode="ansi")), num_cycles=20)
    assert "Passed API test" in capsys.readouterr().out


def test_aec_agents_observe_their_local_views() -> None:
    pytest.importorskip("pettingzoo")
    game = mas_gym.aec_env(MASEnv(SUMS, "rpsv"))
    game.reset(seed=0, options={"problem_id": "sum/3"})
    assert game.agents == ["Reader", "Planner", "Solver", "Verifier"]
    assert game.agent_selection == "Reader"
    game.step(("facts", 1))
    assert game.observe("Solver") == {"question": "", "transcript": (), "messages": ()}
    assert game.observe("Planner")["transcript"] == ((0, "facts", 1),)
    assert game.observe("Planner")["messages"][1].content == "What is 3 + 3?\n\nfacts"
    assert game.observe("Verifier")["question"] == "What is 3 + 3?"
    _, mask = game.infos["Planner"]["action_mask"]
    assert mask.tolist() == [0, 0, 1, 0, 0, 1]
    for text in ("plan", "work", "Final Answer: 6"):
        assert not any(game.terminations.values())
        game.step((text, game.ALL))
    assert set(game.rewards.values()) == {1.0}
    assert all(game.terminations.values())
    totals = {}
    for agent in game.agent_iter():
        _, totals[agent], terminated, _, _ = game.last()
        assert terminated
        game.step(None)
    assert totals == dict.fromkeys(["Reader", "Planner", "Solver", "Verifier"], 1.0)
    assert game.agents == []


def test_skipped_agents_terminate_with_the_others() -> None:
    pytest.importorskip("pettingzoo")
    game = mas_gym.aec_env(MASEnv(SUMS, "dylan"))
    game.reset(seed=0)
    acted = []
    for agent in game.agent_iter():
        if game.last()[2]:
            game.step(None)
        else:
            acted.append(agent)
            game.step(("VERDICT: AGREE", game.ALL))
    assert [name[:6] for name in acted] == ["Solver", "Solver", "Solver", "Judge"]


class Length:
    """Values a state by the length of its message."""

    def score(self, contexts) -> list[float]:
        return [len(context.state.text) / 100 for context in contexts]


@pytest.mark.parametrize("mas", ["rpsv", "dylan", "debate"])
@pytest.mark.parametrize("view", ["texts", "numbers"])
@pytest.mark.parametrize("rewards", ["shared", "own"])
def test_aec_env_of_candidate_choice_passes_the_pettingzoo_checker(
    mas: str, view: str, rewards, capsys: pytest.CaptureFixture[str]
) -> None:
    testing = pytest.importorskip("pettingzoo.test")
    env = choices(mas) if view == "texts" else DenseReward(CandidateFeatures(choices(mas)), Length())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning)
        testing.api_test(mas_gym.aec_env(env, rewards=rewards), num_cycles=20)
    assert "Passed API test" in capsys.readouterr().out


def test_aec_agents_choose_among_their_candidates() -> None:
    pytest.importorskip("pettingzoo")
    game = mas_gym.aec_env(choices(seed=1))
    game.reset(seed=0)
    for turn, agent in enumerate(["Reader", "Planner", "Solver", "Verifier"]):
        assert game.agent_selection == agent
        assert all((len(game.observe(name)["candidates"]) == 6) == (name == agent) for name in game.agents)
        assert all(game.observe(name) in game.observation_space(name) for name in game.agents)
        mask = game.infos[agent]["action_mask"]
        assert mask.shape == (6,) and mask.dtype == np.int8
        pick = game.action_space(agent).sample(mask)
        text = game.observe(agent)["candidates"][pick].text
        game.step(pick)
        assert game.observe(agent)["transcript"][-1].text == text
        assert any(game.rewards.values()) == (turn == 3)
    assert len(set(game.rewards.values())) == 1 and all(game.terminations.values())


def returns_of(game, picks) -> dict[str, float]:
    """Play one episode of choices and return what each agent collects."""
    game.reset(seed=2)
    totals, picks = dict.fromkeys(game.agents, 0.0), iter(picks)
    for agent in game.agent_iter():
        _, reward, terminated, _, _ = game.last()
        totals[agent] += reward
        game.step(None if terminated else next(picks))
    return totals


@pytest.mark.parametrize("numbers", [False, True])
def test_own_reward_is_the_gain_of_the_agents_message(numbers: bool) -> None:
    pytest.importorskip("pettingzoo")
    script = ScriptedPolicy(lambda request, seed: f"{'so ' * (seed % 9)}Final Answer: {seed % 5}")

    def env(dense: bool = True):
        inner = choices(policy=script, seed=1)
        inner = CandidateFeatures(inner) if numbers else inner
        return DenseReward(inner, Length()) if dense else inner

    picks, plain = [3, 1, 4, 2], env(dense=False)
    plain.reset(seed=2)
    values, reward = [0.0], 0.0
    for pick in picks:
        reward = plain.step(pick)[1]
        values.append(len(plain.unwrapped.state.text) / 100)
    values[-1] = 0.0
    gains = [after - before for before, after in itertools.pairwise(values)]
    gains[-1] += reward
    own = returns_of(mas_gym.aec_env(env(), rewards="own"), picks)
    assert list(own.values()) == pytest.approx(gains) and len(set(gains)) == 4
    assert sum(own.values()) == pytest.approx(reward)
    # Shared, each agent collects the environment's return, shaped or not.
    for dense in (True, False):
        shared = returns_of(mas_gym.aec_env(env(dense)), picks)
        assert list(shared.values()) == pytest.approx([reward] * 4)


def test_likelihood_can_be_an_agents_reward() -> None:
    pytest.importorskip("pettingzoo")
    game = mas_gym.aec_env(DenseReward(choices(), PolicyLikelihood()), rewards="own")
    game.reset(seed=0)
    game.step(0)
    assert game.rewards["Reader"] == pytest.approx(1 / (1 + np.e)) and game.rewards["Planner"] == 0


@pytest.mark.parametrize("action", [-1, 6, None, "0", (0, 1), np.array([0, 1])])
def test_invalid_choices_are_rejected(action) -> None:
    pytest.importorskip("pettingzoo")
    game = mas_gym.aec_env(choices())
    game.reset(seed=0)
    with pytest.raises(IllegalActionError, match="from 0 to 5"):
        game.step(action)
    assert game.agent_selection == "Reader"


def test_truncation_ends_the_episode_for_all_agents() -> None:
    pytest.importorskip("pettingzoo")
    game = mas_gym.aec_env(CandidateChoice(TimeLimit(MASEnv(SUMS, "rpsv"), 2), ScriptedPolicy(guess), 2))
    game.reset(seed=0)
    turns = [name for name in game.agent_iter() if game.step(None if game.truncations[name] else 0) is None]
    assert len(turns) == 2 + 4 and game.agents == []


@pytest.mark.parametrize(
    "use",
    [
        lambda game: game.step(("a", 5)),
        lambda game: game.last(),
        lambda game: next(iter(game.agent_iter())),
        lambda game: game.observe("Planner"),
        lambda game: game.rewards,
        lambda game: game.infos,
    ],
)
def test_aec_use_before_reset_raises_an_error_that_suggests_a_fix(use: Any) -> None:
    game = mas_gym.aec_env(MASEnv(SUMS, "rpsv"))
    with pytest.raises(EpisodeOverError, match=r"call .*reset\(\)"):
        use(game)
    assert not hasattr(game, "agents") and not hasattr(game, "unknown")
    game.reset(seed=0)
    game.step(("a", game.ALL))
    assert pickle.loads(pickle.dumps(copy.deepcopy(game))).agents == game.agents


def test_spec_with_a_policy_object_is_copied_without_a_warning() -> None:
    class Locked(ScriptedPolicy):
        def __init__(self) -> None:
            super().__init__(guess)
            self.lock = threading.Lock()

    policy = Locked()
    chosen = CandidateChoice(gym.make("MAS-Arithmetic-v0"), policy, 2)
    spec = TimeLimit(chosen, 5).spec
    assert spec is not None and spec.additional_wrappers[0].kwargs["policy"] is policy
    assert DenseReward(chosen, PolicyLikelihood()).spec is not None
    remade = gym.make(chosen.spec)
    remade.reset(seed=0)
    assert remade.get_wrapper_attr("n") == 2


@pytest.mark.parametrize("wrap", [CandidateFeatures, lambda env: DenseReward(env, PolicyLikelihood())])
def test_wrapped_environment_passes_the_gymnasium_checker(wrap: Any) -> None:
    base = gym.make("MAS-Arithmetic-v0", disable_env_checker=True)
    env = wrap(CandidateChoice(base, ScriptedPolicy(guess), 3))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is different from the unwrapped version")
        check_env(env, skip_render_check=True)
    remade = gym.make(env.spec)
    assert remade.observation_space == env.observation_space


@pytest.mark.parametrize("env", [MASEnv(SUMS), CandidateChoice(MASEnv(SUMS), ScriptedPolicy(guess), 2)])
def test_flattening_texts_is_an_error_that_names_the_numeric_wrapper(env: Any) -> None:
    with pytest.raises(ConfigError, match="CandidateFeatures"):
        gym.wrappers.FlattenObservation(env)
    if isinstance(env, CandidateChoice):
        assert gym.wrappers.FlattenObservation(CandidateFeatures(env)).reset(seed=0)[0].ndim == 1


@pytest.mark.parametrize(
    ("arguments", "options", "expected"),
    [
        ((), {}, ("arithmetic", "train", "rpsv", "full")),
        (("ordering",), {}, ("ordering", "train", "logic", "full")),
        (("arithmetic", "debate"), {"split": "dev", "view": "local"}, ("arithmetic", "dev", "debate", "local")),
        ((SUMS,), {"mas": "single"}, ("custom", "test", "single", "full")),
        ((), {"task": SUMS, "mas": "single"}, ("custom", "test", "single", "full")),
        (("MAS-Ordering-v0",), {"split": "test", "mas": "debate"}, ("ordering", "test", "debate", "full")),
        (("mas_gym:MAS-Custom-v0",), {"task": SUMS}, ("custom", "test", "rpsv", "full")),
    ],
)
def test_aec_env_takes_the_arguments_of_mas_env(arguments: Any, options: Any, expected: tuple[str, ...]) -> None:
    pytest.importorskip("pettingzoo")
    env = mas_gym.aec_env(*arguments, **options).mas_env
    assert (env.task.name, env.task.split, env.mas.name, env.view) == expected


def test_invalid_aec_arguments_are_rejected() -> None:
    pytest.importorskip("pettingzoo")
    assert mas_gym.aec_env("MAS-Arithmetic-Single-v0", render_mode="ansi").render_mode == "ansi"
    with pytest.raises(ConfigError, match="env: expected a registered MAS id"):
        mas_gym.aec_env(gym.make("CartPole-v1"))
    with pytest.raises(ConfigError, match="unknown option 'view'"):
        mas_gym.aec_env(MASEnv(SUMS), view="full")
    with pytest.raises(ConfigError, match="rewards: expected one of 'shared', 'own'"):
        mas_gym.aec_env(MASEnv(SUMS, "rpsv"), rewards="mine")


def test_missing_pettingzoo_error_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['pettingzoo'] = None\n"
        "import mas_gym\n"
        "from mas_gym.errors import MissingDependencyError\n"
        "try:\n    mas_gym.aec_env()\n"
        "except MissingDependencyError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "mas-gym[aec]" in done.stdout
    assert issubclass(MissingDependencyError, ImportError)
