"""What frameworks tell of a call beside its request: the node of a LangGraph graph that makes it.

LangGraph puts the node into the metadata of LangChain's runs. A chat model of LangChain reports them to callbacks in
the program's context, before it sends the request, which is then recognised by its messages. A plain client in a node
is asked in the node's own context. Neither imports LangChain, nor is a program changed for it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from functools import cache
from typing import Any

from mas_gym.programs.activity import CURRENT
from mas_gym.programs.calls import AGENT_HEADER
from mas_gym.programs.execution import Execution

_INNER = ("model", "agent")
"""Nodes of prebuilt agents, whose own names say nothing; the node that holds the agent has the name."""

_LISTENER: ContextVar[Any] = ContextVar("mas_gym_listener", default=None)


def listen() -> None:
    """Have LangChain, if it is imported, report the chat models of this context."""
    if "langchain_core" in sys.modules:
        _LISTENER.set(_listener())


@cache
def _listener() -> Any:
    from langchain_core.callbacks import BaseCallbackHandler
    from langchain_core.tracers.context import register_configure_hook

    class Listener(BaseCallbackHandler):  # type: ignore[misc]
        run_inline = True
        ignore_chain = ignore_agent = ignore_retriever = ignore_retry = ignore_custom_event = True

        def on_chat_model_start(self, serialized: Any, messages: Any, *, metadata: Any = None, **more: Any) -> None:
            execution, name = CURRENT.get(), _node(metadata)
            if execution is not None and name:
                execution.nodes[_contents([message.content for message in messages[0]])] = name

    register_configure_hook(_LISTENER, inheritable=True)
    return Listener()


def with_node(execution: Execution, headers: Mapping[str, str], asked: bytes | Mapping[str, Any]) -> Mapping[str, str]:
    """Return a request's headers; the agent is the node that makes the request if the request says nothing of it."""
    here = _node_here()
    if AGENT_HEADER in headers or not (here or execution.nodes):
        return headers
    try:
        request = json.loads(asked) if isinstance(asked, bytes) else asked
        messages = [message if isinstance(message, dict) else dict(message) for message in request["messages"]]
        named = "agent" in (request.get("metadata") or {})
        key = _contents([message.get("content") for message in messages])
    except (ValueError, TypeError, LookupError, AttributeError):
        # The gateway says what is wrong with it.
        return headers
    name = here or execution.nodes.get(key, "")
    if named or not name or any(message.get("role") in ("system", "developer") for message in messages):
        return headers
    return {**headers, AGENT_HEADER: name}


def _node_here() -> str:
    """Return the node that runs in this context; nothing if none does."""
    config = sys.modules.get("langchain_core.runnables.config")
    running = getattr(config, "var_child_runnable_config", None)
    return _node((running.get() or {}).get("metadata")) if isinstance(running, ContextVar) else ""


def _node(metadata: Mapping[str, Any] | None) -> str:
    """Return the node that LangGraph's metadata name.

    >>> _node({"langgraph_node": "model", "langgraph_checkpoint_ns": "writer:1f|model:2e"})
    'writer'
    """
    told = metadata or {}
    if not told.get("langgraph_node"):
        return ""
    path = [part.partition(":")[0] for part in str(told.get("langgraph_checkpoint_ns") or "").split("|")]
    outer = next((name for name in reversed(path) if name and name not in _INNER), "")
    return outer or str(told.get("lc_agent_name") or told["langgraph_node"])


def _contents(contents: Sequence[Any]) -> tuple[str, ...]:
    return tuple(
        content if isinstance(content, str) else "".join(part.get("text", "") for part in content or () if part)
        for content in contents
    )
