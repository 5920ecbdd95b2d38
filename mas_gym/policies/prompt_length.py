"""Prompts that do not fit the context window: an error by default, because a shortened question is another question."""

from __future__ import annotations

from mas_gym.errors import PromptTooLongError


def reserved_tokens(window: int, max_new_tokens: int) -> int:
    """Return how many tokens of a window are reserved for the reply: ``max_new_tokens``, but at most a quarter."""
    return min(max_new_tokens, max(1, window // 4))


def too_long(where: str, prompt: int | None, window: int | None, reserved: int, said: str = "") -> PromptTooLongError:
    """Return the error for a prompt that does not fit the window of an engine, in tokens; ``said`` is its message."""
    fits = "a prompt that is not too long for the context window"
    if window is not None:
        fits = f"a prompt of at most {window - reserved:,} tokens (window {window:,}, {reserved:,} for the reply)"
    got = "a longer one" if prompt is None else f"{prompt:,}"
    quoted = f" ({said})" if said else ""
    return PromptTooLongError(
        f"{where}: expected {fits}, got {got}{quoted}; use a model or a server with a longer window, lower the "
        "token limits of the agents (--max-tokens), or add #truncate=true to the policy to cut the oldest text"
    )
