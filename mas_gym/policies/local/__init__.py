"""Policies that run a transformers model in this process."""
