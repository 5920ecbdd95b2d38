"""``mas-gym blame``: find the message that is probably the first error of each failed sample."""

from __future__ import annotations

import json as jsonlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mas_gym.cli import options as opt
from mas_gym.cli.console import brief, note, stdout, write_outputs
from mas_gym.cli.option_groups import grouped
from mas_gym.cli.option_values import check_folder, read_critic
from mas_gym.errors import ConfigError
from mas_gym.internal.json_types import JSONObject
from mas_gym.internal.rich_tables import text_table
from mas_gym.internal.suggestions import choice
from mas_gym.internal.text import one_line

if TYPE_CHECKING:
    from search import RunInfo, Store
    from search.compare.blame import Blame

REPLAYS = 8
"""The suggested number of continuations."""


@grouped(cache=False, temperature=False, top_p=False, max_tokens=False)
def blame(
    store: opt.StorePath,
    agents: opt.AgentSource,
    critic: Annotated[
        str | None,
        typer.Option("--critic", help="Critic for samples that the others do not decide; by default stored values."),
    ] = None,
    run: opt.RunNames = None,
    split: Annotated[
        str, typer.Option("--split", help="all questions, or held-out: those that the critic was not trained on.")
    ] = "all",
    replay: Annotated[
        int | None,
        typer.Option("--replay", min=1, help="Decide the others by N new continuations from each of their messages."),
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option("--threshold", min=0.0, max=1.0, help="Minimum probability to name an agent; by default 0.7."),
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write failed samples and blamed agents as JSON.")] = None,
) -> None:
    """For each failed sample, find the agent that made the first error.

    The first message that no right sample of the question shares is probably the error. If the samples do not decide,
    the first error is found by a critic or, with --replay, by new continuations; otherwise it is not known.
    """
    from search import open_store
    from search.compare.blame import SURE, blame_failures, critic_values, stored_values

    held_out = choice("--split", split, ("all", "held-out")) == "held-out"
    check_folder(json)
    least = SURE if threshold is None else threshold
    values = stored_values if critic is None else critic_values(read_critic(critic))
    document = []
    with open_store(store) as opened:
        for info in [opened.find(one) for one in run] if run else opened.runs():
            names = [agent.name for agent in info.mas.agents]
            asked = _asked(opened, info, critic, held_out)
            plans = (one for one in opened.plans(info.run) if asked is None or one.problem_id in asked)
            found = blame_failures(plans, values, least)
            if replay is not None and found:
                found = _replayed(found, opened, info, replay, agents, least)
            if not found:
                note(f"{one_line(info.label)}: no failed samples with a known outcome", "yellow")
                continue
            _show_blame(info.label, found, names, least)
            _show_remedy(found, info, store, least, replay)
            document.append({"run": info.run, "label": info.label, "samples": [_row(b, names, least) for b in found]})
    write_outputs((json, lambda: jsonlib.dumps({"schema": 2, "threshold": least, "runs": document}, indent=1)))


def _asked(store: Store, run: RunInfo, critic: str | None, held_out: bool) -> set[str] | None:
    """Return the ids of the problems that the critic was not trained on; None without a critic."""
    from rewardmodels.model.training_questions import untrained

    if critic is None:
        if held_out:
            raise ConfigError("--split held-out: expected --critic as well, got none")
        return None
    return {problem.id for problem in untrained(list(store.problems(run.run)), [critic], store.path, held_out)}


def _replayed(
    found: Sequence[Blame], store: Store, run: RunInfo, count: int, agents: opt.AgentSource, least: float
) -> list[Blame]:
    """Return the blame of all failed samples, with those that were not decided replayed."""
    from search import Sampling
    from search.compare.replay import replay
    from search.results.run_info import is_recorded

    given = agents.mas is not None or agents.program is not None
    if run.mas.external and not given:
        raise ConfigError(
            f"--replay: expected --mas or --program with the agents that wrote the transcripts of {run.label}, got none"
        )
    if agents.policy is None and is_recorded(run.config):
        raise ConfigError("--replay: expected --policy with the model that wrote the transcripts, got none")
    spec = agents.load(None) if given else None
    system = run.mas if spec is None else spec.mas
    policy, wrote = agents.read_policy(system), run.config["policy"]["name"]
    if not is_recorded(run.config) and policy.name != wrote:
        raise ConfigError(
            f"--replay: expected --policy with the model that wrote the transcripts, {wrote}, got {policy.name}"
        )
    undecided = [one for one in found if one.agent(least) is None]
    replayed = replay(
        undecided,
        store.problems(run.run),
        [agent.name for agent in run.mas.agents],
        system if spec is None or spec.source is None else spec.source.program,
        policy,
        Sampling(**run.config["sampling"]),
        n=count,
        seed=run.config["seed"] + 1,
    )
    known = iter(replayed)
    return [next(known) if one.agent(least) is None else one for one in found]


def _row(one: Blame, agents: Sequence[str], least: float) -> JSONObject:
    agent = one.agent(least)
    return {
        "problem": one.sample.problem_id,
        "sample": one.sample.place,
        "agent": None if agent is None else agents[agent],
        "turn": None if one.turn is None else one.turn + 1,
        "message": None if one.turn is None else one.sample.texts[one.turn],
        "confidence": round(one.confidence, 4),
        "source": one.source,
        "outcomes": [list(outcomes) for outcomes in one.sample.after],
    }


def _show_blame(label: str, found: Sequence[Blame], agents: Sequence[str], least: float) -> None:
    from rich.text import Text

    groups: defaultdict[int, list[Blame]] = defaultdict(list)
    for one in found:
        agent = one.agent(least)
        if agent is not None:
            groups[agent].append(one)
    rows: list[Sequence[str | Text]] = []
    for agent, group in sorted(groups.items(), key=lambda item: -len(item[1])):
        clearest = max(group, key=lambda one: one.confidence)
        assert clearest.turn is not None
        case = f"{one_line(clearest.sample.problem_id)}: {one_line(clearest.sample.texts[clearest.turn])}"
        rows.append(
            [one_line(agents[agent]), Text(str(len(group)), justify="right"), clearest.evidence, brief(case, 80)]
        )
    named = sum(map(len, groups.values()))
    unknown = Text(str(len(found) - named), justify="right")
    rows.append([Text("not known", style="dim"), unknown, "", ""])
    title = f"{one_line(label)}: {len(found)} failed samples, an agent named for {named}"
    stdout().print(text_table(("Agent", "Failed", "Evidence", "Clearest case"), rows, title, words=4))


def _show_remedy(found: Sequence[Blame], run: RunInfo, store: Path, least: float, replayed: int | None) -> None:
    """Print why first errors are not known, and what would settle them."""
    from search.results.run_info import is_recorded

    unknown = [one for one in found if one.agent(least) is None]
    if not unknown:
        return
    reasons = Counter(
        "the question has one sample, so siblings say nothing"
        if one.sample.after[0].total < 2
        else "no sample of the question is right"
        if not one.sample.after[0].right
        else "the outcomes leave several messages possible"
        for one in unknown
    )
    if replayed is None:
        note("Not known: " + "; ".join(f"{reason} ({count})" for reason, count in reasons.most_common()))
        first = min((one for one in unknown), key=lambda one: one.sample.shared).sample.shared + 1
        written = "--mas SYSTEM" if is_recorded(run.config) else "--program PROGRAM" if run.mas.external else ""
        extra = f" {written} --policy MODEL" if written else ""
        note(
            f"To settle them, replay {REPLAYS} continuations from message {first} on: mas-gym blame {store} "
            f"--replay {REPLAYS}{extra}; or score the messages with --critic"
        )
