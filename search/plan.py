"""The result of a search: a `Plan` with ranked candidates, the tree and the cost, and how its answers are graded.

`Grader` is the only place that sees reference answers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from html import escape
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from mas_gym.errors import ConfigError, shown, whole_number
from mas_gym.graph import MAS
from mas_gym.policies.base import AsyncPolicy
from mas_gym.prompts import current_answer
from mas_gym.state import MASState
from mas_gym.tasks.base import Grade, Problem, Task
from search.tree import Tree


@dataclass(frozen=True, slots=True)
class Usage:
    """The cost of a search or a run (paper, App. "Compute budgets and accounting"); adds up with ``+``.

    Attributes:
        agent_calls: AC, LLM generations by agents; every sample counts, duplicates included.
        generated_tokens: TOK, generated tokens over all agent calls, duplicates included.
        reward_calls: RC, critic forwards; one per state and search; none for a free critic.
        reward_hits: Evaluations of states that this search had already scored, without a forward.
        prompt_tokens: Prompt tokens, once per request however many samples it asked for.
        cached_tokens: Prompt tokens that the engine had cached.
        dropped_tokens: Tokens cut from the oldest inputs to fit the context window.
        critic_tokens: Tokens that the critic generated, such as a judge's verdicts; no part of TOK.
        critic_prompt_tokens: Prompt tokens that the critic read to generate them.
        unread_verdicts: Verdicts of a judge that could not be read.
        grader_tokens: Tokens that a judge generated to grade the answers; no part of TOK.
        grader_prompt_tokens: Prompt tokens that it read to generate them.
        seconds: Wall-clock seconds from start to end; in a sum, the sum of them.
    """

    agent_calls: int = 0
    generated_tokens: int = 0
    reward_calls: int = 0
    reward_hits: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    dropped_tokens: int = 0
    critic_tokens: int = 0
    critic_prompt_tokens: int = 0
    unread_verdicts: int = 0
    grader_tokens: int = 0
    grader_prompt_tokens: int = 0
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
            self.critic_tokens + other.critic_tokens,
            self.critic_prompt_tokens + other.critic_prompt_tokens,
            self.unread_verdicts + other.unread_verdicts,
            self.grader_tokens + other.grader_tokens,
            self.grader_prompt_tokens + other.grader_prompt_tokens,
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
        written: Path = import_module("mas_gym.report").write_plan_page(self, Path(path), reference=reference)
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


_QUICK = ("number", "choice", "text", "regex")
"""Kinds that are graded in microseconds."""

_TOGETHER = 8


def final_text(state: MASState) -> str:
    """Return the text of a terminal state that is graded: its last message; none if that reached nobody.

    A message that names no legal recipient ends the episode without an answer (`mas_gym.Dynamics.failure`).
    """
    return state.text if state.recipients else ""


class Grader:
    """Grades the final messages of one problem, each distinct text once.

    Args:
        problems: The task, whose own grading is used if it has one, or any iterable of problems.
        problem: The problem.
        read: Returns the part of a terminal state's text that is graded (`mas_gym.MAS.final_text`).

    Attributes:
        threads: On how many threads messages may be graded at once; 0 if grading is quick and needs none.
    """

    def __init__(
        self, problems: Iterable[Problem], problem: Problem, read: Callable[[str], str] = lambda text: text
    ) -> None:
        """Use the task's own grading if it has one, otherwise strict grading."""
        task: Any = problems
        if not (hasattr(task, "grade") and hasattr(task, "extract")):
            from mas_gym.tasks import grading

            task = SimpleNamespace(extract=grading.extract_answer, grade=grading.grade)
        self._problem = problem
        self._extract: Callable[[str], str | None] = cache(lambda text: task.extract(problem, read(text)))
        self._ask: Callable[[str], Grade] = lambda text: task.grade(problem, read(text))
        self._grades: dict[str, Grade] = {}
        self.threads = grading_threads(problems, problem.kind)

    def extract(self, text: str) -> str | None:
        """Return the normalised answer in a message, without looking at the reference."""
        return self._extract(text)

    def grade(self, text: str) -> Grade:
        """Compare the answer in a message with the reference.

        Raises:
            ConfigError: The task's grader returned something else than a `Grade`.
        """
        if text not in self._grades:
            grade = self._ask(text)
            if not isinstance(grade, Grade):
                raise ConfigError(f"grader: expected a mas_gym.tasks.Grade, got {shown(grade)}; return Grade(correct)")
            self._grades[text] = grade
        return self._grades[text]

    def ungraded(self, texts: Iterable[str]) -> list[str]:
        """Return the distinct ones among messages that have no grade yet."""
        return [text for text in dict.fromkeys(texts) if text not in self._grades]

    @property
    def cost(self) -> Usage:
        """What a judge spent on the grades so far; the verdict on an answer counts once."""
        billed = {grade.extracted or text: grade for text, grade in list(self._grades.items()) if grade.tokens}
        tokens, read = (sum(getattr(one, name) for one in billed.values()) for name in ("tokens", "prompt_tokens"))
        return Usage(grader_tokens=tokens, grader_prompt_tokens=read)

    def reward(self, text: str) -> float:
        """Return R of a terminal state with this final message, +1.0 or -1.0."""
        return 1.0 if self.grade(text).correct else -1.0

    @staticmethod
    def texts(plan: Plan) -> list[str]:
        """Return the messages that `graded` grades."""
        points = [point.state for point in plan.anytime if point.state is not None]
        return [final_text(state) for state in (*(candidate.state for candidate in plan.candidates), *points)]

    def graded(self, plan: Plan, calls: int, tokens: int) -> Plan:
        """Return the plan with the answers of its candidates and its anytime curve extracted and graded.

        A plan without a curve gets one point, at its agent calls and tokens.
        """
        grades = [self.grade(final_text(candidate.state)) for candidate in plan.candidates]
        candidates = tuple(
            replace(candidate, answer=grade.extracted, correct=grade.correct)
            for candidate, grade in zip(plan.candidates, grades, strict=True)
        )
        anytime = tuple(self._graded(point) for point in plan.anytime)
        best = candidates[0] if candidates else None
        if best is not None and not anytime:
            anytime = (AnytimePoint(calls, tokens, best.state, best.node, best.answer, best.correct),)
        return replace(
            plan,
            problem_id=self._problem.id,
            candidates=candidates,
            anytime=anytime,
            answer=best.answer if best else None,
            correct=bool(best.correct) if best else False,
        )

    def _graded(self, point: AnytimePoint) -> AnytimePoint:
        if point.state is None:
            return point
        grade = self.grade(final_text(point.state))
        return point._replace(answer=grade.extracted, correct=grade.correct)


def grading_threads(task: object, kind: str) -> int:
    """Return on how many threads answers of a kind may be graded at once; 0 if they are graded in microseconds.

    What is slow (a judge, code, symbolic equality, a function of the user's) must not hold up the scheduler's loop.
    """
    from mas_gym.tasks.graders import KindGrader

    grader = getattr(task, "grader", None)
    if isinstance(grader, KindGrader) or not hasattr(task, "grade"):
        if kind in _QUICK:
            return 0
        policy = getattr(getattr(grader, "judge", None), "policy", None)
        # Of other judges nothing is known, and a local model computes one verdict at a time anyway.
        return _TOGETHER if kind != "judge" or isinstance(policy, AsyncPolicy) else 1
    return 1


class TurnAnswer(NamedTuple):
    """What an episode would have answered, had it ended after some turns.

    Attributes:
        turns: Number of turns, at least 1.
        answer: The normalised answer; None if none had been stated.
        correct: Whether it equals the reference.
    """

    turns: int
    answer: str | None
    correct: bool


def turn_answers(plan: Plan, task: Task, turns: Sequence[int] = (4, 8, 12)) -> tuple[TurnAnswer, ...]:
    """Return the answers of a plan's chosen episode after several numbers of turns.

    The answer after a turn is the last one that was stated: in the field ``CURRENT ANSWER:`` of a message that
    has it, otherwise anywhere in the message. From the episode's end on, it is the plan's answer.

    Args:
        plan: A graded plan, from `search.run` or a store.
        task: The task with the plan's problem.
        turns: Numbers of turns.

    Raises:
        ConfigError: A number is not a whole number of at least 1.
    """
    for count in turns:
        whole_number("turns", count, at_least=1)
    if plan.best is None:
        return tuple(TurnAnswer(count, None, False) for count in turns)
    grader = Grader(task, task.problem(plan.problem_id))
    grades = [Grade(False)]
    for state in plan.best.state.path()[1:]:
        stated = current_answer(state.text)
        grade = grader.grade(state.text if stated is None else f"Final Answer: {stated}")
        grades.append(grades[-1] if grade.extracted is None else grade)
    grades[-1] = Grade(bool(plan.correct), plan.answer)
    reached = [grades[min(count, len(grades) - 1)] for count in turns]
    return tuple(TurnAnswer(count, g.extracted, g.correct) for count, g in zip(turns, reached, strict=True))
