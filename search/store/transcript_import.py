"""Import of recorded transcripts as runs of a store.

A call creates one run from the files that have not been imported yet. The run's planner is ``recorded``, and the agents
of its system are the speakers of the log. Each question is a search, and its candidates are the recorded samples.
Samples with a common prefix share the nodes of the prefix.

Samples of one question may be anywhere in the files, so samples are first written to a temporary file. Memory use
therefore does not grow with the log. An interrupted import reads the files again and continues with the missing
questions.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from string import ascii_uppercase
from typing import Any

import mas_gym
from mas_gym.critics import Proposal
from mas_gym.errors import ConfigError, MASGymError
from mas_gym.internal.json_types import JSONMapping, JSONObject
from mas_gym.internal.suggestions import choice
from mas_gym.internal.text import one_line
from mas_gym.logs import BrokenLine, LoggedMessage, Transcript, read_transcripts
from mas_gym.logs.reader import check_format, log_files
from mas_gym.plugins import Spec
from mas_gym.systems.dynamics import Dynamics
from mas_gym.systems.graph import RETURNED, unmarked
from mas_gym.systems.loading import load_mas
from mas_gym.systems.state import Action
from mas_gym.systems.validation import RESERVED
from mas_gym.tasks.base import KINDS, Kind, Problem
from mas_gym.tasks.grading.numbers import parse_number
from search.costs import Usage
from search.grading import ProblemGrader
from search.plan import AnytimePoint, Candidate, Plan
from search.results.run_info import RECORDED, is_recorded
from search.store.run_identity import FORM
from search.store.run_writer import RunWriter
from search.store.search_rows import search_id
from search.store.staged_logs import BATCH, START, StagedSample, Staging
from search.store.store import Store
from search.store.table_schema import FORMAT, explained
from search.tree import Tree

_LONGEST = 100
_LISTED = 100
_NO_PROMPT = "(not recorded)"


@dataclass(frozen=True)
class Imported:
    """The result of an import.

    Attributes:
        run: The digest of the run; None if all files had already been imported.
        transcripts: Number of transcripts in the run.
        agents: The speakers in the transcripts.
        broken: Number of lines that are not transcripts.
        lines: The first 1,000 of these lines.
        dropped: Number of omissions from transcripts, by reason.
        ungraded: Number of transcripts with neither a recorded outcome nor a reference answer.
        disagree: Number of recorded outcomes that differ from the answer's grade; the recorded outcomes are used.
        skipped: The files that had already been imported.
    """

    run: str | None = None
    name: str | None = None
    transcripts: int = 0
    questions: int = 0
    agents: tuple[str, ...] = ()
    broken: int = 0
    lines: tuple[BrokenLine, ...] = ()
    dropped: Mapping[str, int] = field(default_factory=dict)
    ungraded: int = 0
    disagree: int = 0
    skipped: tuple[str, ...] = ()


def import_transcripts(
    files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    store: Store | str | os.PathLike[str],
    *,
    format: str | None = None,
    name: str | None = None,
    kind: Kind | None = None,
    references: Iterable[Problem] = (),
    listen: Callable[[str, int, int], None] = lambda step, done, total: None,
) -> Imported:
    """Write recorded transcripts into a store as one run.

    Files with contents that were already imported into the store are skipped. An interrupted import is resumed.

    Args:
        files: One or several files or folders, as for `mas_gym.logs.read_transcripts`.
        store: The store, which is created if it is missing.
        format: As for `mas_gym.logs.read_transcripts`.
        name: Name of the run; by default the name of the file, or of the files' folder.
        kind: Grading kind for answers without a recorded outcome; by default inferred from the reference answers.
        references: Problems whose answers are used for transcripts of the same question without a reference answer,
            such as a task.
        listen: Called with ``"read"``, the number of bytes read and the total, then with ``"write"``, the number of
            questions written and the total.

    Raises:
        ConfigError: The format or kind is unknown, or the files have no transcripts.
        DataError: As for `mas_gym.logs.read_transcripts`; its other errors also apply.
        StoreError: The store cannot be written, or another run has this name.
    """
    check_format(format)
    if kind is not None:
        choice("kind", kind, KINDS)
    path = store.path if isinstance(store, Store) else Path(store)
    paths = log_files(files)
    if not paths:
        raise ConfigError("expected at least one file to import, got none")
    known = {_words(problem.question): problem for problem in references}
    settings = {"format": format, "kind": kind, **_reader_digest(format), **_references_digest(known)}
    digests = {one: _digest(one) for one in {one.resolve(): one for one in reversed(paths)}.values()}
    FORMAT.connect(path, create=True).close()
    held = _held(path, settings)
    fresh, skipped = [], tuple[str, ...]()
    for one in (one for one in dict.fromkeys(paths) if one in digests):
        # Samples in separate files may be equal, so files are counted.
        if held[digests[one]]:
            held[digests[one]] -= 1
            skipped += (str(one),)
        else:
            fresh.append(one)
    if not fresh:
        return Imported(skipped=skipped)
    identity = {**settings, "files": sorted(digests[one] for one in fresh)}
    size = sum(one.stat().st_size for one in fresh)
    with explained(path), closing(Staging()) as staging:
        read = read_transcripts(
            fresh, format, broken=staging.add_broken, listen=lambda done: listen("read", done, size)
        )
        staging.fill((_answered(one, known) for one in read), kind)
        if not staging.count("samples"):
            why = "".join(f"; the first broken line is {one.place}: {one.reason}" for one in staging.lines[:1])
            raise ConfigError(f"expected at least one transcript in {', '.join(map(str, fresh[:3]))}, found none{why}")
        done = _write(path, staging, fresh, digests, identity, name, listen)
    return replace(done, skipped=skipped)


def _digest(path: Path) -> str:
    if not path.is_file():
        # The reader raises the error.
        next(read_transcripts(path, "chat"), None)
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _reader_digest(format: str | None) -> dict[str, str]:
    file = Path(Spec.parse(format or "").file).expanduser()
    return {"reader": _digest(file)} if file.is_file() else {}


def _words(question: str) -> str:
    return " ".join(question.split())


def _references_digest(known: Mapping[str, Problem]) -> dict[str, str]:
    if not known:
        return {}
    text = json.dumps([[question, one.answer, one.kind] for question, one in sorted(known.items())])
    return {"references": hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}


def _answered(one: Transcript, known: Mapping[str, Problem]) -> Transcript:
    """Return a transcript with the reference answer of its question, unless it has one."""
    problem = known.get(_words(one.question)) if one.reference is None else None
    return one if problem is None else replace(one, reference=problem.answer, kind=problem.kind)


def _held(path: Path, settings: JSONMapping) -> Counter[str]:
    """Return how often the digest of a file occurs in complete runs that were read with the same settings."""
    with closing(Store(path)) as store:
        return Counter(
            digest
            for run in store.runs()
            if is_recorded(run.config) and run.searches >= run.facts.get("problems", math.inf)
            if _same(run.config["planner"]["fields"], settings)
            for digest in run.config["planner"]["fields"]["files"]
        )


def _same(old: JSONMapping, new: JSONMapping) -> bool:
    """Return whether files were read with equivalent settings; a detected format counts as equal to a named one."""
    formats = {old["format"], new["format"]} - {None}
    return len(formats) < 2 and all(old.get(key) == new.get(key) for key in ("kind", "reader", "references"))


def _write(
    path: Path,
    staging: Staging,
    files: Sequence[Path],
    digests: Mapping[Path, str],
    identity: JSONMapping,
    name: str | None,
    listen: Callable[[str, int, int], None],
) -> Imported:
    name = None if name is None else one_line(name)
    source = name or one_line(_source(files))
    names = _agent_names(list(staging.agents))
    config = _config(staging, names, identity, source)
    wanted, transcripts, dropped = staging.count("questions"), staging.count("samples"), dict(staging.dropped)
    facts = {
        "mas_gym": mas_gym.__version__,
        "planner": f"{RECORDED}:{source}",
        "task": None,
        "split": None,
        "problems": wanted,
        "started": datetime.now(UTC).isoformat(),
        "transcripts": transcripts,
        # The facts are rewritten with each batch.
        "files": {str(one): digests[one] for one in files[:_LISTED]},
        "broken": staging.broken,
        "dropped": dropped,
    }
    name = name or _free_name(path, source, config)
    record = RunWriter(path, config, facts, name)
    totals: Counter[str] = Counter()
    try:
        with closing(FORMAT.connect(path, create=False)) as connection:
            query = "SELECT id FROM searches WHERE run = ?"
            done = {key for (key,) in connection.execute(query, (record.run,))}
        builder = _Builder(config, names, staging.kind)
        for first in range(0, wanted, BATCH):
            batch = [one for one in staging.questions(first) if search_id(record.run, one[0]) not in done]
            record.save((*builder.search(*one, staging.samples(one[0]), totals), {}) for one in batch)
            listen("write", min(first + BATCH, wanted), wanted)
    finally:
        record.close()
    return Imported(
        run=record.run,
        name=name,
        transcripts=transcripts,
        questions=wanted,
        agents=tuple(names.values()),
        broken=staging.broken,
        lines=tuple(staging.lines),
        dropped=dropped,
        ungraded=totals["ungraded"],
        disagree=totals["disagree"],
    )


def _source(files: Sequence[Path]) -> str:
    first = files[0]
    if len(files) == 1:
        return first.name.removesuffix(".gz").rpartition(".")[0] or first.name
    return first.resolve().parent.name or "logs"


def _free_name(path: Path, source: str, config: JSONMapping) -> str:
    with closing(Store(path)) as store:
        taken = {run.name for run in store.runs() if run.config != config}
    return next(name for n in count(1) if (name := source if n == 1 else f"{source}-{n}") not in taken)


def _agent_names(speakers: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in speakers:
        reserved = name.strip().lower() in RESERVED
        options = (f"{name[:_LONGEST]} (agent{'' if n == 1 else f' {n}'})" for n in count(1))
        found[name] = next(one for one in options if one not in speakers) if reserved else name
    return found


def _config(staging: Staging, names: Mapping[str, str], identity: JSONMapping, source: str) -> JSONObject:
    agents = [
        {"name": names[name], "system_prompt": prompt if prompt and prompt.strip() else _NO_PROMPT}
        for name, prompt in staging.agents.items()
    ]
    mas = load_mas({"name": RECORDED, "agents": agents, "edges": [], "external": True, "max_turns": staging.longest})
    return {
        "schema": FORM,
        "planner": {"class": RECORDED, "fields": dict(identity)},
        "mas": mas.to_dict(),
        "policy": {"name": source, "identity": source},
        "critic": None,
        "seed": 0,
        "training": False,
        "sampling": {},
        "budget": {},
        "grading": RECORDED,
    }


class _Builder:
    def __init__(self, config: JSONMapping, names: Mapping[str, str], kind: Kind) -> None:
        self._mas = load_mas(dict(config["mas"]))
        self._dynamics = Dynamics(self._mas)
        places = {agent.name: place for place, agent in enumerate(self._mas.agents)}
        self._places = {name: places[given] for name, given in names.items()}
        self._kind: Kind = kind

    def search(
        self,
        key: str,
        question: str,
        reference: str | None,
        kind: str | None,
        samples: Sequence[StagedSample],
        totals: Counter[str],
    ) -> tuple[Problem, Plan]:
        """Return the problem, and the plan with a candidate for each sample."""
        problem = self._problem(key, question, reference, kind)
        grader = ProblemGrader([problem], problem, self._mas.final_text)
        # The tree has one root, and only one agent acts there.
        differ = len({one.messages[0].speaker for one in samples}) > 1
        ahead = [LoggedMessage(START, "", agent=False)] if differ else []
        paths = [[*ahead, *one.messages] for one in samples]
        tree = Tree(self._dynamics.initial_state(question, self._places[paths[0][0].speaker]))
        known: dict[tuple[int, str, int], int] = {}
        made: list[tuple[Candidate, JSONObject]] = []
        for one, path in zip(samples, paths, strict=True):
            node = self._grow(tree, known, path, one.more["answer"])
            answer, correct = self._outcome(grader, tree.states[node].text, one, reference, totals)
            candidate = Candidate(tree.states[node], one.more["score"], node, answer, correct)
            facts = {"id": one.sample, "place": one.place, "recorded": one.more["correct"], "facts": one.more["facts"]}
            labels = [message.label for message in path]
            if any(label is not None for label in labels):
                facts["labels"] = labels
            judges = sorted({judge for message in path for judge in message.verdicts})
            if judges:
                facts["verdicts"] = {judge: [message.verdicts.get(judge) for message in path] for judge in judges}
            if any(message.recipients for message in path):
                facts["recipients"] = [message.recipients for message in path]
            made.append((candidate, facts))
            if correct is not None:
                for place in tree.path(node):
                    tree.visits[place] += 1
                    tree.totals[place] += 1.0 if correct else -1.0
        if all(candidate.score is not None for candidate, _ in made):
            made.sort(key=lambda item: -(item[0].score or 0.0))
        return replace(problem, metadata={**problem.metadata, "samples": [facts for _, facts in made]}), self._plan(
            problem, tree, [candidate for candidate, _ in made], paths
        )

    def _problem(self, key: str, question: str, reference: str | None, stated: str | None) -> Problem:
        kind: Any = stated or self._kind
        if reference is None or (kind == "number" and parse_number(reference) is None):
            kind = "text"
        options = {}
        if kind == "choice" and reference is not None:
            last = ascii_uppercase.find(reference.strip().upper()[:1])
            options = {"options": [""] * max(4, last + 1)}
        return Problem(key, question, reference or "", kind, options)

    def _grow(
        self, tree: Tree, known: dict[tuple[int, str, int], int], path: Sequence[LoggedMessage], answer: str | None
    ) -> int:
        """Add a sample's messages that are not yet in the tree, and return the last message's node."""
        node = 0
        following = [*(self._places[message.speaker] for message in path[1:]), self._mas.sink]
        for place, (message, after) in enumerate(zip(path, following, strict=True)):
            text = unmarked(message.said)
            if place == len(path) - 1 and answer is not None and answer.strip() != text.strip():
                text += RETURNED + unmarked(answer)
            child = known.get((node, text, after))
            if child is None:
                action = Action(text, after)
                state = self._dynamics.transition(tree.states[node], action)
                proposal = Proposal(action, message.tokens, message.logprob)
                child = known[node, text, after] = tree.add(node, state, proposal, after == self._mas.sink)
            if message.value is not None:
                tree.values[child] = message.value
            node = child
        return node

    def _outcome(
        self, grader: ProblemGrader, text: str, one: StagedSample, reference: str | None, totals: Counter[str]
    ) -> tuple[str | None, bool | None]:
        """Return a sample's answer and whether it is correct, as recorded or else by grading."""
        recorded: bool | None = one.more["correct"]
        graded: bool | None = None
        try:
            answer = grader.extract(text)
            if reference is not None:
                graded = bool(grader.grade(text).correct)
        except MASGymError:
            # For example code, which is not run here.
            answer = None
        totals["ungraded"] += recorded is None and graded is None
        totals["disagree"] += None not in (recorded, graded) and recorded != graded
        given = one.more["answer"]
        return given if given is not None else answer, graded if recorded is None else recorded

    def _plan(
        self, problem: Problem, tree: Tree, candidates: Sequence[Candidate], paths: Sequence[Sequence[LoggedMessage]]
    ) -> Plan:
        calls = sum(message.agent for path in paths for message in path)
        tokens = sum(message.tokens for path in paths for message in path)
        best = candidates[0]
        return Plan(
            candidates=tuple(candidates),
            tree=tree,
            anytime=(AnytimePoint(calls, tokens, best.state, best.node, best.answer, best.correct),),
            problem_id=problem.id,
            answer=best.answer,
            correct=best.correct,
            usage=Usage(agent_calls=calls, generated_tokens=tokens),
            mas=self._mas,
        )
