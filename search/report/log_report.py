"""The part of a report about an imported run: outcomes, agreement, agents, instructive failures and missing data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from mas_gym.internal.text import one_line
from search.compare.blame import Blame, blame_failures
from search.plan import Plan
from search.results.table_formats import TextTable

_DASH = "\N{EN DASH}"
_INSTRUCTIVE = 10


class Failure(NamedTuple):
    """A failed sample with its question."""

    question: str
    blame: Blame


class LogOverview:
    """Counts over an imported run.

    Args:
        agents: The names of the agents.
        plans: The plans, in which a sample without an outcome has ``correct`` None; read once.

    Attributes:
        agents: The names of the agents.
        blames: The probable first errors of the failed samples.
        labeled: Number of samples with an outcome.
    """

    def __init__(self, agents: Sequence[str], plans: Iterable[Plan]) -> None:
        """Read the plans."""
        self.agents = tuple(agents)
        self.labeled = 0
        self._samples, self._right, self._questions = 0, 0, 0
        self._calls, self._tokens = Counter[int](), Counter[int]()
        self._agreements: list[float] = []
        self._asked: dict[str, str] = {}
        self.blames = blame_failures(self._counted(plans))

    def _counted(self, plans: Iterable[Plan]) -> Iterator[Plan]:
        for plan in plans:
            if plan.tree is None:
                continue
            self._questions += 1
            self._samples += len(plan.candidates)
            self.labeled += sum(one.correct is not None for one in plan.candidates)
            self._right += sum(one.correct is True for one in plan.candidates)
            for one in plan.candidates:
                for node in [] if one.node is None else plan.tree.path(one.node)[1:]:
                    speaker = plan.tree.states[node].speaker
                    self._calls[speaker] += 1
                    self._tokens[speaker] += plan.tree.tokens[node]
            answers = Counter(one.answer for one in plan.candidates)
            if len(plan.candidates) > 1:
                self._agreements.append(max(answers.values()) / len(plan.candidates))
            if any(one.correct is False for one in plan.candidates):
                self._asked[plan.problem_id] = plan.tree.states[0].question
            yield plan

    def tables(self, label: str) -> list[TextTable]:
        """Return the tables of the run, named by a label."""
        outcomes = f"{self._right:,} right, {self.labeled - self._right:,} wrong" if self.labeled else _DASH
        unlabeled = self._samples - self.labeled
        agreement = f"{100 * sum(self._agreements) / len(self._agreements):.1f}%" if self._agreements else _DASH
        facts = [
            ("Transcripts", f"{self._samples:,} of {self._questions:,} questions"),
            ("Outcomes", outcomes),
            ("Without an outcome", f"{unlabeled:,}" + ("" if self.labeled else " (no reference answers)")),
            ("Samples with the question's most frequent answer", agreement),
        ]
        blamed = Counter(one.agent() for one in self.blames)
        counted = any(self._tokens.values())
        spoke = [place for place in range(len(self.agents)) if self._calls[place]]
        agents = [
            (
                one_line(self.agents[place]),
                f"{self._calls[place]:,}",
                f"{self._tokens[place]:,}" if counted else _DASH,
                f"{blamed[place]:,}" if self.labeled else _DASH,
            )
            for place in spoke
        ]
        found = [
            TextTable(("", ""), facts, f"{label}: contents"),
            TextTable(("Agent", "Messages", "Tokens", "First errors"), agents, f"{label}: agents"),
        ]
        if self.blames:
            found.append(self._instructive(label))
        return [*found, *self._missing(label, unlabeled, counted, blamed[None])]

    def _instructive(self, label: str) -> TextTable:
        """Return the failures with the clearest first error, at most one per question."""
        best: dict[str, Blame] = {}
        for one in sorted(self.blames, key=lambda one: (one.agent() is None, -one.confidence)):
            best.setdefault(one.sample.problem_id, one)
        lines = []
        for one in list(best.values())[:_INSTRUCTIVE]:
            place = one.agent()
            said = "\n".join(
                f"{self.agents[speaker]}: {text}" for speaker, text in zip(one.sample.speakers, one.texts, strict=True)
            )
            error = "not known" if place is None or one.turn is None else f"{self.agents[place]}: {one.texts[one.turn]}"
            lines.append((one.sample.problem_id, self._asked[one.sample.problem_id], said, error))
        note = "To browse their trees, run mas-gym view and select the question."
        head = ("Problem", "Question", "Transcript", "Probable first error")
        return TextTable(head, lines, f"{label}: most instructive failures", note)

    def _missing(self, label: str, unlabeled: int, counted: bool, unknown: int) -> list[TextTable]:
        lines = []
        if unlabeled:
            remedy = "add answer or correct to the rows, or regrade with mas-gym regrade --task"
            lines.append(("outcomes", f"{unlabeled:,} transcripts", remedy))
        if not counted:
            lines.append(("token counts", "all messages", "log the tokens of each message"))
        if not self._agreements:
            lines.append(("siblings", "each question has one sample", "record several samples per question"))
        if unknown:
            lines.append(("first errors", f"{unknown:,} failed samples", "mas-gym blame --replay 8, or --critic"))
        return [TextTable(("Missing", "Where", "How to get it"), lines, f"{label}: missing data")] if lines else []
