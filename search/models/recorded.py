"""A recorded run as what a search explores: the recorded messages and outcomes of a problem."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mas_gym.critics import Proposal
from mas_gym.errors import ExhaustedError, SearchError
from mas_gym.policies.base import derive_seed
from mas_gym.systems.dynamics import Dynamics
from mas_gym.systems.state import MASState
from mas_gym.tasks.base import Grade
from mas_gym.tasks.grading.answers import NO_REFERENCE
from search.costs import Usage
from search.models.base import SampleOrigin, SearchModel
from search.plan import Plan
from search.protocol import Propose
from search.tree import Tree


@dataclass(frozen=True)
class RecordedTree:
    """The recorded messages and outcomes of one problem.

    States that do not lead to a recorded terminal state are omitted.

    Attributes:
        root: The initial state.
        messages: Available messages at each non-terminal state, by the state's digest.
        grades: The recorded outcome of each terminal state that has one, by its digest.
    """

    root: MASState
    messages: Mapping[bytes, Sequence[Proposal]]
    grades: Mapping[bytes, Grade]

    @property
    def episodes(self) -> int:
        """Number of messages available at the root: one per recorded episode, or per distinct message."""
        return len(self.messages[self.root.digest])

    def at(self, state: MASState) -> Sequence[Proposal]:
        """Return the messages available at a state.

        Raises:
            SearchError: The state was not recorded.
        """
        found = self.messages.get(state.digest)
        if found is None:
            raise SearchError(
                f"expected a state that was recorded, got {state!r}: planners of a recorded run must keep its messages "
                "and recipients unchanged"
            )
        return found


def tree_of(plan: Plan, model: Dynamics, distinct: bool) -> RecordedTree:
    """Return the tree of a recorded search.

    With ``distinct``, each distinct message at a state can be drawn once; otherwise once per recorded episode that
    contains it.

    Raises:
        SearchError: The plan has no tree.
        DataError: The tree belongs to another system.
    """
    tree = plan.tree
    if tree is None:
        raise SearchError(f"{plan.problem_id}: expected a recorded search with a tree, got one without a tree")
    messages: defaultdict[bytes, list[Proposal]] = defaultdict(list)
    seen: set[bytes] = set()
    for node, episodes in enumerate(_episodes(plan, tree)):
        state = tree.states[node]
        if node == 0 or episodes == 0 or (distinct and state.digest in seen):
            continue
        seen.add(state.digest)
        parent = tree.states[tree.parents[node]]
        entry = tree[node]
        action = model.replayed_action(parent, state.text, state.recipients)
        proposal = Proposal(action, entry.tokens, entry.logprob, entry.finish_reason)
        messages[parent.digest] += [proposal] * (1 if distinct else episodes)
    return RecordedTree(tree.states[0], messages, _grades(plan))


def _episodes(plan: Plan, tree: Tree) -> list[int]:
    """Return the number of episodes through each node; each candidate and each other terminal node counts as one."""
    ends = Counter(candidate.node for candidate in plan.candidates)
    passes = [max(1, ends[node]) if tree.is_terminal(node) else 0 for node in range(len(tree))]
    for node in range(len(tree) - 1, 0, -1):
        passes[tree.parents[node]] += passes[node]
    return passes


def _grades(plan: Plan) -> dict[bytes, Grade]:
    """Return the outcome of each candidate's state; the majority outcome if identical episodes have different ones.

    Without a known outcome, the reason of the grade is `NO_REFERENCE`.
    """
    right: defaultdict[bytes, list[bool]] = defaultdict(list)
    answers: dict[bytes, str | None] = {}
    for candidate in plan.candidates:
        key = candidate.state.digest
        right[key] += [] if candidate.correct is None else [candidate.correct]
        answers[key] = answers.get(key) or candidate.answer
    return {
        key: Grade(2 * sum(found) > len(found), answers[key], "" if found else NO_REFERENCE)
        for key, found in right.items()
    }


@dataclass
class RecordedModel(SearchModel):
    """The recorded messages of a problem; each is drawn once per search."""

    generates: bool = False
    tree: RecordedTree = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.grades = self.tree.grades
        self._orders: dict[bytes, list[Proposal]] = {}

    async def root(self) -> MASState:
        """Return the recorded root."""
        return self.tree.root

    async def successors(self, requests: Sequence[Propose]) -> list[list[Proposal]]:
        """Return recorded messages not yet drawn, in seeded order."""
        if not any(len(self.tree.at(one.state)) > self.count_draws(one.state, 0) for one in requests):
            self.report("", Usage(unrecorded=sum(request.n for request in requests)))
            raise ExhaustedError(f"no recorded message is left at the state after turn {requests[0].state.depth}")
        return [self._take(request.state, request.n) for request in requests]

    def _take(self, state: MASState, n: int) -> list[Proposal]:
        order = self._orders.get(state.digest)
        if order is None:
            order = [*self.tree.at(state)]
            random.Random(derive_seed(self.setup.seed, self.problem.id, state.digest, 0)).shuffle(order)
            self._orders[state.digest] = order
        start = self.count_draws(state, 0)
        drawn = order[start : start + n]
        self.count_draws(state, len(drawn))
        tokens = sum(proposal.tokens for proposal in drawn)
        self.report("", Usage(agent_calls=len(drawn), generated_tokens=tokens, unrecorded=n - len(drawn)))
        for proposal in drawn:
            self.origins.setdefault((state.digest, proposal.action.text), SampleOrigin(proposal, None))
        return drawn
