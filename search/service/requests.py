"""Requests to the service: validation of the OpenAI chat format, and the searches that answer the requests.

The service has one scheduler and a bounded queue. Each request has its own seed and sampling parameters.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from queue import Full, Queue
from typing import TYPE_CHECKING, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from mas_gym.errors import ConfigError, shown
from mas_gym.internal.json_types import JSONObject
from mas_gym.policies.base import AsyncPolicy, Policy, as_policy
from mas_gym.policies.seeds import derive_seed
from mas_gym.programs.calls import unsupported
from mas_gym.tasks import Problem
from search.budget import Budget
from search.protocol import as_planner
from search.report.canary_panel import OUTCOMES

if TYPE_CHECKING:
    from mas_gym.programs import Program
    from mas_gym.systems.graph import MAS
    from mas_gym.tasks.base import Grader, Kind
    from search import Critic, Plan, Planner, Sampling
    from search.engine.scheduler import SearchFuture


PROBLEM_ID = "question"
"""Problem id shared with `mas-gym solve`, so that both return the same answer for the same seed."""


_KNOWN = 10_000
"""Maximum number of a task's questions for which answers are graded."""

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
        grader: Grades the answers after they are sent; None for no grading.
        references: The problems for which answers are graded; None grades every answer, without a reference.
        canary: Share of the requests to repeat without early stops after the answer is sent.
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
    canary: float = 0.0

    def __post_init__(self) -> None:
        """Adapt the policy."""
        object.__setattr__(self, "policy", as_policy(self.policy))


class Canary:
    """Checks early stops by repeating a share of the requests as complete searches.

    Attributes:
        planner: The planner without early stops, adapted to the critic.
        counts: Requests of the share by outcome: not stopped early; same or different answer of the complete search;
            failed; or dropped because the service was busy.
    """

    def __init__(self, share: float, planner: Planner) -> None:
        """Store the share and the planner."""
        self.planner, self._share = planner, share
        self.counts: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))

    def chosen(self, question: str, seed: int) -> bool:
        """Return whether a request belongs to the share, as determined by its question and seed."""
        return derive_seed(seed, question, b"canary", 0) % 2**32 < self._share * 2**32

    def compare(self, early: Plan, whole: SearchFuture) -> None:
        """Count and log the outcome of a complete search; runs on the scheduler's thread."""
        if whole.cancelled() or whole.exception() is not None or whole.result().error is not None:
            self.add("failed", stopped=early.stopped)
            return
        plan = whole.result()
        same = plan.answer == early.answer and (plan.answer is not None or plan.text == early.text)
        fields: dict[str, object] = {"stopped": early.stopped}
        for name, one in (("early", early), ("whole", plan)):
            fields |= {f"{name}_answer": one.answer, f"{name}_tokens": one.usage.generated_tokens}
        self.add("same" if same else "different", **fields)

    def add(self, outcome: str, **fields: object) -> None:
        """Count and log the outcome of a request of the share; `search.report.canary_panel` reads the log."""
        self.counts[outcome] += 1
        _LOGGER.info("canary request ended", extra={"fields": {"event": "canary", "outcome": outcome, **fields}})


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
        """Return the kind of a question's answer, that of the task's problem if the question is one."""
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


class SearchPool:
    """A running scheduler with a bounded queue; not thread-safe, used only by the server's event loop."""

    def __init__(self, service: Service) -> None:
        """Start without searches."""
        from mas_gym.tasks.grading.graders import Ungraded
        from mas_gym.tasks.sequences import ProblemTask
        from search.engine.progress import Journal
        from search.engine.scheduler import Scheduler
        from search.setup import make_setup, priced_setup

        self.service = service
        mas = service.mas if service.program is None else None
        setup = make_setup(service.planner, mas, service.critic, program=service.program, budget=service.budget)
        # Without prices, this rejects planners that need prices.
        setup = priced_setup(setup, service.policy.name, None)
        self._journal = Journal(setup, policy=service.policy.name, concurrency=service.concurrency)
        # Clients send no reference answers.
        task = ProblemTask.of([], grader=Ungraded())
        self.canary = _canary(service, setup.critic)
        grader = service.grader
        self.grades = None if grader is None else _Grades(grader, service.references, service.kind)
        self._scheduler = Scheduler(setup, service.policy, concurrency=service.concurrency, task=task).start()

    @property
    def active(self) -> int:
        """Number of searches in progress."""
        return self._scheduler.active

    @property
    def waiting(self) -> int:
        """Number of searches that have not started."""
        return self._scheduler.waiting

    def submit(
        self,
        question: str,
        seed: int,
        sampling: Sampling,
        changed: Callable[[], None],
        budget: Budget | None = None,
    ) -> SearchFuture:
        """Queue a search.

        Args:
            question: The question.
            seed: Together with the question, determines the answer, as far as the engine is deterministic.
            sampling: How the agents sample.
            changed: Called on another thread after each message.
            budget: Limits of this search, in addition to those of the service.

        Raises:
            PoolFullError: The queue is full.
        """
        if self.waiting + self.active >= self.service.concurrency + self.service.queue:
            raise PoolFullError
        kind = self.service.kind if self.grades is None else self.grades.kind_of(question)
        problem = Problem(PROBLEM_ID, question, "", kind)
        limits = None if budget is None else (self.service.budget or Budget()).tightened(budget)
        future = self._scheduler.submit(
            problem, seed=seed, sampling=sampling, budget=limits, on_progress=lambda step: changed()
        )
        future.add_done_callback(self._ended)  # type: ignore[arg-type]
        if self.canary is not None and self.canary.chosen(question, seed):
            check = partial(self._search_in_full, self.canary, problem, seed, sampling)
            future.add_done_callback(check)
        return future

    def _search_in_full(
        self, canary: Canary, problem: Problem, seed: int, sampling: Sampling, future: SearchFuture
    ) -> None:
        """Repeat a request of the canary share in full; runs on the scheduler's thread."""
        if future.cancelled() or future.exception() is not None or future.result().error is not None:
            return
        plan = future.result()
        if plan.stopped is None:
            canary.add("unstopped")
        elif self._scheduler.closed or self.waiting + self.active >= self.service.concurrency:
            canary.add("dropped", stopped=plan.stopped)
        else:
            whole = self._scheduler.submit(problem, seed=seed, sampling=sampling, planner=canary.planner)
            whole.add_done_callback(partial(canary.compare, plan))

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


def _canary(service: Service, critic: Critic | None) -> Canary | None:
    """Return the canary of a service; None without one.

    Raises:
        ConfigError: The share is not a number from 0 to 1, or the planner never stops early.
    """
    from search.planners.registry import planner_spec, whole_search

    share = service.canary
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        raise ConfigError(f"canary: expected a share from 0 to 1, got {shown(share)}")
    if not share:
        return None
    planner = as_planner(service.planner)
    whole = whole_search(planner)
    if whole == planner:
        raise ConfigError(
            f"canary: {planner_spec(planner)} never stops early, so there is nothing to check; use a planner with "
            "stop=, or a cascade"
        )
    return Canary(share, as_planner(whole.for_run(critic, False)))


TOO_LONG = "context_length_exceeded"
"""OpenAI's ``code`` for a prompt that exceeds the model's context window."""

_MAX_CHOICES, _MAX_INT = 64, 2**31 - 1


class ApiError(Exception):
    """A reply with an error status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        """Store the HTTP status, the message, OpenAI's ``type`` and ``code``, and the retry delay in seconds."""
        super().__init__(message)
        self.status, self.message, self.kind, self.retry_after = status, message, kind, retry_after
        self.code: str | int = status if code is None else code

    def body(self) -> JSONObject:
        """Return the error in OpenAI's format."""
        return {"error": {"message": self.message, "type": self.kind, "param": None, "code": self.code}}


class TextPart(BaseModel):
    """A part of a message's content; only text is supported."""

    type: Literal["text"]
    text: str


class ChatTurn(BaseModel):
    """One message of the client's conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    @property
    def text(self) -> str:
        """The content as one text, prefixed with the speaker's name if there is one."""
        parts = self.content
        text = (parts if isinstance(parts, str) else "".join(part.text for part in parts)).strip()
        return f"{self.name}: {text}" if self.name and text else text


class StreamOptions(BaseModel):
    """Options of streaming."""

    include_usage: bool = False


class ChatRequest(BaseModel):
    """A chat request; other fields are ignored if they do not change the answer, and rejected otherwise."""

    model_config = ConfigDict(extra="ignore")

    model: str
    messages: list[ChatTurn] = Field(min_length=1)
    n: int = Field(default=1, ge=1, le=_MAX_CHOICES)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    max_tokens: int | None = Field(default=None, ge=1, le=_MAX_INT)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=_MAX_INT)
    stream: bool = False
    stream_options: StreamOptions | None = None

    @field_validator("messages")
    @classmethod
    def _has_question(cls, turns: list[ChatTurn]) -> list[ChatTurn]:
        if not any(turn.text for turn in turns if turn.role == "user"):
            raise ValueError("expected a user message with a question")
        return turns

    @property
    def question(self) -> str:
        """The question of the search: the client's messages in order, separated by blank lines."""
        return "\n\n".join(text for turn in self.messages if (text := turn.text))

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self) -> Sampling:
        """Return the paper's sampling settings with the client's overrides; the token limit is per message."""
        from search import Sampling

        cap = self.max_completion_tokens or self.max_tokens
        chosen = {"temperature": self.temperature, "top_p": self.top_p, "max_new_tokens": cap}
        return Sampling(**{name: value for name, value in chosen.items() if value is not None})  # type: ignore[arg-type]


def parse_chat(raw: bytes, model: str) -> ChatRequest:
    """Parse a request body.

    Raises:
        ApiError: 400 with each error and its location; 404 for another model.
    """
    try:
        content = json.loads(raw.decode("utf-8"), parse_constant=_not_json)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"expected a JSON body: {str(error)[:200]}") from None
    if isinstance(content, dict) and (reason := unsupported(content)):
        raise ApiError(400, reason)
    try:
        asked = ChatRequest.model_validate(content)
    except ValidationError as error:
        faults = (f"{'.'.join(map(str, e['loc'])) or 'body'}: {e['msg']}" for e in error.errors()[:5])
        raise ApiError(400, "; ".join(faults)) from None
    if asked.model != model:
        raise ApiError(404, f"the model {asked.model[:100]!r} does not exist; this service serves {model!r}")
    return asked


def _not_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def read_limits(header: str | None) -> Budget | None:
    """Parse the header ``X-MAS-Budget: calls=40,tokens=800,seconds=2``; return None without the header.

    Raises:
        ApiError: 400 if the header is not a budget in these units.
    """
    if header is None:
        return None
    try:
        budget = Budget.read(header)
    except ConfigError as error:
        raise ApiError(400, f"X-MAS-Budget: {error}") from None
    if budget.usd is not None:
        raise ApiError(400, "X-MAS-Budget: expected calls, tokens or seconds, got usd; the service has no prices")
    return budget


def check_question(question: str, limit: int | None) -> None:
    """Reject a question that is too long, before tokenisation.

    Args:
        question: The question.
        limit: Maximum number of UTF-8 bytes; None for no limit.

    Raises:
        ApiError: 413.
    """
    size = len(question.encode("utf-8", "replace"))
    if limit is not None and size > limit:
        message = f"expected a question of at most {limit:,} bytes, got {size:,}; shorten it"
        raise ApiError(413, message, code=TOO_LONG)


def usage_document(plan: Plan) -> JSONObject:
    """Return a plan's usage in OpenAI's format; completion tokens are those of all agents."""
    usage = plan.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.generated_tokens,
        "total_tokens": usage.prompt_tokens + usage.generated_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def completion_document(
    plan: Plan, asked: ChatRequest, model: str, read: Callable[[str], str] = lambda text: text
) -> JSONObject:
    """Return a complete reply: the best candidates as choices, and figures of the search under ``mas_gym``.

    Args:
        plan: The plan.
        asked: The request.
        model: The model's name.
        read: Returns the answer in a candidate's text (`mas_gym.MAS.final_text`).
    """
    best = plan.candidates[: asked.n]
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": read(candidate.text)},
            "logprobs": None,
            "finish_reason": "stop",
        }
        for index, candidate in enumerate(best)
    ]
    figures = {
        "answers": [candidate.answer for candidate in best],
        "scores": [candidate.score for candidate in best],
        "agent_calls": plan.usage.agent_calls,
        "reward_calls": plan.usage.reward_calls,
        "seconds": round(plan.usage.seconds, 3),
        "stopped": plan.stopped,
    }
    head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": "chat.completion", "created": int(time.time())}
    return head | {"model": model, "choices": choices, "usage": usage_document(plan), "mas_gym": figures}


def chunk(
    ident: str, model: str, delta: JSONObject | None, index: int = 0, finish_reason: str | None = None
) -> JSONObject:
    """Return one chunk of a streamed reply."""
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    head = {"id": ident, "object": "chat.completion.chunk", "created": int(time.time()), "model": model}
    return head | {"choices": [choice]}


def sse(content: JSONObject) -> str:
    """Return one server-sent event."""
    return f"data: {json.dumps(content)}\n\n"
