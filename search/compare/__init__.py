"""Comparing planners and critics: `compare` gives a table with intervals and paired differences.

`bench` runs the searches, `outcomes` reduces them to rows, with intervals and the paired bootstrap, `display` shows
rows as tables and plots, and `comparison` puts them together. `critics` measures critics, also on the `transcripts`
whose first wrong step is known.
"""

from search.compare.bench import (
    PAPER_PLANNERS,
    Arm,
    Bench,
    Calibrated,
    Match,
    Remote,
    Workers,
    calibrate,
    measure,
    named_critics,
    named_planners,
    pair,
)
from search.compare.comparison import Comparison, compare, matched
from search.compare.critics import FirstErrorFigures, Threshold, bench_critic
from search.compare.display import (
    report,
    results_table,
    save_tradeoff,
    to_csv,
    to_html,
    to_json,
    to_latex,
    to_markdown,
    tradeoff_figure,
)
from search.compare.outcomes import (
    HIT_RANKS,
    Difference,
    Interval,
    Outcome,
    ResultRow,
    Spread,
    differences,
    find_row,
    mean_std,
    nested_bootstrap,
    paired_bootstrap,
    summarise,
    wilson,
)

__all__ = [
    "HIT_RANKS",
    "PAPER_PLANNERS",
    "Arm",
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
    "Spread",
    "Threshold",
    "Workers",
    "bench_critic",
    "calibrate",
    "compare",
    "differences",
    "find_row",
    "matched",
    "mean_std",
    "measure",
    "named_critics",
    "named_planners",
    "nested_bootstrap",
    "pair",
    "paired_bootstrap",
    "report",
    "results_table",
    "save_tradeoff",
    "summarise",
    "to_csv",
    "to_html",
    "to_json",
    "to_latex",
    "to_markdown",
    "tradeoff_figure",
    "wilson",
]
