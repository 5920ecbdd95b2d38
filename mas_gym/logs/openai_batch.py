"""OpenAI's batch files: the requests, and the responses that refer to them by ``custom_id``."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing

from mas_gym.errors import shown
from mas_gym.internal.json_types import JSONMapping, JSONObject
from mas_gym.logs.chats import made
from mas_gym.logs.messages import read_history
from mas_gym.logs.transcript import BrokenLine, Transcript, validate_transcript
from mas_gym.tasks.data_rows import BadRow


def is_openai_batch(row: object) -> bool:
    """Whether a row is a request or a response of a batch."""
    return isinstance(row, Mapping) and "custom_id" in row and ("body" in row or "response" in row)


class BatchCollector:
    """Joins responses with their requests, which may be in another file; both are kept on disk."""

    def __init__(self) -> None:
        """Open a temporary file, which is deleted when it is closed."""
        self._connection = sqlite3.connect("")
        self._connection.execute("CREATE TABLE requests (id TEXT PRIMARY KEY, body TEXT)")
        self._connection.execute("CREATE TABLE responses (id TEXT, place TEXT, row TEXT)")

    def add(self, place: str, row: object) -> None:
        """Store a request or a response.

        Raises:
            BadRow: The row is neither.
        """
        if not isinstance(row, Mapping) or not is_openai_batch(row) or not isinstance(row["custom_id"], str):
            raise BadRow(f"expected a line with custom_id and body or response (OpenAI batch), got {shown(row)}")
        if "response" in row:
            response = (row["custom_id"], place, json.dumps(row))
            self._connection.execute("INSERT INTO responses VALUES (?, ?, ?)", response)
        else:
            request = (row["custom_id"], json.dumps(row["body"]))
            self._connection.execute("INSERT OR REPLACE INTO requests VALUES (?, ?)", request)

    def transcripts(self) -> Iterator[Transcript | BrokenLine]:
        """Yield a transcript per choice of each response, and close the file."""
        with closing(self._connection) as connection:
            if not connection.execute("SELECT count(*) FROM responses").fetchone()[0]:
                for (identity,) in connection.execute("SELECT id FROM requests LIMIT 1"):
                    yield BrokenLine(f"request {shown(identity)}", "expected the batch's output file as well, got none")
            joined = (
                "SELECT r.id, place, row, body FROM responses r LEFT JOIN requests q ON r.id = q.id ORDER BY r.rowid"
            )
            for identity, place, row, body in connection.execute(joined):
                try:
                    for one in _transcripts(
                        place, identity, json.loads(row), None if body is None else json.loads(body)
                    ):
                        yield validate_transcript(one)
                except BadRow as fault:
                    yield BrokenLine(place, str(fault))
                except (TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
                    yield BrokenLine(place, f"{type(error).__name__}: {shown(error)}")


def _transcripts(place: str, identity: str, row: JSONMapping, request: object) -> Iterator[Transcript]:
    response, error = row.get("response"), row.get("error")
    body = response.get("body") if isinstance(response, Mapping) else None
    if error or not isinstance(body, Mapping) or body.get("error"):
        raise BadRow(f"expected a response, got the error {shown(error or (body or {}).get('error') or response)}")
    if not isinstance(request, Mapping):
        raise BadRow(f"expected the request {shown(identity)}; import the batch's input file together with its output")
    asked = request.get("messages", request.get("input"))
    prompt = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    if not isinstance(prompt, list):
        raise BadRow(f"expected a request with messages or input, got {shown(request)}")
    for reply in _replies(body):
        yield made(
            read_history([*prompt, reply]),
            facts={"custom_id": identity, **({"model": body["model"]} if isinstance(body.get("model"), str) else {})},
            place=place,
        )


def _replies(body: JSONMapping) -> list[JSONObject]:
    usage = body.get("usage")
    counts = usage if isinstance(usage, Mapping) else {}
    tokens = counts.get("completion_tokens", counts.get("output_tokens", 0))
    if isinstance(body.get("choices"), list):
        messages = [choice.get("message") for choice in body["choices"] if isinstance(choice, Mapping)]
        found = [dict(message) for message in messages if isinstance(message, Mapping)]
    else:
        output = body.get("output")
        items = [item for item in output if isinstance(item, Mapping)] if isinstance(output, list) else []
        parts = [part for item in items if item.get("type") == "message" for part in item.get("content", ())]
        calls = [item for item in items if item.get("type") == "function_call"]
        found = [{"role": "assistant", "content": parts, "tool_calls": calls}] if parts or calls else []
    if not found:
        raise BadRow(f"expected a chat completion or a response, got {shown(body)}")
    return [{**found[0], "tokens": tokens}] if len(found) == 1 else found
