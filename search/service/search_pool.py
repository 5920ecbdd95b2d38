"""The searches that answer the requests of a service.

The service has one scheduler, on a thread with its own event loop, and a bounded queue. Each request has its own seed
and sampling parameters.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import islice
from queue import Full, Queue

from mas_gym.internal.event_loop import run_on
from mas_gym.policies.base import Sampling
from mas_gym.tasks import Problem
from mas_gym.tasks.base import Grader, Kind
from mas_gym.tasks.grading.answers import Ungraded
from mas_gym.tasks.grading.numbers import Decimal
from mas_gym.tasks.problem_task import ProblemTask
from search.costs import Budget, Usage
from search.engine.run import Journal
from search.engine.scheduler import Scheduler, Searched
from search.service.chat_format import ApiError
from search.setup import RunSpec, make_setup

PROBLEM_ID = "question"
"""Problem id shared with `mas-gym solve`, so that both return the same answer for the same seed."""


_KNOWN = 10_000
"""Maximum number of a task's questions for which answers are graded."""

_UNGRADED = 1024
_LOGGER = logging.getLogger("search")


@dataclass(frozen=True)
class Service:
    """The settings of a service.

    Attributes:
        spec: The settings of the searches; it has no problems, and clients may set sampling, seed and a lower budget.
            Its seed is that of requests without one.
        queue: Maximum number of waiting searches.
        grader: Grades the answers after they are sent; None for no grading.
        references: The problems for which answers are graded; None grades every answer, without a reference.
        decimal: The decimal sign of answers, where it could also separate thousands.
        model: The model name that clients request.
        key: The required bearer token; None for no authentication.
        max_body: Largest request body, in bytes.
        max_question: Longest question, in UTF-8 bytes; None: only the limits of body and context window apply.
    """

    spec: RunSpec
    kind: Kind = "number"
    queue: int = 256
    grader: Grader | None = None
    references: Iterable[Problem] | None = None
    decimal: Decimal = "."
    model: str = "mas-gym"
    key: str | None = field(default=None, repr=False)
    max_body: int = 2**20
    max_question: int | None = None


class _Grades:
    """Grades answers on a separate thread after they are sent, so that no client waits for a grade.

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
        """Return the kind of answer to a question; for a question of the task, the kind of its problem."""
        found = self._find(question)
        return self._kind if found is None else found.kind

    def _find(self, question: str) -> Problem | None:
        if self._known is None:
            return Problem(PROBLEM_ID, question, "", self._kind)
        return self._known.get(" ".join(question.split()))

    def submit(self, question: str, text: str) -> None:
        """Queue an answer if its question is graded."""
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
        """End the thread; queued answers are not graded."""
        with self._jobs.mutex:
            self._jobs.queue.clear()
        self._jobs.put(None)


class Asked:
    """A search that answers a request.

    Attributes:
        step: The agent of the latest message and the usage so far; None before the first message.
        future: The finished search; cancelling it drops the search.
    """

    def __init__(self) -> None:
        """Start without progress."""
        self.step: tuple[str, Usage] | None = None
        self.future: Future[Searched]

    def advance(self, agent: str, usage: Usage) -> None:
        """Record a message; called on the scheduler's thread."""
        self.step = agent, usage


class SearchPool:
    """A running scheduler with a bounded queue; `submit` is used only by the server's event loop.

    Attributes:
        open: The searches that have not ended, including waiting ones.
    """

    def __init__(self, service: Service) -> None:
        self.service = service
        # Clients send no reference answers.
        task = ProblemTask.of([], grader=Ungraded(decimal=service.decimal))
        self.setup = make_setup(replace(service.spec, problems=task))
        self._journal = Journal(self.setup, concurrency=self.setup.concurrency)
        grader = service.grader
        self.grades = None if grader is None else _Grades(grader, service.references, service.kind)
        self.scheduler = Scheduler(self.setup)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=run_on, args=(self._loop,), name="mas-gym-service", daemon=True)
        self._thread.start()
        self.open: set[Future[Searched]] = set()

    def submit(self, question: str, seed: int, sampling: Sampling, budget: Budget | None = None) -> Asked:
        """Queue a search.

        Args:
            question: The question.
            seed: Together with the question, determines the answer, as far as the engine is deterministic.
            sampling: How the agents sample.
            budget: Limits in addition to those of the service.

        Raises:
            ApiError: 429; the queue is full.
        """
        if len(self.open) >= self.setup.concurrency + self.service.queue:
            raise ApiError(429, "too many searches are waiting; try again later", retry_after=1)
        kind = self.service.kind if self.grades is None else self.grades.kind_of(question)
        problem = Problem(PROBLEM_ID, question, "", kind)
        changes: dict[str, object] = {"seed": seed, "sampling": sampling.for_system(self.setup.mas)}
        if budget is not None:
            changes["budget"] = self.setup.budget.tightened(budget)
        asked = Asked()
        search = self.scheduler.search(problem, asked.advance, **changes)
        asked.future = asyncio.run_coroutine_threadsafe(search, self._loop)
        self.open.add(asked.future)
        asked.future.add_done_callback(self.open.discard)
        asked.future.add_done_callback(self._ended)
        return asked

    def _ended(self, future: Future[Searched]) -> None:
        """Log a finished search and queue its answer for grading; runs on the scheduler's thread."""
        if not future.cancelled() and future.exception() is None:
            [search] = self._journal.written([future.result()])
            problem, plan = search.problem, search.plan
            if self.grades is not None and plan.best is not None:
                text = plan.best.text if plan.best.state.recipients else ""
                self.grades.submit(problem.question, self.setup.mas.final_text(text))

    def close(self) -> None:
        """Cancel every search and wait for the scheduler's thread."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self.scheduler.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        if self.grades is not None:
            self.grades.close()
        self._journal.close(self.scheduler.usage, self.scheduler.calls, self.scheduler.stopped)
