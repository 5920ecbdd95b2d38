"""Error bodies of named servers (tests/data/server_errors.json; ``source`` is a public report), and what they mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mas_gym.policies.retries import StatusError, fault_of
from mas_gym.policies.server_errors import Fault, read_error

SENT = json.loads((Path(__file__).parent / "data" / "server_errors.json").read_text())


@pytest.mark.parametrize("sent", SENT, ids=[sent["server"] for sent in SENT])
def test_error_of_a_named_server_is_recognized(sent: dict[str, Any]) -> None:
    read = read_error(sent["status"], json.dumps(sent["body"]).encode())
    kind, expected = sent["expected"]["meaning"] or "refused", {**sent["expected"]}
    expected["params"] = tuple(expected.get("params", ()))
    del expected["meaning"]
    assert read == Fault(kind, read.reason, **expected) and read.reason


@pytest.mark.parametrize(
    "body",
    [
        b"404 page not found",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"error": {"message": "HTTP 400: the context length was 12 of 34 tokens"}}',
        b'{"error": {"message": "the seed is unlucky", "type": 7, "code": []}}',
        b'{"detail": [{"loc": 3}, 4], "message": null}',
        b'{"error": {"message": "litellm.X: Exception - {\\"error\\": {\\"message\\": 3}}"}}',
    ],
)
def test_error_of_an_unknown_server_has_no_meaning_and_no_numbers(body: bytes) -> None:
    read = read_error(400, body)
    assert read == Fault("refused", read.reason)


def test_torn_error_is_tried_again() -> None:
    body = b'{"error": {"message": "max_tokens=1024 cannot be gre'
    fault = fault_of(StatusError(400, {}, body))
    assert fault is not None and fault.kind == "bad reply"
