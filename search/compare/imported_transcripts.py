"""Labeled transcripts of imported runs, for `bench_critic`."""

from __future__ import annotations

from pathlib import Path

from mas_gym.errors import DataError
from search.compare.transcripts import NOBODY, LabeledTranscript, read_labeled_file
from search.plan import Plan
from search.results.run_info import is_recorded
from search.store import open_store

_SQLITE = b"SQLite format 3\0"


def read_labeled(path: str | Path) -> list[LabeledTranscript]:
    """Read labeled transcripts from a file (`search.compare.transcripts`) or from the imported runs of a store.

    Raises:
        DataNotFoundError: There is no such file.
        DataError: The file has another type or no labeled transcripts.
        StoreError: Searches in the store are corrupt.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        return read_labeled_file(file)
    with file.open("rb") as opened:
        if opened.read(len(_SQLITE)) != _SQLITE:
            return read_labeled_file(file)
    found = []
    with open_store(file) as store:
        for run in store.runs():
            if is_recorded(run.config):
                agents = [agent.name for agent in run.mas.agents]
                for problem, plan in store.searches(run.run):
                    found += _labeled(problem.id, problem.metadata["samples"], plan, agents)
    if not found:
        raise DataError(
            f"{file}: expected imported transcripts with message labels, found none; import some with mas-gym import"
        )
    return found


def _labeled(name: str, samples: list[dict[str, object]], plan: Plan, agents: list[str]) -> list[LabeledTranscript]:
    found = []
    for candidate, facts in zip(plan.candidates, samples, strict=True):
        labels = facts.get("labels")
        if isinstance(labels, list):
            turns = candidate.state.turns
            wrong = labels.index(-1) if -1 in labels else NOBODY
            speakers = tuple(agents[turn.speaker] for turn in turns)
            steps = tuple(turn.text for turn in turns)
            named = f"{name} {facts['id'] or facts['place']}"
            found.append(LabeledTranscript(named, candidate.state.question, steps, wrong, speakers))
    return found
