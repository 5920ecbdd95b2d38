"""Confident and uncertain errors: whether policy likelihood or a critic separates wrong messages from right ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.paper.credit import Pass, collect_passes
from benchmarks.paper.errors import seen
from benchmarks.paper.lab import LIKELIHOOD, MCTS, SCORE_HEADER, Lab, command, row_of, score_cells
from benchmarks.paper.page import NEW, Claim, Page, percent
from benchmarks.paper.rivals import compared
from benchmarks.ranking import auc_cells, auc_difference, rank

TEMPERATURES = (None, 1.0, 1.5)
"""Temperature of the agents in the searches; None for the agents' default."""

FEWEST = 20
"""Right and wrong messages that an agent must have to be in the table."""

ASKS = """
This page measures whether a critic can outperform policy likelihood (PL), which has no cost. This requires that the
agents write both right and wrong messages in a search, and that the wrong messages are about as likely as the right
ones. The first table includes an upper bound: the same search with the ground truth about each message as the critic.
The searches run at the agents' own temperature and at higher temperatures, with top-p 1.

The second table describes messages of single passes, each after a prefix without an error. `likelihood` is the
geometric mean of a message's token probabilities; the table gives its medians over the right and over the wrong
messages. `AUC` is the probability that a right message has a higher value than a wrong message of the same agent, over
all problems. The last table compares messages of the same problem after the same prefix, as a search does. It shows the
share of pairs in trees of the dev split that a critic orders correctly, in %, with 95% intervals.
"""


class Message(NamedTuple):
    """One message after a prefix without an error."""

    problem_id: str
    agent: str
    right: bool
    values: Mapping[str, float]


def run(lab: Lab) -> Page:
    page = Page("confidence", "Confident and uncertain errors", ASKS)
    critics: dict[str, Any] = {
        "PL": lab.load(LIKELIHOOD),
        "MASPRM": lab.critic(lab.home),
    }
    searches = [row_of("single"), *(row_of(MCTS, critic, name) for name, critic in critics.items())]
    searches.append(row_of(MCTS, lab.truth(lab.home), "truth"))
    lines = []
    for temperature in TEMPERATURES:
        scores = lab.measure(lab.home, searches, temperature=temperature)
        shown = "own" if temperature is None else f"{temperature:g}"
        lines += [(score.row.label, shown, *score_cells(score)) for score in scores]
        _, likelihood, masprm, truth = scores
        about = "" if temperature is None else f", temperature {shown}"
        page.claims += [
            compared(f"{MCTS}{about}: the truth over policy likelihood", NEW, truth, likelihood),
            compared(f"{MCTS}{about}: MASPRM over policy likelihood", NEW, masprm, likelihood),
        ]
    page.table(("search", "temperature", *SCORE_HEADER), lines)
    found = messages(collect_passes(lab, lab.home, critics))
    agents = [agent for agent in dict.fromkeys(one.agent for one in found) if _enough(found, agent)]
    rows = []
    for agent in agents:
        own = [one for one in found if one.agent == agent]
        wrong = [one for one in own if not one.right]
        medians = (
            f"{_likelihood(float(np.median([one.values['PL'] for one in part]))):.2f}"
            for part in ([one for one in own if one.right], wrong)
        )
        cells = (cell for name in critics for cell in auc_cells(ranked(own, name)))
        rows.append((agent, f"{len(own):,}", percent(len(wrong) / len(own)), *medians, *cells))
        page.claims.append(_claim(agent, own))
    header = ("agent", "messages", "wrong, %", "likelihood, right", "wrong")
    page.table((*header, *(part for name in critics for part in (f"AUC of {name}", "95% interval"))), rows)
    dropped = sorted({one.agent for one in found} - set(agents))
    if dropped:
        few = f"because they have fewer than {FEWEST} right or fewer than {FEWEST} wrong messages"
        page.blocks.append(f"Omitted {few}: {', '.join(dropped)}.\n")
    page.blocks.append(seen(lab, lab.home, {"MASPRM": critics["MASPRM"], "policy likelihood": critics["PL"]}))
    return page


def messages(passes: Sequence[Pass]) -> list[Message]:
    """Return the messages up to the first wrong one of each pass."""
    found = []
    for one in passes:
        last = len(one.agents) - 1 if one.error is None else one.error.place
        for place, agent in enumerate(one.agents[: last + 1]):
            right = one.error is None or place < last
            found.append(Message(one.problem_id, agent, right, {name: own[place] for name, own in one.values.items()}))
    return found


def ranked(own: Sequence[Message], critic: str) -> Any:
    groups: dict[str, list[Message]] = {}
    for one in own:
        groups.setdefault(one.problem_id, []).append(one)
    truth = [np.array([one.right for one in group], dtype=float) for group in groups.values()]
    return rank(truth, [[np.array([one.values[critic] for one in group]) for group in groups.values()]])


def _likelihood(value: float) -> float:
    """Return the mean probability per token behind a value of policy likelihood, which is its sigmoid."""
    return value / (1 - value)


def _enough(found: Sequence[Message], agent: str) -> bool:
    own = [one.right for one in found if one.agent == agent]
    return min(sum(own), len(own) - sum(own)) >= FEWEST


def _claim(agent: str, own: Sequence[Message]) -> Claim:
    text = f"AUC for the {agent}: MASPRM over policy likelihood"
    return Claim(text, NEW, auc_difference(ranked(own, "MASPRM"), ranked(own, "PL")))


if __name__ == "__main__":
    command(run, "confidence")
