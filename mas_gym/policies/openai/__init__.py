"""Policies over any OpenAI-compatible server."""
