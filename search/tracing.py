"""OpenTelemetry traces: a span per search, agent call and score, with the names of the ``gen_ai`` conventions.

Tracing is off by default. A run that starts inside `trace` records spans::

    invoke_workflow rpsv                    the search: problem, planner, critic, answer, cost
      chat tiny                             an agent call: agent, sampling, tokens, finish reasons
      evaluate masprm                       states scored together: an event with the value of each

The span of a call begins when the search requests it and ends when the reply is received, so it includes the wait for a
batch in the engine.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from mas_gym.critics import Critic, Scores
from mas_gym.errors import need
from mas_gym.internal.json_types import JSONObject
from mas_gym.policies.base import SamplingReply, SamplingRequest, spoken
from mas_gym.tasks.base import Problem
from search.engine.scheduler import Observer, observed
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
    with observed(partial(Spans, provider, content)):
        yield


class Spans(Observer):
    """Records the spans of one engine; the context of a search's task holds its span."""

    def __init__(self, provider: TracerProvider | None, content: bool, policy: str) -> None:
        """Record with the arguments of `trace`; ``policy`` is the policy's name."""
        from opentelemetry import trace as api

        self._api, self._content, self._policy = api, content, policy
        self._tracer = api.get_tracer("mas_gym", tracer_provider=provider)

    @contextlib.contextmanager
    def _span(self, name: str, attributes: JSONObject, internal: bool = False) -> Iterator[Span]:
        """Open a span; an exception that leaves the context is its error."""
        kind = self._api.SpanKind.INTERNAL if internal else self._api.SpanKind.CLIENT
        span = self._tracer.start_span(name, kind=kind, attributes=attributes)
        try:
            with self._api.use_span(span, record_exception=False, set_status_on_exception=False):
                yield span
        except BaseException as error:
            self._fail(span, type(error).__name__, str(error) or "cancelled")
            raise
        finally:
            span.end()

    @contextlib.contextmanager
    def search(self, setup: Setup, problem: Problem) -> Iterator[Callable[[Plan, BaseException | None], None]]:
        """Record a search."""
        mas = setup.dynamics.mas
        attributes: JSONObject = {
            "gen_ai.operation.name": "invoke_workflow",
            "gen_ai.workflow.name": mas.name,
            "mas_gym.problem.id": problem.id,
            "mas_gym.planner": planner_spec(setup.planner),
            "mas_gym.critic": setup.critic.name if setup.critic is not None else "",
            "mas_gym.seed": setup.seed,
        }
        with self._span(f"invoke_workflow {mas.name}", attributes, internal=True) as span:
            yield partial(self._add_plan, span)

    def _add_plan(self, span: Span, plan: Plan, error: BaseException | None) -> None:
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
        if plan.error is not None:
            self._fail(span, type(error).__name__ if error is not None else "search failed", plan.error)

    @contextlib.contextmanager
    def call(self, request: SamplingRequest) -> Iterator[Callable[[SamplingReply], None]]:
        """Record a request to the policy."""
        attributes: JSONObject = {
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": self._policy,
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
        with self._span(f"chat {self._policy}", attributes) as span:
            yield partial(self._add_reply, span)

    @contextlib.contextmanager
    def scores(self, critic: Critic, contexts: Sequence[ScoringContext]) -> Iterator[Callable[[Scores], None]]:
        """Record the scoring of states."""
        attributes: JSONObject = {
            "gen_ai.operation.name": "evaluate",
            "gen_ai.evaluation.name": critic.name,
            "mas_gym.states": len(contexts),
        }
        with self._span(f"evaluate {critic.name}", attributes) as span:
            yield partial(_add_scores, span, critic.name, contexts)

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

    def _fail(self, span: Span, kind: str, reason: str) -> None:
        span.set_attribute("error.type", kind)
        span.set_status(self._api.Status(self._api.StatusCode.ERROR, reason))


def _add_scores(span: Span, critic: str, contexts: Sequence[ScoringContext], scores: Scores) -> None:
    for context, value in zip(contexts, scores, strict=True):
        result = {
            "gen_ai.evaluation.name": critic,
            "gen_ai.evaluation.score.value": float(value),
            "mas_gym.depth": context.state.depth,
        }
        span.add_event("gen_ai.evaluation.result", result)


def _message(role: str, text: str) -> JSONObject:
    return {"role": role, "parts": [{"type": "text", "content": text}]}
