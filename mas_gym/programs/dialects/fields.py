"""Helpers to read and write the fields of a dialect."""

from __future__ import annotations

import json
from collections.abc import Mapping

from mas_gym.errors import shown
from mas_gym.internal.json_types import JSONObject
from mas_gym.programs.chat_completions import CallError


def reject(asked: JSONObject, remedies: Mapping[str, str]) -> None:
    """Raise `CallError` if a request sets one of the fields with a remedy; ``false`` does not count."""
    for key, remedy in remedies.items():
        if asked.get(key) not in (None, False):
            raise CallError(f"{key}: expected none, got {shown(asked[key])}; {remedy}")


def object_at(asked: JSONObject, key: str) -> JSONObject:
    """Return an optional object of a request; empty if it is missing. Raises `CallError`."""
    value = asked.get(key)
    if value is not None and not isinstance(value, dict):
        raise CallError(f"{key}: expected an object, got {shown(value)}")
    return value or {}


def list_at(asked: JSONObject, key: str) -> list[object]:
    """Return an optional list of a request; empty if it is missing. Raises `CallError`."""
    value = asked.get(key)
    if value is not None and not isinstance(value, list):
        raise CallError(f"{key}: expected a list, got {shown(value)}")
    return value or []


def text_at(place: str, content: object) -> str:
    """Return a content, which is a text or a list of parts with texts. Raises `CallError` for images and files."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [None]
    texts = [part.get("text", part.get("refusal")) if isinstance(part, dict) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise CallError(f"{place}: expected text, got {shown(content)}")
    return "".join(map(str, texts))


def request_digest(completion: JSONObject) -> str:
    """Return the digest of the request in the id of its reply, so that ids are equal on replay."""
    return str(completion["id"]).removeprefix("chatcmpl-")


def server_event(kind: str, data: JSONObject) -> bytes:
    """Return a named server-sent event."""
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **data})}\n\n".encode()
