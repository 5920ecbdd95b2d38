"""The result of a search: a `Plan` with ranked candidates, the tree and the cost, and how its answers are graded.

`Grader` is the only place that sees reference answers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from html import escape
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from mas_gym.programs import Call
from mas_gym.systems.graph import MAS
from mas_gym.systems.prompts import ChatMessage
from mas_gym.systems.state import MASState
from search.tree import Tree
from search.usage import Usage


@dataclass(frozen=True, slots=True)
class Candidate:
    """A terminal state that a search found (paper, Sec. "Overall experimental setup").

    Attributes:
        state: The terminal state.
        score: The score that ranks it, by default the path score: the mean value after each
            action, or the terminal value with an outcome critic; None if nothing scored it.
        node: Its index in the plan's tree; None until the driver has seen the plan.
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
    """A point of the anytime curve: the answer of a search that stops at this cost.

    Attributes:
        agent_calls: AC spent so far.
        generated_tokens: TOK spent so far.
        state: The terminal state that decoding would return; None while there was none.
        node: Its index in the plan's tree.
        answer: Its answer; filled in by the driver.
        correct: Whether it is correct; filled in by the driver.
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
        tree: The search tree; for a planner without one, the paths of its candidates.
        anytime: The curve of answers against cost, one `AnytimePoint` per change of answer.
        problem_id: The problem searched.
        answer: The chosen candidate's answer; None if none can be read.
        correct: Whether that answer equals the reference (Hit@1); None before grading.
        usage: The cost of the search.
        stopped: The budget that ended the search early; None if none did, or if the planner stayed within it.
        error: Why the search failed; None if it did not.
        error_details: The traceback of that failure; not stored.
        mas: The system that was searched; filled in by the driver.
        requests: For a program, the prompt that each message of the chosen path replies to, by the message's node;
            long ones are cut.
        order_varied: Whether concurrent calls of an agent program came too late to be ordered by content; not stored.
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
    mas: MAS | None = field(default=None, repr=False, compare=False)
    requests: Mapping[int, tuple[ChatMessage, ...]] = field(default_factory=dict, repr=False, compare=False)
    order_varied: bool = field(default=False, repr=False, compare=False)

    @classmethod
    def single(cls, state: MASState, score: float | None = None) -> Plan:
        """Return a plan with one candidate, a terminal state; the driver adds the tree of its path."""
        return cls((Candidate(state, score),))

    @property
    def best(self) -> Candidate | None:
        """The chosen candidate."""
        return self.candidates[0] if self.candidates else None

    @property
    def text(self) -> str | None:
        """The chosen candidate's final message."""
        return self.candidates[0].text if self.candidates else None

    @property
    def outcome(self) -> str:
        """How it ended: ``"right"``, ``"wrong"``, ``"no answer"``, ``"failed"``, or ``"answered"`` before grading."""
        if self.error is not None:
            return "failed"
        if self.answer is None:
            return "no answer"
        return {True: "right", False: "wrong", None: "answered"}[self.correct]

    def hit(self, k: int) -> bool:
        """Return whether one of the first ``k`` candidates is correct (Hit@k)."""
        return any(candidate.correct for candidate in self.candidates[:k])

    def write_page(self, path: str | os.PathLike[str], *, reference: str | None = None) -> Path:
        """Write the search tree as an HTML page that stands alone; return its path.

        Args:
            path: The file.
            reference: The reference answer, to be shown beside the chosen one.

        Raises:
            SearchError: The plan has no tree, because the search failed or was read from a store without trees.
        """
        # The pages depend on this package, so they are imported by name.
        written: Path = import_module("search.pages").write_plan_page(self, Path(path), reference=reference)
        return written

    def _repr_html_(self) -> str:
        answer = escape(self.error or (self.answer if self.answer is not None else "none"))
        head = f"<p><b>{escape(self.problem_id)}</b>: {answer} ({self.outcome})</p>"
        steps = [] if self.best is None else self.best.state.path()[1:]
        rows = "".join(
            f"<tr><td>{escape(self.mas.node_name(step.speaker) if self.mas else str(step.speaker))}</td>"
            f"<td style='text-align:left;white-space:pre-wrap'>{escape(step.text)}</td></tr>"
            for step in steps
        )
        usage = self.usage
        cost = f"AC {usage.agent_calls:,}, TOK {usage.generated_tokens:,}, RC {usage.reward_calls:,}"
        return f"{head}<table>{rows}</table><p><small>{cost}, {len(self.candidates)} candidates</small></p>"


_MOST_MESSAGES, _LONGEST_MESSAGE = 200, 20_000
"""How much of a program's request is kept with its plan: messages, and characters of each."""


def chosen_requests(plan: Plan, call: Callable[[MASState], Call]) -> dict[int, tuple[ChatMessage, ...]]:
    """Return what a program asked on the chosen path, by the node of each reply.

    Args:
        plan: The plan of a program's search.
        call: Returns the program's call at a state.
    """
    node = plan.best.node if plan.best is not None else None
    found: dict[int, tuple[ChatMessage, ...]] = {}
    while node and plan.tree is not None:
        parent = plan.tree[node].parent
        asked = call(plan.tree.states[parent]).messages
        kept = asked if len(asked) <= _MOST_MESSAGES else (asked[0], *asked[1 - _MOST_MESSAGES :])
        found[node] = tuple(
            m if len(m.content) <= _LONGEST_MESSAGE else m._replace(content=m.content[:_LONGEST_MESSAGE] + " [...]")
            for m in kept
        )
        node = parent
    return found
