"""``mas-gym planners``, ``critics``, ``policies`` and ``tasks``: what can be named, with settings and defaults."""

from __future__ import annotations

import inspect
import json as jsonlib
from collections.abc import Callable, Iterable
from typing import Annotated, Any, NamedTuple

import typer

from mas_gym.cli.console import stdout
from mas_gym.render import one_line

AsJSON = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class Entry(NamedTuple):
    """Something that can be named.

    Attributes:
        name: Its name.
        summary: One line on what it is.
        settings: Its settings in order, as ``name=default``, or ``name`` where one is required.
    """

    name: str
    summary: str
    settings: list[str]


def planners(json: AsJSON = False) -> None:
    """List the planners that --planner takes, with their settings in order."""
    from search.registry import planner_makers

    made = (_entry(name, make) for name, make in planner_makers().items())
    _show(made, json, "--planner NAME:SETTINGS, such as mcts:10,3,leaf=bootstrap", "planner")


def critics(json: AsJSON = False) -> None:
    """List the critics that --critic takes beside folders saved by training."""
    from rewardmodels.critics import critic_makers

    made = (_entry(name, make) for name, make in sorted(critic_makers().items()))
    _show(
        made,
        json,
        "--critic NAME or NAME:ARGUMENT, or a folder saved by training; options follow as #name=value",
        "critic",
    )


def policies(json: AsJSON = False) -> None:
    """List the policies that --policy takes, with their options."""
    from mas_gym.policies.registry import policy_makers

    made = (_entry(name, make) for name, make in policy_makers().items())
    _show(
        made,
        json,
        "--policy NAME:ARGUMENT#option=value&option=value, such as transformers:PATH#dtype=bfloat16",
        "policy",
    )


def tasks(json: AsJSON = False) -> None:
    """List the tasks that --task takes, with their options."""
    from mas_gym.tasks.loading import BENCHMARKS, TASK_NAMES, _procedural

    made = [
        Entry(name, f"{BENCHMARKS[name].hub.path} from the hub, or a local file with --data", [])
        if name in BENCHMARKS
        else _entry(name, _procedural(name))
        for name in TASK_NAMES
    ]
    _show(made, json, "--task NAME -o option=value", "")


def _entry(name: str, make: Callable[..., Any]) -> Entry:
    lines = (inspect.getdoc(make) or "").splitlines()
    parameters = inspect.signature(make).parameters.values()
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    settings = [
        parameter.name if parameter.default is parameter.empty else f"{parameter.name}={parameter.default}"
        for parameter in parameters
        if parameter.kind not in kinds
    ]
    return Entry(name, lines[0].replace("`", "") if lines else "", settings)


def _show(entries: Iterable[Entry], json: bool, usage: str, own: str) -> None:
    from rich.padding import Padding
    from rich.text import Text

    found = list(entries)
    if json:
        typer.echo(jsonlib.dumps([entry._asdict() for entry in found], indent=2))
        return
    console = stdout()
    for entry in found:
        console.print(Text(one_line(entry.name), style="bold"))
        for text, style in ((entry.summary, ""), (", ".join(entry.settings), "dim")):
            if text:
                console.print(Padding(Text(one_line(text), style=style), (0, 0, 0, 4)))
    console.print(Text(f"\n{usage}"))
    if own:
        console.print(Text(f"Your own: --{own} FILE.py:NAME:SETTINGS, a class or function of a Python file."))
