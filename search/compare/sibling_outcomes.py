"""The probable first error of failed samples, from the outcomes of the other samples of the question.

Samples that begin with equal messages share a prefix. A prefix that leads to a right answer probably contains no error,
so the first message of a failed sample that no right sample shares is probably its first error. Its probability is that
of a fall in the success rate: the rate of the samples that leave the path before the message is higher than the rate of
those that share it. Both rates have a uniform prior, so they are beta-distributed. If right samples rarely
share messages at a position, siblings give no evidence about a message that no other sample has. A message that only
repeats that of another agent is never the first error.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mas_gym.tasks.base import normalize_message
from mas_gym.tasks.grading.numbers import parse_number
from search.plan import Plan

_SHORTEST = 3
"""Minimum number of words of a message that repeats the middle of an earlier one."""

_LONGEST_NUMBER = 40
_OPENING = re.compile(r"\A\w{1,40}: ")
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?")
_MARKS = re.compile(r"[^\w\s.+*/=<>-]|\.(?!\d)")


class Outcomes(NamedTuple):
    """Outcomes of samples."""

    right: int
    total: int


class FailedSample(NamedTuple):
    """A failed sample.

    Attributes:
        problem_id: The problem.
        place: Position of the sample among the candidates, from 0.
        nodes: The node of each message in the plan's tree.
        speakers: Index of the agent that wrote each message.
        texts: The messages.
        repeats: Whether each message only repeats an earlier one.
        after: Outcomes of the samples that share the first ``s`` messages, for ``s`` from 0 to the number of messages;
            the failed sample is included.
    """

    problem_id: str
    place: int
    nodes: tuple[int, ...]
    speakers: tuple[int, ...]
    texts: tuple[str, ...]
    repeats: tuple[bool, ...]
    after: tuple[Outcomes, ...]

    @property
    def shared(self) -> int:
        """Number of messages that a right sample shares."""
        return sum(outcomes.right > 0 for outcomes in self.after[1:])

    def first_error(self, agreement: SharedMessages) -> tuple[int, float] | None:
        """Return the position of the probable first error and its probability; None if siblings say nothing."""
        if not self.after[0].right:
            return None
        alone = range(self.shared, len(self.nodes))
        turn = next((turn for turn in alone if not self.repeats[turn]), None)
        if turn is None:
            return None
        before, after = self.after[turn], self.after[turn + 1]
        if after.total < 2 and not agreement.usual(turn):
            return None
        left = Outcomes(before.right - after.right, before.total - after.total)
        return turn, fall_probability(left, after)


def fall_probability(before: Outcomes, after: Outcomes) -> float:
    """Return the probability that the success rate before a message is higher than after it, with uniform priors.

    >>> round(fall_probability(Outcomes(3, 3), Outcomes(0, 1)), 3)
    0.933
    >>> round(fall_probability(Outcomes(0, 0), Outcomes(0, 0)), 3)
    0.5
    """
    # The sum that gives P(x > y) for beta-distributed x and y with integer parameters.
    rights, wrongs = before.right + 1, before.total - before.right + 1
    alpha, beta = after.right + 1, after.total - after.right + 1
    terms = (
        _log_beta(alpha + i, beta + wrongs) - math.log(wrongs + i) - _log_beta(1 + i, wrongs) for i in range(rights)
    )
    return math.fsum(math.exp(term - _log_beta(alpha, beta)) for term in terms)


def _log_beta(alpha: float, beta: float) -> float:
    return math.lgamma(alpha) + math.lgamma(beta) - math.lgamma(alpha + beta)


class SharedMessages:
    """How often two right samples that share a prefix also share the next message, by number of messages.

    Where right samples rarely agree, as in free text, a message that no right sample shares need not be wrong.
    """

    def __init__(self) -> None:
        self._same: Counter[int] = Counter()
        self._pairs: Counter[int] = Counter()

    def add(self, depth: int, right: int, below: Iterable[int]) -> None:
        """Add a prefix: its number of messages, of right samples, and of right samples by next message."""
        self._pairs[depth] += math.comb(right, 2)
        self._same[depth] += sum(math.comb(count, 2) for count in below)

    def usual(self, depth: int) -> bool:
        """Return whether at least half of the pairs share the next message after ``depth`` messages."""
        return 2 * (self._same[depth] + 1) >= self._pairs[depth] + 2


def failed_samples(plan: Plan, agreement: SharedMessages) -> list[FailedSample]:
    """Return the wrong candidates of a plan, in order, and add its samples to the run's agreement.

    Samples without an outcome are ignored. Messages are compared by text, because some planners add a node for each of
    several equal messages.
    """
    tree, mas = plan.tree, plan.mas
    if tree is None or mas is None:
        return []
    outcomes: dict[int, list[int]] = {0: [0, 0]}
    longer: dict[tuple[int, int, str], int] = {}
    paths: list[tuple[int, ...]] = []
    for one in plan.candidates:
        prefixes = [0]
        if one.node is not None and one.correct is not None:
            for node in tree.path(one.node)[1:]:
                state = tree.states[node]
                message = prefixes[-1], state.speaker, _normal(state.text)
                prefixes.append(longer.setdefault(message, len(longer) + 1))
            for prefix in prefixes:
                counts = outcomes.setdefault(prefix, [0, 0])
                counts[0] += one.correct
                counts[1] += 1
        paths.append(tuple(prefixes))
    below: defaultdict[int, list[int]] = defaultdict(list)
    for (prefix, _, _), child in longer.items():
        below[prefix].append(outcomes[child][0])
    depths = {prefix: depth for path in paths for depth, prefix in enumerate(path)}
    for prefix, rights in below.items():
        agreement.add(depths[prefix], sum(rights), rights)
    found = []
    for place, (one, path) in enumerate(zip(plan.candidates, paths, strict=True)):
        if one.correct is not False or one.node is None or len(path) < 2:
            continue
        nodes = tuple(tree.path(one.node)[1:])
        states = [tree.states[node] for node in nodes]
        texts, speakers = tuple(state.text for state in states), tuple(state.speaker for state in states)
        repeats = repeated((*texts[:-1], mas.final_text(texts[-1])), speakers, one.answer)
        after = tuple(Outcomes(*outcomes[prefix]) for prefix in path)
        found.append(FailedSample(plan.problem_id, place, nodes, speakers, texts, repeats, after))
    return found


def _normal(text: str) -> str:
    return normalize_message(_OPENING.sub("", text.lstrip(), count=1))


def repeated(texts: Sequence[str], speakers: Sequence[int], answer: str | None) -> tuple[bool, ...]:
    """Return whether each message only repeats an earlier message of another agent.

    It does if its text equals the end of the earlier message, or a part with several words; or if both end with the
    final answer, and it contains no other number than the earlier message. Case, spaces and punctuation are ignored.
    """
    found: list[bool] = []
    earlier: list[tuple[int, str, set[str] | None]] = []
    ending = None if answer is None else f" {_plain(answer)}"
    for text, speaker in zip(texts, speakers, strict=True):
        plain = _plain(text)
        words = len(plain.split())
        numbers = set(_NUMBER.findall(plain)) if ending is not None and f" {plain}".endswith(ending) else None
        found.append(
            words > 0
            and any(
                f" {before}".endswith(f" {plain}")
                or (words >= _SHORTEST and f" {plain} " in f" {before} ")
                or (numbers is not None and known is not None and numbers <= known)
                for other, before, known in earlier
                if other != speaker
            )
        )
        earlier.append((speaker, plain, numbers))
    return tuple(found)


def _plain(text: str) -> str:
    number = parse_number(text) if len(text) < _LONGEST_NUMBER else None
    return " ".join(_MARKS.sub(" ", normalize_message(text)).split()) if number is None else str(number)
