"""``mas-gym envs``, ``tasks``, ``planners``, ``critics`` and ``policies``: the registered names and their settings."""

from __future__ import annotations

import inspect
import json as jsonlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from mas_gym.cli.console import stdout
from mas_gym.render import one_line

if TYPE_CHECKING:
    from gymnasium.envs.registration import EnvSpec

ENTRY_POINT = "mas_gym.env:MASEnv"
AsJSON = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class Entry(NamedTuple):
    """A registered name.

    Attributes:
        name: Its name.
        summary: One line of description.
        settings: Its settings in order, as ``name=default``, or ``name`` if required.
    """

    name: str
    summary: str
    settings: list[str]


def envs(json: AsJSON = False) -> None:
    """List the registered environments: task, MAS, agents, required data and whether it is available here."""
    rows = [_env_row(spec) for spec in registered().values()]
    if json:
        typer.echo(jsonlib.dumps(rows, indent=2))
        return
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("Environment", "Task", "MAS", "Agents", "Data", "Here"):
        table.add_column(name, overflow="fold", no_wrap=name == "Environment")
    for row in rows:
        here = Text("yes", style="green") if row["available"] else Text("no", style="yellow")
        texts = (row["id"], row["task"], row["mas"], ", ".join(row["agents"]), row["data"])
        table.add_row(*(Text(one_line(text)) for text in texts), here)
    console = stdout()
    console.print(table)
    if any(not row["available"] for row in rows):
        lines = 'For missing data, give a file with gym.make(ID, data="test.jsonl") or --data FILE, or go online once.'
        console.print(Text(lines, style="dim"))


def planners(json: AsJSON = False) -> None:
    """List the planners for --planner, with their settings in order."""
    from search.registry import planner_makers

    made = (_entry(name, make) for name, make in planner_makers().items())
    _show(made, json, "--planner NAME:SETTINGS, such as mcts:10,3,leaf=bootstrap", "planner")


def critics(json: AsJSON = False) -> None:
    """List the critics for --critic, in addition to trained folders."""
    from rewardmodels.critics import critic_makers

    made = (_entry(name, make) for name, make in sorted(critic_makers().items()))
    _show(
        made,
        json,
        "--critic NAME or NAME:ARGUMENT, or a folder saved by training; options follow as #name=value",
        "critic",
    )


def policies(json: AsJSON = False) -> None:
    """List the policies for --policy, with their options."""
    from mas_gym.policies.registry import policy_makers

    made = (_entry(name, make) for name, make in policy_makers().items())
    _show(
        made,
        json,
        "--policy NAME:ARGUMENT#option=value&option=value, such as transformers:PATH#dtype=bfloat16",
        "policy",
    )


def tasks(json: AsJSON = False) -> None:
    """List the tasks for --task, with their options."""
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


def registered() -> dict[str, EnvSpec]:
    """Return the specs of all registered MAS environments by id, including those of other packages."""
    from gymnasium.envs.registration import registry

    import mas_gym  # noqa: F401 - registers the environments

    return {name: spec for name, spec in registry.items() if spec.entry_point == ENTRY_POINT}


def _env_row(spec: EnvSpec) -> dict[str, Any]:
    import mas_gym

    task, mas = spec.kwargs["task"], mas_gym.load_mas(spec.kwargs["mas"])
    data, available = _data(str(task), spec.kwargs.get("data"))
    agents = [agent.name for agent in mas.agents]
    return {"id": spec.id, "task": str(task), "mas": mas.name, "agents": agents, "data": data, "available": available}


def _data(task: str, given: Any) -> tuple[str, bool]:
    """Return the data that a task needs, and whether it is available offline."""
    from pathlib import Path

    from mas_gym.tasks.loading import BENCHMARKS

    if given is not None:
        return str(given), Path(str(given)).exists()
    if task not in BENCHMARKS:
        return "none, generated", True
    hub = BENCHMARKS[task].hub.path
    return f"{hub} from the hub, or a local file", _cached(hub)


def _cached(hub: str) -> bool:
    """Whether a hub data set is in the cache of the datasets library."""
    import os
    from pathlib import Path

    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    cache = Path(os.environ.get("HF_DATASETS_CACHE", home / "datasets"))
    folder = cache / hub.replace("/", "___")
    return folder.is_dir() and any(folder.rglob("*.arrow"))
