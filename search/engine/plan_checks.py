"""Validation of a planner's plan, and completion of the plan with the nodes of its tree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mas_gym.errors import SearchError
from mas_gym.programs import Call
from mas_gym.systems.dynamics import Dynamics
from mas_gym.systems.prompts import ChatMessage
from mas_gym.systems.state import MASState
from search.plan import Plan
from search.tree import Proposal, Tree

ProposalOf = Callable[[MASState], Proposal | None]
"""Returns the proposal that led to a state; None if its message was not written by a policy."""


def checked_plan(plan: object, root: MASState, dynamics: Dynamics, planner: str, proposal_of: ProposalOf) -> Plan:
    """Return a planner's plan with the nodes of its candidates and of its anytime curve.

    Raises:
        SearchError: The object is not a plan, or its candidates are not terminal states below the root.
    """
    if not isinstance(plan, Plan):
        raise SearchError(f"planner {planner}: expected plan() to return a search.Plan, got {type(plan).__name__}")
    if not plan.candidates:
        raise SearchError(f"planner {planner}: expected at least one terminal candidate in its plan, got none")
    for candidate in plan.candidates:
        if candidate.state.path()[0] != root:
            raise SearchError(
                f"planner {planner}: expected candidates that start at the root of the search, got another start"
            )
        if not dynamics.is_terminal(candidate.state):
            raise SearchError(
                f"planner {planner}: expected terminal candidates, got a state at turn {candidate.state.depth}; "
                "an intermediate message is not an answer"
            )
    return replace(_with_nodes(plan, root, dynamics, planner, proposal_of), mas=dynamics.mas)


def _with_nodes(plan: Plan, root: MASState, dynamics: Dynamics, planner: str, proposal_of: ProposalOf) -> Plan:
    """Fill in the nodes of candidates and of the curve, and add missing paths to the tree."""
    tree = Tree(root) if plan.tree is None else plan.tree
    if not isinstance(tree, Tree) or tree.states[0] != root:
        got = f"one of {tree.states[0]!r:.80}" if isinstance(tree, Tree) else type(tree).__name__
        raise SearchError(f"planner {planner}: expected the plan's tree to be a search.Tree(root), got {got}")
    index: dict[MASState, int] = {}
    for node, state in enumerate(tree.states):
        index.setdefault(state, node)

    def place(node: int | None, state: MASState) -> int:
        if node is not None and 0 <= node < len(tree) and tree.states[node] == state:
            return node
        for step in state.path()[1:]:
            if step not in index:
                parent, terminal = index[step.parent], dynamics.is_terminal(step)  # type: ignore[index]
                index[step] = tree.add(parent, step, proposal_of(step), terminal)
        return index[state]

    candidates = tuple(replace(one, node=place(one.node, one.state)) for one in plan.candidates)
    anytime = tuple(
        point if point.state is None else point._replace(node=place(point.node, point.state)) for point in plan.anytime
    )
    return replace(plan, tree=tree, candidates=candidates, anytime=anytime)


_MOST_MESSAGES, _LONGEST_MESSAGE = 200, 20_000
"""Limits of a stored program request: number of messages, and characters per message."""


def chosen_requests(plan: Plan, call: Callable[[MASState], Call]) -> dict[int, tuple[ChatMessage, ...]]:
    """Return a program's requests on the chosen path, by the node of each reply.

    Args:
        plan: The plan of a program's search.
        call: Returns the program's call at a state.
    """
    node = plan.best.node if plan.best is not None else None
    found: dict[int, tuple[ChatMessage, ...]] = {}
    while node and plan.tree is not None:
        parent = plan.tree[node].parent
        asked = call(plan.tree.states[parent]).messages
        kept = asked if len(asked) <= _MOST_MESSAGES else (asked[0], *asked[1 - _MOST_MESSAGES :])
        found[node] = tuple(
            m if len(m.content) <= _LONGEST_MESSAGE else m._replace(content=m.content[:_LONGEST_MESSAGE] + " [...]")
            for m in kept
        )
        node = parent
    return found
