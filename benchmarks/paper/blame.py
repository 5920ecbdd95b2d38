"""Blame compared with known first errors: how often ``mas-gym blame`` names an agent, and how often it is right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np

import search
from benchmarks.paper.lab import MASPRM, Lab, command
from benchmarks.paper.page import Page, percent, span
from benchmarks.real.common import DATA
from benchmarks.tiny.truth import first_error
from mas_gym.tasks.base import Problem
from rewardmodels import load_critic
from search.compare.blame import SURE, Blame, Values, blame_failures, critic_values
from search.compare.replay import replay
from search.plan import Plan
from search.results.intervals import mean_interval

REPLAYED = 40
"""Questions of which undecided samples are replayed."""

CONTINUATIONS = 8

RECORDED = {
    "Who&When": ("who_and_when", ""),
    "AgentProcessBench": ("agent_processbench_hotpotqa", "GPT-5.2"),
    "ProcessBench": ("processbench", ""),
}
"""File and judge of each recording; an empty judge if none is recorded."""

ASKS = f"""
`mas-gym blame` names the agent that probably made the first error of a failed sample, if its probability is at least
{SURE:g}. This page measures for how many failed samples it names an agent (coverage) and how often this is the agent
with the first error (right), on transcripts with a known first error. `most frequent agent` always blames the agent
with the most first errors, which it is given.

The outcomes of siblings decide first. The critic is used only where they leave the first error open: for the project's
own transcripts the trained MASPRM, for AgentProcessBench the verdicts of a recorded judge. `replay` continues the
samples that are still open {CONTINUATIONS} times from each message. In ProcessBench and AgentProcessBench one agent
writes all messages, so only the column for messages is informative. Who&When and ProcessBench have one sample for
almost every question, so siblings say nothing.
"""


class Case(NamedTuple):
    """A failed sample: its question, whether an agent is named, and whether agent and message are right."""

    question: str
    named: bool
    agent: bool
    message: bool


def run(lab: Lab) -> Page:
    page = Page("blame", "Blame compared with known first errors", ASKS)
    critic = lab.critic(lab.home, MASPRM)
    header = ("transcripts", "method", "failed", "coverage, %", "agent right, %", "95% interval", "message right, %")
    rows: list[tuple[str, ...]] = []
    for count in (4, 8):
        rows += own_rows(lab, count, critic_values(critic))
    for name, (file, judge) in RECORDED.items():
        path = DATA / f"{file}.jsonl.gz"
        if path.is_file():
            rows += recorded_rows(name, path, judge)
        else:
            lab.notes.append(f"{name}: left out, because {path.name} is not on this machine")
    page.table(header, rows, left=2)
    page.blocks.append(
        "Accuracies are for the samples with a named agent. Intervals are for the mean of the questions' accuracies, "
        "in which each question has the same weight. A dash means that no agent is named.\n"
    )
    return page


def own_rows(lab: Lab, count: int, values: Values) -> list[tuple[str, ...]]:
    """Return the rows for independent samples of the lab's agents."""
    store = lab.options.out / "searches.db"
    spec = lab.spec(lab.home, "test", lab.options.number, lab.options.seeds[0], store)
    names = [agent.name for agent in spec.mas.agents]
    common = {"mas": spec.mas, "policy": spec.policy, "sampling": spec.sampling, "seed": spec.seed}
    plans = list(search.run(f"sc:{count}", spec.problems, store=str(store), **common))
    problems = {problem.id: problem for problem in spec.problems}
    alone = blame_failures(plans)
    truths = {key: true for one in alone if (true := _truth(one, problems, names)) is not None for key in [_key(one)]}
    label = f"{lab.options.task}, {count} samples"
    rows = [_commonest(label, alone, truths, names)]
    rows.append(_row(label, "siblings", alone, truths, names))
    rows.append(_row(label, "siblings, then critic", blame_failures(plans, values), truths, names))
    few = {problem.id for problem in list(spec.problems)[:REPLAYED]}
    known = [one for one in alone if _key(one) in truths and one.sample.problem_id in few]
    left = [one for one in known if one.agent() is None]
    policy = spec.policy
    if policy is not None:
        again = replay(left, spec.problems, names, spec.mas, policy, spec.sampling, n=CONTINUATIONS, seed=spec.seed + 1)
        settled = [one for one in known if one.agent() is not None] + again
        rows.append(_row(f"{label}, {len(few)} questions", "siblings, then replay", settled, truths, names))
    return rows


Key = tuple[str, int]
Truths = Mapping[Key, tuple[str, int]]
"""Agent and message of the first error, by problem and sample."""


def _key(one: Blame) -> Key:
    return one.sample.problem_id, one.sample.place


def _truth(one: Blame, problems: Mapping[str, Problem], names: Sequence[str]) -> tuple[str, int] | None:
    spoken = [(names[agent], text) for agent, text in zip(one.sample.speakers, one.texts, strict=True)]
    error = first_error(problems[one.sample.problem_id], spoken)
    return None if error is None else (error.speaker, error.place)


def recorded_rows(name: str, path: Path, judge: str) -> list[tuple[str, ...]]:
    """Return the rows for imported runs with labels."""
    with TemporaryDirectory() as folder:
        store = Path(folder) / "runs.db"
        search.import_transcripts(path, store)
        with search.open_store(store) as opened:
            [info] = opened.runs()
            names = [agent.name for agent in info.mas.agents]
            found = list(opened.searches(info.run))
            truths = _labeled(found, names)
            plans = [plan for _, plan in found]
            alone = blame_failures(plans, lambda plan, nodes: [])
            rows = [_commonest(name, alone, truths, names), _row(name, "siblings", alone, truths, names)]
            if judge:
                critic = load_critic(f"recorded:{store}#judge={judge}")
                guided = blame_failures(plans, critic_values(critic))
                rows.append(_row(name, f"siblings, then {judge}", guided, truths, names))
            return rows


def _labeled(found: Sequence[tuple[Problem, Plan]], names: Sequence[str]) -> Truths:
    truths = {}
    for problem, plan in found:
        for place, (one, facts) in enumerate(zip(plan.candidates, problem.metadata["samples"], strict=True)):
            labels = facts.get("labels") or []
            if -1 in labels:
                step = labels.index(-1)
                truths[problem.id, place] = names[one.state.turns[step].speaker], step
    return truths


def _cases(blames: Sequence[Blame], truths: Truths, names: Sequence[str]) -> list[Case]:
    found = []
    for one in blames:
        if _key(one) in truths:
            agent, turn = truths[_key(one)]
            said = one.agent()
            named = said is not None
            right = said is not None and names[said] == agent
            found.append(Case(one.sample.problem_id, named, right, named and one.turn == turn))
    return found


def _row(label: str, method: str, blames: Sequence[Blame], truths: Truths, names: Sequence[str]) -> tuple[str, ...]:
    return _cells(label, method, _cases(blames, truths, names))


def _commonest(label: str, blames: Sequence[Blame], truths: Truths, names: Sequence[str]) -> tuple[str, ...]:
    wrong = [truths[_key(one)] for one in blames if _key(one) in truths]
    agent = Counter(name for name, _ in wrong).most_common(1)[0][0]
    cases = []
    for one in blames:
        if _key(one) in truths:
            spoken = [names[speaker] for speaker in one.sample.speakers]
            first = spoken.index(agent) if agent in spoken else None
            true, turn = truths[_key(one)]
            cases.append(Case(one.sample.problem_id, True, true == agent, first == turn))
    return _cells(label, "most frequent agent", cases)


def _cells(label: str, method: str, cases: Sequence[Case]) -> tuple[str, ...]:
    named = [case for case in cases if case.named]
    head = label, method, f"{len(cases):,}", percent(len(named) / max(len(cases), 1))
    if not named:
        return (*head, "-", "-", "-")
    by_question: dict[str, list[bool]] = {}
    for case in named:
        by_question.setdefault(case.question, []).append(case.agent)
    interval = mean_interval([float(np.mean(found)) for found in by_question.values()], 0, 1)
    agents, messages = (float(np.mean([case[i] for case in named])) for i in (2, 3))
    return (*head, percent(agents), span(*interval), percent(messages))


if __name__ == "__main__":
    command(run, "blame")
