"""Commands that list environments, tasks, planners, critics and policies."""

from __future__ import annotations

import inspect
import json as jsonlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from mas_gym.cli.console import stdout
from mas_gym.internal.json_types import JSONObject
from mas_gym.internal.rich_tables import text_table
from mas_gym.internal.text import one_line

if TYPE_CHECKING:
    from gymnasium.envs.registration import EnvSpec


ENTRY_POINT = "mas_gym.envs.env:MASEnv"
PROGRAM_ENTRY_POINT = "mas_gym.programs.program_env:ProgramEnv"
AsJSON = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def envs(json: AsJSON = False) -> None:
    """List the registered environments: task, MAS, agents and required data."""
    rows = [_env_row(spec) for spec in registered(ENTRY_POINT, PROGRAM_ENTRY_POINT).values()]
    if json:
        typer.echo(jsonlib.dumps(rows, indent=2))
        return
    cells = [
        [one_line(text) for text in (row["id"], row["task"], row["mas"], ", ".join(row["agents"]), row["data"])]
        for row in rows
    ]
    columns = ("Environment", "Task", "MAS", "Agents", "Data")
    shown = text_table(columns, cells, words=len(columns))
    shown.columns[0].no_wrap = True
    console = stdout()
    console.print(shown)
    console.print('Data files: gym.make(ID, data="test.jsonl"), or --data FILE.', style="dim")


def planners(json: AsJSON = False) -> None:
    """List the planners for --planner, with their settings in order."""
    from search.planners.registry import planner_makers

    arms = "With several models (--policy arms:...), arms=thompson, cost or only:NAME chooses the model of each message"
    _show(
        _entries(planner_makers()),
        json,
        f"--planner NAME:SETTINGS, such as mcts:10,3,leaf=bootstrap\n{arms}",
        "planner",
    )


def critics(json: AsJSON = False) -> None:
    """List the named critics for --critic, which also accepts folders of trained critics."""
    from search.critic_registry import critic_makers

    usage = "--critic NAME or NAME:ARGUMENT, or a folder saved by training; options follow as #name=value"
    _show(_entries(dict(sorted(critic_makers().items()))), json, usage, "critic")


def policies(json: AsJSON = False) -> None:
    """List the policies for --policy, with their options."""
    from mas_gym.policies.registry import policy_makers

    usage = "--policy NAME:ARGUMENT#option=value&option=value, such as transformers:PATH#dtype=bfloat16"
    _show(_entries(policy_makers()), json, usage, "policy")


def tasks(json: AsJSON = False) -> None:
    """List the tasks for --task, with their options."""
    from mas_gym.tasks.catalog import BENCHMARKS, task_makers

    made: list[JSONObject] = [
        {"name": name, "summary": f"{one.hub.path} from the hub, or a local file with --data", "settings": []}
        for name, one in BENCHMARKS.items()
    ]
    made += _entries(task_makers())
    own = "Your data: --task FILE.csv (or JSONL, Parquet, a folder, or OWNER/NAME on the hub), with --columns, --kind"
    _show(made, json, f"--task NAME:SETTINGS, such as arithmetic:difficulty=5, or -o option=value\n{own}", "task")


def _entries(makers: Mapping[str, Callable[..., object]]) -> list[JSONObject]:
    """Return the name, a line of description and the settings in order, as ``name=default`` or ``name``."""
    found: list[JSONObject] = []
    for name, make in makers.items():
        summary = (inspect.getdoc(make) or "").partition("\n")[0].replace("`", "")
        settings = [
            part.name if part.default is part.empty else f"{part.name}={part.default}"
            for part in inspect.signature(make).parameters.values()
            if part.kind not in (part.VAR_KEYWORD, part.VAR_POSITIONAL)
        ]
        found.append({"name": name, "summary": summary, "settings": settings})
    return found


def _show(entries: Sequence[JSONObject], json: bool, usage: str, own: str) -> None:
    from rich.padding import Padding
    from rich.text import Text

    if json:
        typer.echo(jsonlib.dumps(entries, indent=2))
        return
    console = stdout()
    for entry in entries:
        console.print(one_line(entry["name"]), style="bold")
        for text, style in ((entry["summary"], ""), (", ".join(entry["settings"]), "dim")):
            if text:
                console.print(Padding(Text(one_line(text), style=style), (0, 0, 0, 4)))
    console.print(f"\n{usage}")
    console.print(f"Custom: --{own} FILE.py:NAME:SETTINGS, a class or function in a Python file.")
    console.print("Grammar of these specs: python -m pydoc mas_gym.plugins")


def registered(*entry_points: str) -> dict[str, EnvSpec]:
    """Return the specs of registered environments from any package, by id; by default only those of `MASEnv`."""
    from gymnasium.envs.registration import registry

    import mas_gym  # noqa: F401 - registers the environments

    return {name: spec for name, spec in registry.items() if spec.entry_point in (entry_points or (ENTRY_POINT,))}


def _env_row(spec: EnvSpec) -> JSONObject:
    import mas_gym

    if "task" not in spec.kwargs:
        program = spec.entry_point == PROGRAM_ENTRY_POINT
        mas, data = ("the program's", "program=FILE.py:NAME, task=FILE") if program else ("the task's", "task=FILE")
        return {"id": spec.id, "task": "yours", "mas": mas, "agents": [], "data": data}
    task, system = str(spec.kwargs["task"]), mas_gym.load_mas(spec.kwargs["mas"])
    data = str(spec.kwargs["data"]) if spec.kwargs.get("data") is not None else _data(task)
    agents = [agent.name for agent in system.agents]
    return {"id": spec.id, "task": task, "mas": system.name, "agents": agents, "data": data}


def _data(task: str) -> str:
    from mas_gym.tasks.catalog import BENCHMARKS

    return f"{BENCHMARKS[task].hub.path} from the hub, or a local file" if task in BENCHMARKS else "none, generated"
