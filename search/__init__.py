"""Search over the messages of a multi-agent system: protocol, planners, driver and run store.

`run` searches many problems at once; `MCTS`, `StepBeamSearch`, `SelfConsistency`,
`BestOfN` and `SinglePass` are the paper's planners; anything with a `plan` method
is another.
"""

from search.plan import Candidate, Moment, Plan, Usage
from search.planners import MCTS, BestOfN, SelfConsistency, SinglePass, StepBeamSearch
from search.protocol import Critic, Evaluate, Extract, Model, Planner, Proposal, Propose, Reward, ScoringContext
from search.registry import load_planner, planner_names, planner_spec
from search.tree import Node, Tree

__all__ = [
    "MCTS",
    "BestOfN",
    "Candidate",
    "Critic",
    "Evaluate",
    "Extract",
    "Model",
    "Moment",
    "Node",
    "Plan",
    "Planner",
    "Proposal",
    "Propose",
    "Reward",
    "ScoringContext",
    "SelfConsistency",
    "SinglePass",
    "StepBeamSearch",
    "Tree",
    "Usage",
    "load_planner",
    "planner_names",
    "planner_spec",
]
