"""Comparisons of planners and critics: `compare` returns a table with intervals and paired differences.

`rows` runs the searches, `matching` adjusts planners to an equal cost, and `comparison` builds the tables of
`search.results`. `first_errors` evaluates critics on `transcripts` with a known first wrong step, `calibration`
evaluates them on stored trees, `selection` chooses among recorded samples, and `blame` finds the message with the
largest drop in value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mas_gym.internal.lazy import lazy_names

if TYPE_CHECKING:
    from search.compare.comparison import compare, matched
    from search.compare.cost_matching import Match, calibrate
    from search.compare.first_errors import FirstErrorFigures, Threshold, bench_critic
    from search.compare.rows import (
        PAPER_PLANNERS,
        Bench,
        Remote,
        Row,
        Workers,
        measure,
        named_critics,
        named_planners,
        pair,
    )
    from search.compare.selection import Selection, select
    from search.results.display import (
        report,
        save_tradeoff,
        to_csv,
        to_html,
        to_json,
        to_latex,
        to_markdown,
        tradeoff_figure,
    )
    from search.results.intervals import (
        FEWEST_PROBLEMS,
        Difference,
        Interval,
        accuracy_interval,
        bootstrap,
        mean_interval,
        mean_std,
        nested_bootstrap,
        paired_difference,
        wilson,
    )
    from search.results.outcomes import Outcome
    from search.results.summary import HIT_RANKS, ResultRow, Spread, differences, find_row, summarise
    from search.results.table import Calibrated, Comparison

_HOMES = {
    "search.compare.rows": "PAPER_PLANNERS Row Bench Remote Workers measure named_critics named_planners pair",
    "search.compare.comparison": "compare matched",
    "search.compare.first_errors": "FirstErrorFigures Threshold bench_critic",
    "search.compare.cost_matching": "Match calibrate",
    "search.compare.selection": "Selection select",
    "search.results.display": ("report save_tradeoff to_csv to_html to_json to_latex to_markdown tradeoff_figure"),
    "search.results.intervals": (
        "FEWEST_PROBLEMS Difference Interval accuracy_interval bootstrap mean_interval mean_std "
        "nested_bootstrap paired_difference wilson"
    ),
    "search.results.outcomes": "Outcome",
    "search.results.summary": "HIT_RANKS ResultRow Spread differences find_row summarise",
    "search.results.table": "Calibrated Comparison",
}

__all__ = [
    "FEWEST_PROBLEMS",
    "HIT_RANKS",
    "PAPER_PLANNERS",
    "Bench",
    "Calibrated",
    "Comparison",
    "Difference",
    "FirstErrorFigures",
    "Interval",
    "Match",
    "Outcome",
    "Remote",
    "ResultRow",
    "Row",
    "Selection",
    "Spread",
    "Threshold",
    "Workers",
    "accuracy_interval",
    "bench_critic",
    "bootstrap",
    "calibrate",
    "compare",
    "differences",
    "find_row",
    "matched",
    "mean_interval",
    "mean_std",
    "measure",
    "named_critics",
    "named_planners",
    "nested_bootstrap",
    "pair",
    "paired_difference",
    "report",
    "save_tradeoff",
    "select",
    "summarise",
    "to_csv",
    "to_html",
    "to_json",
    "to_latex",
    "to_markdown",
    "tradeoff_figure",
    "wilson",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
