"""The commands of ``mas-gym``, the options that precede a command, and the entry point.

Each command has a module, which is imported when the command is first accessed; large packages are imported only when
the command runs.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any

import typer
import typer.main
from typer.core import TyperGroup

from mas_gym.cli.console import examples
from mas_gym.cli.error_output import (
    NoteHandler,
    errors_shown,
    escape_logs_and_warnings,
    escaped_usage_errors,
    log_handler,
    show_traceback,
)

_DEBUG = "--debug"


class _Commands(Mapping[str, Any]):
    """The commands by name. The first access to a command imports its module and builds the command."""

    def __init__(self) -> None:
        self._built: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._built:
            home, *usage = _COMMANDS[name]
            found = resolve_name(home)
            if not isinstance(found, typer.Typer):
                function, found = found, typer.Typer(add_completion=False, rich_markup_mode="rich")
                found.command(name, epilog=examples(*usage))(function)
            self._built[name] = typer.main.get_command(found)
            self._built[name].name = name
        return self._built[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_COMMANDS)

    def __len__(self) -> int:
        return len(_COMMANDS)


class _Front(TyperGroup):
    """Imports commands on demand, and shows their errors."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # The mapping is never modified.
        self.commands = _Commands()  # type: ignore[assignment]

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        with escaped_usage_errors():
            return super().make_context(*arguments, **options)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Also accept ``--debug`` after the command."""
        end = args.index("--") if "--" in args else len(args)
        rest = [word for word in args[:end] if word != _DEBUG]
        parsed: list[str] = super().parse_args(ctx, [_DEBUG] * (len(rest) < end) + rest + args[end:])
        return parsed

    def invoke(self, ctx: Any) -> Any:
        with errors_shown(bool(ctx.params.get("debug"))):
            return super().invoke(ctx)


app = typer.Typer(
    name="mas-gym",
    cls=_Front,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        import mas_gym

        typer.echo(f"mas-gym {mas_gym.__version__}")
        raise typer.Exit


@app.callback(epilog=examples("mas-gym demo", "mas-gym eval -n 100 --planner single --planner sc:5"))
def front(
    context: typer.Context,
    debug: Annotated[bool, typer.Option(_DEBUG, envvar="MAS_GYM_DEBUG", help="Show tracebacks.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
    traces: Annotated[
        str | None,
        typer.Option(
            "--traces",
            metavar="FILE|otlp",
            help="Record OpenTelemetry spans of searches, agent calls and scores, in a file or to a collector.",
        ),
    ] = None,
    trace_content: Annotated[
        bool, typer.Option("--trace-content", help="With --traces: also record prompts and messages.")
    ] = False,
) -> None:
    """Build multi-agent LLM systems, train reward models for them and compare test-time search."""
    if traces is not None:
        from mas_gym.cli.option_values import check_folder
        from search.service.telemetry import traces as recorded_traces

        check_folder(Path(traces))
        context.with_resource(recorded_traces(traces, content=trace_content))
    # Show decisions made while loading, such as a task's kind of answer or a program's agents, and why a run is not
    # resumed.
    levels = {"mas_gym.tasks": logging.INFO, "mas_gym.programs": logging.INFO, "search.store": logging.WARNING}
    for name, level in levels.items():
        noted = logging.getLogger(name)
        if not noted.handlers:
            noted.addHandler(NoteHandler())
            noted.setLevel(level)
            noted.propagate = False
    searches = logging.getLogger("search")
    if debug:
        logging.basicConfig(level=logging.INFO, handlers=[log_handler(logging.INFO)])
    elif not searches.handlers:
        # Failed searches are counted in the progress and listed with their reasons at the end.
        searches.addHandler(logging.NullHandler())


_COMMANDS: dict[str, tuple[str, ...]] = {
    "demo": ("mas_gym.cli.demo:demo", "mas-gym demo -n 50", "mas-gym demo --critic models/masprm"),
    "solve": (
        "mas_gym.cli.solve:solve",
        'mas-gym solve "Tom has 3 pens and buys 4. How many pens does he have?"',
        "mas-gym solve --task arithmetic --critic tiny-masprm --tree tree.html",
    ),
    "eval": (
        "mas_gym.cli.evaluate:evaluate",
        "mas-gym eval -n 100 --planner single --planner sc:5",
        "mas-gym eval --planner mcts:10,3 --critic tiny-masprm --store runs.db",
    ),
    "envs": ("mas_gym.cli.listings:envs", "mas-gym envs", "mas-gym envs --json"),
    "tasks": ("mas_gym.cli.listings:tasks", "mas-gym tasks", "mas-gym tasks --json"),
    "planners": ("mas_gym.cli.listings:planners", "mas-gym planners", "mas-gym planners --json"),
    "critics": ("mas_gym.cli.listings:critics", "mas-gym critics", "mas-gym critics --json"),
    "policies": ("mas_gym.cli.listings:policies", "mas-gym policies", "mas-gym policies --json"),
    "play": (
        "mas_gym.cli.play:play",
        "mas-gym play MAS-Arithmetic-v0",
        "mas-gym play MAS-Arithmetic-v0 --agent Solver",
    ),
    "new": ("mas_gym.cli.systems:new", "mas-gym new mas.yaml", "mas-gym new agents/debate.yaml"),
    "check": ("mas_gym.cli.systems:check", "mas-gym check mas.yaml --svg mas.svg", "mas-gym check rpsv"),
    "rollouts": (
        "mas_gym.cli.train:rollouts",
        "mas-gym rollouts --store trees.db -n 200",
        "mas-gym rollouts --store trees.db --task gsm8k --policy openai:MODEL@URL",
    ),
    "improve": (
        "mas_gym.cli.improve:improve",
        "mas-gym improve --rounds 2 --problems 100 --out improved",
        "mas-gym improve --method dpo --rounds 3 --out improved-dpo",
    ),
    "import": (
        "mas_gym.cli.import_logs:import_logs",
        "mas-gym import logs/*.jsonl --store runs.db",
        "mas-gym import traces.json --dry-run",
    ),
    "compare": (
        "mas_gym.cli.compare_results:compare",
        "mas-gym compare old.eval new.eval",
        "mas-gym compare results/ --metric exact_match --against MODEL --out compare.html",
    ),
    "status": ("mas_gym.cli.status:status", "mas-gym status runs.db", "watch mas-gym status runs.db"),
    "view": ("mas_gym.cli.view:view", "mas-gym view runs.db", "mas-gym view runs.db --port 0 --no-open"),
    "report": (
        "mas_gym.cli.report:report",
        "mas-gym report runs.db --out report.html",
        "mas-gym report runs.db --latex table.tex --figures figures",
    ),
    "blame": (
        "mas_gym.cli.blame:blame",
        "mas-gym blame runs.db",
        "mas-gym blame runs.db --critic tiny-masprm --json blame.json",
    ),
    "bench-critic": (
        "mas_gym.cli.bench_critic:bench_critic",
        "mas-gym bench-critic --critic tiny-masprm --data transcripts.jsonl",
        "mas-gym bench-critic --critic prm:MODEL --critic judge:POLICY --data processbench/gsm8k.json",
    ),
    "calibrate": (
        "mas_gym.cli.calibrate:calibrate",
        "mas-gym calibrate --planner bon:20 --critic tiny-orm --out stop.json",
        "mas-gym calibrate --planner mcts:20,3 --critic tiny-masprm -n 200 --cache replies.db --out stop.json",
    ),
    "regrade": (
        "mas_gym.cli.regrade:regrade",
        "mas-gym regrade runs.db --grader my.py:grade",
        "mas-gym regrade runs.db --task corrected.csv",
    ),
    "serve": (
        "mas_gym.cli.serve:serve",
        "mas-gym serve --planner sc:5",
        "mas-gym serve --planner mcts:10,3 --critic tiny-masprm --port 9000",
    ),
    "train": ("mas_gym.cli.train:app",),
}
"""Each command: its function, or the application of several commands, and the two examples at the end of its help."""


def main() -> None:
    """Run the command line; the entry point of ``mas-gym``."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character gets a question mark, not a crash.
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    # Reading a store allocates millions of objects, few of them in cycles; by default, this costs a tenth of its time.
    gc.set_threshold(50_000)
    escape_logs_and_warnings()
    try:
        app()
    except Exception as error:
        show_traceback(error)
        sys.exit(1)
