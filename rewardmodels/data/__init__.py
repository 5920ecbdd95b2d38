"""Training data: serialized states, labels and pairs mined from search trees, and their export."""
