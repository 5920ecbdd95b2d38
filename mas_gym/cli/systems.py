"""``mas-gym new`` and ``mas-gym check``: create a MAS config, and check and draw one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from mas_gym.cli.console import note, stdout, write_outputs
from mas_gym.cli.option_values import check_folder
from mas_gym.errors import ConfigError
from mas_gym.internal.text import one_line
from mas_gym.systems.graph import MAS, Edge, Q

TEMPLATE = "template.yaml"


def new(
    path: Annotated[Path, typer.Argument(help="File to write, such as mas.yaml.")],
) -> None:
    """Write a commented MAS config to start from: three agents, one of them conditional."""
    check_folder(path)
    text = (resources.files("mas_gym") / TEMPLATE).read_text(encoding="utf-8")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{path} exists: choose another name, or check it with mas-gym check {path}") from None
    note(f"Wrote {path}. Next: mas-gym check {path}")


def check(
    source: Annotated[str | None, typer.Argument(metavar="MAS", help="YAML or JSON file, or a bundled system.")] = None,
    svg: Annotated[Path | None, typer.Option("--svg", help="Write the graph as an SVG picture.")] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema of configs, for editors.")] = False,
) -> None:
    """Report all errors of a MAS config; if it is valid, draw its graph and list what each agent sees."""
    from mas_gym.systems.schema import json_schema
    from mas_gym.systems.validation import ANYONE
    from search.pages.graph_drawing import drawn_edges, graph_svg, graph_text

    if schema:
        typer.echo(json.dumps(json_schema(), indent=2))
        return
    if source is None:
        raise ConfigError("expected a MAS, as in mas-gym check mas.yaml, or --schema for the JSON Schema")
    check_folder(svg)
    mas = _load(source)
    console = stdout()
    console.print(_headline(mas))
    console.print()
    for line in graph_text(mas).splitlines():
        console.print(line, overflow="crop", no_wrap=True)
    console.print()
    edges = sorted(drawn_edges(mas), key=lambda edge: (edge.source, edge.target))
    for number in range(len(mas.agents)):
        console.print(_view(mas, number, edges))
    for name, policy in mas.policies:
        console.print(f"policy of {'other agents' if name == ANYONE else one_line(name)}: {one_line(policy)}")
    if mas.policies:
        console.print("These policies are used only with --policy from-config. They may run code and open connections.")
    write_outputs((svg, lambda: graph_svg(mas)))


def _load(source: str) -> MAS:
    import mas_gym

    try:
        return mas_gym.load_mas(source)
    except ConfigError as error:
        if not error.faults:
            raise
        # The error's message lists only the first faults.
        lines = [f"{source}: {len(error.faults)} error{'s' if len(error.faults) > 1 else ''}", *error.faults]
        raise ConfigError("\n".join(lines), error.faults) from None


def _headline(mas: MAS) -> str:
    agents = f"{len(mas.agents)} agent{'s' if len(mas.agents) > 1 else ''}"
    schedule = "each agent acts once, in listed order"
    if mas.max_turns is not None:
        schedule = f"agents act as messages reach them, {mas.min_turns} to {mas.max_turns} turns"
    elif mas.dynamic:
        schedule = "agents act in listed order if every edge to them delivers"
    return f"{one_line(mas.name)}: no errors; {agents}; {schedule}."


def _view(mas: MAS, number: int, edges: Sequence[Edge]) -> str:
    """Return the lines about one agent: its inputs and the recipients of its message."""
    agent = mas.agents[number]
    reads = ["the question"] if mas.sees_question[number] else []
    reads += [_end(mas, edge.source, edge) for edge in edges if edge.target == number and edge.source != Q]
    if mas.history == "private":
        reads.append("its own earlier messages")
    names = [_end(mas, edge.target, edge) for edge in edges if edge.source == number]
    writes = ", ".join(names) or "nobody"
    if agent.route == "message":
        other = "" if agent.fallback is None else f", or else {one_line(mas.node_name(agent.fallback))}"
        writes = f"the agent named in its message{other}; legal: {writes}"
    elif mas.dynamic and all(edge.condition for edge in edges if edge.source == number):
        writes = ", ".join([*names, "sink if no agent is left to act"])
    return f"{one_line(agent.name)}\n  sees   {', '.join(reads) or 'nothing'}\n  writes {writes}"


def _end(mas: MAS, node: int, edge: Edge) -> str:
    return one_line(mas.node_name(node)) + (f" (if {one_line(edge.condition)})" if edge.condition else "")
