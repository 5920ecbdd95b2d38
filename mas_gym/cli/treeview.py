"""From a finished search to what the tree page shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from mas_gym.policies.base import mean_logprob
from mas_gym.report.page import TreeNodes, TreeView

if TYPE_CHECKING:
    from mas_gym.graph import MAS
    from search import Plan


def tree_view(plan: Plan, mas: MAS, facts: Mapping[str, str], reference: str | None = None) -> TreeView:
    """Lay out a plan's tree for `mas_gym.report.write_tree_page`.

    Args:
        plan: The plan of a planner that keeps its tree.
        mas: The system that was searched.
        facts: What the head of the page states beside the usage.
        reference: The right answer, for problems that have one.
    """
    assert plan.tree is not None
    nodes = list(plan.tree)
    visited = any(node.visits for node in nodes)
    graded = {candidate.node: candidate for candidate in plan.candidates}
    columns = TreeNodes(
        parent=[node.parent for node in nodes],
        speaker=[node.state.speaker for node in nodes],
        text=[node.state.text for node in nodes],
        recipients=[list(node.state.recipients) for node in nodes],
        visits=[node.visits for node in nodes] if visited else None,
        q=[node.q for node in nodes] if visited else None,
        value=[node.value for node in nodes],
        logprob=[mean_logprob(node.logprob, node.tokens) for node in nodes],
        tokens=[node.tokens for node in nodes],
        answer=[graded[i].answer if i in graded else None for i in range(len(nodes))],
        correct=[graded[i].correct if i in graded and reference is not None else None for i in range(len(nodes))],
    )
    usage = plan.usage
    costs = {"AC": usage.agent_calls, "TOK": usage.generated_tokens, "RC": usage.reward_calls}
    return TreeView(
        question=nodes[0].state.question,
        agents=[agent.name for agent in mas.agents],
        sees_question=list(mas.sees_question),
        nodes=columns,
        chosen=plan.best.node if plan.best is not None else None,
        answer=plan.answer,
        correct=plan.correct if reference is not None else None,
        reference=reference,
        facts={**facts, **{name: f"{number:,}" for name, number in costs.items()}},
        title=f"{facts.get('problem', 'question')}, {facts.get('planner', 'search')}",
    )
