"""The result of a search: a `Plan` with ranked candidates, the tree and the cost, and the check of a planner's plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from html import escape
from typing import NamedTuple

from mas_gym.critics import Proposal
from mas_gym.errors import SearchError
from mas_gym.systems.dynamics import Dynamics
from mas_gym.systems.graph import MAS
from mas_gym.systems.prompts import ChatMessage
from mas_gym.systems.state import MASState
from search.costs import Usage
from search.tree import Tree


@dataclass(frozen=True, slots=True)
class Candidate:
    """A terminal state that a search found (paper, Sec. "Overall experimental setup").

    Attributes:
        state: The terminal state.
        score: The score that ranks it, by default the path score: the mean of the values
            after each action, or the terminal value with an outcome critic; None if it was not scored.
        node: Its index in the plan's tree; None until the search ends.
        answer: The normalized answer read from its last message; filled in when the search ends.
        correct: Whether that answer equals the reference; filled in when the search ends.
    """

    state: MASState
    score: float | None = None
    node: int | None = None
    answer: str | None = None
    correct: bool | None = None

    @property
    def text(self) -> str:
        """The final message."""
        return self.state.text


class AnytimePoint(NamedTuple):
    """A point on the anytime curve: the answer of a search that stops at this cost.

    Attributes:
        agent_calls: AC spent so far.
        generated_tokens: TOK spent so far.
        state: The terminal state that decoding would return; None before the first one.
        node: Its index in the plan's tree.
        answer: Its answer; filled in when the search ends.
        correct: Whether it is correct; filled in when the search ends.
    """

    agent_calls: int
    generated_tokens: int
    state: MASState | None
    node: int | None = None
    answer: str | None = None
    correct: bool | None = None


@dataclass(frozen=True)
class Plan:
    """The outcome of one search.

    A planner fills in ``candidates``, ``tree`` and ``anytime``, and ``stopped`` if a stop rule ended it early; the
    search (`search.engine.one_search`) fills in the rest.

    Attributes:
        candidates: Terminal states: the chosen one first, then by descending score.
        tree: The search tree; for a planner without a tree, the paths of its candidates.
        anytime: The curve of answers against cost, one `AnytimePoint` per change of answer.
        problem_id: The problem searched.
        answer: The chosen candidate's answer; None if no answer can be read.
        correct: Whether that answer equals the reference (Hit@1); None before grading.
        usage: The cost of the search.
        stopped: Reason for stopping early: an exhausted budget, or the planner's reason, such as a settled majority;
            None if the search did not stop early, or if the planner limited the search to fit its budget.
        error: Reason for the failure; None if the search did not fail.
        error_details: The traceback of the failure; not stored.
        mas: The system that was searched; filled in when the search ends.
        requests: For a program, the prompt for each message of the chosen path, by the message's node.
        order_varied: Whether concurrent calls of an agent program arrived too late to be ordered by content; not
            stored.
    """

    candidates: tuple[Candidate, ...] = ()
    tree: Tree | None = field(default=None, repr=False)
    anytime: tuple[AnytimePoint, ...] = field(default=(), repr=False)
    problem_id: str = ""
    answer: str | None = None
    correct: bool | None = None
    usage: Usage = field(default_factory=Usage)
    stopped: str | None = None
    error: str | None = None
    error_details: str | None = field(default=None, repr=False, compare=False)
    mas: MAS | None = field(default=None, repr=False, compare=False)
    requests: Mapping[int, tuple[ChatMessage, ...]] = field(default_factory=dict, repr=False, compare=False)
    order_varied: bool = field(default=False, repr=False, compare=False)

    @classmethod
    def single(cls, state: MASState, score: float | None = None) -> Plan:
        """Return a plan with one candidate, a terminal state; the search adds the tree with its path."""
        return cls((Candidate(state, score),))

    @property
    def best(self) -> Candidate | None:
        """The chosen candidate."""
        return self.candidates[0] if self.candidates else None

    @property
    def text(self) -> str | None:
        """The chosen candidate's final message."""
        return self.candidates[0].text if self.candidates else None

    @property
    def outcome(self) -> str:
        """Outcome: ``"right"``, ``"wrong"``, ``"no answer"``, ``"failed"``, or ``"answered"`` before grading."""
        if self.error is not None:
            return "failed"
        if self.answer is None:
            return "no answer"
        return {True: "right", False: "wrong", None: "answered"}[self.correct]

    def hit(self, k: int) -> bool:
        """Return whether one of the first ``k`` candidates is correct (Hit@k)."""
        return any(candidate.correct for candidate in self.candidates[:k])

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the answer, the messages that led to it, and the cost."""
        steps = [] if self.best is None else self.best.state.path()[1:]
        said = [(self.mas.node_name(one.speaker) if self.mas else str(one.speaker), one.text) for one in steps]
        row = '<tr><td>{}</td><td style="text-align:left;white-space:pre-wrap">{}</td></tr>\n'
        lines = "".join(row.format(escape(who), escape(text)) for who, text in said)
        answer = escape(self.error or (self.answer if self.answer is not None else "none"))
        usage = self.usage
        costs = f"AC {usage.agent_calls:,}, TOK {usage.generated_tokens:,}, RC {usage.reward_calls:,}"
        page = (
            f"<p><b>{escape(self.problem_id)}</b>: {answer} ({self.outcome})</p>\n<table>\n{lines}</table>\n"
            f"<p><small>{costs}, {len(self.candidates)} candidates</small></p>\n"
        )
        # Models can emit lone surrogates, which a notebook cannot save.
        return page.encode("utf-8", "replace").decode("utf-8")


ProposalOf = Callable[[MASState], Proposal | None]
"""Returns the proposal that led to a state; None if its message was not written by a policy."""


def checked_plan(plan: object, root: MASState, dynamics: Dynamics, proposal_of: ProposalOf) -> Plan:
    """Return a planner's plan with the nodes of its candidates and of its anytime curve.

    Raises:
        SearchError: The object is not a plan, or its candidates are not terminal states below the root.
    """
    if not isinstance(plan, Plan):
        raise SearchError(f"planner: expected plan() to return a search.Plan, got {type(plan).__name__}")
    if not plan.candidates:
        raise SearchError("planner: expected at least one terminal candidate in its plan, got none")
    for candidate in plan.candidates:
        if candidate.state.path()[0] != root:
            raise SearchError(
                "planner: expected candidates that start at the root of the search, got one that starts at "
                "another state"
            )
        if not dynamics.is_terminal(candidate.state):
            raise SearchError(
                f"planner: expected terminal candidates, got a state at turn {candidate.state.depth}; "
                "an intermediate message is not an answer"
            )
    return replace(_with_nodes(plan, root, dynamics, proposal_of), mas=dynamics.mas)


def _with_nodes(plan: Plan, root: MASState, dynamics: Dynamics, proposal_of: ProposalOf) -> Plan:
    """Fill in the nodes of candidates and of the curve, and add missing paths to the tree."""
    tree = Tree(root) if plan.tree is None else plan.tree
    if not isinstance(tree, Tree) or tree.states[0] != root:
        got = f"a tree with root {tree.states[0]!r:.80}" if isinstance(tree, Tree) else type(tree).__name__
        raise SearchError(f"planner: expected the plan's tree to be a search.Tree(root), got {got}")
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
