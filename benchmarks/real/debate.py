"""Features of the answers that debating agents gave to one problem, for a critic without a language model."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mas_gym.tasks.grading.formulas import formula_value
from mas_gym.tasks.grading.numbers import parse_number

Floats = NDArray[np.float64]

MOST_AGENTS = 4

_HEDGES = (
    *("approximately", "\\approx", "no solution", "cannot", "mistake", "incorrect", "however", "therefore", "correct"),
    *("agree", "assume", "check", "verify", "boxed", "since", "let ", "previous", "round"),
)
_CUES = (
    *("fraction", "decimal", "integer", "simplest", "radical", "how many", "percent", "degrees", "express"),
    *("remainder", "smallest", "largest", "probability", "in terms of", "ordered", "interval", "round", "find all"),
    *("\\sqrt", "\\pi", "evaluate", "compute", "simplify", "polynomial", "factor"),
)
_SUM = re.compile(
    r"(?<![\w.\\^}/])(?P<left>\d[\d,.]*(?:\s*(?:[-+*/\u00d7\u00f7]|\\cdot|\\times|\\div)\s*\d[\d,.]*)+)\s*=\s*"
    r"(?P<right>-?\d[\d,]*(?:\.\d+)?)(?![\w^]|\s*[-+*/^(\\])"
)
_TIMES, _OVER = re.compile(r"\\cdot|\\times|\u00d7"), re.compile(r"\\div|\u00f7")


class Said(NamedTuple):
    """One message of a debate.

    Attributes:
        agent: Index of the agent.
        round: Index of the round.
        text: The message.
        answer: The answer in it; None if there is none.
        correct: Whether it is right.
    """

    agent: int
    round: int
    text: str
    answer: str | None
    correct: bool


class Debate(NamedTuple):
    """The messages of all agents on one problem.

    Attributes:
        id: Name of the problem.
        question: The question.
        level: Difficulty from 1 to 5.
        subject: Subject of the problem.
        said: All messages, by agent and round.
    """

    id: str
    question: str
    level: int
    subject: str
    said: tuple[Said, ...]

    @property
    def answers(self) -> list[str]:
        """The distinct answers, in order of appearance."""
        return list(dict.fromkeys(one.answer for one in self.said if one.answer is not None))

    @property
    def agents(self) -> list[list[Said]]:
        """The messages of each agent, by round."""
        return [[one for one in self.said if one.agent == agent] for agent in range(1 + self.said[-1].agent)]

    def correct(self, answer: str | None) -> bool:
        """Return whether an answer is right."""
        return any(one.correct for one in self.said if one.answer == answer)

    def votes(self, said: Sequence[Said]) -> Counter[str]:
        """Return the votes of some messages; a message without an answer has none."""
        return Counter(one.answer for one in said if one.answer is not None)

    @property
    def first(self) -> list[Said]:
        """Each agent's first message."""
        return [one[0] for one in self.agents]

    @property
    def last(self) -> list[Said]:
        """Each agent's last message."""
        return [one[-1] for one in self.agents]


def arithmetic(text: str) -> tuple[int, int]:
    r"""Return how many true and how many false equations between plain numbers a text states.

    >>> arithmetic(r"Since $2 \cdot 3 + 1 = 7$ and 7 + 5 = 13, x = 4")
    (1, 1)
    """
    right = wrong = 0
    for found in _SUM.finditer(text.replace("\\!", "").replace("$", "")):
        left = _OVER.sub("/", _TIMES.sub("*", found["left"])).replace(",", "").rstrip(".")
        value, stated = formula_value(left) if len(left) <= 80 else None, parse_number(found["right"])
        if value is None or stated is None:
            continue
        # A stated decimal may be rounded.
        allowed = max(0.01 * abs(value), 0.051) if "." in found["right"] else max(0.01 * abs(value), 1e-6)
        right, wrong = (right + 1, wrong) if abs(value - float(stated)) <= allowed else (right, wrong + 1)
    return right, wrong


def features(debate: Debate, subjects: Sequence[str]) -> Floats:
    """Return the critic's features of each distinct answer, shape (answers, features).

    Votes by agent and round, who kept or changed it, its form and how it compares with the other answers, counts of
    words and of arithmetic that holds or fails in the messages that give it, the level, the subject, and words of the
    question.
    """
    answers, said = debate.answers, debate.said
    if not answers:
        return np.zeros((0, 0))
    agents, groups = debate.agents, (said, debate.first, debate.last)
    votes = [debate.votes(group) for group in groups]
    texts = np.array([_text_figures(one.text) for one in said])
    forms = np.array([_form(answer) for answer in answers])
    numbers = set(re.findall(r"\d+(?:\.\d+)?", debate.question))
    lowered = debate.question.lower()
    asked = [
        debate.level,
        *(float(debate.subject == one) for one in subjects),
        *(float(cue in lowered) for cue in _CUES),
    ]
    rows = []
    for place, answer in enumerate(answers):
        row: list[float] = []
        for group, counts in zip(groups, votes, strict=True):
            rival = max((count for other, count in counts.items() if other != answer), default=0)
            row += [counts[answer], counts[answer] / len(group), (counts[answer] - rival) / len(group), len(counts)]
        ends = [(one[0].answer == answer, one[-1].answer == answer) for one in agents]
        row += [sum(pair == end for pair in ends) / len(agents) for end in ((True, True), (False, True), (True, False))]
        row += [len({one.agent for one in said if one.answer == answer}) / len(agents), len(agents), len(agents[0])]
        row += [float(place < len(agents) and ends[place][end]) for end in (0, 1) for place in range(MOST_AGENTS)]
        row += [*forms[place], float(answer in numbers), *(forms == forms[place]).mean(0)]
        own = texts[[one.answer == answer for one in said]]
        row += [*own.mean(0), *(own.mean(0) - texts.mean(0)), *own.min(0)[:5]]
        row += [sum(answer in one.text for one in said) / len(said), len(debate.question), *asked]
        rows.append(row)
    return np.array(rows, dtype=np.float32)


def _text_figures(text: str) -> list[float]:
    right, wrong = arithmetic(text)
    lowered = text.lower()
    counts = [len(text), right, wrong, wrong > 0, wrong / (right + wrong + 1), text.count("="), text.count("\n")]
    return [float(count) for count in (*counts, *map(lowered.count, _HEDGES))]


def _form(answer: str) -> list[float]:
    number = parse_number(answer)
    whole = number is not None and number.denominator == 1
    size = -1.0 if number is None else min(math.log1p(abs(number.numerator) / number.denominator), 30.0)
    letters = re.search(r"[a-z]", re.sub(r"\\[a-zA-Z]+", "", answer))
    signs = ("/", "frac", ".", "sqrt", "pi", ",", "=", "(")
    found = [number is not None, whole, answer.startswith("-"), letters is not None, number == 0, number == 1]
    return [*map(float, found), *(float(sign in answer) for sign in signs), float(len(answer)), size]
