"""Rollouts of the library verifiers, as its evaluations save them."""

from __future__ import annotations

from mas_gym.errors import shown
from mas_gym.internal.json_types import JSONMapping
from mas_gym.logs.chats import made, reference_of
from mas_gym.logs.fields import has_fields, inside, list_of
from mas_gym.logs.messages import read_history
from mas_gym.logs.transcript import Transcript, number, small_facts
from mas_gym.tasks.data_rows import BadRow

is_verifiers = has_fields("prompt", "completion", "reward")


def verifiers(row: JSONMapping) -> Transcript:
    """Read a rollout; the question is the last user message of the prompt, and a reward of 1 or 0 is the outcome.

    Raises:
        BadRow: The prompt has no user message.
    """
    prompt, completion = (
        _messages(row[name], role) for name, role in (("prompt", "user"), ("completion", "assistant"))
    )
    places = [place for place, one in enumerate(prompt) if inside(one, "role") == "user"]
    if not places:
        raise BadRow(f"expected a prompt with a user message, got {shown(row['prompt'])}")
    # Messages before the last user message are examples.
    shown_before = [one for one in prompt[: places[-1]] if inside(one, "role") == "system"]
    history = read_history([*shown_before, prompt[places[-1]], *completion])
    reward = number(row["reward"], "reward")
    others = small_facts(row, {"prompt", "completion", "reward", "answer"})
    if left_out := places[-1] - len(shown_before):
        others["dropped"]["example in the prompt"] = left_out
    return made(
        history,
        reference=reference_of(row.get("answer") or None),
        correct=bool(reward) if reward in (0, 1) else None,
        score=None if reward in (0, 1) else reward,
        **others,
    )


def _messages(value: object, role: str) -> list[object]:
    return [{"role": role, "content": value}] if isinstance(value, str) else list_of(value)
