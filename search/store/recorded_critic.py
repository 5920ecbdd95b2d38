"""A critic that returns recorded values and verdicts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path

from mas_gym.errors import ConfigError, DataError, whole_number
from mas_gym.internal.json_types import JSONMapping
from mas_gym.internal.suggestions import unknown_name
from mas_gym.systems.graph import RETURNED
from mas_gym.systems.state import MASState
from mas_gym.tasks.base import Problem
from search.plan import Plan
from search.protocol import Critic, Scores, ScoringContext
from search.results.run_info import is_recorded
from search.store.store import Store
from search.store.table_schema import digest

LABELS = "labels"
"""The judge name for human labels."""


class RecordedCritic(Critic):
    """Recorded values of states, from a log, a judge or an earlier search.

    States are matched by the question and the texts of their messages, so values of one log apply to other runs of
    the same transcripts. If a message, such as a tool result, has no value, the last earlier value is used. If there is
    no earlier value, the state has no value, and a search that requests one fails with this reason. If samples with the
    same beginning have different values, their mean is used.

    Args:
        path: The store.
        run: Name or digest of a run; None takes all runs.
        judge: ``""`` for the values in the trees: those of messages in a log, or those of the critic of a search.
            Otherwise a judge with imported verdicts, or ``"labels"`` for human labels.
        calls: Number of model calls per recorded value, counted in RC.

    Attributes:
        name: The judge, or ``"recorded"``.
        judges: The judges with verdicts in the store.

    Raises:
        StoreError: The store cannot be read, or there is no such run.
        UnknownNameError: There is no such judge.
        DataError: There are no values.
    """

    def __init__(self, path: str | Path, *, run: str | None = None, judge: str = "", calls: int = 1) -> None:
        if not str(path):
            raise ConfigError("expected recorded:FILE with a store, got no file; mas-gym import writes one")
        self.name = judge or "recorded"
        self.calls = whole_number("calls", calls, at_least=1)
        sums: defaultdict[bytes, list[float]] = defaultdict(list)
        judges: set[str] = set()
        with Store(Path(path).expanduser()) as store:
            for info in [store.find(run)] if run is not None else store.runs():
                for problem, plan in store.searches(info.run):
                    samples = problem.metadata.get("samples", []) if is_recorded(info.config) else []
                    judges |= {name for one in samples for name in one.get("verdicts", {})}
                    for key, value in _values(problem, plan, samples, judge):
                        sums[key].append(value)
        self.judges = sorted(judges)
        if judge and judge != LABELS and judge not in judges:
            raise unknown_name("judge", judge, judges)
        if not sums:
            what = f"values of {judge}" if judge else "values in the trees"
            known = (
                f"; for the values of a judge ({', '.join(self.judges)}), use recorded:{path}#judge=NAME"
                if judges
                else ""
            )
            raise DataError(f"{path}: expected {what}, found none{known}")
        self._values: Mapping[bytes, float] = {key: math.fsum(found) / len(found) for key, found in sums.items()}

    def identity(self) -> dict[str, str]:
        """Return a digest of the values."""
        state = blake2b(digest_size=16)
        for key, value in sorted(self._values.items()):
            state.update(key + repr(value).encode())
        return {"values": state.hexdigest(), "calls": str(self.calls)}

    def score(self, contexts: Sequence[ScoringContext]) -> Scores:
        """Return the recorded value of each state, in order; NaN with a reason if there is none."""
        return Scores.from_rows(self._row(context.state) for context in contexts)

    def _row(self, state: MASState) -> tuple[float, int, int, int, str]:
        value = self._values.get(transcript_key(state), math.nan)
        return value, 0, 0, 0, "" if math.isfinite(value) else "no value is recorded for its transcript"


def _values(problem: Problem, plan: Plan, samples: Sequence[JSONMapping], judge: str) -> Iterator[tuple[bytes, float]]:
    if not judge and plan.tree is not None:
        held: list[float | None] = []
        for node in plan.tree:
            held.append(node.value if node.value is not None or node.id == 0 else held[node.parent])
            if node.id and held[-1] is not None:
                yield transcript_key(node.state), held[-1]
    for candidate, facts in zip(plan.candidates, samples if judge else (), strict=False):
        verdicts = facts.get("labels") if judge == LABELS else facts.get("verdicts", {}).get(judge)
        last: float | None = None
        for state, verdict in zip(candidate.state.path()[1:], verdicts or (), strict=False):
            last = last if verdict is None else float(verdict)
            if last is not None:
                yield transcript_key(state), last


def transcript_key(state: MASState) -> bytes:
    """Return a digest of a question and the message texts, independent of the speakers."""
    texts = (one.question if one.parent is None else one.text.split(RETURNED)[0] for one in state.path())
    return digest(*map(str.strip, texts))
