"""Reports of finished searches: intervals, tables, pictures, and a page on which a search tree can be walked.

Nothing here knows a planner or a model; the input is plain data.
"""

from mas_gym.report.curves import Series, save_curves, save_matrices
from mas_gym.report.outcomes import HIT_RANKS, Outcome, Row, Spread, differences, summarise
from mas_gym.report.page import TreeNodes, TreeView, tree_page, write_tree_page
from mas_gym.report.plots import save_tradeoff, tradeoff_figure
from mas_gym.report.stats import Difference, Interval, mean_std, paired_bootstrap, wilson
from mas_gym.report.tables import report, results_table, to_csv, to_json, to_markdown

__all__ = [
    "HIT_RANKS",
    "Difference",
    "Interval",
    "Outcome",
    "Row",
    "Series",
    "Spread",
    "TreeNodes",
    "TreeView",
    "differences",
    "mean_std",
    "paired_bootstrap",
    "report",
    "results_table",
    "save_curves",
    "save_matrices",
    "save_tradeoff",
    "summarise",
    "to_csv",
    "to_json",
    "to_markdown",
    "tradeoff_figure",
    "tree_page",
    "wilson",
    "write_tree_page",
]
