"""The searches of a service: one scheduler, a bounded queue, one seed and sampling per request."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from queue import Full, Queue
from typing import TYPE_CHECKING

from mas_gym.tasks import Problem

if TYPE_CHECKING:
    from mas_gym.graph import MAS
    from mas_gym.policies.base import AsyncPolicy, Policy
    from mas_gym.programs import Program
    from mas_gym.tasks.base import Grader, Kind
    from search import Budget, Critic, Planner, Sampling
    from search.engine.scheduler import SearchFuture

PROBLEM_ID = "question"
"""The problem id that `mas-gym solve` uses too, so that both give the same answer for the same seed."""


_KNOWN = 10_000
"""Questions of a task that answers are graded for."""

_UNGRADED = 1024
_LOGGER = logging.getLogger("search")


class PoolFullError(Exception):
    """The queue is full."""


@dataclass(frozen=True)
class Service:
    """The setup shared by all searches of a service.

    Attributes:
        planner: The search algorithm.
        mas: The system.
        policy: Writes the messages.
        critic: Scores states; None for planners that need none.
        kind: Kind of answer.
        budget: Limits of one search.
        concurrency: Maximum number of open searches.
        queue: Maximum number of waiting searches.
        program: The agent program behind ``mas``; None for a MAS.
        grader: Grades the answers after they are sent; None for none.
        references: The problems whose questions are graded; None grades every answer, without a reference.
    """

    planner: Planner
    mas: MAS
    policy: Policy | AsyncPolicy
    critic: Critic | None = None
    kind: Kind = "number"
    budget: Budget | None = None
    concurrency: int = 32
    queue: int = 256
    program: Program | None = None
    grader: Grader | None = None
    references: Iterable[Problem] | None = None


class _Grades:
    """Grades answers on a thread of its own, after they were sent, so that no client waits for a grade.

    Attributes:
        counts: Answers by verdict: right, wrong, failed, or dropped because too many were waiting.
    """

    def __init__(self, grader: Grader, references: Iterable[Problem] | None, kind: Kind) -> None:
        self.counts: Counter[str] = Counter(dict.fromkeys(("right", "wrong", "failed", "dropped"), 0))
        self._grader, self._kind = grader, kind
        chosen = None if references is None else islice(references, _KNOWN)
        self._known = None if chosen is None else {" ".join(problem.question.split()): problem for problem in chosen}
        self._jobs: Queue[tuple[Problem, str] | None] = Queue(_UNGRADED)
        threading.Thread(target=self._serve, name="mas-gym-grading", daemon=True).start()

    def kind_of(self, question: str) -> Kind:
        """Return the kind of a question's answer: that of the task's problem, if it is one."""
        found = self._find(question)
        return self._kind if found is None else found.kind

    def _find(self, question: str) -> Problem | None:
        if self._known is None:
            return Problem(PROBLEM_ID, question, "", self._kind)
        return self._known.get(" ".join(question.split()))

    def submit(self, question: str, text: str) -> None:
        """Queue an answer, if its question is graded."""
        problem = self._find(question)
        if problem is None:
            return
        try:
            self._jobs.put_nowait((problem, text))
        except Full:
            self.counts["dropped"] += 1

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            problem, text = job
            try:
                grade = self._grader.grade(problem, text)
            except Exception as error:
                self.counts["failed"] += 1
                _LOGGER.warning("the answer to %s could not be graded: %s", ascii(problem.id), error)
                continue
            self.counts["right" if grade.correct else "wrong"] += 1
            fields: dict[str, object] = {"event": "answer graded", "problem": problem.id, "answer": grade.extracted}
            fields |= {"correct": grade.correct, "reason": grade.reason}
            _LOGGER.info("answer to %s graded", ascii(problem.id), extra={"fields": fields})

    def close(self) -> None:
        """Let the thread end; answers that wait are not graded."""
        with self._jobs.mutex:
            self._jobs.queue.clear()
        self._jobs.put(None)


class SearchPool:
    """A running scheduler with a bounded queue; not thread-safe, used only by the server's event loop."""

    def __init__(self, service: Service) -> None:
        """Start without searches."""
        from mas_gym.tasks.graders import Ungraded
        from mas_gym.tasks.sequences import ProblemTask
        from search.engine.journal import Journal
        from search.engine.scheduler import Scheduler
        from search.setup import make_setup

        self.service = service
        mas = service.mas if service.program is None else None
        setup = make_setup(service.planner, mas, service.critic, program=service.program, budget=service.budget)
        self._journal = Journal(setup, policy=service.policy.name, concurrency=service.concurrency)
        # Clients send no reference answers.
        task = ProblemTask.of([], grader=Ungraded())
        grader = service.grader
        self.grades = None if grader is None else _Grades(grader, service.references, service.kind)
        self._scheduler = Scheduler(setup, service.policy, concurrency=service.concurrency, task=task).start()

    @property
    def active(self) -> int:
        """Searches in progress."""
        return self._scheduler.active

    @property
    def waiting(self) -> int:
        """Searches that have not started."""
        return self._scheduler.waiting

    def submit(self, question: str, seed: int, sampling: Sampling, changed: Callable[[], None]) -> SearchFuture:
        """Queue a search.

        Args:
            question: The question.
            seed: Determines the answer together with the question, as far as the engine allows.
            sampling: How the agents sample.
            changed: Called on another thread after each message.

        Raises:
            PoolFullError: The queue is full.
        """
        if self.waiting + self.active >= self.service.concurrency + self.service.queue:
            raise PoolFullError
        kind = self.service.kind if self.grades is None else self.grades.kind_of(question)
        problem = Problem(PROBLEM_ID, question, "", kind)
        future = self._scheduler.submit(problem, seed=seed, sampling=sampling, on_progress=lambda step: changed())
        future.add_done_callback(self._ended)  # type: ignore[arg-type]
        return future

    def _ended(self, future: SearchFuture) -> None:
        """Log a search on the scheduler's thread."""
        if not future.cancelled() and future.exception() is None:
            plan = future.result()
            self._journal.ended(future.problem, plan, {})
            if self.grades is not None and plan.best is not None:
                self.grades.submit(future.problem.question, self.service.mas.final_text(plan.best.text))

    def close(self) -> None:
        """Cancel every search and wait for the scheduler's thread."""
        self._scheduler.close()
        if self.grades is not None:
            self.grades.close()
        self._journal.close(self._scheduler.usage, self._scheduler.calls, self._scheduler.stopped)
