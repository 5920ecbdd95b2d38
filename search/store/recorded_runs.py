"""Recorded runs of a store, opened for new searches."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from mas_gym.errors import ConfigError, DataError, MASGymError, PolicyError
from mas_gym.internal.json_types import JSONMapping
from mas_gym.policies.base import Policy, PolicyBase, SamplingReply, SamplingRequest
from mas_gym.systems.dynamics import Dynamics
from mas_gym.systems.graph import MAS
from mas_gym.tasks.base import Grade, Problem
from search.grading import ProblemGrader
from search.models.base import MakeModel, Report, SampleFrom, SearchSource
from search.models.recorded import RecordedModel, RecordedTree, tree_of
from search.results.run_info import RunInfo, is_recorded
from search.setup import Setup
from search.store.search_rows import problem_of
from search.store.store import Store
from search.store.table_schema import digest

_TREES = 4096
"""Maximum number of trees kept in memory."""


class Recorded(Sequence[Problem], SearchSource):
    """A recorded run, imported or searched by MAS-Gym, that `search.run` and `search.compare` can search.

    `search.Propose` returns messages recorded at a state, each at most once per search. The seed of the new run
    determines their order. Tokens, log-probabilities and outcomes are as recorded. If a planner requests more
    messages than were recorded, the reply is shorter, and ``usage.unrecorded`` counts the missing messages.

    By default, each recorded episode is drawn at most once, so ``k`` passes are ``k`` recorded episodes, drawn without
    replacement. A message can be drawn once for each episode that contains it. With ``distinct``, each distinct message
    at a state is drawn at most once; use this for recorded trees.

    Args:
        path: The store.
        run: Name or digest of the run; by default the only imported run, or the only run.
        distinct: Whether equal messages at a state are merged.

    Attributes:
        info: The run.
        mas: Its system.
        name: Name of the run, or the beginning of its digest.
        distinct: As given.

    Raises:
        StoreError: The run cannot be found or read.
        ConfigError: Every search of the run failed.
    """

    def __init__(self, path: str | os.PathLike[str], run: str | None = None, *, distinct: bool = False) -> None:
        """Read the problems; a problem's tree is read when the problem is searched."""
        self.path, self.distinct = Path(path), distinct
        self._store = Store(self.path)
        self.info = _chosen(self._store, run)
        self.mas: MAS = self.info.mas
        self.name = self.info.name or self.info.run[:8]
        self._model = Dynamics(self.mas)
        state = blake2b(digest_size=16)
        self._problems = []
        for row in self._store.rows(self.info.run):
            if row["error"] is None:
                state.update(row["content"] + digest(row["question"], row["reference"]))
                self._problems.append(_plain(problem_of(row)))
        self._content = state.hexdigest()
        if not self._problems:
            raise ConfigError(f"{self.path}: expected searches without errors in the run {self.name}, found none")
        self._known = {one.id: one for one in self._problems}
        self._trees = lru_cache(_TREES)(self._read)
        self.policy = RecordedRunPolicy(str(self.info.config["policy"]["name"]), self.identity())

    def __len__(self) -> int:
        return len(self._problems)

    def __getitem__(self, index: Any) -> Any:
        return self._problems[index]

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the store's path; an unpickled copy reads the store again."""
        return partial(Recorded, distinct=self.distinct), (self.path, self.info.run)

    @property
    def problems(self) -> Recorded:  # type: ignore[override]
        """All problems of the run."""
        return self

    def identity(self) -> object:
        """Return the identity of the trees: the run, its contents and the drawing mode."""
        return {"run": self.info.run, "content": self._content, "distinct": self.distinct}

    @contextmanager
    def opened(self, policy: PolicyBase, sample: SampleFrom) -> Iterator[MakeModel]:
        """Yield a function that creates the model of a problem; nothing is shared."""

        def make(setup: Setup, problem: Problem, report: Report) -> RecordedModel:
            return RecordedModel(setup, problem, report, sample, tree=self.tree(problem))

        yield make

    def tree(self, problem: Problem) -> RecordedTree:
        """Return the tree of a problem.

        Raises:
            DataError: The run does not contain the problem.
            StoreError: The problem's search is corrupt.
        """
        known = self._known.get(problem.id)
        if known is None:
            raise DataError(
                f"{self.path}: expected one of the {len(self):,} problems of the run {self.name}, got {problem.id!r}"
            )
        if known != problem:
            raise DataError(
                f"{self.path}: expected problem {problem.id!r} as recorded in the run {self.name}, got another "
                "question, answer or kind; take the problems from `search.Recorded`"
            )
        return self._trees(problem.id)

    def _read(self, problem_id: str) -> RecordedTree:
        problem, plan = self._store.search(problem_id, self.info.run)
        tree = tree_of(plan, self._model, self.distinct)
        if not is_recorded(self.info.config):
            return tree
        # Imported answers are stored as written in the log; votes need normalized answers.
        grader = ProblemGrader([problem], problem, self.mas.final_text)
        read = {one.state.digest: _answer(grader, one.state.text) or one.answer for one in plan.candidates}
        grades = {key: Grade(grade.correct, read[key], grade.reason) for key, grade in tree.grades.items()}
        return replace(tree, grades=grades)


def _answer(grader: ProblemGrader, text: str) -> str | None:
    try:
        return grader.extract(text)
    except MASGymError:
        # For example code, which is not run here.
        return None


def _chosen(store: Store, run: str | None) -> RunInfo:
    imported = [info for info in store.runs() if is_recorded(info.config)]
    return imported[0] if run is None and len(imported) == 1 else store.find(run)


def _plain(problem: Problem) -> Problem:
    """Return a problem without the metadata of its recorded samples."""
    kept: JSONMapping = {key: value for key, value in problem.metadata.items() if key != "samples"}
    return replace(problem, metadata=kept)


def as_recorded(source: Recorded | str | os.PathLike[str]) -> Recorded:
    """Return a `Recorded` unchanged, or open the only run of a store.

    Raises:
        StoreError: As for `Recorded`; its other errors also apply.
    """
    return source if isinstance(source, Recorded) else Recorded(source)


class RecordedRunPolicy(Policy):
    """Placeholder for the policies of a recorded run, with a name (for reports and prices) and the run's identity."""

    max_batch = 1

    def __init__(self, name: str, stated: Any) -> None:
        self.name = name
        self._stated = stated

    def identity(self) -> object:
        """Return the identity of the recorded run."""
        return self._stated

    def sample(self, requests: Sequence[SamplingRequest]) -> Sequence[SamplingReply]:
        """Raise an error, because a recorded run cannot generate new messages."""
        raise PolicyError(f"{self.name} is a policy of a recorded run, which cannot generate new messages")
