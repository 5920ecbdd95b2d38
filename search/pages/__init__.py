"""HTML pages of finished searches, such as an interactive page of a search tree.

The input is plain data. Tables, intervals and plots are in `search.results`.
"""

from search.pages.tree_page import TreeNodes as TreeNodes
from search.pages.tree_page import TreePage as TreePage
from search.pages.tree_page import tree_page as tree_page
from search.pages.tree_page import write_tree_page as write_tree_page
