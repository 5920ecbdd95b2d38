"""The README's first command, small: shipped critics, critics from scratch, custom critics."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import search
from mas_gym.cli import app
from search.compare.comparison_runs import PAPER_PLANNERS, Row, named_critics, named_planners, pair

Run = Callable[..., Result]
FILES = {"results.json", "results.csv", "accuracy-tokens.png", "tree.html", "runs.db"}


@pytest.fixture
def run() -> Run:
    def invoke(*arguments: object) -> Result:
        return CliRunner(env={"COLUMNS": "120"}).invoke(app, ["demo", *map(str, arguments)])

    return invoke


def rows_of(out: Path) -> list[tuple[str, str, float]]:
    rows = json.loads((out / "results.json").read_text())["rows"]
    assert not any(row["failed"] for row in rows)
    return [(row["planner"], row["critic"], row["agent_calls"]) for row in rows]


class Outcome:
    name, terminal_only, free = "orm", True, False

    def score(self, contexts: list[search.ScoringContext]) -> list[float]:
        return [0.0 for _ in contexts]


def test_planner_critic_pairs_equal_the_rows_of_the_papers_table() -> None:
    critics = {"PL": search.PolicyLikelihood(), "ORM": Outcome(), "MASPRM": search.ConstantCritic()}
    arms = pair(named_planners(PAPER_PLANNERS), named_critics(critics))
    assert [(arm.name, arm.critic_name) for arm in arms] == [
        ("single", ""),
        ("sc:5", ""),
        *(("sc:5,weights=critic", name) for name in ("PL", "ORM", "MASPRM")),
        *(("sbs:5,1", name) for name in ("PL", "MASPRM")),
        *(("sbs:5,3", name) for name in ("PL", "MASPRM")),
        *(("mcts:10,3", name) for name in ("PL", "ORM", "MASPRM")),
    ]


def test_critics_of_one_kind_have_distinct_labels() -> None:
    assert list(named_critics(["policy-likelihood", "constant:0.5"])) == ["policy-likelihood", "constant(0.5)"]
    assert list(named_critics(["constant:0", "constant:0.0"])) == ["constant:0", "constant:0.0"]


@pytest.mark.slow
def test_demo_writes_table_picture_and_page(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "demo"
    result = run("--out", out, "-n", 2)
    assert result.exit_code == 0, result.output
    assert {path.name for path in out.iterdir()} >= FILES
    assert rows_of(out)[:2] == [("single", "", 4), ("sc:5", "", 20)]
    calls = {planner: count for planner, _, count in rows_of(out)}
    assert (calls["sc:5,weights=critic"], calls["sbs:5,1"], calls["sbs:5,3"], calls["bon:10"]) == (20, 20, 50, 40)
    assert rows_of(out)[-1][:2] == ("bon:10", "orm")
    assert [critic for planner, critic, _ in rows_of(out) if planner == "mcts:10,3"] == [
        *("policy-likelihood", "orm", "masprm")
    ]
    assert "tiny-masprm" in result.stderr
    assert "tree.html" in result.stdout


@pytest.mark.slow
def test_demo_accepts_other_critics(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Row] = []

    def measure(rows: list[Row], *others: Any, **options: Any) -> None:
        measured.extend(rows)
        raise KeyboardInterrupt

    monkeypatch.setattr("mas_gym.cli.demo.measure", measure)
    run("--out", tmp_path / "demo", "-n", 1, "--critic", "constant:0.5")
    critics = [row.critic_name for row in measured if row.name == "sbs:5,1"]
    assert critics == ["policy-likelihood", "constant(0.5)"]
    # Without an ORM every critic chooses among passes.
    assert [row.critic_name for row in measured if row.name == "bon:10"] == critics
