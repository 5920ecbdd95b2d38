"""Outcomes of searches, their intervals and differences, and the tables that show them."""
