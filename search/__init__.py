"""Search over the messages of a multi-agent system: protocol, planners, engine and run store.

`run` searches many problems at once; `MCTS`, `StepBeamSearch`, `SelfConsistency`,
`BestOfN` and `SinglePass` are the paper's planners; anything with a `plan` method
is another.
"""

from mas_gym.errors import BudgetError
from search.compare import Comparison, compare
from search.critics import ConstantCritic, PolicyLikelihood
from search.engine.journal import Progress
from search.engine.run import Run, run
from search.plan import AnytimePoint, Candidate, Plan, TurnAnswer, Usage, turn_answers
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
from search.planners.variants import AskTell
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
from search.setup import Budget, Sampling, load_planner, planner_names, planner_spec
from search.store import RunInfo, Store, open_store
from search.tree import Node, Proposal, Tree

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
    "Model",
    "Node",
    "Plan",
    "Planner",
    "PolicyLikelihood",
    "Progress",
    "Proposal",
    "Propose",
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
    "compare",
    "load_planner",
    "open_store",
    "planner_names",
    "planner_spec",
    "run",
    "turn_answers",
]
