"""Searches on a fleet of Ray actors: the same rows as without Ray, even if actors die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed")

import ray
from search_worlds import consults, writes

import mas_gym
import search
from mas_gym.errors import ConfigError, DataError, EngineUnavailableError, PolicyError, StoreError
from mas_gym.policies import ScriptedPolicy, load_policy
from mas_gym.programs import Folder, Program
from search.engine.ray_actors import Fleet, run_ray

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

TASK = mas_gym.load_task("arithmetic", split="test")
PLANNER = "mcts:4,2"
COMMAND = """
import json, os, sys, urllib.request
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": sys.stdin.read()}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as got:
    print(json.load(got)["choices"][0]["message"]["content"])
"""


class Mortal(ScriptedPolicy):
    """A policy whose replies do not depend on when it dies."""

    def identity(self) -> str:
        return "mortal"


def make_policy(fatal: str = "", held: Sequence[str] = ()) -> ScriptedPolicy:
    """A policy that, once, ends its process in the middle of its work if ``fatal`` names a file.

    It never answers about ``held`` questions.
    """

    def script(request: Any, seed: int) -> str:
        while any(question in message.content for question in held for message in request.messages):
            time.sleep(1)
        if fatal and seed % 23 == 0 and not os.path.exists(fatal):
            Path(fatal).touch()
            os._exit(1)
        return f"{request.agent} says {seed % 97}. Final Answer: {seed % 7}"

    return Mortal(script, max_batch=16)


def broken() -> ScriptedPolicy:
    raise PolicyError("no such model")


def dying() -> ScriptedPolicy:
    return ScriptedPolicy(lambda request, seed: os._exit(1))


def python_path() -> str:
    here = Path(__file__).parent
    return os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=200 * 2**20,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": python_path()}},
    )
    yield
    ray.shutdown()


def results(plans: Any) -> dict[str, Any]:
    return {p.problem_id: (p.error, p.answer, [(c.text, c.score) for c in p.candidates]) for p in plans}


def trees(store: search.Store) -> list[Any]:
    return [(plan.problem_id, plan.tree.to_dict() if plan.tree else None) for plan in store.plans()]


def fleet_run(policy: Any, problems: int = 20, actors: int = 2, replacements: int = 3, **options: Any) -> search.Run:
    return run_ray(
        PLANNER,
        TASK[:problems],
        **{"mas": "rpsv", **options},
        make_policy=policy,
        make_critic=search.PolicyLikelihood,
        concurrency=4,
        fleet=Fleet(actors=actors, replacements=replacements),
    )


def plain_run(problems: int = 20, **options: Any) -> search.Run:
    critic = search.PolicyLikelihood()
    options = {"mas": "rpsv", **options}
    return search.run(PLANNER, TASK[:problems], policy=make_policy(), critic=critic, **options)


def test_two_actors_give_the_same_rows_as_a_local_run(tmp_path: Path) -> None:
    expected = results(plain_run(store=tmp_path / "plain.db"))
    assert results(fleet_run(make_policy, store=tmp_path / "fleet.db")) == expected
    # Each reads the other's store as its own run: same settings, same plans, nothing left to do.
    again = plain_run(store=tmp_path / "fleet.db")
    assert results(again) == expected and again.usage.agent_calls == 0
    assert results(fleet_run(make_policy, store=tmp_path / "plain.db")) == expected


@pytest.mark.parametrize("kind", ["function", "file", "command", "world"])
def test_program_on_two_actors_gives_the_same_rows_as_a_local_run(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("openai", reason="the openai package is not installed")
    script = tmp_path / "agents.py"
    script.write_text(COMMAND, encoding="utf-8")
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo" / "log").write_text("start")
    more: dict[str, Any] = {"agents": ["Ann", "Bob", "Cleo"]}
    program = {
        "function": Program(consults, **more),
        "file": Program(f"{Path(__file__).parent}/search_worlds.py:consults", **more),
        "command": Program(f"{sys.executable} -S {script}", files=[script], agents=["Ann"]),
        "world": Program(writes, agents=["Ann"], world=Folder(tmp_path / "repo")),
    }[kind]
    count = 3 if kind == "command" else 12
    options: dict[str, Any] = {"mas": None, "program": program}
    expected = results(plain_run(count, store=tmp_path / "plain.db", **options))
    assert all(error is None for error, _, _ in expected.values())
    assert results(fleet_run(make_policy, count, store=tmp_path / "fleet.db", **options)) == expected
    again = plain_run(count, store=tmp_path / "fleet.db", **options)
    assert results(again) == expected and again.usage.agent_calls == 0
    assert (tmp_path / "repo" / "log").read_text() == "start"


def test_cost_over_all_actors_equals_the_cost_of_a_local_run(tmp_path: Path) -> None:
    pytest.importorskip("openai", reason="the openai package is not installed")
    pytest.importorskip("fastapi", reason="the fastapi package is not installed")
    from loopback import hash_policy, make_app, serving

    with serving(make_app(hash_policy())) as base:
        make = partial(load_policy, f"openai:served@{base}/v1#price=1000,500,2000")
        list(fleet_run(make, 12, store=tmp_path / "fleet.db"))
        critic = search.PolicyLikelihood()
        plain: dict[str, Any] = {"mas": "rpsv", "policy": make(), "critic": critic, "store": tmp_path / "plain.db"}
        list(search.run(PLANNER, TASK[:12], **plain))
    money = []
    for name in ("fleet.db", "plain.db"):
        with search.open_store(tmp_path / name) as store:
            money.append(store.find().facts["money"])
    assert money[0] == pytest.approx(money[1]) and money[0] > 0


def test_dead_actor_is_replaced_and_its_searches_rerun(tmp_path: Path) -> None:
    fatal = tmp_path / "died"
    plans = list(fleet_run(partial(make_policy, str(fatal)), store=tmp_path / "fleet.db"))
    assert fatal.exists()
    assert len(plans) == 20 and results(plans) == results(plain_run(store=tmp_path / "plain.db"))
    with search.open_store(tmp_path / "fleet.db") as fleet, search.open_store(tmp_path / "plain.db") as plain:
        [one], [other] = fleet.runs(), plain.runs()
        assert (one.run, one.searches, one.failed) == (other.run, other.searches, other.failed)
        assert trees(fleet) == trees(plain)


DRIVER = """
import functools, ray, sys
import test_ray
ray.init(address=sys.argv[1], log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": sys.argv[2]}})
held = [problem.question for problem in test_ray.TASK[10:20]]
list(test_ray.fleet_run(functools.partial(test_ray.make_policy, held=held), store=sys.argv[3]))
"""


def test_killed_driver_keeps_its_finished_searches(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    address = ray.get_runtime_context().gcs_address
    child = subprocess.Popen(
        [sys.executable, "-c", DRIVER, address, python_path(), str(path)],
        env=os.environ | {"PYTHONPATH": python_path()},
    )

    def held() -> int:
        # There is no store until the driver has written its tables.
        with suppress(StoreError), search.open_store(path) as store:
            return sum(info.searches for info in store.runs())
        return 0

    end = time.monotonic() + 120
    while held() < 3 and child.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL, "the run ended before it could be killed"
    kept = held()
    assert 3 <= kept < 20
    run = fleet_run(make_policy, store=path)
    whole = plain_run()
    assert results(run) == results(whole) and run.usage.agent_calls < whole.usage.agent_calls


def test_command_line_with_ray_gives_the_same_table(tmp_path: Path) -> None:
    def table(name: str, *options: str) -> Any:
        command = [sys.executable, "-m", "mas_gym.cli", "eval", "-n", "6", "--planner", "sc:2,weights=critic"]
        command += ["--critic", "constant:0.5", "--json", f"{name}.json", *options]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr
        rows = json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))["rows"]
        return [{key: value for key, value in row.items() if not key.startswith("seconds")} for row in rows]

    expected = table("plain", "--cache", "replies.db")
    assert table("fleet", "--ray", "local", "--actors", "2", "--store", "runs.db", "--cache", "replies.db") == expected
    # A run without a fleet resumes from the searches that a fleet stored.
    assert table("again", "--store", "runs.db", "--policy", "tiny") == expected


def test_actors_without_resources_are_not_awaited(tmp_path: Path) -> None:
    # Two cores have room for two actors; the others would join in a cluster that grows.
    plans = list(fleet_run(make_policy, 12, actors=5, store=tmp_path / "fleet.db"))
    assert results(plans) == results(plain_run(12, store=tmp_path / "plain.db"))


@ray.remote(num_cpus=1)
def occupy(until: str) -> None:
    while not os.path.exists(until):
        time.sleep(0.02)


def noted(folder: str, free: str) -> ScriptedPolicy:
    """A policy that leaves a file for its process, and once there is room waits until a second one has joined."""
    (Path(folder) / str(os.getpid())).touch()
    end = time.monotonic() + 60

    def script(request: Any, seed: int) -> str:
        while os.path.exists(free) and len(os.listdir(folder)) < 2 and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.001)
        return f"{request.agent} says {seed % 97}. Final Answer: {seed % 7}"

    return ScriptedPolicy(script, max_batch=16)


def test_actor_joins_when_resources_are_free(tmp_path: Path) -> None:
    busy = occupy.remote(str(tmp_path / "free"))
    (tmp_path / "actors").mkdir()
    run = fleet_run(partial(noted, str(tmp_path / "actors"), str(tmp_path / "free")), 40)
    plans = [next(run) for _ in range(3)]
    assert len(list((tmp_path / "actors").iterdir())) == 1
    (tmp_path / "free").touch()
    plans += run
    ray.get(busy)
    assert len(list((tmp_path / "actors").iterdir())) == 2
    assert results(plans) == results(plain_run(40))


def test_fleet_ends_at_its_budget_and_resumes(tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    for limit in (search.Budget(calls=100), search.Budget(seconds=1e-3)):
        last: list[search.Progress] = []
        plans = list(fleet_run(make_policy, 12, run_budget=limit, progress=last.append, store=store))
        assert len(plans) < 12
        assert str(last[-1].stopped).startswith("budget of")
    assert results(fleet_run(make_policy, 12, store=store)) == results(plain_run(12))


def test_ctrl_c_ends_a_fleet_and_keeps_finished_searches(tmp_path: Path) -> None:
    reports: list[search.Progress] = []

    def interrupt(now: search.Progress) -> None:
        reports.append(now)
        if len(reports) == 4:
            raise KeyboardInterrupt

    run = fleet_run(make_policy, progress=interrupt, store=tmp_path / "runs.db")
    with pytest.raises(KeyboardInterrupt):
        list(run)
    kept = results(run)
    assert run.stopped == "interrupted" and reports[-1].stopped == "interrupted"
    expected = results(plain_run())
    assert len(kept) < 20 and kept.items() <= expected.items()
    assert results(fleet_run(make_policy, store=tmp_path / "runs.db")) == expected


def test_fleet_completes_the_searches_its_budget_covers() -> None:
    def passes(budget: int) -> search.Run:
        return run_ray(
            "sc:3",
            TASK[:20],
            mas="rpsv",
            make_policy=make_policy,
            run_budget=search.Budget(calls=budget),
            concurrency=4,
            fleet=Fleet(actors=2),
        )

    plans = passes(150)
    assert len(list(plans)) == 12 and "6 left" in str(plans.stopped)
    plans = passes(240)
    assert len(list(plans)) == 20 and plans.stopped is None


def test_fleet_respects_a_usd_budget() -> None:
    prices = {make_policy().name: {"prompt": 0, "generated": 1000}}
    runs = plain_run(prices=prices), fleet_run(make_policy, prices=prices)
    plain, costs = ({plan.problem_id: run.cost(plan.usage) for plan in run} for run in runs)
    assert costs == plain and all(plain.values())
    limit = sum(usd or 0 for usd in plain.values()) / 2
    some = fleet_run(make_policy, prices=prices, run_budget=search.Budget(usd=limit))
    assert 0 < len(list(some)) < 20 and "USD spent" in str(some.stopped)


def test_cost_of_dropped_searches_is_counted(tmp_path: Path) -> None:
    last: list[search.Progress] = []
    store = tmp_path / "runs.db"
    plans = fleet_run(make_policy, 12, progress=last.append, store=store)
    finished = next(plans).usage.agent_calls
    plans.stop()
    finished += sum(plan.usage.agent_calls for plan in plans)
    assert last[-1].usage.agent_calls > finished
    with search.open_store(store) as opened:
        searches = opened.find().searches
    # A later call starts from all that was spent.
    list(fleet_run(make_policy, 12, run_budget=search.Budget(calls=finished + 1), store=store))
    with search.open_store(store) as opened:
        assert opened.find().searches == searches


def test_duplicate_problem_ids_are_rejected() -> None:
    with pytest.raises(DataError, match="ids must be distinct"):
        list(
            run_ray(
                PLANNER, [TASK[0], TASK[0]], mas="rpsv", make_policy=make_policy, make_critic=search.PolicyLikelihood
            )
        )


def test_fleet_reports_progress(tmp_path: Path) -> None:
    for stored in (0, 6):
        reports: list[search.Progress] = []
        list(fleet_run(make_policy, 6, progress=reports.append, store=tmp_path / "runs.db"))
        last = reports[-1]
        assert (last.total, last.done, last.failed, last.stored, last.open) == (6, 6, 0, stored, 0)
        assert (last.usage.agent_calls > 0) == (stored == 0)


def test_run_ends_if_actors_fail_to_start() -> None:
    with pytest.raises(PolicyError, match="no such model"):
        list(fleet_run(broken))
    with pytest.raises(EngineUnavailableError, match=r"more actors died.*: 2; .*repeat the command"):
        list(fleet_run(dying, actors=1, replacements=1))


def killed_while_loading(fatal: str) -> ScriptedPolicy:
    """A policy whose process, once, is killed while it loads."""
    if not os.path.exists(fatal):
        Path(fatal).touch()
        os._exit(1)
    return make_policy()


def test_actor_killed_while_loading_is_replaced(tmp_path: Path) -> None:
    fatal = tmp_path / "died"
    plans = list(fleet_run(partial(killed_while_loading, str(fatal)), 6, actors=1))
    assert fatal.exists() and results(plans) == results(plain_run(6))


def test_invalid_fleets_are_rejected() -> None:
    with pytest.raises(ConfigError):
        Fleet(actors=0)
