"""The states of a recorded run with their recorded outcomes, used to fit critics."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from typing import NamedTuple

from mas_gym.critics import Proposal
from mas_gym.systems.dynamics import Dynamics
from mas_gym.systems.state import MASState
from search.grading import known
from search.models.recorded import RecordedTree
from search.protocol import Peers, ScoringContext
from search.store.recorded_runs import Recorded


class RecordedState(NamedTuple):
    """A recorded state.

    Attributes:
        question: The problem of the state.
        context: The state with the answers of all samples of its question.
        right: Number of correct recorded episodes through the state; with message labels, whether its messages are
            correct.
        total: Number of recorded episodes through the state; 1 with message labels.
    """

    question: str
    context: ScoringContext
    right: int
    total: int


def recorded_states(recorded: Recorded, terminal_only: bool) -> Iterator[RecordedState]:
    """Yield each state of a recorded run once: all states after a message, or only terminal ones."""
    model = Dynamics(recorded.mas)
    for problem in recorded:
        tree = recorded.tree(problem)
        found = _states(tree, model)
        answers = tuple(
            tree.grades[state.digest].extracted
            for state, _, _, total in found
            if state.digest in tree.grades
            for _ in range(total)
        )
        for state, message, right, total in found:
            if total and (not terminal_only or model.is_terminal(state)):
                answer = tree.grades[state.digest].extracted if state.digest in tree.grades else None
                context = ScoringContext(state, recorded.mas, message, Peers(answer, answers))
                yield RecordedState(problem.id, context, right, total)


def _states(tree: RecordedTree, model: Dynamics) -> list[tuple[MASState, Proposal, int, int]]:
    """Return each state below the root with its message and its numbers of correct and of all graded episodes."""
    order: list[tuple[MASState, Proposal]] = []
    right: Counter[bytes] = Counter()
    total: Counter[bytes] = Counter()
    waiting = deque([tree.root])
    while waiting:
        state = waiting.popleft()
        messages = tree.messages.get(state.digest, ())
        times = Counter(message.action for message in messages)
        for action, message in {one.action: one for one in messages}.items():
            child = model.transition(state, action)
            grade = tree.grades.get(child.digest)
            if grade is not None and known(grade) is not None:
                right[child.digest] = times[action] * grade.correct
                total[child.digest] = times[action]
            order.append((child, message))
            waiting.append(child)
    for state, _ in reversed(order):
        assert state.parent is not None
        right[state.parent.digest] += right[state.digest]
        total[state.parent.digest] += total[state.digest]
    return [(state, message, right[state.digest], total[state.digest]) for state, message in order]
