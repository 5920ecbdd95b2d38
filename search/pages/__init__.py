"""HTML pages of finished searches, such as an interactive page of a search tree.

Tables, intervals and plots are in `search.results`.
"""

from search.pages.tree_page import tree_page, write_tree_page

__all__ = ["tree_page", "write_tree_page"]
