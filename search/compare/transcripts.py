"""Transcripts with a known first wrong step, in ProcessBench's file format, and a critic's values for their prefixes.

A row of a JSON, JSONL or Parquet file has ``problem``, ``steps`` (texts) and ``label``, the index of the first wrong
step, or -1 if all are right (Zheng et al. 2024, arXiv:2412.06559). Optional columns: ``agents`` (the agent that wrote
each step), ``mas`` (the shipped system that wrote them), ``logprobs`` and ``tokens`` (of each step, as reported by its
policy), ``split`` and ``id``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from mas_gym.critics import Proposal, score_batch
from mas_gym.errors import (
    ConfigError,
    CriticError,
    DataError,
    DataNotFoundError,
    EngineUnavailableError,
    MASGymError,
    is_number,
    shown,
)
from mas_gym.internal.json_types import JSONMapping
from mas_gym.systems.dynamics import Dynamics
from mas_gym.systems.graph import MAS, Agent
from mas_gym.systems.loading import load_mas, mas_names
from mas_gym.systems.state import Action, MASState
from mas_gym.tasks.data_rows import BadRow, read_rows
from mas_gym.tasks.files import read_file
from search.costs import Usage
from search.protocol import Critic, Scores, ScoringContext, as_critic
from search.results.run_info import is_recorded
from search.store.store import is_database, open_store

SUFFIXES = (".json", ".jsonl", ".parquet")
NOBODY = -1
"""The label of a transcript without an error."""

_DEV_SHARE = 5
_DEV = ("dev", "val", "validation")


@dataclass(frozen=True)
class LabeledTranscript:
    """A transcript with a known first wrong step.

    Attributes:
        id: Identifies the transcript in error messages.
        problem: The question.
        steps: The messages.
        label: Index of the first wrong step; -1 if all are right.
        agents: The agent that wrote each step; empty if unknown.
        mas: The system that wrote the steps; None if unknown.
        proposals: ``(tokens, log-probability)`` of each step; empty if unknown.
        split: ``"dev"``, another split, or ``""``.
    """

    id: str
    problem: str
    steps: tuple[str, ...]
    label: int
    agents: tuple[str, ...] = ()
    mas: str | None = None
    proposals: tuple[tuple[int, float | None], ...] = ()
    split: str = ""

    def states(self, mas: MAS | None = None) -> tuple[MAS, list[MASState]]:
        """Return the system, by default the transcript's own, and the state after each step.

        Raises:
            DataError: The steps are not an episode of that system.
        """
        system = mas if mas is not None else None if self.mas is None else load_mas(self.mas)
        if system is None:
            return self._as_program()
        dynamics, found = Dynamics(system), [Dynamics(system).initial_state(self.problem)]
        for place, step in enumerate(self.steps):
            state = found[-1]
            speaker = None if dynamics.is_terminal(state) else system.agents[state.acting].name
            if speaker is None or (self.agents and speaker != self.agents[place]):
                expected = "no more steps" if speaker is None else f"a step of {speaker}"
                got = f"a step of {shown(self.agents[place])}" if self.agents else "another step"
                raise DataError(
                    f"{self.id}: step {place}: expected {expected} in an episode of {system.name}, got {got}; "
                    "pass the system of this transcript with --mas"
                )
            found.append(dynamics.transition(state, Action(step, system.ALL)))
        if not dynamics.is_terminal(found[-1]):
            raise DataError(f"{self.id}: expected more steps: the last step does not end the episode of {system.name}")
        return system, found[1:]

    def _as_program(self) -> tuple[MAS, list[MASState]]:
        """Replay the steps in a system without edges, in which agents may act in any order."""
        names = list(dict.fromkeys(self.agents)) or ["Assistant"]
        order = [names.index(name) for name in self.agents] or [0] * len(self.steps)
        system = MAS(
            "steps", tuple(Agent(name, "", 1024) for name in names), (), max_turns=len(order) + 1, external=True
        )
        dynamics = Dynamics(system)
        found = [dynamics.initial_state(self.problem, order[0])]
        for step, after in zip(self.steps, [*order[1:], system.sink], strict=True):
            found.append(dynamics.transition(found[-1], Action(step, after)))
        return system, found[1:]


def read_labeled(path: str | Path) -> list[LabeledTranscript]:
    """Read labeled transcripts from a file or from the imported runs of a store.

    Raises:
        DataNotFoundError: There is no such file.
        DataError: The file has another type, no labeled transcripts, or invalid rows, which the message lists.
        StoreError: Searches in the store are corrupt.
    """
    file = Path(path).expanduser()
    if not file.exists():
        raise DataNotFoundError(f"{file}: no such file; expected one with columns problem, steps and label")
    if is_database(file):
        return _imported(file)
    if file.suffix.lower() not in SUFFIXES:
        raise DataError(f"{file}: expected a file of type {', '.join(SUFFIXES)}, got {file.suffix or 'no suffix'}")
    rows = read_file(file, "transcripts")
    found = read_rows("labeled transcripts", rows, lambda number, row: _transcript(row, rows[number].place))
    if not found:
        raise DataError(f"{file}: expected at least one transcript, got none")
    return found


def _imported(file: Path) -> list[LabeledTranscript]:
    found = []
    with open_store(file) as store:
        for run in store.runs():
            if is_recorded(run.config):
                agents = [agent.name for agent in run.mas.agents]
                for problem, plan in store.searches(run.run):
                    for candidate, facts in zip(plan.candidates, problem.metadata["samples"], strict=True):
                        labels, turns = facts.get("labels"), candidate.state.turns
                        if isinstance(labels, list):
                            wrong = labels.index(-1) if -1 in labels else NOBODY
                            speakers = tuple(agents[turn.speaker] for turn in turns)
                            steps = tuple(turn.text for turn in turns)
                            named = f"{problem.id} {facts['id'] or facts['place']}"
                            found.append(LabeledTranscript(named, candidate.state.question, steps, wrong, speakers))
    if not found:
        raise DataError(
            f"{file}: expected imported transcripts with message labels, found none; import some with mas-gym import"
        )
    return found


def _transcript(row: JSONMapping, place: str) -> LabeledTranscript:
    problem, steps, label = (row.get(name) for name in ("problem", "steps", "label"))
    if not isinstance(problem, str) or not problem.strip():
        raise BadRow(f"expected a non-empty string as problem, got {shown(problem)}")
    texts = _each(steps, "steps", "texts", lambda step: isinstance(step, str))
    if not texts:
        raise BadRow("expected at least one step, got none")
    if type(label) is not int or not NOBODY <= label < len(texts):
        raise BadRow(f"expected a label from -1 (no error) to {len(texts) - 1} (the last step), got {shown(label)}")
    agents = _each(row.get("agents"), "agents", "names", lambda name: isinstance(name, str) and name != "")
    tokens = _each(row.get("tokens"), "tokens", "integers >= 0", lambda count: type(count) is int and count >= 0)
    logprobs = _each(
        row.get("logprobs"), "logprobs", "numbers <= 0 or null", lambda x: x is None or (is_number(x) and x <= 0)
    )
    for what, column in (("agents", agents), ("tokens", tokens), ("logprobs", logprobs)):
        if column and len(column) != len(texts):
            raise BadRow(f"expected {len(texts)} {what}, one per step, got {len(column)}")
    mas, part = row.get("mas"), row.get("split")
    # A data file must not refer to other files.
    if mas is not None and mas not in mas_names():
        raise BadRow(f"expected the name of a shipped system as mas, got {shown(mas)}; use --mas for another system")
    proposals = zip(tokens, logprobs, strict=True) if tokens and logprobs else ()
    name = row.get("id")
    return LabeledTranscript(
        str(name) if name is not None else place, problem, tuple(texts), label, tuple(agents), mas, tuple(proposals),
        part.lower() if isinstance(part, str) else "",
    )  # fmt: skip


def _each(values: object, name: str, kind: str, fits: Callable[[Any], bool]) -> list[Any]:
    if values is None and name != "steps":
        return []
    if not isinstance(values, list):
        raise BadRow(f"expected a list of {name}, got {shown(values)}")
    wrong = next((value for value in values if not fits(value)), values)
    if wrong is not values:
        raise BadRow(f"{name}: expected {kind}, got {shown(wrong)}")
    return values


def divide(
    transcripts: Sequence[LabeledTranscript],
) -> tuple[list[LabeledTranscript], list[LabeledTranscript], str]:
    """Return the transcripts to choose thresholds on, the transcripts to measure, and a description of the split.

    If a column ``split`` marks some rows as dev, it determines the split. Otherwise a hash of the question does, so
    that transcripts of one question stay together.
    """
    dev = [one for one in transcripts if one.split in _DEV]
    if dev:
        return dev, [one for one in transcripts if one.split not in _DEV], "rows with split dev"
    dev = [one for one in transcripts if _bucket(one.problem) == 0]
    rest = [one for one in transcripts if _bucket(one.problem) != 0]
    return dev, rest, f"a fifth of the questions, by hash ({len(dev):,} transcripts)"


def _bucket(question: str) -> int:
    return sha256(" ".join(question.split()).encode("utf-8", "replace")).digest()[0] % _DEV_SHARE


class Scored(NamedTuple):
    """A transcript with a critic's values.

    Attributes:
        transcript: The transcript.
        values: The value after each step, or only after the last step for outcome critics; empty if the critic failed.
        error: Reason for the failure.
    """

    transcript: LabeledTranscript
    values: tuple[float, ...]
    error: str | None = None


def score_transcripts(
    transcripts: Sequence[LabeledTranscript],
    critic: Critic,
    mas: MAS | None = None,
    listen: Callable[[int], None] = lambda done: None,
) -> tuple[list[Scored], Usage]:
    """Score every prefix of every transcript; for outcome critics only whole transcripts.

    If the critic cannot score a transcript, the result's ``error`` states the reason. ``mas`` overrides the
    transcripts' systems. ``listen`` is called with the number of transcripts scored so far.

    Raises:
        ConfigError: The critic compares states with each other.
        CriticError: The critic is incompatible with the system, or cannot score any transcript.
        DataError: The steps do not form an episode of the system.
        EngineUnavailableError: A judge's engine is unavailable.
    """
    critic = as_critic(critic)
    if critic.reads_peers:
        raise ConfigError(
            f"expected a critic that scores single states, got {critic.name!r}, which compares states of one search"
        )
    found: list[Scored] = []
    cost = Usage()
    waiting: dict[int, Sequence[ScoringContext]] = {}
    checked: set[str] = set()

    def flush() -> None:
        nonlocal cost
        for place, outcome in score_batch(critic, waiting) if waiting else ():
            if isinstance(outcome, EngineUnavailableError):
                raise outcome
            found.append(_scored(transcripts[place], outcome))
            if isinstance(outcome, Scores):
                calls, (tokens, read, unread) = 0 if critic.free else critic.calls * len(outcome), outcome.cost()
                cost += Usage(
                    reward_calls=calls, critic_tokens=tokens, critic_prompt_tokens=read, unread_verdicts=unread
                )
        waiting.clear()
        listen(len(found))

    for place, one in enumerate(transcripts):
        system, states = one.states(mas)
        if system.fingerprint not in checked:
            critic.check_graph(system)
            checked.add(system.fingerprint)
        waiting[place] = _contexts(one, system, states, critic.terminal_only)
        if sum(map(len, waiting.values())) >= critic.max_batch:
            flush()
    flush()
    if found and all(one.error is not None for one in found):
        raise CriticError(f"critic {critic.name!r} scored none of {len(found):,} transcripts: {found[0].error}")
    return found, cost


def _contexts(one: LabeledTranscript, mas: MAS, states: Sequence[MASState], last_alone: bool) -> list[ScoringContext]:
    written: list[Proposal | None] = [
        Proposal(Action(text, mas.ALL), tokens, logprob)
        for text, (tokens, logprob) in zip(one.steps, one.proposals, strict=False)
    ]
    contexts = [
        ScoringContext(state, mas, proposal)
        for state, proposal in zip(states, written or [None] * len(states), strict=True)
    ]
    return contexts[-1:] if last_alone else contexts


def _scored(transcript: LabeledTranscript, outcome: Scores | Exception) -> Scored:
    if isinstance(outcome, Exception):
        reason = str(outcome) if isinstance(outcome, MASGymError) else f"{type(outcome).__name__}: {outcome}"
        return Scored(transcript, (), reason or type(outcome).__name__)
    failed = next(filter(None, outcome.reasons), None)
    return Scored(transcript, tuple(outcome.values)) if failed is None else Scored(transcript, (), failed)
