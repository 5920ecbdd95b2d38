"""The truth as a critic, which shows the result of a search with a perfect critic."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.tiny.stories import GENERATED
from benchmarks.tiny.truth import rights
from mas_gym.tasks.base import Task
from search import ScoringContext

KNOWN = ("arithmetic", "ordering", *GENERATED)
"""Tasks of which it is known whether a message is right."""


class Truth:
    """Scores a state +1 if its last message is right given the earlier ones, else -1 (`benchmarks.tiny.truth.rights`).

    This is not a perfect value: an earlier message may be wrong, and a later agent may correct or repeat it.
    """

    name = "truth"
    terminal_only = False
    free = True

    def __init__(self, task: Task) -> None:
        """Keep the task, whose problems it finds by their questions."""
        self._task = task.name
        self._problems = {problem.question: problem for problem in task}

    def identity(self) -> object:
        return self._task

    def score(self, contexts: Sequence[ScoringContext]) -> list[float]:
        return [self._score(context) for context in contexts]

    def _score(self, context: ScoringContext) -> float:
        names = [agent.name for agent in context.mas.agents]
        messages = [(names[turn.speaker], turn.text) for turn in context.state.turns]
        return 1.0 if rights(self._problems[context.state.question], messages)[-1] else -1.0
