"""Search over the messages of a multi-agent system: protocol, planners, scheduler and run store.

`run` searches many problems concurrently. `MCTS`, `StepBeamSearch`, `SelfConsistency`,
`BestOfN` and `SinglePass` are the paper's planners. Subclass `Planner` to add others.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from mas_gym.errors import BudgetError
from mas_gym.internal.lazy import lazy_names

if TYPE_CHECKING:
    from search.budget import Budget
    from search.compare import Comparison, compare, compare_results
    from search.critics import ConstantCritic, PolicyLikelihood
    from search.engine.run import Run
    from search.grading import TurnAnswer, turn_answers
    from search.plan import AnytimePoint, Candidate, Plan
    from search.planners import (
        DVTS,
        MCTS,
        PUCT,
        REBASE,
        AdaptiveBranching,
        BestOfN,
        ChosenArms,
        ChosenRecipients,
        SelfConsistency,
        SequentialHalving,
        Siblings,
        SinglePass,
        StepBeamSearch,
    )
    from search.planners.ask_tell import AskTell
    from search.planners.registry import load_planner, planner_names, planner_spec
    from search.prices import Prices, as_prices
    from search.progress import Progress
    from search.protocol import (
        Arm,
        Arms,
        Critic,
        Evaluate,
        Extract,
        Model,
        Planner,
        Propose,
        Remaining,
        Reward,
        Scores,
        ScoringContext,
        as_critic,
        as_planner,
    )
    from search.runs import run
    from search.sampling import Sampling
    from search.store import Imported, Recorded, RunInfo, Store, import_transcripts, open_store
    from search.tree import Node, Proposal, Tree
    from search.usage import ArmUsage, Usage

_HOMES = {
    "search.budget": "Budget",
    "search.compare": "Comparison compare compare_results",
    "search.critics": "ConstantCritic PolicyLikelihood",
    "search.progress": "Progress",
    "search.engine.run": "Run",
    "search.runs": "run",
    "search.grading": "TurnAnswer turn_answers",
    "search.plan": "AnytimePoint Candidate Plan",
    "search.planners": (
        "DVTS MCTS PUCT REBASE AdaptiveBranching BestOfN ChosenArms ChosenRecipients SelfConsistency "
        "SequentialHalving Siblings SinglePass StepBeamSearch"
    ),
    "search.planners.ask_tell": "AskTell",
    "search.planners.registry": "load_planner planner_names planner_spec",
    "search.prices": "Prices as_prices",
    "search.protocol": (
        "Arm Arms Critic Evaluate Extract Model Planner Propose Remaining Reward Scores ScoringContext "
        "as_critic as_planner"
    ),
    "search.sampling": "Sampling",
    "search.store": "Imported Recorded RunInfo Store import_transcripts open_store",
    "search.tree": "Node Proposal Tree",
    "search.usage": "ArmUsage Usage",
}

__all__ = [
    "DVTS",
    "MCTS",
    "PUCT",
    "REBASE",
    "AdaptiveBranching",
    "AnytimePoint",
    "Arm",
    "ArmUsage",
    "Arms",
    "AskTell",
    "BestOfN",
    "Budget",
    "BudgetError",
    "Candidate",
    "ChosenArms",
    "ChosenRecipients",
    "Comparison",
    "ConstantCritic",
    "Critic",
    "Evaluate",
    "Extract",
    "Imported",
    "Model",
    "Node",
    "Plan",
    "Planner",
    "PolicyLikelihood",
    "Prices",
    "Progress",
    "Proposal",
    "Propose",
    "Recorded",
    "Remaining",
    "Reward",
    "Run",
    "RunInfo",
    "Sampling",
    "Scores",
    "ScoringContext",
    "SelfConsistency",
    "SequentialHalving",
    "Siblings",
    "SinglePass",
    "StepBeamSearch",
    "Store",
    "Tree",
    "TurnAnswer",
    "Usage",
    "as_critic",
    "as_planner",
    "as_prices",
    "compare",
    "compare_results",
    "import_transcripts",
    "load_planner",
    "open_store",
    "planner_names",
    "planner_spec",
    "run",
    "turn_answers",
]

# Import the package now, so that a later import does not replace the function of the same name.
import_module("search.compare")
del globals()["compare"]
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
