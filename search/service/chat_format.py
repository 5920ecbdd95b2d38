"""The OpenAI chat format of the service: request validation and reply documents."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, NoReturn

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from mas_gym.errors import ConfigError
from mas_gym.internal.json_types import JSONObject
from mas_gym.programs.chat_completions import unsupported
from search.costs import Budget

if TYPE_CHECKING:
    from search import Plan, Sampling

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
        """The content as one string, prefixed with the speaker's name if there is one."""
        parts = self.content
        text = (parts if isinstance(parts, str) else "".join(part.text for part in parts)).strip()
        return f"{self.name}: {text}" if self.name and text else text


class StreamOptions(BaseModel):
    """Streaming options."""

    include_usage: bool = False


class ChatRequest(BaseModel):
    """A chat request; other fields are ignored if they do not change the answer, and rejected otherwise."""

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

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: object) -> object:
        """In OpenAI's schema, null means the default."""
        return {k: v for k, v in given.items() if v is not None} if isinstance(given, dict) else given

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

    def sampling(self, default: Sampling) -> Sampling:
        """Return the service's sampling with the client's values; the token limit is per message."""
        temperature = default.temperature if self.temperature is None else self.temperature
        top_p = default.top_p if self.top_p is None else self.top_p
        cap = self.max_completion_tokens or self.max_tokens or default.max_new_tokens
        return replace(default, temperature=temperature, top_p=top_p, max_new_tokens=cap)


def parse_chat(raw: bytes, model: str) -> ChatRequest:
    """Parse a request body.

    Raises:
        ApiError: 400 with the first five errors and their locations; 404 for another model.
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
    """Raise `ApiError` 413 for a question of more than ``limit`` UTF-8 bytes, before tokenization."""
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


def completion_document(plan: Plan, asked: ChatRequest, model: str, read: Callable[[str], str]) -> JSONObject:
    """Return a complete reply: the best candidates as choices, and statistics of the search under ``mas_gym``.

    ``read`` returns the answer in a candidate's text (`mas_gym.MAS.final_text`).
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
