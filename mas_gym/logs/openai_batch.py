"""OpenAI's batch files: the requests, and the responses that refer to them by ``custom_id``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mas_gym.errors import shown
from mas_gym.internal.json_types import JSONMapping, JSONObject
from mas_gym.logs.chats import made
from mas_gym.logs.fields import field_text, inside, list_of
from mas_gym.logs.messages import read_history
from mas_gym.logs.transcript import Transcript
from mas_gym.tasks.data_rows import BadRow


def is_openai_batch(row: object) -> bool:
    """Whether a row is a request or a response of a batch."""
    return isinstance(row, Mapping) and "custom_id" in row and ("body" in row or "response" in row)


def batch_parts(row: JSONMapping) -> list[tuple[str, JSONMapping]]:
    """Return a request or a response with its id."""
    return [(field_text(row, "custom_id"), row)]


def batch_transcripts(identity: str, rows: list[JSONObject]) -> Iterator[Transcript]:
    """Yield a transcript per choice of each response to a request.

    Raises:
        BadRow: There is no request or no response, or the response is an error.
    """
    request = next((row["body"] for row in rows if "response" not in row), None)
    responses = [row for row in rows if "response" in row]
    for row in responses:
        if error := row.get("error") or inside(row, "response", "body", "error"):
            raise BadRow(f"expected a response, got the error {shown(error)}")
    if request is None or not responses:
        missing = "request" if request is None else "response"
        raise BadRow(
            f"expected the {missing} {shown(identity)}; import the batch's input file together with its output file"
        )
    asked = request.get("messages", request.get("input"))
    prompt = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    for row in responses:
        body = row["response"]["body"]
        facts = {"custom_id": identity, **({"model": body["model"]} if "model" in body else {})}
        for reply in _replies(body):
            yield made(read_history([*prompt, reply]), facts=facts)


def _replies(body: JSONMapping) -> list[JSONObject]:
    usage = body.get("usage") or {}
    tokens = usage.get("completion_tokens", usage.get("output_tokens", 0))
    found = [choice["message"] for choice in list_of(body.get("choices"))]
    items = list_of(body.get("output"))
    parts = [part for item in items if item["type"] == "message" for part in item["content"]]
    calls = [item for item in items if item["type"] == "function_call"]
    if parts or calls:
        found.append({"role": "assistant", "content": parts, "tool_calls": calls})
    if not found:
        raise BadRow(f"expected a chat completion or a response, got {shown(body)}")
    return [{**found[0], "tokens": tokens}] if len(found) == 1 else found
