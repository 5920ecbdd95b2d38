"""Search over the messages of a multi-agent system: protocol, planners, scheduler and run store.

`run` searches many problems concurrently. `MCTS`, `StepBeamSearch`, `SelfConsistency`,
`BestOfN` and `SinglePass` are the paper's planners. Subclass `Planner` to add others.
"""

from mas_gym.errors import BudgetError
from search.budget import Budget
from search.compare import Comparison, compare
from search.critics import ConstantCritic, PolicyLikelihood
from search.engine.journal import Progress
from search.engine.run import Run, run
from search.grading import TurnAnswer, turn_answers
from search.plan import AnytimePoint, Candidate, Plan
from search.planners import (
    DVTS,
    MCTS,
    PUCT,
    REBASE,
    AdaptiveBranching,
    BestOfN,
    ChosenRecipients,
    SelfConsistency,
    SequentialHalving,
    SinglePass,
    StepBeamSearch,
)
from search.planners.ask_tell import AskTell
from search.planners.registry import load_planner, planner_names, planner_spec
from search.prices import Prices, as_prices
from search.protocol import (
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
from search.setup import Sampling
from search.store import Imported, Recorded, RunInfo, Store, import_transcripts, open_store
from search.tree import Node, Proposal, Tree
from search.usage import Usage

__all__ = [
    "DVTS",
    "MCTS",
    "PUCT",
    "REBASE",
    "AdaptiveBranching",
    "AnytimePoint",
    "AskTell",
    "BestOfN",
    "Budget",
    "BudgetError",
    "Candidate",
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
    "import_transcripts",
    "load_planner",
    "open_store",
    "planner_names",
    "planner_spec",
    "run",
    "turn_answers",
]
