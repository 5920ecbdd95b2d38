"""``mas-gym envs``: the registered environments, who acts in them, and whether their data is here."""

from __future__ import annotations

import json as jsonlib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mas_gym.cli.console import stdout
from mas_gym.render import one_line

if TYPE_CHECKING:
    from gymnasium.envs.registration import EnvSpec

ENTRY_POINT = "mas_gym.env:MASEnv"


def envs(
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the registered environments: task, MAS, agents, the data that each needs and whether it is here."""
    rows = [_row(spec) for spec in registered().values()]
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
        lines = 'Data that is not here: give a file, gym.make(ID, data="test.jsonl") or --data FILE; or go online once.'
        console.print(Text(lines, style="dim"))


def registered() -> dict[str, EnvSpec]:
    """Return the specs of every registered MAS environment, third parties' included, by id."""
    from gymnasium.envs.registration import registry

    import mas_gym  # noqa: F401 - registers the environments

    return {name: spec for name, spec in registry.items() if spec.entry_point == ENTRY_POINT}


def _row(spec: EnvSpec) -> dict[str, Any]:
    import mas_gym

    task, mas = spec.kwargs["task"], mas_gym.load_mas(spec.kwargs["mas"])
    data, available = _data(str(task), spec.kwargs.get("data"))
    agents = [agent.name for agent in mas.agents]
    return {"id": spec.id, "task": str(task), "mas": mas.name, "agents": agents, "data": data, "available": available}


def _data(task: str, given: Any) -> tuple[str, bool]:
    """Say what data a task needs, and whether it can be had without a network."""
    from pathlib import Path

    from mas_gym.tasks.loading import BENCHMARKS

    if given is not None:
        return str(given), Path(str(given)).exists()
    if task not in BENCHMARKS:
        return "none, made on the spot", True
    hub = BENCHMARKS[task].hub.path
    return f"{hub} from the hub, or a local file", _cached(hub)


def _cached(hub: str) -> bool:
    """Whether the datasets library has a hub data set in its cache."""
    import os
    from pathlib import Path

    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    cache = Path(os.environ.get("HF_DATASETS_CACHE", home / "datasets"))
    folder = cache / hub.replace("/", "___")
    return folder.is_dir() and any(folder.rglob("*.arrow"))
