"""Gymnasium and PettingZoo environments of multi-agent systems, with spaces, wrappers and vector environments."""
