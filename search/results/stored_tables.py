"""Comparison tables of stored runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING

from search.results.outcomes import Outcome
from search.results.run_info import RunInfo, Setting
from search.results.summary import find_row, summarize
from search.results.table import Comparison
from search.usage import Usage

if TYPE_CHECKING:
    from search.prices import Prices


def cost_of(run: RunInfo, prices: Prices | None) -> Callable[[Usage], float] | None:
    """Return a function that computes the USD cost of a stored run's searches; None without prices.

    Raises:
        MASGymError: As for `search.Prices.rate`, when a search is priced.
    """
    if prices is None:
        return None

    def cost(usage: Usage) -> float:
        # A critic without forwards costs nothing.
        critic = run.config["critic"]["name"] if usage.reward_calls else None
        return prices.rate(run.config["policy"]["name"], critic).usd(usage)

    return cost


def table_of(store: Path, setting: Setting, outcomes: Sequence[Outcome], baseline: str = "") -> Comparison:
    """Return the table of one setting of a store, with rows by increasing cost."""
    rows = tuple(sorted(summarize(outcomes), key=lambda row: (isnan(row.tokens.mean), row.tokens.mean)))
    name = find_row(rows, baseline).label if rows else ""
    seeds = sorted({run.config["seed"] for run in setting.runs})
    facts = {"store": store.name, "seeds": seeds, "baseline": name}
    return Comparison(rows, tuple(outcomes), name, setting.title, facts)
