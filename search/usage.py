"""The cost of a search."""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import attrgetter, sub
from typing import NamedTuple

from mas_gym.internal.json_types import JSONObject


class TagUsage(NamedTuple):
    """The part of a usage that was requested with one tag (`search.Propose`).

    Attributes:
        tag: The tag.
        calls: Agent calls (AC).
        generated_tokens: Generated tokens (TOK).
        prompt_tokens: Prompt tokens.
        cached_tokens: Prompt tokens that the engine had cached.
        chosen: Messages on the paths to the chosen answers.
    """

    tag: str
    calls: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    chosen: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """The cost of a search or a run (paper, App. "Compute budgets and accounting"); supports ``+``.

    Attributes:
        agent_calls: AC, LLM generations by agents; every sample counts, duplicates included.
        generated_tokens: TOK, generated tokens over all agent calls, duplicates included.
        reward_calls: RC, critic forward passes: one per state and search; for a combination of critics, one per member;
            for a free critic, none.
        reward_hits: Evaluations of states that this search had already scored, without a forward pass.
        prompt_tokens: Prompt tokens, once per call to the engine: servers with one sample per call process the prompt
            once per sample, others once per request.
        cached_tokens: Prompt tokens that the engine had cached.
        dropped_tokens: Tokens cut from the oldest input because a prompt did not fit the context window.
        reasoning_only: Messages without text because the reply contains only reasoning.
        critic_tokens: Tokens that the critic generated, such as a judge's verdicts; not included in TOK.
        critic_prompt_tokens: Prompt tokens that the critic read to generate them.
        unread_verdicts: Verdicts of a judge that could not be parsed.
        grader_tokens: Tokens that a judge generated to grade the answers; not included in TOK.
        grader_prompt_tokens: Prompt tokens that the judge read to generate them.
        unrecorded: Messages that a planner requested beyond those of a recorded run (`search.Recorded`).
        seconds: Wall-clock seconds from start to end; ``+`` adds them up.
        tags: The usage of each tag, sorted by name; usage without a tag is in the other fields only.
    """

    agent_calls: int = 0
    generated_tokens: int = 0
    reward_calls: int = 0
    reward_hits: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    dropped_tokens: int = 0
    reasoning_only: int = 0
    critic_tokens: int = 0
    critic_prompt_tokens: int = 0
    unread_verdicts: int = 0
    grader_tokens: int = 0
    grader_prompt_tokens: int = 0
    unrecorded: int = 0
    seconds: float = 0.0
    tags: tuple[TagUsage, ...] = ()

    def __post_init__(self) -> None:
        """Convert tags read from JSON (lists of lists) to `TagUsage`."""
        if self.tags != ():
            object.__setattr__(self, "tags", tuple(TagUsage(*tag) for tag in self.tags))

    def __add__(self, other: Usage) -> Usage:
        # Written out because it runs for every reply; this is many times faster than a loop over the fields.
        return Usage(
            self.agent_calls + other.agent_calls,
            self.generated_tokens + other.generated_tokens,
            self.reward_calls + other.reward_calls,
            self.reward_hits + other.reward_hits,
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.dropped_tokens + other.dropped_tokens,
            self.reasoning_only + other.reasoning_only,
            self.critic_tokens + other.critic_tokens,
            self.critic_prompt_tokens + other.critic_prompt_tokens,
            self.unread_verdicts + other.unread_verdicts,
            self.grader_tokens + other.grader_tokens,
            self.grader_prompt_tokens + other.grader_prompt_tokens,
            self.unrecorded + other.unrecorded,
            self.seconds + other.seconds,
            _sum(self.tags, other.tags, 1) if self.tags or other.tags else (),
        )

    def __sub__(self, other: Usage) -> Usage:
        amounts = map(sub, _amounts(self), _amounts(other))
        return Usage(*amounts, _sum(self.tags, other.tags, -1))  # type: ignore[call-arg]

    def to_dict(self) -> JSONObject:
        """Return the fields by name; ``Usage(**found)`` reads them, also from JSON."""
        # Many times faster than dataclasses.asdict, which copies each number.
        return dict(zip(AMOUNTS, _amounts(self), strict=True)) | {"tags": self.tags}


AMOUNTS = tuple(field.name for field in fields(Usage) if field.name != "tags")
"""The fields of `Usage` that are numbers."""

_amounts = attrgetter(*AMOUNTS)


def _sum(first: tuple[TagUsage, ...], second: tuple[TagUsage, ...], sign: int) -> tuple[TagUsage, ...]:
    found = {tag.tag: tag for tag in first}
    for tag in second:
        known = found.get(tag.tag, TagUsage(tag.tag))
        found[tag.tag] = TagUsage(tag.tag, *(a + sign * b for a, b in zip(known[1:], tag[1:], strict=True)))
    return tuple(found[name] for name in sorted(found))
