"""Training data: serialised states, labels and pairs mined from search trees, and their export."""
