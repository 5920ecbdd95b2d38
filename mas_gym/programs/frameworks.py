"""Detection of the LangGraph node that makes a call; its name identifies agents without a system prompt.

LangGraph stores the metadata of the running node in a context variable of LangChain. LangChain chat models and plain
clients send their requests in the context of their node and use httpx. Therefore httpx requests to a gateway get a
header with the node. A second header lists all nodes of the graphs that have started, because a dry run may not reach
all of them. The function of a conditional edge runs as a part of the node before it, but its calls have the name of
the function. LangChain is not imported, and programs are not changed.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from types import FunctionType, MethodType
from typing import Any
from urllib.parse import quote
from weakref import WeakKeyDictionary

from mas_gym.internal.lazy import when_imported
from mas_gym.programs.background import CURRENT
from mas_gym.programs.chat_completions import HERE_HEADER, NODE_HEADER, NODES_HEADER

_INNER = ("model", "agent")
"""Generic node names of prebuilt agents; such agents are named after their enclosing node."""

_GRAPHS = "langgraph.pregel"
_LIBRARIES = ("langgraph", "langchain")
"""Libraries with routing functions that do not call a model."""

_process_port: int | None = None
_nodes: ContextVar[tuple[str, ...]] = ContextVar("mas_gym_nodes", default=())
_routers: WeakKeyDictionary[object, str] = WeakKeyDictionary()
"""Names of routing functions (which choose the next node), by their runnable."""
_router: ContextVar[tuple[str, str]] = ContextVar("mas_gym_router", default=("", ""))
"""The routing function that runs in this context, after its node."""


def name_nodes(port: int | None = None) -> None:
    """Send the node of a request and the nodes of its graphs in headers, to gateways only; safe to call again.

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
                _wrap(client, client.send, _naming)
    # A program may import LangGraph while it runs.
    when_imported(_GRAPHS, _describe_graphs)


def _describe_graphs() -> None:
    graph = sys.modules[_GRAPHS].Pregel
    for run in (graph.stream, graph.astream):
        _wrap(graph, run, _describing)


@functools.cache
def _name_routers(kind: Any) -> None:
    for run in (kind.invoke, kind.ainvoke):
        _wrap(kind, run, _routing)


def _wrap(kind: type, method: Callable[..., Any], wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    setattr(kind, method.__name__, functools.wraps(method)(wrapper(method)))


def _naming(send: Callable[..., Any]) -> Callable[..., Any]:
    def send_named(client: object, request: Any, *args: object, **named: object) -> Any:
        execution = CURRENT.get()
        port = _process_port if execution is None else execution.activity.port
        if port is not None and request.url.port == port:
            request.headers.update(node_headers())
            if execution is not None:
                request.headers[HERE_HEADER] = "1"
        return send(client, request, *args, **named)

    return send_named


def _describing(run: Callable[..., Any]) -> Callable[..., Any]:
    def run_described(graph: object, /, *args: object, **named: object) -> Any:
        if CURRENT.get() is not None or _process_port is not None:
            _nodes.set(tuple(dict.fromkeys((*_nodes.get(), *_nodes_of(graph, _running())))))
        return run(graph, *args, **named)

    return run_described


def _nodes_of(graph: Any, above: Mapping[str, object]) -> Iterator[str]:
    """Yield the nodes of a graph and its subgraphs, and the routing functions.

    Args:
        graph: A compiled graph.
        above: LangGraph's metadata of the node that runs it.
    """
    metadata = {**above, **((graph.config or {}).get("metadata") or {})}
    space, inner = metadata.get("langgraph_checkpoint_ns"), dict(graph.get_subgraphs())
    # Graphs of LangGraph's functional interface have no builder.
    builder = vars(graph).get("builder")
    for node in graph.nodes:
        place = f"{space}|{node}" if space else node
        inside = {**metadata, "langgraph_node": node, "langgraph_checkpoint_ns": place}
        name = _node(inside)
        if not node.startswith("__"):
            yield name
        if isinstance(inner.get(node), sys.modules[_GRAPHS].Pregel):
            yield from _nodes_of(inner[node], inside)
        for branch in builder.branches.get(node, {}).values() if builder is not None else ():
            if router := _router_name(branch.path):
                yield router
                _routers[branch.path] = router
                kind: Any = type(branch.path)
                _name_routers(kind)


def _router_name(path: object) -> str:
    """Return the name of a routing function; empty if it has no name or belongs to the library."""
    held = vars(path)
    held_function: Any = held.get("func") or held.get("afunc")
    function = inspect.unwrap(held_function)
    if not isinstance(function, FunctionType | MethodType) or function.__module__.partition(".")[0] in _LIBRARIES:
        return ""
    return "" if function.__name__ == "<lambda>" else function.__name__


def _routing(run: Callable[..., Any]) -> Callable[..., Any]:
    @contextmanager
    def named_by(path: object, config: Any) -> Iterator[None]:
        before = _router.set((_node((config or {}).get("metadata") or {}), _routers[path]))
        try:
            yield
        finally:
            _router.reset(before)

    def run_named(path: object, value: object, config: Any = None, **named: object) -> object:
        if path not in _routers:
            return run(path, value, config, **named)
        with named_by(path, config):
            return run(path, value, config, **named)

    async def await_named(path: object, value: object, config: Any = None, **named: object) -> object:
        if path not in _routers:
            return await run(path, value, config, **named)
        with named_by(path, config):
            return await run(path, value, config, **named)

    return await_named if inspect.iscoroutinefunction(run) else run_named


def _running() -> Mapping[str, Any]:
    """Return LangGraph's metadata of the node that runs in this context; empty if no node runs."""
    config = sys.modules.get("langchain_core.runnables.config")
    running = None if config is None else vars(config).get("var_child_runnable_config")
    return ((running.get() or {}).get("metadata") or {}) if isinstance(running, ContextVar) else {}


def node_headers() -> dict[str, str]:
    """Return two headers: the node running in this context, with its task, and all nodes.

    Empty if no node runs.
    """
    metadata = _running()
    node, place = _node(metadata), _place(metadata.get("langgraph_path", ()))
    if not node:
        return {}
    before, router = _router.get()
    name = router if before == node else node
    return {NODE_HEADER: f"{quote(name)} {place}".strip(), NODES_HEADER: " ".join(map(quote, _nodes.get()))}


def _place(path: Iterable[object]) -> str:
    """Return the numbers in a task's path, which distinguish the tasks that `Send` starts at one node.

    >>> _place(("__pregel_push", 2, False))
    '2'
    """
    numbers = (part for part in path if isinstance(part, int) and not isinstance(part, bool))
    return "-".join(map(str, numbers))


def _node(metadata: Mapping[str, object]) -> str:
    """Return the node name from LangGraph's metadata.

    >>> _node({"langgraph_node": "model", "langgraph_checkpoint_ns": "writer:1f|model:2e"})
    'writer'
    """
    if not metadata.get("langgraph_node"):
        return ""
    path = [part.partition(":")[0] for part in str(metadata.get("langgraph_checkpoint_ns") or "").split("|")]
    outer = next((name for name in reversed(path) if name and name not in _INNER), "")
    return outer or str(metadata.get("lc_agent_name") or metadata["langgraph_node"])
