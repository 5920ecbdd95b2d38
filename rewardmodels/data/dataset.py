"""Training sets: examples mined from the search trees of many problems.

Three kinds: ``"pairs"`` (Bradley-Terry), ``"points"`` (MASPRM by regression) and
``"outcomes"`` (ORM). Each example names its problem, so that a split holds out whole
problems.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Literal, NamedTuple

from mas_gym.dynamics import Dynamics
from mas_gym.errors import ConfigError, DataError
from mas_gym.graph import MAS
from mas_gym.state import MASState
from rewardmodels.data import mining
from rewardmodels.data.mining import Labelled, Pair, TreeView
from rewardmodels.data.serialise import Parts, View, state_parts

DataKind = Literal["pairs", "points", "outcomes"]

_SHOWN = 5


class LabelledTree(NamedTuple):
    """A training search tree and its source.

    Attributes:
        tree: A `search.Tree`.
        mas: The MAS of the search.
        task: The task's name.
        problem_id: The problem.
        seed: Seed of the run; one problem may occur in several runs.
    """

    tree: TreeView
    mas: MAS
    task: str
    problem_id: str
    seed: int = 0


class Example(NamedTuple):
    """One training example. A pair has ``rejected``; a labelled state has None there, and a ``margin`` of 0.

    Attributes:
        tree: Name of the tree it comes from.
        task: The task's name.
        problem_id: The problem.
        mas: Name of the MAS.
        depth: Turns before the judged message, 0 for the first agent's.
        agent: Name of the agent that wrote the message.
        chosen: Parts of the better sibling's text, or of the labelled state's (`rewardmodels.data.serialise`).
        chosen_target: Its target in ``[-1, 1]``.
        rejected: Parts of the worse sibling's text.
        rejected_target: Its target.
        margin: Difference of the targets.
    """

    tree: str
    task: str
    problem_id: str
    mas: str
    depth: int
    agent: str
    chosen: Parts
    chosen_target: float
    rejected: Parts | None = None
    rejected_target: float | None = None
    margin: float = 0.0


@dataclass(frozen=True)
class RewardData:
    """Examples of one kind.

    Attributes:
        kind: ``"pairs"``, ``"points"`` or ``"outcomes"``.
        view: What the critic sees of a state.
        graphs: The MAS graphs that the examples come from, by name, as `graph_of` describes them.
        examples: The examples.
        trees: Number of trees read, including those without an example.
    """

    kind: DataKind
    view: View
    graphs: dict[str, dict[str, object]]
    examples: tuple[Example, ...]
    trees: int

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self.examples)

    def fingerprint(self) -> str:
        """Return 32 hexadecimal digits that change with any example."""
        digest = blake2b(f"{self.kind}|{self.view}|{len(self.examples)}".encode(), digest_size=16)
        for example in self.examples:
            digest.update(repr(example).encode("utf-8", "surrogatepass"))
        return digest.hexdigest()


def graph_of(mas: MAS) -> dict[str, object]:
    """Return the part of a MAS that a critic depends on: names and edges, not prompts."""
    edges = [[e.source, e.target, *([] if e.condition is None else [str(e.condition)])] for e in mas.edges]
    return {"name": mas.name, "agents": [agent.name for agent in mas.agents], "edges": sorted(edges, key=str)}


def collect(
    trees: Iterable[LabelledTree],
    kind: DataKind,
    view: View = "full",
    pairs_per_tree: int = mining.PAIRS_PER_TREE,
    min_margin: float = 0.0,
) -> RewardData:
    """Mine a training set from trees.

    Args:
        trees: The trees; read once, in order.
        kind: What to mine.
        view: What the critic sees of a state.
        pairs_per_tree: The paper's cap of 8.
        min_margin: Smallest margin of a pair; 0 is the paper's rule.

    Raises:
        DataError: There is no tree, no example, or only one class, with the problems and what to change.
    """
    examples: list[Example] = []
    graphs: dict[str, dict[str, object]] = {}
    without: dict[str, list[str]] = {"all right": [], "all wrong": [], "no two different siblings": []}
    count = 0
    for item in trees:
        count += 1
        if graphs.setdefault(item.mas.name, graph_of(item.mas)) != graph_of(item.mas):
            raise DataError(f"two different graphs are both called {item.mas.name!r}; rename one of them")
        mined = _mine(item, kind, view, pairs_per_tree, min_margin)
        examples += mined
        rewards = {target for _, target in mining.outcomes(item.tree)}
        if len(rewards) == 1:
            without["all right" if rewards == {1.0} else "all wrong"].append(item.problem_id)
        elif not mined:
            without["no two different siblings"].append(item.problem_id)
    _check(kind, examples, count, without)
    return RewardData(kind, view, graphs, tuple(examples), count)


def _mine(item: LabelledTree, kind: DataKind, view: View, limit: int, min_margin: float) -> list[Example]:
    name = f"{item.task}/{item.mas.name}/{item.problem_id}@{item.seed}"
    known: dict[MASState, Parts] = {}

    def parts(state: MASState) -> Parts:
        return known.setdefault(state, tuple(state_parts(item.mas, state, view)))

    def example(better: Labelled, pair: Pair | None = None) -> Example:
        state = better.state
        agent = item.mas.agents[state.speaker].name
        source = (name, item.task, item.problem_id, item.mas.name, state.depth - 1, agent)
        single = Example(*source, parts(state), better.target)
        if pair is None:
            return single
        worse = pair.rejected
        return single._replace(rejected=parts(worse.state), rejected_target=worse.target, margin=pair.margin)

    if kind == "pairs":
        found = mining.pairs(item.tree, Dynamics(item.mas).max_depth, limit, min_margin)
        return [example(pair.chosen, pair) for pair in found]
    if kind == "points":
        return [example(sample) for sample in mining.pointwise(item.tree)]
    if kind == "outcomes":
        return [example(sample) for sample in mining.outcomes(item.tree)]
    raise ConfigError(f'expected kind "pairs", "points" or "outcomes", got {kind!r}')


def _check(kind: DataKind, examples: Sequence[Example], trees: int, without: dict[str, list[str]]) -> None:
    if not trees:
        raise DataError("no tree to learn from: the store holds no finished training search; run the rollouts first")
    blame = "; ".join(
        f"{len(ids)} {reason} ({', '.join(ids[:_SHOWN])}{', ...' if len(ids) > _SHOWN else ''})"
        for reason, ids in without.items()
        if ids
    )
    if not examples:
        raise DataError(
            f"no {kind} in {trees} trees: {blame or 'no visited terminal state'}. Use problems that the agents solve "
            "sometimes, a higher temperature, or more simulations per tree"
        )
    if kind == "outcomes" and len({example.chosen_target for example in examples}) == 1:
        which = "right" if examples[0].chosen_target > 0 else "wrong"
        raise DataError(
            f"every outcome is {which}: {blame}. An outcome model needs both: use "
            f"{'harder' if which == 'right' else 'easier'} problems, or other agents"
        )


def merge(parts: Sequence[RewardData]) -> RewardData:
    """Merge sets of one kind and view, such as those of two tasks.

    Raises:
        ConfigError: The kinds or views differ, or there is none.
        DataError: Two different graphs share a name.
    """
    if not parts or len({(part.kind, part.view) for part in parts}) != 1:
        got = [(part.kind, part.view) for part in parts]
        raise ConfigError(f"expected sets of one kind and view, got {got}; mine them with the same kind and view")
    graphs: dict[str, dict[str, object]] = {}
    for part in parts:
        for name, graph in part.graphs.items():
            if graphs.setdefault(name, graph) != graph:
                raise DataError(f"two different graphs are both called {name!r}; rename one of them")
    examples = tuple(example for part in parts for example in part.examples)
    return replace(parts[0], graphs=graphs, examples=examples, trees=sum(part.trees for part in parts))


def split(data: RewardData, held_out: float = 0.1, seed: int = 42) -> tuple[RewardData, RewardData]:
    """Split by problem into a training and a held-out set.

    The side of a problem depends only on its name and the seed, not on the run or the rest of the set; only if a
    small set would leave one side empty, one problem changes sides.

    Args:
        data: The examples.
        held_out: Share of the problems to hold out, in ``(0, 1)``.
        seed: Seed of the choice.

    Raises:
        ConfigError: The share is not between 0 and 1.
        DataError: There are fewer than two problems.
    """
    if not 0 < held_out < 1:
        raise ConfigError(f"expected a held-out share between 0 and 1, got {held_out}")
    problems = {(example.task, example.problem_id) for example in data.examples}
    if len(problems) < 2:
        raise DataError(f"expected examples of at least two problems, got {len(problems)}; one side would be empty")
    place = {p: int.from_bytes(blake2b(f"{seed}|{p[0]}|{p[1]}".encode(), digest_size=8).digest()) for p in problems}
    ranked = sorted(problems, key=place.__getitem__)
    count = sum(place[problem] < held_out * 2**64 for problem in ranked)
    out = set(ranked[: min(max(1, count), len(ranked) - 1)])
    learned, held = (
        tuple(example for example in data.examples if ((example.task, example.problem_id) in out) is side)
        for side in (False, True)
    )
    return replace(data, examples=learned), replace(data, examples=held)


def histogram(data: RewardData) -> dict[str, dict[str, int]]:
    """Count examples by depth and by agent, each in order of depth."""
    ordered = sorted(data.examples, key=lambda example: (example.mas, example.depth))
    return {
        "depth": dict(Counter(str(example.depth) for example in sorted(ordered, key=lambda e: e.depth))),
        "agent": dict(Counter(example.agent for example in ordered)),
    }
