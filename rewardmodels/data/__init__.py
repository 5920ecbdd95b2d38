"""Training data: states as text, labels and pairs mined from search trees, and their export."""
