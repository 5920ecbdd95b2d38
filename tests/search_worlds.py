"""Small worlds for tests of search: every message, value and reward is written down or drawn from a hash."""

from __future__ import annotations

import asyncio
import json
import random
import sqlite3
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from mas_gym.errors import StoreError
from mas_gym.policies import SamplingRequest, ScriptedPolicy
from mas_gym.systems.dynamics import Dynamics
from mas_gym.systems.graph import MAS, Agent, Edge
from mas_gym.systems.state import Action, MASState
from mas_gym.tasks.base import Problem
from search import MCTS, Critic, Evaluate, Extract, Plan, Progress, Proposal, Propose, Remaining, Reward, Tag, Tags, run
from search.store.table_schema import FORMAT


def chain(depth: int, cap: int = 64) -> MAS:
    """Agents in a row, each hearing the one before; the first hears the question."""
    agents = tuple(Agent(f"agent{i}", f"You are agent {i}.", cap) for i in range(depth))
    return MAS(f"chain{depth}", agents, (Edge(-1, 0), *(Edge(i, i + 1) for i in range(depth - 1))))


def execute(path: Path, *statements: str) -> None:
    """Change a database file behind its owner's back."""
    database = sqlite3.connect(path)
    for statement in statements:
        database.execute(statement)
    database.commit()
    database.close()


def way(state: MASState) -> str:
    """The texts on the way to a state, with slashes."""
    return "/".join(turn.text for turn in state.turns)


def verdict(request: SamplingRequest, word: str) -> str:
    """The line in which a judge states a word, as its prompt requests."""
    [line] = [line for line in request.messages[-1].content.splitlines()[-2:] if line.endswith(f": {word}")]
    return line


class WholeBatches:
    """A session in which each step replies to all requests."""

    def __init__(self, policy: Any) -> None:
        self.policy, self.requests, self.pending = policy, {}, 0

    def submit(self, key: object, request: SamplingRequest) -> None:
        self.requests[key] = request
        self.pending += len(request.seeds)

    def step(self) -> list[tuple[object, Any]]:
        done = list(zip(self.requests, self.policy.sample(list(self.requests.values())), strict=True))
        self.requests, self.pending = {}, 0
        return done

    def close(self) -> None:
        self.requests, self.pending = {}, 0


def noise(*parts: object) -> float:
    """A number in [0, 1) that depends on its arguments alone."""
    digest = blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def drive(planner: Any, model: Any, reply: Callable[[Any], Any], rng: random.Random) -> Plan:
    """Run a planner with replies that do not depend on the way to a state, which may be long."""
    generator = planner.plan(model, model.initial_state("q"), rng)
    replies: Any = None
    try:
        while True:
            replies = [None if request == Remaining() else reply(request) for request in generator.send(replies)]
    except StopIteration as end:
        return end.value


@dataclass
class World:
    """Replies to a planner without a scheduler, and counts the cost."""

    depth: int = 2
    messages: Callable[[str, int], str] = lambda path, index: chr(ord("a") + index)
    value: Callable[[str], float] = lambda path: noise("value", path)
    reward: Callable[[str], float] = lambda path: 1.0 if noise("reward", path) < 0.5 else -1.0
    calls: int = 0
    evaluated: list[str] = field(default_factory=list)
    rewarded: list[str] = field(default_factory=list)
    yields: int = 0

    def __post_init__(self) -> None:
        self.model = Dynamics(chain(self.depth))
        self._drawn: dict[str, int] = {}

    def plan(self, planner: Any, question: str = "q") -> Plan:
        generator = planner.plan(self.model, self.model.initial_state(question), random.Random(0))
        try:
            requests = next(generator)
            while True:
                self.yields += 1
                requests = generator.send([self.answer(request) for request in requests])
        except StopIteration as end:
            return end.value

    def answer(self, request: Any) -> Any:
        match request:
            case Propose(state=state, n=n):
                return self.propose(state, n)
            case Evaluate(states=states):
                self.evaluated += [way(state) for state in states]
                return [self.value(way(state)) for state in states]
            case Reward(states=states):
                assert all(self.model.is_terminal(state) for state in states)
                self.rewarded += [way(state) for state in states]
                return [self.reward(way(state)) for state in states]
            case Extract(states=states):
                return [state.text or None for state in states]
            case Remaining():
                return None
            case Tags():
                return (Tag(""),)
        raise AssertionError(request)

    def propose(self, state: MASState, n: int) -> list[Proposal]:
        path = way(state)
        start = self._drawn.get(path, 0)
        self._drawn[path] = start + n
        self.calls += n
        texts = [self.messages(path, start + i) for i in range(n)]
        return [Proposal(Action(text, self.model.mas.ALL), 3, -1.5) for text in texts]


def problems(count: int) -> list[Problem]:
    return [Problem(f"toy/{i}", f"Question {i}: what is {i} modulo 4?", str(i % 4)) for i in range(count)]


def talk(request: Any, seed: int) -> str:
    """A message that depends on the prompt and the seed alone; its answer is one of four."""
    rng = random.Random(f"{request.messages[-1].content}|{seed}")
    return f"{request.agent} {'says ' * rng.randint(1, 5)}{rng.randint(0, 2)}. Final Answer: {rng.randint(0, 3)}"


def talker(max_batch: int = 16) -> ScriptedPolicy:
    return ScriptedPolicy(talk, "talker", max_batch)


async def consults(question: str, client: Any) -> str:
    """A program that calls two agents concurrently and a third with both replies."""

    async def ask(name: str, text: str) -> str:
        messages = [{"role": "system", "content": f"You are {name}."}, {"role": "user", "content": text}]
        reply = await client.chat.completions.create(model="m", messages=messages)
        return str(reply.choices[0].message.content)

    said = await asyncio.gather(ask("Ann", question), ask("Bob", question))
    return await ask("Cleo", " ".join([question, *said]))


def unparked(program: Any) -> Any:
    """Keep no waiting executions of a program, so that each branch is a replay."""
    program.source.parked = 0
    return program


def writes(question: str, client: Any, world: str) -> str:
    """A program with a folder as its world: it appends three replies to a file, and returns the file."""
    log = Path(world, "log")
    for _ in range(3):
        messages = [{"role": "user", "content": f"{question} {log.read_text()}"}]
        reply = client.chat.completions.create(model="m", messages=messages)
        log.write_text(f"{log.read_text()} {reply.choices[0].message.content}")
    return log.read_text()


class HashCritic(Critic):
    """Values in (0, 1) that depend on the transcript alone; remembers the size of each batch."""

    name = "hash"
    terminal_only = False
    free = False

    def __init__(self, **settings: Any) -> None:
        self.batches: list[int] = []
        self.settings = settings
        self.__dict__.update(settings)

    def identity(self) -> dict[str, Any]:
        return self.settings

    def score(self, contexts: Sequence[Any]) -> list[float]:
        self.batches.append(len(contexts))
        return [noise(context.state.digest) for context in contexts]


def comparable(plan: Plan) -> dict[str, Any]:
    """All of a plan but wall-clock seconds."""
    usage = {name: getattr(plan.usage, name) for name in type(plan.usage).__slots__ if name != "seconds"}
    return {
        "problem": plan.problem_id,
        "answer": plan.answer,
        "correct": plan.correct,
        "error": plan.error,
        "stopped": plan.stopped,
        "usage": usage,
        "tree": None if plan.tree is None else plan.tree.to_dict(),
        "candidates": [(c.node, c.score, c.answer, c.correct, way(c.state)) for c in plan.candidates],
        "anytime": [(m.agent_calls, m.generated_tokens, m.node, m.answer, m.correct) for m in plan.anytime],
    }


def by_problem(plans: Any) -> dict[str, dict[str, Any]]:
    return {plan.problem_id: comparable(plan) for plan in plans}


def command(*arguments: object) -> Result:
    """Run a command of the command line in a terminal of 80 columns."""
    from mas_gym.cli import app

    return CliRunner(env={"COLUMNS": "80"}).invoke(app, [str(argument) for argument in arguments])


def said(result: Result) -> str:
    """The output of a command as one line, without the boxes around errors."""
    return " ".join(result.output.replace("│", "").split())


# ---- functions for separate processes


def write_searches(path: Path, program: bool, pipe: Any) -> None:
    """Store searches; after those that end together, report them and wait for a word, until the pipe is closed."""

    def report(progress: Progress) -> None:
        if progress.done > progress.stored:
            with suppress(OSError, EOFError):
                pipe.send(progress.done)
                pipe.recv()

    system: dict[str, Any] = {"mas": chain(4)}
    if program:
        from mas_gym.programs import Program

        system = {"program": Program(consults, agents=["Ann", "Bob", "Cleo"])}
    options = {"policy": talker(), "training": True, "concurrency": 6, "progress": report, "store": path}
    list(run(MCTS(8, 3), problems(200), **system, **options))


def open_at_once(path: Path, start: Any, found: Any) -> None:
    """Create a store at the same time as all others; return the error."""
    start.wait()
    try:
        FORMAT.connect(path, create=True).close()
    except StoreError as error:
        found.put(str(error))
    else:
        found.put("")


def change_document(connection: sqlite3.Connection, search: str, change: Callable[[Any], object]) -> None:
    """Change the document of a search without its checksum."""
    query = f"SELECT search, document FROM documents WHERE search = {search}"
    [(key, document)] = connection.execute(query).fetchall()
    found = json.loads(zlib.decompress(document))
    change(found)
    changed = zlib.compress(json.dumps(found).encode())
    connection.execute("UPDATE documents SET document = ? WHERE search = ?", (changed, key))
    connection.commit()
