"""``mas-gym serve``: an OpenAI-compatible endpoint that answers by search."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from mas_gym.cli import options as opt
from mas_gym.cli.console import note
from mas_gym.cli.evaluate import pair_rows
from mas_gym.cli.option_groups import grouped
from mas_gym.cli.option_values import check_folder, check_kind, load_weights
from mas_gym.errors import ConfigError, need

if TYPE_CHECKING:
    from mas_gym.tasks.base import Grader, Task
    from mas_gym.tasks.grading.numbers import Decimal

_SPARE_CONNECTIONS = 64
_KEY = "MAS_GYM_SERVE_KEY"


@grouped(number=False)
def serve(
    source: opt.TaskSource,
    agents: opt.AgentSource,
    planner: opt.PlannerName = "mcts:10,3",
    critic: opt.CriticName = None,
    seed: opt.Seed = 42,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535)] = 8080,
    model: Annotated[str, typer.Option("--model", help="Model name that clients request.")] = "mas-gym",
    concurrency: Annotated[int, typer.Option("--concurrency", min=1, help="Maximum concurrent searches.")] = 32,
    queue: Annotated[int, typer.Option("--queue", min=0, help="Maximum waiting searches; others get 429.")] = 256,
    seconds: Annotated[
        float | None,
        typer.Option("--seconds", help="Time limit per search, which then returns its best answer so far."),
    ] = None,
    max_body: Annotated[int, typer.Option("--max-body", min=1024, help="Largest request body, in bytes.")] = 2**20,
    max_question: Annotated[
        int, typer.Option("--max-question", min=1, help="Longest question, in bytes; longer ones get status 413.")
    ] = 2**16,
    log_json: opt.LogJSON = None,
) -> None:
    """Answer OpenAI chat requests by search; any OpenAI client works unchanged.

    The environment variable MAS_GYM_SERVE_KEY contains the API key. Without a key, only clients on this machine are
    served, and pages of other sites are rejected.

    With --task, the task's system is used, and answers to its questions are graded after they are sent (see /metrics).
    """
    for package in ("fastapi", "uvicorn", "prometheus_client"):
        need(package, "mas-gym serve", "serve")
    from search import Budget
    from search.service.app import listen, make_app
    from search.service.search_pool import Service
    from search.service.telemetry import json_lines

    key = _key(host)
    check_folder(log_json)
    [row] = pair_rows([planner], [critic] if critic else None)
    load_weights([row])
    grader, task, kind, decimal = _grading(source)
    spec = agents.load(task, kind)
    spec = replace(spec, policy=agents.read_policy(spec.mas), planner=row.planner, critic=row.critic)
    spec = replace(spec, seed=seed, budget=Budget(seconds=seconds), concurrency=concurrency)
    service = Service(
        spec,
        kind=check_kind(kind),
        queue=queue,
        grader=grader,
        references=task,
        decimal=decimal,
        model=model,
        key=key,
        max_body=max_body,
        max_question=max_question,
    )
    app = make_app(service)
    note(f"Serving {spec.mas.name} by {planner} at http://{host}:{port}/v1 as model {model!r}; Ctrl-C stops it.")
    with json_lines(log_json):
        listen(app, host, port, limit=concurrency + queue + _SPARE_CONNECTIONS)
    note("Stopped.")


def _grading(source: opt.TaskSource) -> tuple[Grader | None, Task | None, str | None, Decimal]:
    """Return the grader, the task with the references and the kind, each None if unknown, and the decimal sign."""
    from mas_gym.tasks.grading.graders import make_grader

    if source.task is not None:
        task = source.load()
        decimal: Decimal = source.options.get("decimal", ".")
        return task.grader or task, task, source.kind or (task[0].kind if task else None), decimal
    if source.judge is not None:
        raise ConfigError("--judge: expected --task as well, got none")
    base = source.base_grader()
    grader = None if source.grader is None else make_grader(source.grader, base)
    return grader, None, source.kind, base.decimal


def _key(host: str) -> str | None:
    """Return the API key, which is required if other machines can connect."""
    key = os.environ.get(_KEY) or None
    from search.service import is_loopback

    if key is None and not is_loopback(host):
        raise ConfigError(
            f"--host {host}: expected an API key because other machines can reach the service; set one with "
            f"export {_KEY}=..., or leave out --host"
        )
    return key
