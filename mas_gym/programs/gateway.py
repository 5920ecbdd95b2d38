"""Routing of a program's calls to its execution.

Each execution has a separate address with an unguessable path, so that no program can access the calls of another.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable, Mapping
from typing import Any

from mas_gym.internal.json_types import JSONObject
from mas_gym.programs.chat_completions import Call, CallDialect, CallError, Reply, openai_error, read_call
from mas_gym.programs.dialects import DIALECTS
from mas_gym.programs.execution import Execution
from mas_gym.programs.recorded_tools import answer_use


class Gateway:
    """Maps paths to open executions.

    Attributes:
        open: The executions that receive requests, by token.
        normalize: See `mas_gym.programs.Program`.
        fitted: Converts a call to the form that its policy supports. Raises `CallError` if a part is unsupported.
    """

    def __init__(
        self,
        normalize: Callable[[JSONObject], Any] | None = None,
        fitted: Callable[[Call], Call] = lambda call: call,
    ) -> None:
        self.normalize, self.fitted = normalize, fitted
        self.open: dict[str, Execution] = {}

    def at(self, path: str) -> Execution | None:
        """Return the execution with the token at the beginning of a path; None if there is no such execution."""
        return self.open.get(path.strip("/").partition("/")[0])

    def admit(self, path: str, headers: Mapping[str, str]) -> Execution:
        """Return the execution that a request belongs to; its body need not have been read.

        Raises:
            CallError: There is no such execution, or the request lacks its key.
        """
        execution = self.at(path)
        if execution is None:
            raise CallError("no program is running at this address", 404)
        sent = (headers.get("authorization", ""), f"Bearer {headers.get('x-api-key', '')}")
        if execution.key and not any(hmac.compare_digest(s.encode("utf-8", "replace"), execution.bearer) for s in sent):
            raise CallError("expected the API key of this program", 401)
        return execution

    def receive(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> Reply | tuple[Call, Execution]:
        """Reply to a request, or return the call that it makes and the execution that answers it.

        The names of headers are in lower case.
        """
        route, dialect = _route(path)
        try:
            execution = self.admit(path, headers)
            if route == "v1/models" and method == "GET":
                entry = {"id": "mas-gym", "object": "model", "created": 0, "owned_by": "mas-gym"}
                return Reply(200, "application/json", json.dumps({"object": "list", "data": [entry]}).encode())
            if route == "v1/recorded" and method in ("POST", "PUT"):
                return answer_use(execution, method, body)
            if route != _CHAT and dialect is None:
                known = ", ".join(f"/{path}" for path in (_CHAT, *DIALECTS))
                raise CallError(f"expected a request to one of {known}, got {method} /{route[:100]}", 404)
            if method != "POST":
                raise CallError(f"expected POST, got {method}", 405)
            return self.fitted(read_call(body, headers, self.normalize, dialect)), execution
        except CallError as error:
            return refusal(path, error)


def refusal(path: str, error: CallError) -> Reply:
    """Return an error in the format that clients of a path expect."""
    _, dialect = _route(path)
    body = (openai_error if dialect is None else dialect.error)(str(error), error.status)
    return Reply(error.status, "application/json", json.dumps(body).encode())


_CHAT = "v1/chat/completions"


def _route(path: str) -> tuple[str, CallDialect | None]:
    """Return the part of a path after the execution's token, and its dialect; None if it is not a dialect's path."""
    route = path.strip("/").partition("/")[2]
    return route, DIALECTS.get(route)
