"""Plots and pages of finished searches: curves, matrices, and an HTML page to explore a search tree.

The input is plain data. Tables, intervals and the plot of accuracy against cost are in `search.compare`.
"""

from mas_gym.report.pages import TreeNodes, TreePage, tree_page, tree_view, write_plan_page, write_tree_page
from search.compare.plots import Series, save_curves, save_matrices

__all__ = [
    "Series",
    "TreeNodes",
    "TreePage",
    "save_curves",
    "save_matrices",
    "tree_page",
    "tree_view",
    "write_plan_page",
    "write_tree_page",
]
