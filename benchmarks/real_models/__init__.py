"""The paper's experiment on a real language model; see ``docs/real-models.md``."""
