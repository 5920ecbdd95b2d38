"""Every registered environment, and what `MASEnv` promises beyond Gymnasium's contract."""

import copy
import json
import pickle
import runpy
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from env_data import IDS, OFFLINE, data_kwargs, make, right_answer, write_rows
from gymnasium.utils.env_checker import check_env, data_equivalence
from gymnasium.wrappers import RecordEpisodeStatistics, RecordVideo, TimeLimit

import mas_gym
from mas_gym import ENVIRONMENTS
from mas_gym.envs.env import MASEnv
from mas_gym.errors import (
    ConfigError,
    DataError,
    DataNotFoundError,
    EpisodeOverError,
    IllegalActionError,
    MASGymError,
    UnknownNameError,
)
from mas_gym.tasks import Problem, ProblemTask

EIGHT_FIVE = ProblemTask.of([Problem("sum/0", "What is 8 + 5?", "13"), Problem("sum/1", "What is 1 + 1?", "2")])


def rpsv(**kwargs) -> MASEnv:
    env = MASEnv(EIGHT_FIVE, "rpsv", **kwargs)
    env.reset(options={"problem_id": "sum/0"})
    return env


def play(env, *texts: str):
    """Send each text to ALL and return the last step."""
    for text in texts:
        result = env.step((text, env.unwrapped.ALL))
    return result


@pytest.mark.parametrize("env_id", IDS)
def test_env_passes_the_gymnasium_checker(env_id: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    check_env(make(env_id, tmp_path, disable_env_checker=True).unwrapped)


@pytest.mark.parametrize("view", ["full", "local"])
@pytest.mark.parametrize("on_invalid", ["terminate", "retry"])
def test_env_with_every_option_passes_the_checker(view: str, on_invalid: str) -> None:
    for mas in mas_gym.mas_names():
        check_env(MASEnv(EIGHT_FIVE, mas, view=view, on_invalid=on_invalid), skip_render_check=True)


@pytest.mark.parametrize("env_id", IDS)
def test_episode_through_gym_make_gives_a_reward(env_id: str, tmp_path: Path) -> None:
    first, second = make(env_id, tmp_path), make(env_id, tmp_path)
    assert data_equivalence(first.reset(seed=7), second.reset(seed=7), exact=True)
    for step in range(first.unwrapped.dynamics.max_depth):
        acting = first.unwrapped.state.acting
        text = right_answer(first) if first.unwrapped.dynamics.max_depth - step == 1 else f"step {step} von {acting}"
        results = [env.step((text, env.unwrapped.ALL)) for env in (first, second)]
        assert data_equivalence(*results, exact=True)
        observation, reward, terminated, truncated, info = results[0]
        assert observation in first.observation_space
        assert truncated is False
        if terminated:
            break
        assert reward == 0.0
        assert info["action_mask"][-1] == 1
    assert terminated
    expected = step + 1 == first.unwrapped.dynamics.max_depth
    assert (reward, info["correct"]) == ((1.0, True) if expected else (-1.0, False))
    following = first.reset(seed=7)[1]
    assert following["problem_id"] == info["problem_id"]
    assert following["action_mask"].tolist() == info["action_mask"].tolist()


@pytest.mark.parametrize(
    ("file", "split", "expected"),
    [
        ("train.jsonl", None, ("train", 40)),
        ("test.jsonl", None, ("test", 40)),
        ("validation.jsonl", None, ("dev", 40)),
        ("mine.jsonl", None, ("", 40)),
        ("mine.jsonl", "train", ("train", 38)),
        ("mine.jsonl", "dev", ("dev", 2)),
        ("mine.jsonl", "test", ("test", 40)),
        ("", None, ("train", 38)),
    ],
)
def test_data_file_is_whole_without_a_split(
    tmp_path: Path, file: str, split: str | None, expected: tuple[str, int]
) -> None:
    rows = "".join(json.dumps({"question": f"{n} + 1?", "answer": f"#### {n + 1}"}) + "\n" for n in range(40))
    (tmp_path / (file or "train.jsonl")).write_text(rows)
    task = gym.make("MAS-GSM8K-v0", data=str(tmp_path / file), split=split).unwrapped.task
    assert (task.split, len(task)) == expected
    name = expected[0] or "mine"
    assert all(problem.id.startswith(f"gsm8k/{name}/") for problem in task)


@pytest.mark.parametrize("options", [{}, {"split": "test"}])
def test_environments_use_the_train_split_by_default(options: dict[str, str]) -> None:
    expected = options.get("split", "train")
    assert gym.make("MAS-Arithmetic-v0", **options).unwrapped.task.split == expected
    assert [env.task.split for env in gym.make_vec("MAS-Ordering-v0", num_envs=2, **options).envs] == [expected] * 2


@pytest.mark.parametrize("env_id", IDS)
def test_specs_survive_json_and_pickle(env_id: str, tmp_path: Path) -> None:
    env = make(env_id, tmp_path, split="test", view="local", on_invalid="retry", render_mode="ansi")
    spec = gym.envs.registration.EnvSpec.from_json(env.spec.to_json())
    twin = gym.make(pickle.loads(pickle.dumps(spec)))
    assert twin.unwrapped.view == "local"
    assert data_equivalence(env.reset(seed=3), twin.reset(seed=3), exact=True)


@pytest.mark.parametrize("env_id", IDS)
def test_copies_and_pickles_continue_identically(env_id: str, tmp_path: Path) -> None:
    env = make(env_id, tmp_path).unwrapped
    env.reset(seed=1)
    play(env, "first")
    deep, thawed = copy.deepcopy(env), pickle.loads(pickle.dumps(env))
    assert deep.task is env.task
    assert len(pickle.dumps(env)) < 100_000
    if not env.dynamics.is_terminal(env.state):
        results = [play(e, "second") for e in (env, deep, thawed)]
        assert data_equivalence(results[0], results[1], exact=True)
        assert data_equivalence(results[0], results[2], exact=True)
    following = [e.reset() for e in (env, deep, thawed)]
    assert data_equivalence(following[0], following[1], exact=True)
    assert data_equivalence(following[0], following[2], exact=True)
    assert env.action_space is not deep.action_space


# Processes that are spawned share nothing by accident.
SPAWNED = [
    {"vectorization_mode": "async", "vector_kwargs": {"shared_memory": shared, "context": "spawn"}}
    for shared in (True, False)
]


@pytest.mark.parametrize(
    ("env_id", "mode"),
    [
        *((env_id, {"vectorization_mode": "sync"}) for env_id in IDS),
        *(("MAS-GSM8K-v0", mode) for mode in SPAWNED),
        ("MAS-GSM8K-DyLAN-v0", SPAWNED[0]),
    ],
)
def test_vector_env_equals_single_envs_with_the_same_seeds(env_id: str, mode: Any, tmp_path: Path) -> None:
    envs = gym.make_vec(env_id, num_envs=3, **mode, **data_kwargs(env_id, tmp_path))
    try:
        singles = [make(env_id, tmp_path) for _ in range(3)]
        observations, infos = envs.reset(seed=5)
        expected = [env.reset(seed=5 + i) for i, env in enumerate(singles)]
        for text in ("erste Zeile\nنص 🙂", "zweite"):
            for i, (observation, info) in enumerate(expected):
                for key in ("question", "transcript", "messages", "acting"):
                    assert observations[key][i] == observation[key], key
                assert infos["action_mask"][i].tolist() == info["action_mask"].tolist()
                assert infos["problem_id"][i] == info["problem_id"]
            every = singles[0].unwrapped.ALL
            kept = observations
            actions = (tuple(f"{text} {i}" for i in range(3)), np.full(3, every))
            observations, rewards, terminated, truncated, infos = envs.step(actions)
            results = [env.step((f"{text} {i}", every)) for i, env in enumerate(singles)]
            assert rewards.tolist() == [result[1] for result in results]
            assert terminated.tolist() == [result[2] for result in results]
            assert not truncated.any()
            expected = [(result[0], result[4]) for result in results]
            # Previously returned objects have not changed.
            assert kept["transcript"][0] != observations["transcript"][0]
            if terminated.all():
                assert infos["correct"].tolist() == [info["correct"] for _, info in expected]
                break
    finally:
        envs.close()


def test_statistics_and_time_limit_wrappers_work() -> None:
    env = RecordEpisodeStatistics(TimeLimit(gym.make("MAS-Arithmetic-v0"), 10))
    env.reset(seed=0)
    *_, info = play(env, "a", "b", "c", "Final Answer: none")
    assert info["episode"]["l"] == 4
    assert info["episode"]["r"] == -1.0
    env = gym.make("MAS-Arithmetic-v0", max_episode_steps=2)
    env.reset(seed=0)
    _, reward, terminated, truncated, _ = play(env, "a", "b")
    assert (reward, terminated, truncated) == (0.0, False, True)


def test_video_is_recorded(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("moviepy", reason="RecordVideo needs moviepy")
    env = RecordVideo(
        gym.make("MAS-Arithmetic-v0", render_mode="rgb_array"), str(tmp_path / "videos"), episode_trigger=lambda _: True
    )
    env.reset(seed=0)
    play(env, "a", "b", "c", "Final Answer: 1")
    env.close()
    assert [path.stat().st_size > 0 for path in tmp_path.glob("videos/*.mp4")] == [True]


def test_make_resolves_ids_without_import(tmp_path: Path) -> None:
    data = write_rows("gsm8k", tmp_path)
    code = (
        "import gymnasium as gym\n"
        f"env = gym.make('mas_gym:MAS-GSM8K-v0', data={data!r})\n"
        "observation, info = env.reset(seed=0)\n"
        "print(info['problem_id'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("gsm8k/gsm8k/")


@pytest.mark.parametrize("order", ["gymnasium as gym, mas_gym", "mas_gym, gymnasium as gym"])
def test_environments_are_registered_in_any_import_order(order: str) -> None:
    code = f"import {order}; print(sum(name.startswith('MAS-') for name in gym.registry))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == len(IDS) + 2


def test_import_does_not_load_heavy_packages() -> None:
    code = (
        "import sys, mas_gym\n"
        "heavy = {'torch', 'transformers', 'datasets', 'rich', 'yaml', 'PIL', 'pettingzoo', 'matplotlib', 'sympy'}\n"
        "heavy |= {'numpy', 'gymnasium'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
        "assert mas_gym.load_mas('rpsv').name == 'rpsv'\n"
        "assert set(mas_gym.__all__) <= set(dir(mas_gym))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_public_names_resolve() -> None:
    for name in mas_gym.__all__:
        if name != "aec_env":
            assert getattr(mas_gym, name) is not None
    with pytest.raises(AttributeError, match="it has Action, Agent"):
        mas_gym.no_such_name  # noqa: B018


def test_ids_combine_known_tasks_and_systems() -> None:
    from mas_gym.tasks import TASK_NAMES

    for task, mas in ENVIRONMENTS.values():
        assert task in TASK_NAMES
        assert mas in mas_gym.mas_names()
    assert {env_id for env_id in gym.registry if env_id.startswith("MAS-")} == {*IDS, "MAS-Custom-v0", "MAS-Program-v0"}


# ------------------------------------------------------------------------------------------ errors


def test_step_outside_an_episode_raises() -> None:
    env = MASEnv(EIGHT_FIVE)
    for use in (lambda: env.step(("a", 5)), env.clone_state, lambda: env.state, lambda: env.problem_id, env.observe):
        with pytest.raises(EpisodeOverError, match="reset"):
            use()
    env.reset(seed=0)
    play(env, "a", "b", "c", "d")
    with pytest.raises(EpisodeOverError, match="reset"):
        env.step(("a", env.ALL))
    env.reset()
    assert env.step(("a", env.ALL))[2] is False


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({"split": "tests"}, "split: expected one of 'train', 'dev', 'test', got 'tests'; did you mean 'test'"),
        ({"view": "locale"}, "view: expected one of 'full', 'local'"),
        ({"render_mode": "ascii"}, "render_mode: expected one of None, 'ansi', 'human', 'rgb_array'"),
        ({"on_invalid": "raise"}, "on_invalid: expected one of 'terminate', 'retry'"),
        ({"max_bytes": 0}, "max_bytes: expected an integer of at least 1, got 0"),
        ({"max_bytes": 1.5}, "max_bytes: expected an integer"),
        ({"max_retries": -1}, "max_retries: expected an integer of at least 0"),
        ({"mas": {"agents": []}}, "agents: expected a list of at least one agent"),
        ({"mas": "rpvs"}, "did you mean 'rpsv'"),
        ({"task": "arithmetik"}, "did you mean 'arithmetic'"),
        ({"task": 3}, "expected a task's name or an object with"),
        ({"dificulty": 3}, "dificulty"),
        ({"grading": "lax"}, "lax"),
    ],
)
def test_invalid_arguments_are_rejected_on_construction(kwargs, expected: str) -> None:
    with pytest.raises(MASGymError) as caught:
        MASEnv(**{"task": "arithmetic", **kwargs})
    assert expected in str(caught.value)
    if "task" not in kwargs and kwargs.get("render_mode") is None:
        with pytest.raises(MASGymError):
            gym.make("MAS-Arithmetic-v0", **kwargs)


def test_task_object_with_task_options_is_rejected() -> None:
    with pytest.raises(ConfigError, match="unknown option 'difficulty'"):
        MASEnv(EIGHT_FIVE, difficulty=3)


@pytest.mark.parametrize(
    ("options", "error", "expected"),
    [
        (
            {"problem": "sum/0"},
            ConfigError,
            "unknown reset option 'problem'; expected one of: problem_id; did you mean",
        ),
        ({"problem_id": "sum/9"}, UnknownNameError, "sum/9"),
        ({"problem_id": 3}, UnknownNameError, "expected the id of one of its"),
        (["problem_id"], ConfigError, "expected a dict"),
    ],
)
def test_invalid_reset_options_are_rejected(options, error, expected: str) -> None:
    env = rpsv()
    play(env, "a")
    before = env.clone_state(include_rng=True)
    with pytest.raises(error) as caught:
        env.reset(options=options)
    assert expected in str(caught.value)
    assert env.clone_state(include_rng=True) == before


@pytest.mark.parametrize("env_id", [i for i in IDS if ENVIRONMENTS[i][0] not in OFFLINE])
def test_missing_data_is_reported_at_the_first_reset(env_id: str, tmp_path: Path) -> None:
    env = gym.make(env_id, data=str(tmp_path / "none.jsonl"))
    assert env.spec.id == env_id
    with pytest.raises(DataNotFoundError) as caught:
        env.reset()
    assert "Three ways to provide it" in str(caught.value)


def test_overlong_question_and_empty_task_are_rejected() -> None:
    long = ProblemTask.of([Problem("long/0", "é" * 60, "1")])
    with pytest.raises(DataError, match="100 bytes, got 120 in long/0"):
        MASEnv(long, max_bytes=100).reset()
    with pytest.raises(DataError, match="no problems in the split"):
        MASEnv(long[:0]).reset()


# ------------------------------------------------------------------------------------------ actions


@pytest.mark.parametrize("recipient", [0, 2, 3, 4, -1, 6, 99, 2**70])
def test_illegal_recipients_end_the_episode(recipient: int) -> None:
    env = rpsv()
    observation, reward, terminated, truncated, info = env.step(("facts", recipient))
    assert (reward, terminated, truncated) == (-1.0, True, False)
    assert f"Reader cannot route to {recipient}" in info["invalid_action"]
    assert (info["correct"], info["reason"]) == (False, "invalid action")
    assert observation["transcript"] == ()
    assert observation in env.observation_space
    assert info["action_mask"].any()
    with pytest.raises(EpisodeOverError):
        env.step(("facts", 1))


def test_retries_leave_the_state_unchanged_and_are_bounded() -> None:
    env = rpsv(on_invalid="retry", max_retries=2)
    before = env.observe()
    for left in (1, 0):
        observation, reward, terminated, _, info = env.step(("facts", 3))
        assert (reward, terminated, info["retries_left"]) == (0.0, False, left)
        assert observation == before[0]
        assert info["action_mask"].tolist() == before[1]["action_mask"].tolist()
    # A legal message gives the next agent its own retries.
    assert env.step(("facts", 1))[2] is False
    for _ in range(2):
        assert env.step(("plan", 0))[2] is False
    _, reward, terminated, _, info = env.step(("plan", 0))
    assert (reward, terminated) == (-1.0, True)
    assert "invalid_action" in info


def test_oversized_text_is_rejected() -> None:
    env = MASEnv(EIGHT_FIVE, max_bytes=16, on_invalid="retry")
    env.reset(seed=0)
    assert "at most 16 bytes, got 1000000" in env.step(("x" * 1_000_000, 1))[4]["invalid_action"]
    assert "at most 16 bytes, got 18" in env.step(("é" * 9, 1))[4]["invalid_action"]
    assert "invalid_action" not in env.step(("é" * 8, 1))[4]


@pytest.mark.parametrize(
    "action", ["text", ("text",), ("text", 1, 2), (1, "text"), ("text", "1"), ("text", 1.0), ("text", None), None, 3]
)
def test_malformed_action_raises_and_leaves_the_state_unchanged(action) -> None:
    env = rpsv()
    before = env.clone_state()
    with pytest.raises(IllegalActionError, match=r"expected \(text, recipient\)"):
        env.step(action)
    assert env.clone_state() == before


def test_actions_accept_every_integer_type() -> None:
    for recipient in (1, np.int64(1), np.uint8(1), np.array(1), True):
        env = rpsv()
        assert env.step(["facts", recipient])[0]["acting"] == 1
        json.dumps(env.state.to_dict())


@pytest.mark.parametrize(
    ("message", "reward", "extracted"),
    [("Final Answer: 13", 1.0, "13"), ("Final Answer: 12", -1.0, "12"), ("no idea", -1.0, None), ("", -1.0, None)],
)
def test_last_message_is_graded(message: str, reward: float, extracted) -> None:
    env = rpsv()
    _, got, terminated, _, info = play(env, "13", "13", "13", message)
    assert (got, terminated) == (reward, True)
    assert (info["extracted"], info["correct"]) == (extracted, reward > 0)
    assert isinstance(info["reason"], str)
    assert info["agent"] == "sink"


def test_reference_answer_is_not_exposed() -> None:
    secret = ProblemTask.of([Problem("p/0", "What?", "918273", metadata={"solution": "918273"})])
    env = MASEnv(secret, "single", render_mode="ansi")
    told = [repr(env.reset(seed=0)), repr(env.clone_state()), env.render()]
    told += [repr(env.step(("Final Answer: 1", env.ALL))), env.render(), repr(env.clone_state())]
    assert not any("918273" in text for text in told)


def test_returned_objects_do_not_share_state() -> None:
    env = rpsv()
    observation, info = env.observe()
    observation["question"] = "changed"
    info["action_mask"][:] = 0
    info.clear()
    assert env.observe()[0]["question"] == "What is 8 + 5?"
    assert env.observe()[1]["action_mask"].any()


# ------------------------------------------------------------------------------------------ views


def test_local_view_is_observed() -> None:
    env = MASEnv(EIGHT_FIVE, "rpsv", view="local")
    observation, _ = env.reset(options={"problem_id": "sum/0"})
    assert observation["question"] == "What is 8 + 5?"
    env.step(("facts", 1))
    observation, *_ = env.step(("plan", 2))
    # The Solver has no edge from q, and hears the Planner alone.
    assert observation["question"] == ""
    assert observation["transcript"] == ((1, "plan", 2),)
    assert observation["messages"][1].content == "plan"
    env.step(("work", 3))
    observation, *_ = env.step(("Final Answer: 13", env.ALL))
    assert observation["transcript"] == ((3, "Final Answer: 13", 4),)
    assert observation["messages"] == ()


def test_full_view_is_observed() -> None:
    env = rpsv()
    play(env, "facts", "plan", "work")
    observation, _ = env.observe()
    assert observation["question"] == "What is 8 + 5?"
    assert observation["transcript"] == ((0, "facts", 1), (1, "plan", 2), (2, "work", 3))
    assert [m.content for m in observation["messages"]] == [
        "You are the Verifier. Double-check the result and produce the final answer only.",
        "What is 8 + 5?\n\nwork",
    ]


# ------------------------------------------------------------------------------------------ snapshots


@pytest.mark.parametrize("env_id", IDS)
def test_restored_snapshot_is_identical(env_id: str, tmp_path: Path) -> None:
    env = make(env_id, tmp_path).unwrapped
    env.reset(seed=2)
    snapshots, tails = [], []
    over = False
    while not over:
        snapshots.append(env.clone_state(include_rng=True))
        over = play(env, "VERDICT: DISAGREE Final Answer: 1")[2]
    snapshots.append(env.clone_state(include_rng=True))
    for snapshot in snapshots:
        env.restore_state(snapshot)
        assert pickle.dumps(env.clone_state(include_rng=True)) == pickle.dumps(snapshot)
        assert env.clone_state() == snapshot._replace(rng=None)
        observed = env.observe()
        tails.append((observed[0], env.reset()[1]["problem_id"]))
    # The generator came back too: every return is followed by the same next problem.
    assert len({problem for _, problem in tails}) == 1
    for snapshot, (observation, _) in zip(snapshots, tails, strict=True):
        fresh = make(env_id, tmp_path).unwrapped
        fresh.restore_state(pickle.loads(pickle.dumps(snapshot)))
        assert fresh.observe()[0] == observation
        assert hash(fresh.clone_state()) == hash(snapshot._replace(rng=None))


def test_branches_are_independent() -> None:
    env = rpsv()
    root = env.clone_state()
    left = play(env, "left")[0]
    env.restore_state(root)
    right = play(env, "right")[0]
    assert left["transcript"][0].text == "left"
    assert right["transcript"][0].text == "right"
    over = play(env, "b", "c", "Final Answer: 13")
    assert over[1] == 1.0
    end = env.clone_state()
    env.restore_state(root)
    assert env.observe()[0]["transcript"] == ()
    env.restore_state(end)
    with pytest.raises(EpisodeOverError):
        env.step(("more", 5))


def test_snapshots_include_retries_and_the_problem() -> None:
    env = rpsv(on_invalid="retry", max_retries=1)
    env.step(("facts", 0))
    used = env.clone_state()
    env.reset(options={"problem_id": "sum/1"})
    env.restore_state(used)
    assert env.problem_id == "sum/0"
    assert env.step(("facts", 0))[2] is True


def test_snapshots_of_other_systems_are_rejected() -> None:
    other = MASEnv(EIGHT_FIVE, "refine")
    other.reset(seed=0)
    with pytest.raises(ConfigError, match="MAS 'rpsv', got one of another"):
        rpsv().restore_state(other.clone_state())
    with pytest.raises(ConfigError, match="expected a Snapshot, from clone_state"):
        rpsv().restore_state(("rpsv", 1))
    with pytest.raises(UnknownNameError):
        rpsv().restore_state(rpsv().clone_state()._replace(problem_id="gone/1"))


# ------------------------------------------------------------------------------------------ rendering


def test_ansi_render_returns_text() -> None:
    env = rpsv(render_mode="ansi")
    play(env, "facts\nmore", "plan", "work", "Final Answer: 13")
    assert env.render() == (
        "Question (rpsv):\n    What is 8 + 5?\n"
        "1. Reader -> Planner\n    facts\n    more\n"
        "2. Planner -> Solver\n    plan\n"
        "3. Solver -> Verifier\n    work\n"
        "4. Verifier -> sink\n    Final Answer: 13\n"
        "[ended: answer 13, correct, reward +1 (equal)]"
    )


def test_ansi_list_contains_every_turn_once() -> None:
    env = gym.make("MAS-Custom-v0", task=EIGHT_FIVE, mas="rpsv", render_mode="ansi_list")
    env.reset(options={"problem_id": "sum/0"})
    play(env, "facts", "plan")
    frames = env.render()
    assert len(frames) == 3
    assert frames[-1].endswith("[Solver acts next]")
    assert env.render() == []
    env.step(("work", 0))
    assert "refused" not in env.render()[0]
    env.reset()
    assert len(env.render()) == 1


def test_human_render_prints_each_turn(capsys: pytest.CaptureFixture[str]) -> None:
    env = rpsv(render_mode="human")
    env.step(("[bold]facts[/bold]", 1))
    assert env.render() is None
    env.step(("plan", 0))
    told = capsys.readouterr().out
    assert "What is 8 + 5?" in told
    # Brackets are text, not markup.
    assert "[bold]facts[/bold]" in told
    assert "Reader -> Planner" in told
    assert "cannot route to 0" in told.replace("\n", " ")


def test_hostile_messages_are_escaped_in_rendering() -> None:
    env = rpsv(render_mode="ansi")
    play(env, "\x1b[2J\x07\u202egnp.\ud800\r\x9b")
    text = env.render()
    assert "\\x1b[2J\\x07\\u202egnp.\\ud800\\r\\x9b" in text
    text.encode("utf-8")


@pytest.mark.parametrize("mas", mas_gym.mas_names())
def test_rgb_array_render_returns_a_picture(mas: str) -> None:
    pytest.importorskip("matplotlib")
    env = MASEnv(EIGHT_FIVE, mas, render_mode="rgb_array")
    env.reset(seed=0)
    frames = [env.render()]
    over = False
    while not over:
        over = play(env, "VERDICT: DISAGREE\n" + "a long text " * 200 + "\x1b نص")[2]
        frames.append(env.render())
    for frame in frames:
        assert frame.shape == (640, 1120, 3)
        assert frame.dtype == np.uint8
    assert all((a != b).any() for a, b in pairwise(frames))
    again = MASEnv(EIGHT_FIVE, mas, render_mode="rgb_array")
    again.reset(seed=0)
    assert (again.render() == frames[0]).all()


def test_picture_of_a_large_graph_highlights_the_acting_agent() -> None:
    pytest.importorskip("matplotlib")
    agents = [{"name": f"Agent{i}", "system_prompt": "Go on."} for i in range(60)]
    env = MASEnv(EIGHT_FIVE, {"agents": agents, "edges": [[-1, 0], *([i, i + 1] for i in range(59))]})
    env.render_mode = "rgb_array"
    env.reset(seed=0)
    frames = {env.render().tobytes()}
    for turn in range(60):
        play(env, "x" * 1_000)
        if turn % 6 == 0 or turn == 59:
            frames.add(env.render().tobytes())
    assert len(frames) == 12


def test_render_without_mode_error_suggests_a_fix() -> None:
    env = rpsv()
    with pytest.warns(UserWarning, match="render\\(\\) needs a mode"):
        assert env.render() is None


# ------------------------------------------------------------------------------------------ real data


def test_equal_environments_share_a_data_set(tmp_path: Path) -> None:
    path = write_rows("gsm8k", tmp_path)
    first, second = (MASEnv("gsm8k", data=path) for _ in range(2))
    assert first.task[0] is second.task[0]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("environment_loop", "reward -1, extracted answer: 42, correct: False"),
        ("own_mas", "MAS config 'writers' has 4 errors"),
        ("plain_tree_search", "the most visited path answers 18: reward +1"),
    ],
)
def test_environment_examples_run(name: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(__file__).resolve().parents[1] / "examples"
    runpy.run_path(str(folder / f"{name}.py"), run_name="__main__")
    assert said in capsys.readouterr().out
