"""Detection of the LangGraph node that makes a call, which names agents without a system prompt.

LangGraph stores the metadata of the running node in a context variable of LangChain. Chat models of LangChain and plain
clients send their requests in the context of their node and use httpx. Therefore httpx requests to a gateway get a
header with the node. LangChain is not imported, and programs are not changed.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from typing import Any
from urllib.parse import quote

from mas_gym.programs.activity import CURRENT
from mas_gym.programs.calls import NODE_HEADER

_INNER = ("model", "agent")
"""Nodes of prebuilt agents, whose own names say nothing; the node that holds the agent has the name."""

_process_port: int | None = None


def name_nodes(port: int | None = None) -> None:
    """Send the node of a request in its header `NODE_HEADER`, to gateways only; safe to call twice.

    Args:
        port: The gateway's port, in a process that runs one program; None for the port of the running execution.
    """
    global _process_port
    _process_port = port
    _extend_clients()


@functools.cache
def _extend_clients() -> None:
    # openai builds on httpx or on httpx2, depending on its version.
    for library in ("httpx", "httpx2"):
        with suppress(ImportError):
            module = importlib.import_module(library)
            for client in (module.Client, module.AsyncClient):
                client.send = _naming(client.send)


def _naming(send: Any) -> Any:
    @functools.wraps(send)
    def send_named(client: Any, request: Any, *args: Any, **named: Any) -> Any:
        execution = CURRENT.get()
        port = _process_port if execution is None else execution.activity.port
        if port is not None and request.url.port == port:
            request.headers.update(node_header())
        return send(client, request, *args, **named)

    return send_named


def node_header() -> dict[str, str]:
    """Return the header that names the node which runs in this context, and its task; empty if none does."""
    config = sys.modules.get("langchain_core.runnables.config")
    running = None if config is None else vars(config).get("var_child_runnable_config")
    metadata = (running.get() or {}).get("metadata") or {} if isinstance(running, ContextVar) else {}
    node, place = _node(metadata), _place(metadata.get("langgraph_path", ()))
    return {NODE_HEADER: f"{quote(node)} {place}".strip()} if node else {}


def _place(path: Iterable[object]) -> str:
    """Return the numbers in the path of a task, which tell the tasks apart that `Send` starts at one node.

    >>> _place(("__pregel_push", 2, False))
    '2'
    """
    numbers = (part for part in path if isinstance(part, int) and not isinstance(part, bool))
    return "-".join(map(str, numbers))


def _node(metadata: Mapping[str, object]) -> str:
    """Return the node that LangGraph's metadata name.

    >>> _node({"langgraph_node": "model", "langgraph_checkpoint_ns": "writer:1f|model:2e"})
    'writer'
    """
    if not metadata.get("langgraph_node"):
        return ""
    path = [part.partition(":")[0] for part in str(metadata.get("langgraph_checkpoint_ns") or "").split("|")]
    outer = next((name for name in reversed(path) if name and name not in _INNER), "")
    return outer or str(metadata.get("lc_agent_name") or metadata["langgraph_node"])
