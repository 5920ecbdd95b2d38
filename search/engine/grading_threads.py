"""Grading threads, so that a slow grader delays only the search being graded."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from queue import SimpleQueue

from search.engine.policy_requests import Mail
from search.grading import Grader


class GradingThreads:
    """Grades messages on daemon threads, which start on demand.

    Most graders use one thread; graders that can process several messages at once use a few.
    """

    def __init__(self, mail: Mail) -> None:
        """Start without threads."""
        self._mail = mail
        self._jobs: dict[int, SimpleQueue[tuple[Hashable, Grader, Sequence[str]] | None]] = {}
        self._started: dict[int, int] = {}
        self._open: set[Hashable] = set()

    def submit(self, key: Hashable, grader: Grader, texts: Sequence[str]) -> None:
        """Queue messages for grading. The grader caches the grades; the outcome is None, or the error."""
        count = max(1, grader.threads)
        jobs = self._jobs.setdefault(count, SimpleQueue())
        self._open.add(key)
        jobs.put((key, grader, texts))
        if self._started.get(count, 0) < count:
            self._started[count] = self._started.get(count, 0) + 1
            threading.Thread(target=self._serve, args=(jobs,), name="mas-gym-grading", daemon=True).start()

    def cancel(self, key: Hashable) -> None:
        """Drop the queued messages of one search; grading in progress is not affected."""
        self._open.discard(key)

    def _serve(self, jobs: SimpleQueue[tuple[Hashable, Grader, Sequence[str]] | None]) -> None:
        while (job := jobs.get()) is not None:
            key, grader, texts = job
            outcome: Exception | None = None
            try:
                for text in texts:
                    if key in self._open:
                        grader.grade(text)
            except Exception as error:
                outcome = error
            self._open.discard(key)
            self._mail.put((key, outcome))

    def close(self) -> None:
        """End the threads after their current messages; queued messages are dropped."""
        self._open.clear()
        for count, jobs in self._jobs.items():
            for _ in range(self._started.get(count, 0)):
                jobs.put(None)
