"""Runs of smolagents: a saved ``RunResult``, or the steps of an agent's memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from mas_gym.internal.json_types import JSONMapping, JSONObject
from mas_gym.logs.chats import made
from mas_gym.logs.fields import has_fields, inside, list_of
from mas_gym.logs.messages import read_history, written
from mas_gym.logs.transcript import Transcript
from mas_gym.tasks.data_rows import BadRow

_is_action = has_fields("step_number", "model_output")


def is_smolagents(row: object) -> bool:
    """Whether a row is a run of smolagents."""
    steps = row.get("steps") if isinstance(row, Mapping) else row
    return any(map(_is_action, list_of(steps)))


def smolagents(row: JSONMapping | list[JSONMapping]) -> Transcript:
    """Read a run: an action is a message of the agent, and its observations are a message of the tool.

    Raises:
        BadRow: The row contains no task.
    """
    fields = {"steps": row} if isinstance(row, list) else row
    steps = fields["steps"]
    task = next((step["task"] for step in steps if isinstance(step.get("task"), str)), fields.get("task"))
    if not isinstance(task, str):
        raise BadRow("expected a step with the task; save agent.memory.get_full_steps(), or the whole RunResult")
    dropped: Counter[str] = Counter()
    messages = [message for step in steps for message in _messages(step, dropped)]
    output = fields.get("output")
    return made(
        read_history(messages, task),
        answer=None if output is None else written(output),
        facts={"state": fields["state"]} if isinstance(fields.get("state"), str) else {},
        dropped=dropped,
    )


def _messages(step: JSONMapping, dropped: Counter[str]) -> Iterator[JSONObject]:
    if isinstance(step.get("system_prompt"), str):
        yield {"role": "system", "content": step["system_prompt"]}
    if "plan" in step:
        yield {"role": "assistant", "name": "Agent", "content": step["plan"]}
    if "step_number" not in step:
        return
    calls, tokens = step.get("tool_calls"), inside(step, "token_usage", "output_tokens")
    said = {"content": step.get("model_output"), "tool_calls": calls, "tokens": tokens}
    yield {"role": "assistant", "name": "Agent", **said}
    dropped["error of a step"] += bool(step.get("error"))
    if step.get("observations"):
        yield {"role": "tool", "tool_call_id": calls[0].get("id") if calls else None, "content": step["observations"]}
