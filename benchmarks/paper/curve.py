"""Learning curves: held-out pairwise accuracy and MCTS Hit@1 over the number of training trees and of pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.paper.held_out import pair_accuracy, pair_cells
from benchmarks.paper.lab import MCTS, Lab, Recipe, Score, command, keep_rows, row_of
from benchmarks.paper.page import NEW, Page, percent, span
from benchmarks.paper.rivals import compared, rivals
from mas_gym.errors import ConfigError
from rewardmodels import LearnedCritic
from search.results.plots import COLOURS, INK, figure_class, plain_log_ticks, save_figure

PAIRS = (1, 2, 4, 8)
FEWEST = 4
"""Trees; fewer may leave one side of the split without pairs."""

ASKS = """
These learning curves show whether more data would improve MASPRM with the Bradley-Terry loss. MASPRM is trained on
several numbers of trees, and of pairs per tree. The pairs for evaluation are from the dev split and are the same for
every point. The paper has no such curve.
"""


class Point(NamedTuple):
    """One critic on the curve.

    Attributes:
        series: The varied quantity.
        trees: Training trees.
        per_tree: Cap of pairs per tree.
        pairs: Pairs learned from.
        metrics: On the dev pairs.
        score: MCTS(10,3) with it.
    """

    series: str
    trees: int
    per_tree: int
    pairs: int
    metrics: dict[str, Any]
    score: Score


def run(lab: Lab) -> Page:
    page = Page("curve", "Learning curves", ASKS)
    full = lab.options.trees
    sizes = [size for size in (full // 8, full // 4, full // 2) if size >= FEWEST]
    recipes = [("trees", Recipe(trees=size)) for size in sizes]
    recipes += [("pairs per tree", Recipe(pairs=number)) for number in PAIRS[:-1]]
    recipes += [("all", Recipe(trees=full))]
    critics = [lab.critic(lab.home, recipe) for _, recipe in recipes]
    searches = [row_of("single")]
    searches += [row_of(MCTS, critic, _name(recipe)) for (_, recipe), critic in zip(recipes, critics, strict=True)]
    seeds = lab.options.seeds[-1:]
    single, *scores = lab.measure(lab.home, searches, seeds)
    equal = rivals(lab, lab.home, scores[-1], single, seeds=seeds)
    likelihood = equal.likelihood
    lab.notes.append(f"all searches of this page use run seed {seeds[0]}")
    points = [
        _point(lab, series, recipe, critic, score)
        for (series, recipe), critic, score in zip(recipes, critics, scores, strict=True)
    ]
    header = ("varied", "trees", "pairs per tree", "pairs", "pairwise accuracy, %", "95% interval", "by depth")
    rows = [
        (
            p.series,
            p.trees,
            p.per_tree,
            p.pairs,
            *pair_cells(p.metrics),
            percent(p.score.hit),
            span(*p.score.row.interval),
        )
        for p in points
    ]
    page.table((*header, "Hit@1", "95% interval"), rows)
    page.blocks.append(
        f"Hit@1 of policy likelihood, which is not trained: {percent(likelihood.hit)}; of {equal.best.row.planner} "
        f"with the ORM, at the tokens of the last row: {percent(equal.best.hit)}.\n"
    )
    page.picture("curve.png", "learning curves", lambda path: _draw(points, likelihood, path))
    first, last = points[0], points[-1]
    page.claims = [
        compared(f"{last.trees} trees over {first.trees} trees, MCTS(10,3)", NEW, last.score, first.score),
        compared("8 pairs per tree over 1, MCTS(10,3)", NEW, last.score, points[len(sizes)].score),
        compared(f"{first.trees} trees over policy likelihood, MCTS(10,3)", NEW, first.score, likelihood),
        *equal.claims(),
    ]
    keep_rows(lab, page.name, [single, likelihood, equal.best, *scores])
    return page


def _name(recipe: Recipe) -> str:
    return f"MASPRM of {recipe.trees} trees" if recipe.trees else f"MASPRM of {recipe.pairs} pairs per tree"


def _point(lab: Lab, series: str, recipe: Recipe, critic: LearnedCritic, score: Score) -> Point:
    metrics = pair_accuracy(lab, lab.home, critic)
    pairs = int(critic.info.data["pairs"])
    return Point(series, recipe.trees or lab.options.trees, recipe.pairs, pairs, metrics, score)


def _draw(points: Sequence[Point], likelihood: Score, path: Path) -> None:
    groups: dict[str, list[Point]] = {"trees": [], "pairs per tree": []}
    for point in points:
        for name in groups if point.series == "all" else [point.series]:
            groups[name].append(point)
    accuracy, hits = [], []
    for name, group in groups.items():
        pairs = [point.pairs for point in group]
        spans = [point.metrics["accuracy_interval"] for point in group]
        accuracy.append(Series(name, pairs, [point.metrics["accuracy"] for point in group], spans))
        hits.append(Series(name, pairs, [p.score.hit for p in group], [list(p.score.row.interval) for p in group]))
    panels = {"pairwise accuracy on dev trees (%)": accuracy, "Hit@1 of MCTS(10,3) (%)": hits}
    save_curves(panels, "pairs learned from", path)


class Series(NamedTuple):
    """One curve.

    Attributes:
        name: Label in the legend.
        x: Positions of the points.
        y: Shares in ``[0, 1]``.
        intervals: Lower and upper bound of each point.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    intervals: Sequence[Sequence[float]]


def save_curves(panels: Mapping[str, Sequence[Series]], x_label: str, path: Path) -> Path:
    """Draw panels side by side, in percent over a logarithmic axis; return the path.

    Args:
        panels: Label of the vertical axis to curves; a curve keeps its colour in all panels.
        x_label: Label of the horizontal axis.
        path: Its suffix names the format.

    Raises:
        ConfigError: There is nothing to draw, or the suffix names no format.
        MissingDependencyError: matplotlib is not installed.
    """
    if not panels or not all(any(series.x for series in curves) for curves in panels.values()):
        raise ConfigError("expected at least one point in each panel, got none; there is nothing to plot")
    figure = figure_class()(figsize=(4.4 * len(panels), 3.6), dpi=200, layout="constrained")
    names = list(dict.fromkeys(series.name for curves in panels.values() for series in curves))
    for axes, (label, curves) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for series in curves:
            colour = COLOURS[names.index(series.name) % len(COLOURS)]
            y = [100 * share for share in series.y]
            ends = [[abs(100 * end - at) for end in pair] for pair, at in zip(series.intervals, y, strict=True)]
            bars: Any = list(zip(*ends, strict=True))
            axes.errorbar(series.x, y, yerr=bars, color=colour, marker="o", ms=5, lw=1.6, elinewidth=1, capsize=2)
        axes.set_xscale("log")
        places = [place for series in curves for place in series.x]
        plain_log_ticks(axes, min(places), max(places))
        axes.set_xlabel(x_label, color=INK)
        axes.set_ylabel(label, color=INK)
        axes.grid(True, which="major", alpha=0.3)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.axes[0].legend(names, frameon=False, labelcolor=INK, fontsize=9)
    return save_figure(figure, path)


if __name__ == "__main__":
    command(run, "curve")
