"""Searches on a fleet of Ray actors: the same rows as without, whoever dies."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed")

import ray

import mas_gym
import search
from mas_gym.errors import ConfigError, EngineUnavailableError, PolicyError
from mas_gym.policies import ScriptedPolicy
from search.ray_run import Fleet, run_ray

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

TASK = mas_gym.load_task("arithmetic", split="test")
PLANNER = "mcts:4,2"


def make_policy(fatal: str = "") -> ScriptedPolicy:
    """A policy that, once, ends its process in the middle of its work if ``fatal`` names a file."""

    def script(request: Any, seed: int) -> str:
        if fatal and seed % 23 == 0 and not os.path.exists(fatal):
            Path(fatal).touch()
            os._exit(1)
        return f"{request.agent} says {seed % 97}. Final Answer: {seed % 7}"

    return ScriptedPolicy(script, max_batch=16)


def broken() -> ScriptedPolicy:
    raise PolicyError("no such model")


def dying() -> ScriptedPolicy:
    return ScriptedPolicy(lambda request, seed: os._exit(1))


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    here = str(Path(__file__).parent)
    paths = os.pathsep.join([here, str(Path(here).parent), os.environ.get("PYTHONPATH", "")])
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=200 * 2**20,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": paths}},
    )
    yield
    ray.shutdown()


def told(plans: Any) -> dict[str, Any]:
    return {p.problem_id: (p.error, p.answer, [(c.text, c.score) for c in p.candidates]) for p in plans}


def fleet_run(policy: Any, problems: int = 20, actors: int = 2, replacements: int = 3, **options: Any) -> Iterator[Any]:
    return run_ray(
        PLANNER,
        TASK[:problems],
        mas="rpsv",
        make_policy=policy,
        make_critic=search.PolicyLikelihood,
        concurrency=4,
        fleet=Fleet(actors=actors, replacements=replacements),
        **options,
    )


def plain_run(problems: int = 20, **options: Any) -> search.Run:
    critic = search.PolicyLikelihood()
    return search.run(PLANNER, TASK[:problems], mas="rpsv", policy=make_policy(), critic=critic, **options)


def test_two_actors_give_the_rows_of_none(tmp_path: Path) -> None:
    expected = told(plain_run(store=tmp_path / "plain.db"))
    assert told(fleet_run(make_policy, store=tmp_path / "fleet.db")) == expected
    # Each reads the other's store as its own run: same settings, same plans, nothing left to do.
    again = plain_run(store=tmp_path / "fleet.db")
    assert told(again) == expected and again.usage.agent_calls == 0
    assert told(fleet_run(make_policy, store=tmp_path / "plain.db")) == expected


def test_a_dead_actor_is_replaced_and_its_searches_redone(tmp_path: Path) -> None:
    fatal = tmp_path / "died"
    plans = list(fleet_run(partial(make_policy, str(fatal)), store=tmp_path / "fleet.db"))
    assert fatal.exists()
    assert len(plans) == 20 and told(plans) == told(plain_run())


def test_actors_that_cannot_live_end_the_run() -> None:
    with pytest.raises(PolicyError, match="no such model"):
        list(fleet_run(broken))
    with pytest.raises(EngineUnavailableError, match=r"2 actors died.*repeat the command"):
        list(fleet_run(dying, actors=1, replacements=1))


def test_bad_fleets() -> None:
    with pytest.raises(ConfigError):
        Fleet(actors=0)
