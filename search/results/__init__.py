"""Outcomes of searches, with intervals and differences, and their tables."""
