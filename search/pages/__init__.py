"""HTML pages of finished searches, such as an interactive page of a search tree.

Tables, intervals and plots are in `search.results`.
"""

from search.pages.tree_page import tree_page as tree_page
from search.pages.tree_page import write_tree_page as write_tree_page
