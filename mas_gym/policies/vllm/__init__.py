"""Policies on a vLLM engine of this process."""
