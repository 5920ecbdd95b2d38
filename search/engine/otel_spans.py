"""OpenTelemetry traces: a span per search, agent call and score, with the names of the ``gen_ai`` conventions.

Tracing is off by default. A scheduler that is created inside `trace` records spans::

    invoke_workflow rpsv                    the search: problem, planner, critic, answer, cost
      chat tiny                             an agent call: agent, sampling, tokens, finish reasons
      evaluate masprm                       states scored together: an event with the value of each

Times are measured in the scheduler. The span of a call begins when the request is submitted to the engine and ends when
the reply is received, so it includes the wait for a batch in the engine.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from mas_gym.errors import need
from mas_gym.internal.json_types import JSONObject
from mas_gym.policies.base import SamplingReply, SamplingRequest, spoken
from search.plan import Plan
from search.planners.registry import planner_spec
from search.protocol import ScoringContext
from search.setup import Setup

if TYPE_CHECKING:
    from opentelemetry.trace import Span, TracerProvider


@contextlib.contextmanager
def trace(provider: TracerProvider | None = None, *, content: bool = False) -> Iterator[None]:
    """Record the searches of all runs that start inside this context in this process.

    Args:
        provider: Receives the spans, such as a ``TracerProvider`` of ``opentelemetry.sdk.trace`` with an exporter; the
            application's global provider by default.
        content: Also record prompts and messages, which may be confidential.

    Raises:
        MissingDependencyError: OpenTelemetry is not installed.
    """
    need("opentelemetry", "recording traces", "telemetry")
    before, Spans.current = Spans.current, partial(Spans, provider, content)
    try:
        yield
    finally:
        Spans.current = before


class Spans:
    """The open spans of one scheduler, by the number of the search and the key of the request.

    Attributes:
        current: Creates the spans of a new scheduler; None if tracing is off.
    """

    current: ClassVar[Callable[[], Spans] | None] = None

    def __init__(self, provider: TracerProvider | None, content: bool) -> None:
        """Start without spans; the arguments are those of `trace`."""
        from opentelemetry import trace as api

        self._api, self._content = api, content
        self._tracer = api.get_tracer("mas_gym", tracer_provider=provider)
        self._searches: dict[int, Span] = {}
        self._requests: dict[Hashable, tuple[Span, str, Sequence[ScoringContext]]] = {}

    def begin(self, number: int, setup: Setup, problem_id: str) -> None:
        """Open the span of a search."""
        mas = setup.dynamics.mas
        self._searches[number] = self._tracer.start_span(
            f"invoke_workflow {mas.name}",
            attributes={
                "gen_ai.operation.name": "invoke_workflow",
                "gen_ai.workflow.name": mas.name,
                "mas_gym.problem.id": problem_id,
                "mas_gym.planner": planner_spec(setup.planner),
                "mas_gym.critic": setup.critic.name if setup.critic is not None else "",
                "mas_gym.seed": setup.seed,
            },
        )

    def finish(self, number: int, plan: Plan | None, error: BaseException | None = None) -> None:
        """Close the span of a search with its result; ``plan`` is None if the search was dropped."""
        span = self._searches.pop(number, None)
        if span is None:
            return
        if plan is not None:
            usage = plan.usage
            span.set_attributes(
                {
                    "gen_ai.usage.input_tokens": usage.prompt_tokens,
                    "gen_ai.usage.output_tokens": usage.generated_tokens,
                    "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
                    "mas_gym.agent_calls": usage.agent_calls,
                    "mas_gym.reward_calls": usage.reward_calls,
                    "mas_gym.answer": plan.answer or "",
                }
            )
            if plan.correct is not None:
                span.set_attribute("mas_gym.correct", plan.correct)
        reason = plan.error if plan is not None else str(error or "the search was cancelled")
        if reason is not None:
            self._fail(span, type(error).__name__ if error is not None else "search failed", reason)
        span.end()

    def ask(self, number: int, key: Hashable, model: str, request: SamplingRequest) -> None:
        """Open the span of a policy request."""
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": model,
            "gen_ai.agent.name": request.agent,
            "gen_ai.request.temperature": request.temperature,
            "gen_ai.request.top_p": request.top_p,
            "gen_ai.request.max_tokens": request.max_new_tokens,
            "gen_ai.request.choice.count": len(request.seeds),
            "gen_ai.request.seed": request.seeds[0],
        }
        if self._content:
            prompt = [
                _message(message.role, message.content) for message in spoken(request.messages, request.extra_body)[0]
            ]
            attributes["gen_ai.input.messages"] = json.dumps(prompt)
        self._requests[key] = self._open(number, f"chat {model}", attributes), "", ()

    def score(self, number: int, key: Hashable, critic: str, contexts: Sequence[ScoringContext]) -> None:
        """Open the span of a batch of states to score."""
        attributes = {
            "gen_ai.operation.name": "evaluate",
            "gen_ai.evaluation.name": critic,
            "mas_gym.states": len(contexts),
        }
        self._requests[key] = self._open(number, f"evaluate {critic}", attributes), critic, contexts

    def answer(self, key: Hashable, outcome: object) -> None:
        """Close the span of a request with its reply, values or exception; ``outcome`` is None if it was cancelled."""
        if key not in self._requests:
            return
        span, critic, contexts = self._requests.pop(key)
        if isinstance(outcome, BaseException) or outcome is None:
            self._fail(span, type(outcome).__name__ if outcome else "cancelled", str(outcome or "cancelled"))
        elif isinstance(outcome, SamplingReply):
            self._add_reply(span, outcome)
        elif isinstance(outcome, Sequence):
            for context, value in zip(contexts, outcome, strict=False):
                result = {
                    "gen_ai.evaluation.name": critic,
                    "gen_ai.evaluation.score.value": float(value),
                    "mas_gym.depth": context.state.depth,
                }
                span.add_event("gen_ai.evaluation.result", result)
        span.end()

    def _add_reply(self, span: Span, reply: SamplingReply) -> None:
        span.set_attributes(
            {
                "gen_ai.usage.input_tokens": reply.prompt_tokens,
                "gen_ai.usage.output_tokens": sum(sample.tokens for sample in reply.samples),
                "gen_ai.usage.cache_read.input_tokens": reply.cached_tokens,
                "gen_ai.response.finish_reasons": [sample.finish_reason for sample in reply.samples],
            }
        )
        if self._content:
            said = [
                {**_message("assistant", sample.text), "finish_reason": sample.finish_reason}
                for sample in reply.samples
            ]
            span.set_attribute("gen_ai.output.messages", json.dumps(said))

    def _open(self, number: int, name: str, attributes: dict[str, object]) -> Span:
        kind = self._api.SpanKind.CLIENT
        within = self._api.set_span_in_context(self._searches[number])
        return self._tracer.start_span(name, context=within, kind=kind, attributes=attributes)

    def _fail(self, span: Span, kind: str, reason: str) -> None:
        span.set_attribute("error.type", kind)
        span.set_status(self._api.Status(self._api.StatusCode.ERROR, reason))


def _message(role: str, text: str) -> JSONObject:
    return {"role": role, "parts": [{"type": "text", "content": text}]}
