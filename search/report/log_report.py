"""The part of a report about an imported run: outcomes, agreement, agents, instructive failures and missing data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from mas_gym.internal.text import cut, one_line
from search.compare.blame import Blame, blame_failures
from search.plan import Plan
from search.results.table_formats import TextTable

_DASH = "\N{EN DASH}"
_INSTRUCTIVE = 10
LONGEST = 20_000


class Said(NamedTuple):
    """A message of a failed sample; ``blamed`` if it is the probable first error."""

    speaker: str
    text: str
    blamed: bool


class Failure(NamedTuple):
    """A failed sample.

    Attributes:
        problem: The problem's id.
        verdict: The blamed agent with the evidence, in words.
        tree: Address of the page of the question's tree; empty if it is not written.
    """

    problem: str
    messages: tuple[Said, ...]
    verdict: str
    question: str = ""
    reference: str = ""
    tree: str = ""


class LogOverview:
    """Counts over an imported run.

    Args:
        agents: The names of the agents.
        plans: The plans, in which a sample without an outcome has ``correct`` None; read once.

    Attributes:
        blames: The probable first errors of the failed samples.
        labeled: Number of samples with an outcome.
    """

    def __init__(self, agents: Sequence[str], plans: Iterable[Plan]) -> None:
        self.agents = tuple(agents)
        self.labeled = 0
        self._samples, self._right, self._questions = 0, 0, 0
        self._calls, self._tokens = Counter[int](), Counter[int]()
        self._agreements: list[float] = []
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
            yield plan

    def tables(self, label: str) -> list[TextTable]:
        """Return the tables of the run, named by a label."""
        outcomes = f"{self._right:,} right, {self.labeled - self._right:,} wrong" if self.labeled else _DASH
        unlabeled = self._samples - self.labeled
        agreement = f"{100 * sum(self._agreements) / len(self._agreements):.1f}%" if self._agreements else _DASH
        blamed = Counter(one.agent() for one in self.blames)
        errors = [f"{one_line(self.agents[i])} {count:,}" for i, count in blamed.most_common() if i is not None]
        errors += [f"not known {blamed[None]:,}"] if blamed[None] else []
        facts = [
            ("Transcripts", f"{self._samples:,} of {self._questions:,} questions"),
            ("Outcomes", outcomes),
            ("Without an outcome", f"{unlabeled:,}" + ("" if self.labeled else " (no reference answers)")),
            ("Probable first errors", ", ".join(errors) or _DASH),
            ("Agreement of samples", f"{agreement} have the question's most frequent answer"),
        ]
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
        return [*found, *self._missing(label, unlabeled, counted, blamed[None])]

    @property
    def failures(self) -> list[Failure]:
        """The failures with the clearest first error, at most one per question."""
        best: dict[str, Blame] = {}
        for one in sorted(self.blames, key=lambda one: (one.agent() is None, -one.confidence)):
            best.setdefault(one.sample.problem_id, one)
        return [self._failure(one) for one in list(best.values())[:_INSTRUCTIVE]]

    def _failure(self, one: Blame) -> Failure:
        place = one.agent()
        verdict = "not known"
        if place is not None:
            verdict = f"{self.agents[place]}, probability {one.confidence:.2f} ({one.evidence})"
        messages = tuple(
            Said(self.agents[speaker], cut(text, LONGEST), place is not None and turn == one.turn)
            for turn, (speaker, text) in enumerate(zip(one.sample.speakers, one.sample.texts, strict=True))
        )
        return Failure(one.sample.problem_id, messages, verdict)

    def _missing(self, label: str, unlabeled: int, counted: bool, unknown: int) -> list[TextTable]:
        lines = []
        if unlabeled:
            remedy = "mas-gym import --task FILE.csv, with the columns question and answer"
            lines.append(("outcomes", remedy, f"{unlabeled:,} transcripts"))
        if not counted:
            lines.append(("token counts", "log the tokens of each message", "all messages"))
        if not self._agreements:
            lines.append(("siblings", "record several samples per question", "each question has one sample"))
        if unknown:
            lines.append(("first errors", "mas-gym blame --replay 8, or --critic", f"{unknown:,} failed samples"))
        return [TextTable(("Missing", "How to get it", "Where"), lines, f"{label}: missing data")] if lines else []
