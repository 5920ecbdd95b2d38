"""Growth of the search tree within the budget, scores of its paths, and the ranking of candidates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from mas_gym.critics import Proposal
from mas_gym.errors import BudgetError, ConfigError
from mas_gym.systems.state import MASState
from mas_gym.tasks.base import Same
from search.plan import Candidate
from search.protocol import Critic, Evaluate, Model, Propose, Remaining, Steps, ValueKind, value_kind
from search.tree import Tree


def append(tree: Tree, model: Model, node: int, proposal: Proposal) -> int:
    """Add the child for a proposal and return its index."""
    state = model.transition(tree.states[node], proposal.action)
    return tree.add(node, state, proposal, model.is_terminal(state))


def append_distinct(tree: Tree, model: Model, node: int, proposals: Sequence[Proposal], same: Same | None) -> list[int]:
    """Add one child per distinct action (its first proposal) and return their indices.

    Actions differ if their recipients or their texts differ. Texts are compared by ``same``, or exactly if it is None.
    """
    first: dict[tuple[str, tuple[int, ...]], int] = {}
    for proposal in proposals:
        state = model.transition(tree.states[node], proposal.action)
        text, recipients = action = state.text, state.recipients
        if same is not None:
            action = next((a for a in first if a[1] == recipients and same(a[0], text)), action)
        if action not in first:
            first[action] = tree.add(node, state, proposal, model.is_terminal(state))
    return list(first.values())


def child_of(tree: Tree, model: Model, node: int, proposal: Proposal) -> int:
    """Return the child for a proposal: the existing one if the message is equal, otherwise a new one."""
    state = model.transition(tree.states[node], proposal.action)
    known = next((child for child in tree.children(node) if tree.states[child] == state), None)
    return tree.add(node, state, proposal, model.is_terminal(state)) if known is None else known


def evaluate(tree: Tree, nodes: Sequence[int]) -> Steps[None]:
    """Request the critic's values of nodes and write them into the tree."""
    if nodes:
        [values] = yield [Evaluate([tree.states[node] for node in nodes])]
        for node, value in zip(nodes, values, strict=True):
            tree.values[node] = value


def turns_left(model: Model, state: MASState) -> int:
    """Return an upper bound on the number of messages from a state to the end of its episode."""
    return max(1, model.max_depth - state.depth)


def finish_paths(tree: Tree, model: Model, chains: list[int]) -> Steps[None]:
    """Extend paths to their ends, all by one message at a time; ``chains`` receives their last nodes."""
    while growing := [i for i, node in enumerate(chains) if not tree.is_terminal(node)]:
        replies = yield [Propose(tree.states[chains[i]], 1) for i in growing]
        for i, [proposal] in zip(growing, replies, strict=True):
            chains[i] = append(tree, model, chains[i], proposal)


def grow_chains(tree: Tree, model: Model, count: int, earlier: Sequence[int] = ()) -> Steps[list[int]]:
    """Run up to ``count`` independent passes and return their terminal nodes, in sample order.

    ``earlier`` holds the terminal nodes of passes that have already ended; these count as the first passes.

    Without a budget, all passes run concurrently. With a budget, only the passes that it covers start. With a call
    limit, they run in one group. With a token limit, one pass runs first, then groups sized by the length of the
    messages so far.
    """
    ends = list(earlier)
    turns = turns_left(model, tree.states[0])
    while len(ends) < count:
        [left] = yield [Remaining()]
        group = count - len(ends) if left is None else min(count - len(ends), left // turns)
        if group == 0 and ends:
            break
        chains: list[int] = []
        try:
            [proposals] = yield [Propose(tree.states[0], max(group, 1))]
            chains += [append(tree, model, 0, proposal) for proposal in proposals]
            yield from finish_paths(tree, model, chains)
        except BudgetError:
            chains = [node for node in chains if tree.is_terminal(node)]
            if not ends and not chains:
                chains = [len(tree) - 1]
                yield from finish_paths(tree, model, chains)
            return ends + chains
        ends += chains
        if len(chains) < group:
            # The recorded run has no more messages.
            break
    return ends


def widen(tree: Tree, model: Model, wanted: Mapping[int, int], answered: bool) -> Steps[dict[int, list[int]]]:
    """Sample ``wanted[node]`` messages at each node, or as many as an even share of the budget covers.

    The remaining messages are divided evenly among the remaining turns, so a search narrows instead of stopping early.
    Nodes with higher values come first.

    Unless the search is ``answered``, which means that it has a terminal state and may stop here, at least one message
    is sampled.

    Returns:
        The children by node, one per message. A node of a recorded run may have fewer.
    """
    wanted = dict(wanted)
    grown: dict[int, list[int]] = {node: [] for node in wanted}
    best_first = sorted(wanted, key=tree.values.__getitem__, reverse=True)
    turns = max(turns_left(model, tree.states[node]) for node in wanted)
    drawn = 0
    while drawn < (total := sum(wanted.values())):
        [left] = yield [Remaining()]
        amount = total - drawn if left is None else min(total, (left + drawn) // turns) - drawn
        if amount <= 0:
            if drawn or answered:
                break
            amount = 1
        served = dict.fromkeys(wanted, 0)
        for node in best_first:
            served[node] = min(wanted[node] - len(grown[node]), amount - sum(served.values()))
        nodes = [node for node in wanted if served[node]]
        try:
            replies = yield [Propose(tree.states[node], served[node]) for node in nodes]
        except BudgetError:
            if drawn or answered:
                break
            nodes = best_first[:1]
            served[nodes[0]] = 1
            replies = yield [Propose(tree.states[nodes[0]], 1)]
        for node, proposals in zip(nodes, replies, strict=True):
            grown[node] += [append(tree, model, node, proposal) for proposal in proposals]
            drawn += len(proposals)
            if len(proposals) < served[node]:
                wanted[node] = len(grown[node])
    return grown


def step_values(planner: str, critic: Critic | None, training: bool) -> ValueKind:
    """Return the kind of a run's values, for a planner that needs a value at every step.

    Raises:
        ConfigError: There is no critic, or it cannot score intermediate states.
    """
    kind = value_kind(critic, training)
    if kind is None:
        raise ConfigError(f"{planner} needs a critic: pass one, such as critic=load_critic('policy-likelihood')")
    if kind in ("outcome", "reward"):
        what = "the true reward" if kind == "reward" else f"the outcome critic {critic.name!r}"  # type: ignore[union-attr]
        raise ConfigError(
            f"{planner} ranks intermediate states, but {what} is defined on terminal states only: "
            "pass a process critic or 'policy-likelihood', or change the planner to MCTS, sc or bon"
        )
    return kind


def path_score(tree: Tree, node: int) -> float:
    """Return the mean value over the steps from the root to a node (paper, App. "Search configurations")."""
    steps = tree.path(node)[1:]
    return math.fsum(tree.values[step] for step in steps) / len(steps)


def path_scores(tree: Tree, terminals: Sequence[int], kind: ValueKind | None) -> dict[int, float]:
    """Return the score of each terminal node: the path score for step values, the node's value for outcome values."""
    if kind is None:
        return {}
    if kind in ("outcome", "reward"):
        return {node: tree.values[node] for node in terminals}
    return {node: path_score(tree, node) for node in terminals}


def ranked(
    tree: Tree, terminals: Sequence[int], scores: Mapping[int, float], chosen: int | None
) -> tuple[Candidate, ...]:
    """Return the chosen candidate, then the others by descending score, unscored ones last; ties keep node order."""
    order = sorted(terminals, key=lambda node: (node != chosen, -scores.get(node, -math.inf), node))
    return tuple(Candidate(tree.states[node], scores.get(node), node) for node in order)
