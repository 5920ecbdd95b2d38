"""Runs of smolagents: a saved ``RunResult``, or the steps of an agent's memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from mas_gym.errors import shown
from mas_gym.internal.json_types import JSONMapping, JSONObject
from mas_gym.logs.chats import made
from mas_gym.logs.messages import read_history, written
from mas_gym.logs.transcript import Transcript
from mas_gym.tasks.data_rows import BadRow


def is_smolagents(row: object) -> bool:
    """Whether a row is a run of smolagents."""
    steps = row.get("steps") if isinstance(row, Mapping) else row
    return isinstance(steps, list) and any(
        isinstance(step, Mapping) and "step_number" in step and "model_output" in step for step in steps
    )


def smolagents(row: object) -> Transcript:
    """Read a run: an action is a message of the agent, and its observations are a message of the tool.

    Raises:
        BadRow: The row has another format, or contains no task.
    """
    if not is_smolagents(row):
        raise BadRow(f"expected steps with step_number and model_output (smolagents), got {shown(row)}")
    fields = row if isinstance(row, Mapping) else {}
    steps = [step for step in (fields.get("steps") if fields else row) if isinstance(step, Mapping)]  # type: ignore[union-attr]
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
    usage = step.get("token_usage")
    tokens = usage.get("output_tokens") if isinstance(usage, Mapping) else 0
    calls = step.get("tool_calls")
    said = {"content": step.get("model_output"), "tool_calls": calls, "tokens": tokens}
    yield {"role": "assistant", "name": "Agent", **said}
    dropped["error of a step"] += bool(step.get("error"))
    if isinstance(step.get("observations"), str) and step["observations"].strip():
        first = calls[0] if isinstance(calls, list) and calls and isinstance(calls[0], Mapping) else {}
        yield {"role": "tool", "tool_call_id": first.get("id"), "content": step["observations"]}
