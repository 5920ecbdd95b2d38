"""``mas-gym blame``: find the message that lowered the value most in each wrong answer."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mas_gym.cli import options as opt
from mas_gym.cli.console import brief, note, stdout, table
from mas_gym.cli.option_values import check_folder, read_critic
from mas_gym.internal.json_types import JSONObject
from mas_gym.internal.text import one_line
from mas_gym.internal.whole_files import write_file

if TYPE_CHECKING:
    from search import Critic, Plan, RunInfo, Store
    from search.compare.blame import Blame


def blame(
    store: opt.StorePath,
    critic: Annotated[
        str | None, typer.Option("--critic", help="Critic that scores the transcripts; by default stored values.")
    ] = None,
    run: opt.RunNames = None,
    threshold: Annotated[
        float | None, typer.Option("--threshold", min=0.0, help="Minimum confidence to name an agent; by default 0.3.")
    ] = None,
    json: Annotated[
        Path | None, typer.Option("--json", help="Write failed searches and blamed agents as JSON.")
    ] = None,
) -> None:
    """For each wrong answer, find the agent that lowered the value most with one message, if the drop is clear."""
    from search import open_store
    from search.compare.reliability import CONFIDENT

    check_folder(json)
    least = CONFIDENT if threshold is None else threshold
    guide = None if critic is None else read_critic(critic)
    document = []
    with open_store(store) as opened:
        for info in [opened.find(one) for one in run] if run else opened.runs():
            agents = [agent.name for agent in info.mas.agents]
            found = _blamed(opened, info, guide)
            if not found:
                note(f"{one_line(info.label)}: no wrong answers with values; choose a critic with --critic", "yellow")
                continue
            _show_blame(info.label, found, agents, least)
            document.append({"run": info.run, "label": info.label, "searches": [_row(b, agents, least) for b in found]})
    if json is not None:
        write_file(json, jsonlib.dumps({"schema": 1, "threshold": least, "runs": document}, indent=1))
        note(f"wrote {json}")


def _blamed(store: Store, run: RunInfo, critic: Critic | None) -> list[Blame]:
    """Return the blame for each wrong answer of a run."""
    from search.compare.blame import blamed, path_values

    scored = ((plan, path_values(plan) if critic is None else _scores(plan, critic)) for plan in store.plans(run.run))
    return blamed((plan, values) for plan, values in scored if values)


def _scores(plan: Plan, critic: Critic) -> list[float]:
    from mas_gym.critics import finite_values, scores_of
    from mas_gym.systems.state import Action
    from search import Proposal, ScoringContext
    from search.compare.blame import chosen_path

    assert plan.tree is not None and plan.mas is not None
    nodes = [plan.tree[node] for node in chosen_path(plan)]
    contexts = [
        ScoringContext(n.state, plan.mas, Proposal(Action(n.state.text, plan.mas.ALL), n.tokens, n.logprob))
        for n in nodes
    ]
    return finite_values(critic, [context.state for context in contexts], scores_of(critic, contexts))


def _row(one: Blame, agents: Sequence[str], least: float) -> JSONObject:
    named = one.confidence >= least
    return {
        "problem": one.problem_id,
        "agent": agents[one.speaker] if named else None,
        "turn": one.turn + 1,
        "message": one.text,
        "confidence": round(one.confidence, 4),
        "values": [round(value, 4) for value in one.values],
    }


def _show_blame(label: str, found: Sequence[Blame], agents: Sequence[str], least: float) -> None:
    from rich.text import Text

    sure = sorted((one for one in found if one.confidence >= least), key=lambda one: (one.speaker, -one.confidence))
    groups = [(speaker, list(group)) for speaker, group in groupby(sure, key=lambda one: one.speaker)]
    rows: list[Sequence[str | Text]] = []
    for speaker, group in sorted(groups, key=lambda item: -len(item[1])):
        case = f"{one_line(group[0].problem_id)}: {one_line(group[0].text)}"
        rows.append([one_line(agents[speaker]), Text(str(len(group)), justify="right"), brief(case, 100)])
    nobody = Text(str(len(found) - len(sure)), justify="right")
    rows.append([Text("nobody", style="dim"), nobody, Text("no clear fall in value", style="dim")])
    title = f"{one_line(label)}: {len(found)} wrong answers, an agent named for {len(sure)}"
    stdout().print(table(("Agent", "Blamed", "Clearest case"), rows, title, words=3))
