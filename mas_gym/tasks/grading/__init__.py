"""Grading of a final message: where it states its answer, and whether that equals the reference."""
