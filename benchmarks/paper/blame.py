"""Blame with abstention: how often ``mas-gym blame`` is right among the failed passes whose agent it names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import search
from benchmarks.paper.credit import Pass, collect_passes
from benchmarks.paper.lab import MASPRM, ORM, Lab, command
from benchmarks.paper.options import Options
from benchmarks.paper.page import Page, percent, span
from rewardmodels import load_critic
from search.compare.blame import largest_fall
from search.compare.reliability import CONFIDENT
from search.results.intervals import mean_interval

JUDGE = "judge:tiny"
"""Left out for other agents."""

WANTED = 0.85
"""Share right on dev that a threshold must reach."""

FEWEST = 20
"""Passes of dev that it must name: fewer may be right by chance."""

ASKS = f"""
`mas-gym blame` names the agent whose message lowered the value of a failed transcript the most, or no agent if the fall
is small. In a generated task the first wrong message is known, so it is possible to measure how many failed passes an
agent is named for (coverage) and how often it is the right one (accuracy). The confidence is half of the fall. The
threshold of each critic is the smallest at which, on dev problems, at least {FEWEST} agents are named and {
    100 * WANTED:.0f}% of them are right. Accuracy and coverage are measured on test problems.

`shipped` is MASPRM with the command's default threshold, {CONFIDENT:g}. `PL` is policy likelihood. The ORM scores
unfinished transcripts, although it was not trained on them. `judge` is the bundled agents' model, which returns a
verdict after each message. It was not trained to judge, so its result does not show the quality of an LLM judge. `most
frequent agent` always blames the agent that errs most often on dev.
"""


def run(lab: Lab) -> Page:
    page = Page("blame", "Blame with abstention", ASKS)
    critics: dict[str, Any] = {
        "MASPRM": lab.critic(lab.home, MASPRM),
        "ORM": lab.critic(lab.home, ORM, prefixes=True),
        "PL": search.PolicyLikelihood(),
    }
    if lab.options.policy == Options.policy:
        critics["judge"] = load_critic(JUDGE)
    failed: dict[str, list[Pass]] = {}
    starts: dict[str, dict[str, float]] = {}
    for split in ("dev", "test"):
        passes = collect_passes(lab, lab.home, critics, split)
        failed[split] = [one for one in passes if not one.correct and one.error is not None]
        starts[split] = {name: float(np.mean([one.values[name][0] for one in passes])) for name in critics}
    lab.notes.append(f"{len(failed['dev']):,} failed single passes on dev, {len(failed['test']):,} on test")
    rows = []
    for name in critics:
        threshold = smallest(*judged(failed["dev"], name, starts["dev"][name]))
        rows.append(_row(name, threshold, failed["test"], name, starts["test"][name]))
    rows.append(_row("MASPRM, shipped", CONFIDENT, failed["test"], "MASPRM", starts["test"]["MASPRM"]))
    commonest = Counter(one.error.speaker for one in failed["dev"] if one.error).most_common(1)[0][0]
    hits = _shares(failed["test"], lambda one: one.error is not None and one.error.speaker == commonest)
    rows.append(("most frequent agent", "", *_measured(hits), percent(1.0)))
    page.table(("method", "confidence at least", "right, %", "95% interval", "coverage, %"), rows)
    page.blocks.append(
        "Accuracy is measured on the passes for which an agent is named, and averaged per problem. Intervals are over "
        "problems.\n"
    )
    return page


def judged(failed: Sequence[Pass], critic: str, start: float) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return confidence and whether the blamed message is the first wrong one, of each pass."""
    confidence, right = [], []
    for one in failed:
        assert one.error is not None
        place, sure = largest_fall(one.values[critic], start)
        confidence.append(sure)
        right.append(place == one.error.place)
    return np.array(confidence), np.array(right)


def smallest(confidence: NDArray[np.float64], right: NDArray[np.bool_]) -> float | None:
    """Return the smallest confidence from which on `WANTED` of at least `FEWEST` passes are right; None without one."""
    named = {at: right[confidence >= at] for at in sorted({round(float(one), 2) for one in confidence})}
    return next((at for at, hits in named.items() if len(hits) >= FEWEST and hits.mean() >= WANTED), None)


def _row(label: str, threshold: float | None, failed: Sequence[Pass], critic: str, start: float) -> tuple[str, ...]:
    if threshold is None:
        return label, f"none reaches {100 * WANTED:.0f}%", "", "", percent(0.0)
    confidence, right = judged(failed, critic, start)
    named = confidence >= threshold
    if not named.any():
        return label, f"{threshold:.2f}", "", "", percent(0.0)
    hits = dict(zip(map(id, failed), right, strict=True))
    sure = [one for one, said in zip(failed, named, strict=True) if said]
    shares = _shares(sure, lambda one: bool(hits[id(one)]))
    return label, f"{threshold:.2f}", *_measured(shares), percent(float(named.mean()))


def _measured(shares: Mapping[str, float]) -> tuple[str, str]:
    values = list(shares.values())
    return percent(float(np.mean(values))), span(*mean_interval(values, 0, 1))


def _shares(passes: Sequence[Pass], right: Callable[[Pass], bool]) -> Mapping[str, float]:
    by_problem: dict[str, list[bool]] = {}
    for one in passes:
        by_problem.setdefault(one.problem_id, []).append(right(one))
    return {problem: sum(found) / len(found) for problem, found in by_problem.items()}


if __name__ == "__main__":
    command(run, "blame")
