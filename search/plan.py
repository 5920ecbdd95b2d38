"""What a search comes to: a `Plan`, its ranked candidates, and what it cost."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import NamedTuple

from mas_gym.state import MASState
from search.tree import Tree


@dataclass(frozen=True, slots=True)
class Usage:
    """What was spent (paper, App. "Compute budgets and accounting"); adds up with ``+``.

    Attributes:
        agent_calls: AC, LLM generations by agents; every sample counts, repeated texts too.
        generated_tokens: TOK, generated tokens over all agent calls; likewise.
        reward_calls: RC, critic forwards; one per state and search, none for a critic that is free.
        reward_hits: Evaluations of a state that this search had scored before, at no forward.
        prompt_tokens: Prompt tokens, once per request however many samples it asked for.
        cached_tokens: How many of them the engine had cached.
        dropped_tokens: Tokens cut from the oldest inputs to fit the context window.
        seconds: Wall-clock seconds from start to end; in a sum, the sum.
    """

    agent_calls: int = 0
    generated_tokens: int = 0
    reward_calls: int = 0
    reward_hits: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    dropped_tokens: int = 0
    seconds: float = 0.0

    def __add__(self, other: Usage) -> Usage:
        """Add field by field."""
        # Written out, because it is done for every reply: many times faster than a loop over the fields.
        return Usage(
            self.agent_calls + other.agent_calls,
            self.generated_tokens + other.generated_tokens,
            self.reward_calls + other.reward_calls,
            self.reward_hits + other.reward_hits,
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.dropped_tokens + other.dropped_tokens,
            self.seconds + other.seconds,
        )

    def __sub__(self, other: Usage) -> Usage:
        """Subtract field by field."""
        return Usage(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(Usage)))


@dataclass(frozen=True, slots=True)
class Candidate:
    """A terminal state that a search found (paper, Sec. "Overall experimental setup").

    Attributes:
        state: The terminal state.
        score: What it is ranked by, by default the path score: the mean value after each
            action, or the terminal value with an outcome critic; None when nothing scored it.
        node: Its index in the plan's tree; None before the driver has seen the plan.
        answer: The normalised answer read from its last message; filled in by the driver.
        correct: Whether that answer equals the reference; filled in by the driver.
    """

    state: MASState
    score: float | None = None
    node: int | None = None
    answer: str | None = None
    correct: bool | None = None

    @property
    def text(self) -> str:
        """The final message."""
        return self.state.text


class AnytimePoint(NamedTuple):
    """A point of the anytime curve: what a search would have answered, from this cost on.

    Attributes:
        agent_calls: AC spent so far.
        generated_tokens: TOK spent so far.
        state: The terminal state that decoding would return; None while there was none.
        node: Its index in the plan's tree.
        answer: Its answer; filled in by the driver.
        correct: Whether it is right; filled in by the driver.
    """

    agent_calls: int
    generated_tokens: int
    state: MASState | None
    node: int | None = None
    answer: str | None = None
    correct: bool | None = None


@dataclass(frozen=True)
class Plan:
    """The outcome of one search.

    A planner fills in ``candidates``, ``tree`` and ``anytime``; the driver the rest.

    Attributes:
        candidates: Terminal states: the chosen one first, then by descending score.
        tree: Everything that was tried; of a planner without a tree, its candidates' paths.
        anytime: The curve of answers against cost, one `AnytimePoint` per change of answer.
        problem_id: The problem searched.
        answer: The chosen candidate's answer; None if there is none to read.
        correct: Whether it equals the reference (Hit@1); None before grading.
        usage: What the search cost.
        stopped: Which budget ended the search early; None if none did.
        error: Why the search failed; None if it did not.
        error_details: The traceback of that failure; not stored.
    """

    candidates: tuple[Candidate, ...] = ()
    tree: Tree | None = field(default=None, repr=False)
    anytime: tuple[AnytimePoint, ...] = field(default=(), repr=False)
    problem_id: str = ""
    answer: str | None = None
    correct: bool | None = None
    usage: Usage = field(default_factory=Usage)
    stopped: str | None = None
    error: str | None = None
    error_details: str | None = field(default=None, repr=False, compare=False)

    @classmethod
    def single(cls, state: MASState, score: float | None = None) -> Plan:
        """Return the plan with one candidate, a terminal state; the driver adds the tree of its path."""
        return cls((Candidate(state, score),))

    @property
    def best(self) -> Candidate | None:
        """The chosen candidate."""
        return self.candidates[0] if self.candidates else None

    @property
    def text(self) -> str | None:
        """The chosen candidate's final message."""
        return self.candidates[0].text if self.candidates else None

    def hit(self, k: int) -> bool:
        """Return whether one of the first ``k`` candidates is right (Hit@k)."""
        return any(candidate.correct for candidate in self.candidates[:k])
