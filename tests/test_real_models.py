"""The published samples of a real model: the page's tables come out of them."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("sklearn", reason="the features critic needs the extra 'train'")

from typer.testing import CliRunner

from benchmarks.real_models import trees
from benchmarks.real_models.table import FOLDER, lines
from mas_gym.cli import app

PAGE = Path(__file__).parents[1] / "docs" / "real-models.md"


@pytest.mark.slow
def test_tables_of_the_page_come_out_of_the_published_samples(tmp_path: Path) -> None:
    words = [
        "train",
        "orm",
        "--store",
        str(FOLDER / "train-cot.db"),
        "--base",
        "features",
        "--out",
        str(tmp_path / "orm"),
    ]
    assert CliRunner().invoke(app, words).exit_code == 0
    found = list(lines(str(tmp_path / "orm")))
    assert len(found) > 30
    assert "\n".join(found) in PAGE.read_text(encoding="utf-8")


@pytest.mark.slow
def test_tables_of_critics_come_out_of_the_published_values() -> None:
    found = list(trees.complete_trees())
    critics, truth = {"PL": trees.likelihoods(found), **trees.trained()}, trees.true_values(found)
    page = PAGE.read_text(encoding="utf-8")
    tables = [trees.tables(found, truth, critics), trees.culprits(found, truth), trees.losses(found, truth, critics)]
    for table in "\n\n".join("\n".join(one) for one in tables).split("\n\n"):
        assert table in page


@pytest.mark.parametrize("planner", ["mcts:10,3", "sbs:3,3"])
def test_planners_search_the_published_trees(planner: str) -> None:
    words = ["eval", "--recorded", str(FOLDER / "trees-rpsv.db"), "--distinct", "--planner", planner]
    done = CliRunner().invoke(app, [*words, "--critic", "policy-likelihood"])
    assert done.exit_code == 0 and "37 problems" in done.output
