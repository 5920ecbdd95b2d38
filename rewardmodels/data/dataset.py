"""Training sets: examples mined from the search trees of many problems, split by problem.

There are three kinds: ``"pairs"`` (Bradley-Terry), ``"points"`` (MASPRM by regression) and
``"outcomes"`` (ORM). Each example contains its problem, so that a split can hold out
whole problems.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Literal, NamedTuple

from mas_gym.errors import ConfigError, DataError
from mas_gym.systems.dynamics import Dynamics
from mas_gym.systems.graph import MAS
from mas_gym.systems.state import MASState
from mas_gym.tasks.base import Same, question_digest, rule_of, same_rule
from rewardmodels.data import mining
from rewardmodels.data.encode import Parts, View, state_parts
from rewardmodels.data.mining import Labeled, Pair
from search.results.run_info import RECORDED, is_recorded
from search.store import RunInfo, Store, open_store
from search.tree import Tree

DataKind = Literal["pairs", "points", "outcomes"]

LOOPS: dict[str, object] = {"max_turns": None, "min_turns": 1, "history": "inputs"}
"""The loop settings of a MAS and their defaults; a graph's description lists the settings that differ."""

_SHOWN = 5
_HELD_OUT_SHARE = 5


class LabeledTree(NamedTuple):
    """A training search tree and its source.

    Attributes:
        tree: The tree.
        mas: The MAS of the search.
        task: The task's name.
        problem_id: The problem.
        seed: Seed of the run; one problem may occur in several runs.
        recorded: Whether its episodes were imported, in which case ``N`` counts recorded continuations.
    """

    tree: Tree
    mas: MAS
    task: str
    problem_id: str
    seed: int = 0
    recorded: bool = False


class Example(NamedTuple):
    """One training example. For a labeled state, ``rejected`` is None and ``margin`` is 0.

    Attributes:
        tree: Name of the tree it comes from.
        task: The task's name.
        problem_id: The problem.
        mas: Name of the MAS.
        depth: Number of turns before the judged message; 0 for the first message.
        agent: Name of the agent that wrote the message.
        chosen: Parts of the text of the better sibling or of the labeled state (`rewardmodels.data.encode`).
        chosen_target: Its target in ``[-1, 1]``.
        rejected: Parts of the worse sibling's text.
        rejected_target: Its target.
        margin: Difference between the targets.
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
        view: Part of a state that the critic reads.
        graphs: The MAS graphs that the examples come from, by name, as returned by `graph_of`.
        examples: The examples.
        trees: Number of trees read, including those without an example.
        continuations: Number of non-terminal states of imported trees, by the number of recorded continuations behind
            their target.
        questions: Digests of the questions of the trees.
    """

    kind: DataKind
    view: View
    graphs: dict[str, dict[str, object]]
    examples: tuple[Example, ...]
    trees: int
    continuations: Mapping[int, int] = field(default_factory=dict)
    questions: frozenset[str] = frozenset()

    def __len__(self) -> int:
        return len(self.examples)

    def fingerprint(self) -> str:
        """Return a digest of 32 hexadecimal digits that changes if any example changes."""
        return fingerprint(f"{self.kind}|{self.view}|{len(self.examples)}", self.examples)


def fingerprint(start: str, examples: Iterable[object]) -> str:
    """Return a digest of 32 hexadecimal digits that changes if ``start`` or any example changes."""
    digest = blake2b(start.encode(), digest_size=16)
    for example in examples:
        digest.update(repr(example).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def for_training(question: str) -> bool:
    """Return whether a question is in the training part of a log: four fifths, selected by digest."""
    return int(question_digest(question), 16) % _HELD_OUT_SHARE > 0


def graph_of(mas: MAS) -> dict[str, object]:
    """Return the part of a MAS that a critic depends on: names, edges and loops, not prompts."""
    edges = [[e.source, e.target, *([] if e.condition is None else [str(e.condition)])] for e in mas.edges]
    # In a program without edges, such as a log, any agent may follow any other; the longest run limits the turns.
    free = mas.external and not mas.edges
    stated = {"max_turns": mas.max_turns, "min_turns": mas.min_turns, "history": mas.history}
    loops = {name: value for name, value in stated.items() if value != LOOPS[name] and not free}
    return {"name": mas.name, "agents": [agent.name for agent in mas.agents], "edges": sorted(edges, key=str), **loops}


def collect(
    trees: Iterable[LabeledTree],
    kind: DataKind,
    view: View = "full",
    pairs_per_tree: int = mining.PAIRS_PER_TREE,
    same: str | Same | None = None,
    min_continuations: int | None = None,
) -> RewardData:
    """Mine a training set from trees.

    A target is the mean reward of the episodes through a state. In search trees, episodes are simulations. In imported
    trees, they are the recorded samples that begin with the same messages; for a single sample, the target is its
    outcome.

    Args:
        trees: The trees; read once, in order.
        kind: Kind of examples.
        view: Part of a state that the critic reads.
        pairs_per_tree: Maximum number of pairs per tree; 8 in the paper.
        same: The rule for duplicate siblings: a rule of `mas_gym.tasks.base` or a function ``same(a, b)``; None uses
            the rule of each tree's task, which is ``"text"`` by default.
        min_continuations: Minimum number of recorded continuations for a non-terminal state of an imported tree.
            None uses all states, but raises an error for pairs and points if each target is based on only one
            continuation.

    Raises:
        DataError: There is no tree, no example, or only one class (the message lists the reasons and a fix); or each
            target is the outcome of a single sample.
    """
    examples: list[Example] = []
    graphs: dict[str, dict[str, object]] = {}
    without: dict[str, list[str]] = {"only successes": [], "only failures": [], "no two different siblings": []}
    count = 0
    continuations: Counter[int] = Counter()
    questions = set[str]()
    for item in trees:
        count += 1
        questions.add(question_digest(item.tree.states[0].question))
        if graphs.setdefault(item.mas.name, graph_of(item.mas)) != graph_of(item.mas):
            raise DataError(
                f"two different graphs are both called {item.mas.name!r}; rename one of them, or use the trees of one "
                "run (--run)"
            )
        if item.recorded:
            item = item._replace(tree=_supported(item.tree, min_continuations or 1))
            inner = (node for node in range(1, len(item.tree.parents)) if not item.tree.is_terminal(node))
            continuations.update(item.tree.visits[node] for node in inner if item.tree.visits[node])
        rule = same_rule(rule_of(item.task) if same is None else same)
        mined = _mine(item, kind, view, pairs_per_tree, rule)
        examples += mined
        rewards = {target for _, target in mining.outcomes(item.tree)}
        if len(rewards) == 1:
            without["only successes" if rewards == {1.0} else "only failures"].append(item.problem_id)
        elif not mined:
            without["no two different siblings"].append(item.problem_id)
    if kind != "outcomes" and min_continuations is None:
        check_continuations(continuations)
    _check(kind, examples, count, without)
    counts = dict(sorted(continuations.items()))
    return RewardData(kind, view, graphs, tuple(examples), count, counts, frozenset(questions))


def _supported(tree: Tree, least: int) -> Tree:
    """Return an imported tree in which non-terminal states with too few continuations count as unvisited."""
    found = copy(tree)
    found.visits = [n if n >= least or tree.is_terminal(node) else 0 for node, n in enumerate(tree.visits)]
    return found


def check_continuations(continuations: Mapping[int, int]) -> None:
    """Raise `DataError` if each target of a recorded state is the outcome of a single sample.

    Args:
        continuations: Number of non-terminal states, by the number of recorded continuations.
    """
    if continuations and max(continuations) == 1:
        raise DataError(
            f"each of the {continuations[1]:,} recorded non-terminal states has one continuation, so its target "
            "would be the outcome of one sample; record several samples that share their first messages, train an "
            "outcome model (mas-gym train orm), or accept such targets with min_continuations=1 (--min-continuations 1)"
        )


def _mine(item: LabeledTree, kind: DataKind, view: View, limit: int, same: Same) -> list[Example]:
    name = f"{item.task}/{item.mas.name}/{item.problem_id}@{item.seed}"
    known: dict[MASState, Parts] = {}

    def parts(state: MASState) -> Parts:
        return known.setdefault(state, tuple(state_parts(item.mas, state, view)))

    def example(better: Labeled, pair: Pair | None = None) -> Example:
        state = better.state
        agent = item.mas.agents[state.speaker].name
        source = (name, item.task, item.problem_id, item.mas.name, state.depth - 1, agent)
        single = Example(*source, parts(state), better.target)
        if pair is None:
            return single
        worse = pair.rejected
        return single._replace(rejected=parts(worse.state), rejected_target=worse.target, margin=pair.margin)

    if kind == "pairs":
        found = mining.pairs(item.tree, Dynamics(item.mas).max_depth, limit, same)
        return [example(pair.chosen, pair) for pair in found]
    if kind == "points":
        return [example(sample) for sample in mining.pointwise(item.tree)]
    if kind == "outcomes":
        return [example(sample) for sample in mining.outcomes(item.tree)]
    raise ConfigError(f'expected kind "pairs", "points" or "outcomes", got {kind!r}')


def _check(kind: DataKind, examples: Sequence[Example], trees: int, without: dict[str, list[str]]) -> None:
    if not trees:
        raise DataError("no tree to train on: the store contains no finished training search; run the rollouts first")
    blame = "; ".join(
        f"{len(ids)} with {reason} ({', '.join(ids[:_SHOWN])}{', ...' if len(ids) > _SHOWN else ''})"
        for reason, ids in without.items()
        if ids
    )
    if not examples:
        raise DataError(
            f"no {kind} in {trees} trees: {blame or 'no visited terminal state'}. Use problems that the agents solve "
            "only sometimes, a higher temperature, or more simulations per tree"
        )
    if kind == "outcomes" and len({example.chosen_target for example in examples}) == 1:
        which = "right" if examples[0].chosen_target > 0 else "wrong"
        raise DataError(
            f"every outcome is {which}: {blame}. An outcome model needs right and wrong outcomes: use "
            f"{'harder' if which == 'right' else 'easier'} problems, or other agents"
        )


def split(data: RewardData, held_out: float = 0.1) -> tuple[RewardData, RewardData]:
    """Split by problem into a training and a held-out set.

    A problem's assignment depends only on its name, not on the run or the other problems. If one of
    the sets would be empty, one problem is moved into it.

    Args:
        data: The examples.
        held_out: Share of the problems to hold out, in ``(0, 1)``.

    Raises:
        ConfigError: The share is not between 0 and 1.
        DataError: There are fewer than two problems.
    """
    if not 0 < held_out < 1:
        raise ConfigError(f"expected a held-out fraction between 0 and 1, got {held_out}")
    problems = {(example.task, example.problem_id) for example in data.examples}
    if len(problems) < 2:
        raise DataError(
            f"expected examples from at least two problems, to hold one out, got {len(problems)}; add problems"
        )
    place = {p: int.from_bytes(blake2b(f"42|{p[0]}|{p[1]}".encode(), digest_size=8).digest()) for p in problems}
    ranked = sorted(problems, key=place.__getitem__)
    count = sum(place[problem] < held_out * 2**64 for problem in ranked)
    out = set(ranked[: min(max(1, count), len(ranked) - 1)])
    learned, held = (
        tuple(example for example in data.examples if ((example.task, example.problem_id) in out) is side)
        for side in (False, True)
    )
    return replace(data, examples=learned), replace(data, examples=held)


def histogram(data: RewardData) -> dict[str, dict[str, int]]:
    """Count examples by depth and by agent; depths in ascending order, agents by MAS and depth."""
    ordered = sorted(data.examples, key=lambda example: (example.mas, example.depth))
    return {
        "depth": dict(Counter(str(example.depth) for example in sorted(ordered, key=lambda e: e.depth))),
        "agent": dict(Counter(example.agent for example in ordered)),
    }


def stored_trees(path: str | Path, run: str | None = None) -> Iterator[LabeledTree]:
    """Read the trees of training searches (with the true reward), and of imported transcripts, from a store.

    Args:
        path: The store.
        run: One run's name or fingerprint; None reads every training run and every imported one.

    Yields:
        The trees, run by run in the order in which the runs started, and by problem id within a run.

    Raises:
        StoreError: There is no store, it has a different schema, or there is no such run.
        DataError: The store contains no training run.
    """
    with open_store(path) as store:
        for info in training_runs(store, run, recorded=True):
            recorded, seed = is_recorded(info.config), int(info.config["seed"])
            task = RECORDED if recorded else str(info.facts.get("task") or "problems")
            for plan in store.plans(info.run):
                if plan.tree is not None:
                    yield LabeledTree(plan.tree, info.mas, task, plan.problem_id, seed, recorded)


def training_runs(store: Store, run: str | None, recorded: bool = False) -> list[RunInfo]:
    """Return the training runs of a store or only the run of this name; with ``recorded``, also imported ones.

    Raises:
        DataError: There is no such run; the message describes the store's contents.
    """
    runs = [store.find(run)] if run is not None else store.runs()
    chosen = [info for info in runs if info.config["training"] or (recorded and is_recorded(info.config))]
    if not chosen:
        held = "; ".join(info.label for info in runs) or "nothing"
        raise DataError(
            f"expected a training run in {store.path}, found {held}. Training uses searches with the true reward "
            f"(mas-gym rollouts){' or logs (mas-gym import)' if recorded else ''}"
        )
    return chosen
