"""HTML pages of finished searches, such as an interactive page of a search tree.

The input is plain data. Tables, intervals and plots are in `search.results`.
"""

from search.pages.tree_page import TreeNodes, TreePage, tree_page, write_tree_page

__all__ = [
    "TreeNodes",
    "TreePage",
    "tree_page",
    "write_tree_page",
]
