"""The core works in a copy of the packages without the features that it does not know."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

SATELLITES = [
    *("mas_gym/programs", "mas_gym/logs", "mas_gym/policies/arms_policy.py", "mas_gym/cli"),
    *("search/models/programs.py", "search/models/recorded.py"),
    *(f"search/store/{name}.py" for name in ("recorded_runs", "recorded_critic", "stored_states")),
    *(f"search/store/{name}.py" for name in ("transcript_import", "staged_logs")),
    *("search/planners/chosen_arms.py", "search/prices.py", "search/tracing.py", "search/service"),
    "search/engine/ray_actors.py",
]
"""Agent programs and worlds, logs, recorded runs, arms, prices, telemetry, Ray, and the packages above ``search``."""

CASES = """
from importlib.util import find_spec
from pathlib import Path

import pytest
from search_worlds import HashCritic, chain, problems, talker
from test_planners import test_golden_trees_are_unchanged

import search

assert Path(search.__file__).is_relative_to(Path.cwd()) and find_spec("mas_gym.programs") is None
OPTIONS = {"mas": chain(3), "policy": talker()}
PLANNERS = ["single", "sc:3", "sbs:2,2", "mcts:6,2", "bon:3", "mcts:6,2,recipients=schedule"]


@pytest.mark.parametrize("planner", PLANNERS)
def test_run(planner):
    plans = list(search.run(planner, problems(4), critic=HashCritic(), **OPTIONS))
    assert len(plans) == 4 and all(plan.error is None for plan in plans)


def test_compare():
    table = search.compare(["single", "mcts:6,2"], problems(4), critics=HashCritic(), **OPTIONS)
    assert [row.problems for row in table.rows] == [4, 4]


def test_resume(tmp_path):
    options = {"critic": HashCritic(), "store": tmp_path / "runs.db", **OPTIONS}
    with search.run("mcts:6,2", problems(6), **options) as first:
        kept = next(first)
    again = search.run("mcts:6,2", problems(6), **options)
    plans = {plan.problem_id: plan for plan in again}
    assert len(plans) == 6 and plans[kept.problem_id].candidates == kept.candidates
    assert 0 < again.usage.agent_calls < sum(plan.usage.agent_calls for plan in plans.values())
    with search.open_store(tmp_path / "runs.db") as store:
        assert {plan.problem_id: plan.answer for plan in store.plans()} == {k: v.answer for k, v in plans.items()}
        assert len(store.compare().rows) == 1
"""

MAIN = """
import sys

# An editable installation would find the deleted modules in the checkout.
sys.meta_path = [finder for finder in sys.meta_path if "Editable" not in str(finder)]
import pytest

sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "tests/test_alone.py"]))
"""


def test_core_without_its_satellites_searches_compares_and_resumes(tmp_path: Path) -> None:
    for folder in ("mas_gym", "search", "tests/golden"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("conftest", "search_worlds", "test_planners"):
        shutil.copy(ROOT / f"tests/{name}.py", tmp_path / "tests")
    for name in SATELLITES:
        place = tmp_path / name
        shutil.rmtree(place) if place.is_dir() else place.unlink(missing_ok=not place.parent.is_dir())
    (tmp_path / "tests/test_alone.py").write_text(CASES)
    done = subprocess.run(
        [sys.executable, "-c", MAIN],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    golden = len(list((ROOT / "tests/golden").glob("*.json")))
    assert f"{golden + 8} passed" in done.stdout
