"""Accuracy and first errors of the tiny model on each graph and difficulty, and the content of full three-way trees."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from math import sqrt
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.tiny.send_back import SYSTEM as SEND_BACK
from benchmarks.tiny.truth import first_error
from mas_gym.policies.base import Policy, SamplingRequest, derive_seed
from mas_gym.systems.dynamics import Dynamics
from mas_gym.systems.loading import load_mas
from mas_gym.systems.prompts import chat_messages
from mas_gym.tasks import load_task

if TYPE_CHECKING:
    from mas_gym.systems.graph import MAS
    from mas_gym.systems.state import MASState
    from mas_gym.tasks.base import Problem, Task

GRAPHS = {
    "rpsv": "arithmetic",
    "single": "arithmetic",
    "refine": "arithmetic",
    "consensus": "arithmetic",
    "dylan": "arithmetic",
    "debate": "ordering",
    "logic": "ordering",
    "send-back": "arithmetic",
}


def load_graph(name: str) -> MAS:
    """Load a shipped MAS, or the one that sends work back."""
    return load_mas(str(SEND_BACK) if name == "send-back" else name)


class Result(NamedTuple):
    """What independent passes through one graph gave.

    Attributes:
        graph: Name of the MAS.
        difficulty: Level of the task.
        right: For each problem, for each pass, whether the final answer was right.
        votes: For each problem, whether the commonest answer was right.
        errors: How often each ``(agent, kind of error)`` came first in a failed pass; the agent is ``"none"`` where
            every message was right, which only a rounding of the definition could cause.
        calls: Agent calls made.
        seconds: How long they took.
    """

    graph: str
    difficulty: int
    right: list[list[bool]]
    votes: list[bool]
    errors: Counter[tuple[str, str]]
    calls: int
    seconds: float

    @property
    def accuracy(self) -> float:
        """Share of single passes that are right."""
        return sum(map(sum, self.right)) / sum(map(len, self.right))

    @property
    def interval(self) -> float:
        """Half the width of the accuracy's 95% interval, from the spread between problems."""
        means = [sum(row) / len(row) for row in self.right]
        variance = sum((mean - self.accuracy) ** 2 for mean in means) / max(len(means) - 1, 1)
        return 1.96 * sqrt(variance / len(means))

    @property
    def best(self) -> float:
        """Share of problems that at least one pass got right."""
        return sum(map(any, self.right)) / len(self.right)


def run_passes(
    policy: Policy, graph: str, problems: Sequence[Problem], passes: int, seed: int
) -> tuple[list[list[MASState]], int]:
    """Run every problem through a graph several times, all in step.

    Returns:
        The terminal states, by problem and pass, and the number of agent calls.
    """
    model = Dynamics(load_graph(graph))
    states = [[model.initial_state(problem.question) for _ in range(passes)] for problem in problems]
    calls = 0
    while True:
        places = [(i, j) for i, row in enumerate(states) for j, state in enumerate(row) if not model.is_terminal(state)]
        if not places:
            return states, calls
        calls += len(places)
        requests = [_request(model, states[i][j], problems[i].id, j, seed) for i, j in places]
        for (i, j), reply in zip(places, policy.sample(requests), strict=True):
            states[i][j] = model.transition(states[i][j], (reply.samples[0].text, model.mas.ALL))


def _request(model: Dynamics, state: MASState, problem_id: str, number: int, seed: int, n: int = 1) -> SamplingRequest:
    agent = model.mas.agents[state.acting]
    seeds = tuple(derive_seed(seed, problem_id, state.digest, number * n + k) for k in range(n))
    return SamplingRequest(chat_messages(model.mas, state), seeds, agent.max_new_tokens, agent=agent.name)


def evaluate(
    policy: Policy, graph: str, difficulty: int, n: int, passes: int, seed: int, split: str = "test"
) -> Result:
    """Measure one graph at one difficulty on the first ``n`` problems of a split."""
    task = load_task(GRAPHS[graph], split=split, difficulty=difficulty)
    problems = [task[i] for i in range(n)]
    names = [agent.name for agent in load_graph(graph).agents]
    started = time.perf_counter()
    states, calls = run_passes(policy, graph, problems, passes, seed)
    seconds = time.perf_counter() - started
    right: list[list[bool]] = []
    votes: list[bool] = []
    errors: Counter[tuple[str, str]] = Counter()
    for problem, row in zip(problems, states, strict=True):
        texts = [[(names[turn.speaker], turn.text) for turn in state.turns] for state in row]
        grades = [task.grade(problem, messages[-1][1]) for messages in texts]
        right.append([grade.correct for grade in grades])
        answers = Counter(grade.extracted for grade in grades if grade.extracted is not None)
        winner = answers.most_common(1)[0][0] if answers else None
        votes.append(any(grade.correct and grade.extracted == winner for grade in grades))
        for grade, messages in zip(grades, texts, strict=True):
            if not grade.correct:
                found = first_error(problem, messages)
                errors[(found.speaker, found.kind) if found else ("none", "")] += 1
    return Result(graph, difficulty, right, votes, errors, calls, seconds)


class TreeStats(NamedTuple):
    """The content of a complete tree of three messages per agent, averaged over problems.

    Attributes:
        right_leaf: Share of problems with a right answer at some leaf.
        differ: For each depth, the share of nodes whose children differ by more than 0.25 in the share of right leaves.
    """

    right_leaf: float
    differ: list[float]


def full_tree(policy: Policy, graph: str, difficulty: int, n: int, seed: int, width: int = 3) -> TreeStats:
    """Grow the full tree of a fixed graph on ``n`` problems."""
    task = load_task(GRAPHS[graph], split="test", difficulty=difficulty)
    model = Dynamics(load_graph(graph))
    found, differ, nodes = 0, [0] * model.max_depth, [0] * model.max_depth
    for i in range(n):
        problem = task[i]
        levels: list[list[MASState]] = [[model.initial_state(problem.question)]]
        for _ in range(model.max_depth):
            requests = [_request(model, state, problem.id, 0, seed, width) for state in levels[-1]]
            replies = policy.sample(requests)
            levels.append(
                [
                    model.transition(state, (sample.text, model.mas.ALL))
                    for state, reply in zip(levels[-1], replies, strict=True)
                    for sample in reply.samples
                ]
            )
        values = [float(_is_right(task, problem, state)) for state in levels[-1]]
        found += any(values)
        for depth in reversed(range(model.max_depth)):
            groups = [values[k : k + width] for k in range(0, len(values), width)]
            nodes[depth] += len(groups)
            differ[depth] += sum(max(group) - min(group) > 0.25 for group in groups)
            values = [sum(group) / width for group in groups]
    return TreeStats(found / n, [d / count for d, count in zip(differ, nodes, strict=True)])


def _is_right(task: Task, problem: Problem, state: MASState) -> bool:
    return task.grade(problem, state.turns[-1].text).correct
