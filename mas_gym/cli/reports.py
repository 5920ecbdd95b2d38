"""``mas-gym report`` and ``mas-gym blame``: what a run store shows, and which agent lost each failed problem."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mas_gym.cli import options as opt
from mas_gym.cli.console import note, stdout
from mas_gym.render import one_line

if TYPE_CHECKING:
    from search import Critic, Plan, RunInfo, Store
    from search.compare.values import Blame

StorePath = Annotated[Path, typer.Argument(metavar="RUNS.DB", help="Store written with --store.")]
RunNames = Annotated[
    list[str] | None, typer.Option("--run", help="Only this run: its name or the beginning of its digest. Repeatable.")
]
_WIDEST = 100


def report(
    store: StorePath,
    out: Annotated[Path, typer.Option("--out", help="The page.")] = Path("report.html"),
    run: RunNames = None,
    baseline: Annotated[str, typer.Option("--baseline", help="Row to compare the others with.")] = "",
    figures: Annotated[Path | None, typer.Option("--figures", help="Folder for the figures as PNG files.")] = None,
    markdown: Annotated[Path | None, typer.Option("--markdown", help="Write the tables as Markdown.")] = None,
    latex: Annotated[Path | None, typer.Option("--latex", help="Write the tables as LaTeX.")] = None,
    tensorboard: Annotated[Path | None, typer.Option("--tensorboard", help="Folder for TensorBoard scalars.")] = None,
) -> None:
    """Turn a run store into one HTML page: tables, intervals, curves, calibration and failures; runs nothing."""
    from mas_gym.report.summary import write_report, write_tensorboard
    from search import open_store

    for path in (out, markdown, latex):
        opt.check_folder(path)
    with open_store(store) as opened:
        reports = write_report(opened, out, runs=run or (), baseline=baseline, figures=figures)
    console = stdout()
    for one in reports:
        console.print(one.comparison.show(console.width))
    for path, form in ((markdown, "to_markdown"), (latex, "to_latex")):
        if path is not None:
            path.write_text("\n".join(getattr(one.comparison, form)() for one in reports), encoding="utf-8")
    if tensorboard is not None:
        write_tensorboard(reports, tensorboard)
    for path in filter(None, (out, figures, markdown, latex, tensorboard)):
        note(f"wrote {path}")


def blame(
    store: StorePath,
    critic: Annotated[
        str | None, typer.Option("--critic", help="Score the transcripts with this critic; by default stored values.")
    ] = None,
    run: RunNames = None,
    threshold: Annotated[
        float | None, typer.Option("--threshold", min=0.0, help="Least confidence to name an agent; by default 0.25.")
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write every failed search and its blame.")] = None,
) -> None:
    """Name the agent whose message most lowered the value of each wrong answer, or nobody where no fall is clear."""
    from search import open_store
    from search.compare.values import CONFIDENT

    opt.check_folder(json)
    least = CONFIDENT if threshold is None else threshold
    guide = None if critic is None else opt.read_critic(critic)
    document = []
    with open_store(store) as opened:
        for info in [opened.find(one) for one in run] if run else opened.runs():
            agents = [agent.name for agent in info.mas.agents]
            found = _blamed(opened, info, guide)
            if not found:
                note(f"{one_line(info.label)}: no wrong answers with values; choose a critic with --critic", "yellow")
                continue
            _show(info.label, found, agents, least)
            document.append({"run": info.run, "label": info.label, "searches": [_row(b, agents, least) for b in found]})
    if json is not None:
        json.write_text(jsonlib.dumps({"schema": 1, "threshold": least, "runs": document}, indent=1), encoding="utf-8")
        note(f"wrote {json}")


def _blamed(store: Store, run: RunInfo, critic: Critic | None) -> list[Blame]:
    """Return the blame of a run's wrong answers."""
    from search.compare.values import blamed, path_values

    scored = ((plan, path_values(plan) if critic is None else _scores(plan, critic)) for plan in store.plans(run.run))
    return blamed((plan, values) for plan, values in scored if values)


def _scores(plan: Plan, critic: Critic) -> list[float]:
    from mas_gym.state import Action
    from search import Proposal, ScoringContext
    from search.compare.values import chosen_path

    assert plan.tree is not None and plan.mas is not None
    nodes = [plan.tree[node] for node in chosen_path(plan)]
    contexts = [
        ScoringContext(n.state, plan.mas, Proposal(Action(n.state.text, plan.mas.ALL), n.tokens, n.logprob))
        for n in nodes
    ]
    return list(critic.score(contexts))


def _row(one: Blame, agents: Sequence[str], least: float) -> dict[str, Any]:
    named = one.confidence >= least
    return {
        "problem": one.problem_id,
        "agent": agents[one.speaker] if named else None,
        "turn": one.turn + 1,
        "message": one.text,
        "confidence": round(one.confidence, 4),
        "values": [round(value, 4) for value in one.values],
    }


def _show(label: str, found: Sequence[Blame], agents: Sequence[str], least: float) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    sure = sorted((one for one in found if one.confidence >= least), key=lambda one: (one.speaker, -one.confidence))
    title = f"{one_line(label)}: {len(found)} wrong answers, an agent named for {len(sure)}"
    table = Table(title=Text(title, style="bold"), box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
    for name, justify in (("Agent", "left"), ("Blamed", "right"), ("Clearest case", "left")):
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    groups = [(speaker, list(group)) for speaker, group in groupby(sure, key=lambda one: one.speaker)]
    for speaker, group in sorted(groups, key=lambda item: -len(item[1])):
        case = f"{one_line(group[0].problem_id)}: {one_line(group[0].text)}"
        shown = case if len(case) <= _WIDEST else case[: _WIDEST - 3] + "..."
        table.add_row(Text(one_line(agents[speaker])), str(len(group)), Text(shown))
    table.add_row(Text("nobody", style="dim"), str(len(found) - len(sure)), Text("no clear fall in value", style="dim"))
    stdout().print(table)
