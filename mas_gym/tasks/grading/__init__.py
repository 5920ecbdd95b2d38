"""Grading of final messages: extraction of the answer and comparison with the reference."""
