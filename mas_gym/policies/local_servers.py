"""Short names of model servers that people run on their machine, at the servers' default addresses."""

from __future__ import annotations

from mas_gym.policies.openai import OpenAIPolicy, load_openai


def load_ollama(argument: str, **options: object) -> OpenAIPolicy:
    """Load ``"NAME"``, a model that Ollama serves on this machine; options are those of `OpenAIOptions`."""
    return load_openai(f"{argument}@http://127.0.0.1:11434/v1", **options)


def load_lmstudio(argument: str, **options: object) -> OpenAIPolicy:
    """Load ``"NAME"``, a model that LM Studio serves on this machine; options are those of `OpenAIOptions`."""
    return load_openai(f"{argument}@http://127.0.0.1:1234/v1", **options)
