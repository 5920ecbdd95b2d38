"""The APIs in which programs call models, besides OpenAI's Chat Completions, by the path of their requests."""

from __future__ import annotations

from mas_gym.programs.chat_completions import CallDialect
from mas_gym.programs.dialects.messages import MESSAGES
from mas_gym.programs.dialects.responses import RESPONSES

DIALECTS: dict[str, CallDialect] = {path: dialect for dialect in (RESPONSES, MESSAGES) for path in dialect.paths}
PROVIDERS = sorted({dialect.provider for dialect in DIALECTS.values()})
"""Prefixes of the environment variables from which clients read their base URL and API key."""
