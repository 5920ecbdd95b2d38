"""The page and the picture of `benchmarks.learning`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.nested_bootstrap import nested_bootstrap
from benchmarks.paper.page import Page, percent, span, write_page
from search.compare.first_errors import auc
from search.results.outcomes import Outcome
from search.results.plots import COLORS, dress, figure_class, save_figure
from search.results.table_formats import gap_cells

RESAMPLES = 2000
SHARED, OURS = "grpo, shared outcome", "grpo, leave-one-out"
COLUMNS = {"single": "single pass", "vote": "sc:6", "mcts": "MCTS(20,2), shipped MASPRM"}
COSTS = ("vote", "mcts")

Floats = NDArray[np.float64]
Lines = tuple[Sequence[str], Sequence[Sequence[str]]]
"""The header and the lines of a table."""

Statistic = Callable[[list[tuple[Floats, Floats]]], float]
"""Of the mean curves of some rows: tokens and shares, each of shape ``[points]``."""


class Point(NamedTuple):
    """Agents after some rounds of training.

    Attributes:
        tokens: Generated tokens of all training searches so far.
        problems: Training problems searched so far.
        policy: As for `load_policy`.
        right: 1 or 0 for each dev problem: whether a single pass solves it.
        values: The shipped MASPRM's value of the final state of each of these passes.
    """

    tokens: int
    problems: int
    policy: str
    right: dict[str, float]
    values: dict[str, float]

    @property
    def accuracy(self) -> float:
        """Share of dev problems solved by a single pass."""
        return sum(self.right.values()) / len(self.right)


def chosen(points: Sequence[Point]) -> int:
    """Return the round with the highest dev accuracy, the first of equal ones; its agents are evaluated."""
    return max(range(len(points)), key=lambda number: (points[number].accuracy, -number))


@dataclass
class Row:
    """Agents trained by one method.

    Attributes:
        name: The method.
        curves: For each training seed the points from the untrained to the trained agents.
        found: For each column of the table the outcomes of each training seed.
    """

    name: str
    curves: list[list[Point]]
    found: dict[str, list[list[Outcome]]] = field(default_factory=dict)

    def shares(self, kind: str) -> list[dict[str, float]]:
        """Return each training seed's share of right answers per problem; there is one run seed."""
        return [{one.problem_id: float(one.correct) for one in outcomes} for outcomes in self.found[kind]]

    def tokens(self, kind: str) -> float:
        """Return the mean of generated tokens per problem."""
        spent = [one.tokens for outcomes in self.found[kind] for one in outcomes]
        return sum(spent) / len(spent)

    def budget(self) -> float:
        return sum(points[-1].tokens for points in self.curves) / len(self.curves)


def write(rows: Sequence[Row], args: argparse.Namespace) -> Path:
    """Write the page and the curves, and return the page's file; text below the page's last heading stays."""
    page = Page(args.page.stem, "Agents that learn from search" + f": {args.task}" * (args.task != "arithmetic"))
    page.asks = (
        f"This page compares methods of agent training. The RPSV agents of `{args.base}` are trained on `{args.task}` "
        "with each method and the same budget of generated tokens."
    )
    facts = [
        f"{args.tokens:,} generated tokens of training searches per training run, in {args.rounds} rounds; "
        f"learning rate {args.rate:g}; training seeds {', '.join(map(str, args.seeds))}; the column `seeds` "
        "contains the number of seeds of a row",
        f"{args.number} test problems for single passes, "
        f"{args.searched} for searches; {args.dev} dev problems for the curves; run seed 14",
        "agents of each training run: those of the round with the highest dev accuracy",
        "Hit@1 in percent, mean over training seeds, with 95% bootstrap intervals over problems and training runs; "
        "TOK is generated tokens per problem",
    ]
    alt = "dev accuracy of single passes against generated tokens"
    page.picture(f"{args.page.stem}.png", alt, lambda path: draw(rows, path))
    page.text("Single passes on dev problems; the bands show the range over training seeds.")
    page.table(*_main_table(rows))
    page.text("## Differences")
    page.table(*_differences(rows))
    page.text("## Tokens")
    _tokens(page, rows)
    if rows[0].curves[0][0].values:
        page.text("## Reward hacking")
        page.text(
            "Single passes on dev problems during training: mean true reward, mean value of the final states by the "
            "shipped MASPRM, and the AUC with which this value separates right from wrong final states. If the value "
            "rises and the reward does not, the agents exploit the critic."
        )
        page.table(*_hacking(rows))
    return write_page(page, args.page.parent, f"python -m benchmarks.learning {args.words}".rstrip(), facts)


def _main_table(rows: Sequence[Row]) -> Lines:
    kinds = [kind for kind in COLUMNS if any(kind in row.found for row in rows)]
    head = ["agents", "seeds", "training tokens"]
    for kind in kinds:
        head += [COLUMNS[kind], *(["TOK"] if kind in COSTS else [])]
    lines = []
    for row in rows:
        trained = [str(len(row.curves)), f"{row.budget():,.0f}"] if row.budget() else ["", "0"]
        line = [row.name, *trained]
        for kind in kinds:
            line.append(_hit(row, kind) if kind in row.found else "")
            if kind in COSTS:
                line.append(f"{row.tokens(kind):,.0f}" if kind in row.found else "")
        lines.append(line)
    return head, lines


def _hit(row: Row, kind: str) -> str:
    shares = row.shares(kind)
    found = nested_bootstrap(shares, [dict.fromkeys(shares[0], 0.0)])
    return f"{percent(found.mean)} ({span(found.low, found.high)})"


def _differences(rows: Sequence[Row]) -> Lines:
    named = {row.name: row for row in rows}
    before = rows[0]
    pairs = [
        (f"{row.name}: {COLUMNS[kind]} over the agents before", row.shares(kind), before.shares(kind))
        for row in rows[1:]
        for kind in COLUMNS
        if kind in row.found and kind in before.found
    ]
    if OURS in named:
        pairs += [
            (f"{OURS} over {row.name}: {COLUMNS[kind]}", named[OURS].shares(kind), row.shares(kind))
            for row in rows[1:]
            for kind in ("single", "mcts")
            if row.name != OURS and kind in row.found and kind in named[OURS].found
        ]
    pairs += [
        (f"{row.name}: {COLUMNS['mcts']} over {COLUMNS['vote']}", row.shares("mcts"), row.shares("vote"))
        for row in rows
        if "mcts" in row.found and "vote" in row.found
    ]
    lines = [(text, *gap_cells(nested_bootstrap(ours, theirs))) for text, ours, theirs in pairs]
    return ["difference, in points", "here", "95% interval"], lines


def _arrays(row: Row) -> tuple[Floats, Floats]:
    """Return tokens of shape ``[seeds, points]`` and dev answers of shape ``[seeds, points, problems]``."""
    tokens = [[float(point.tokens) for point in points] for points in row.curves]
    right = [[[point.right[key] for key in sorted(point.right)] for point in points] for points in row.curves]
    return np.array(tokens), np.array(right)


def crossing(tokens: Sequence[float] | Floats, shares: Sequence[float] | Floats, level: float) -> float:
    """Return the tokens at which a piecewise linear curve first reaches a level; infinity if it does not.

    Args:
        tokens: Increasing, one per point.
        shares: The curve's value at each point.
        level: The level.
    """
    for place, share in enumerate(shares):
        if share >= level:
            if not place:
                return float(tokens[0])
            part = (level - shares[place - 1]) / (share - shares[place - 1])
            return float(tokens[place - 1] + part * (tokens[place] - tokens[place - 1]))
    return math.inf


def _drawn(rows: Sequence[Row], statistic: Statistic) -> tuple[float, float, float]:
    """Return a statistic of mean curves, with its 95% bootstrap interval over problems and training runs."""
    arrays = [_arrays(row) for row in rows]
    rng = np.random.default_rng(0)
    found = []
    for _ in range(RESAMPLES):
        problems = arrays[0][1].shape[2]
        drawn = rng.integers(problems, size=problems)
        curves = []
        for tokens, right in arrays:
            seeds = rng.integers(len(tokens), size=len(tokens))
            curves.append((tokens[seeds].mean(0), right[seeds][:, :, drawn].mean((0, 2))))
        found.append(statistic(curves))
    here = statistic([(tokens.mean(0), right.mean((0, 2))) for tokens, right in arrays])
    low, high = np.quantile(found, [0.025, 0.975], method="nearest")
    return here, float(low), float(high)


def _tokens(page: Page, rows: Sequence[Row]) -> None:
    """Compare the tokens of each row of GRPO with those of the shared outcome."""
    named = {row.name: row for row in rows}
    if SHARED not in named:
        return
    shared = named[SHARED]
    mean = _arrays(shared)[1].mean((0, 2))
    if mean.max() == mean[0]:
        page.text(f"The curve of `{SHARED}` never exceeds the accuracy of the untrained agents.")
        return
    page.text(
        "Generated tokens at which a row's mean dev curve reaches the last value and the maximum of the curve of "
        f"`{SHARED}`, as a share of the tokens at that point; 95% bootstrap intervals over problems and training runs. "
        "The goal is at most 40%."
    )

    def share(best: bool) -> Statistic:
        def statistic(curves: list[tuple[Floats, Floats]]) -> float:
            (tokens, right), (own, ours) = curves[0], curves[1]
            place = 1 + int(right[1:].argmax()) if best else -1
            return crossing(own, ours, float(right[place])) / float(tokens[place])

        return statistic

    lines = []
    for row in rows[1:]:
        if row is shared:
            continue
        cells = [row.name]
        for best in (False, True):
            found = _drawn([shared, row], share(best))
            shown = [f"{100 * one:.0f}%" if math.isfinite(one) else "not reached" for one in found]
            cells.append(f"{shown[0]} ({shown[1]} to {shown[2]})")
        lines.append(cells)
    page.table(["agents", "of the tokens to its end", "of the tokens to its maximum"], lines)


def _hacking(rows: Sequence[Row]) -> Lines:
    lines = []
    for row in rows:
        for place in range(len(row.curves[0])):
            if row is not rows[0] and not place:
                continue
            points = [points[place] for points in row.curves]
            reward = sum(2 * point.accuracy - 1 for point in points) / len(points)
            values = [value for point in points for value in point.values.values()]
            separates = [
                auc(list(point.values.values()), [point.right[key] for key in point.values]) for point in points
            ]
            lines.append(
                [
                    row.name,
                    f"{sum(point.tokens for point in points) / len(points):,.0f}",
                    f"{reward:+.3f}",
                    f"{sum(values) / len(values):+.3f}",
                    f"{sum(separates) / len(separates):.3f}",
                ]
            )
    return ["agents", "tokens", "true reward", "MASPRM", "AUC"], lines


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw dev accuracy of single passes over generated tokens: a line per method, a band over the training seeds."""
    figure = figure_class()(figsize=(8.4, 4.0), dpi=200, layout="constrained")
    axes: Any = figure.subplots()
    looks = ((color, style) for style in ("-", "--", ":") for color in COLORS)
    for row, (color, style) in zip(rows[1:], looks, strict=False):
        tokens, right = _arrays(row)
        means = 100 * right.mean(2)
        x = tokens.mean(0) / 1000
        axes.fill_between(x, means.min(0), means.max(0), color=color, alpha=0.15, lw=0)
        axes.plot(x, means.mean(0), color=color, ls=style, marker="o", ms=3, lw=1.6, label=row.name)
    axes.axhline(100 * rows[0].curves[0][0].accuracy, color="#5a626c", lw=1, ls=":", label="before")
    dress(axes, "generated training tokens, thousands", "single pass, dev, %")
    figure.legend(loc="outside right center", frameon=False, fontsize=8)
    save_figure(figure, path)
