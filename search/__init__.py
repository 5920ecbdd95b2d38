"""Search over the messages of a multi-agent system: protocol, planners, scheduler and run store.

`run` searches many problems concurrently. `MCTS`, `StepBeamSearch`, `SelfConsistency`,
`BestOfN` and `SinglePass` are the paper's planners. Subclass `Planner` to add others.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from mas_gym.internal.lazy import lazy_names

if TYPE_CHECKING:
    from mas_gym.critics import Proposal as Proposal
    from mas_gym.errors import BudgetError as BudgetError
    from mas_gym.policies.base import Sampling as Sampling
    from search.answers_by_turn import TurnAnswer as TurnAnswer
    from search.answers_by_turn import turn_answers as turn_answers
    from search.compare import Comparison as Comparison
    from search.compare import compare as compare
    from search.compare import compare_results as compare_results
    from search.costs import Budget as Budget
    from search.costs import TagUsage as TagUsage
    from search.costs import Usage as Usage
    from search.critics import ConstantCritic as ConstantCritic
    from search.critics import PolicyLikelihood as PolicyLikelihood
    from search.engine.run import Run as Run
    from search.plan import AnytimePoint as AnytimePoint
    from search.plan import Candidate as Candidate
    from search.plan import Plan as Plan
    from search.planners import DVTS as DVTS
    from search.planners import MCTS as MCTS
    from search.planners import PUCT as PUCT
    from search.planners import REBASE as REBASE
    from search.planners import AdaptiveBranching as AdaptiveBranching
    from search.planners import BestOfN as BestOfN
    from search.planners import ChosenRecipients as ChosenRecipients
    from search.planners import SelfConsistency as SelfConsistency
    from search.planners import SequentialHalving as SequentialHalving
    from search.planners import Siblings as Siblings
    from search.planners import SinglePass as SinglePass
    from search.planners import StepBeamSearch as StepBeamSearch
    from search.planners.ask_tell import AskTell as AskTell
    from search.planners.chosen_arms import ChosenArms as ChosenArms
    from search.planners.registry import load_planner as load_planner
    from search.planners.registry import planner_names as planner_names
    from search.planners.registry import planner_spec as planner_spec
    from search.prices import Prices as Prices
    from search.prices import as_prices as as_prices
    from search.progress import Progress as Progress
    from search.protocol import Critic as Critic
    from search.protocol import Evaluate as Evaluate
    from search.protocol import Extract as Extract
    from search.protocol import Model as Model
    from search.protocol import Planner as Planner
    from search.protocol import Propose as Propose
    from search.protocol import Remaining as Remaining
    from search.protocol import Reward as Reward
    from search.protocol import Scores as Scores
    from search.protocol import ScoringContext as ScoringContext
    from search.protocol import Tag as Tag
    from search.protocol import Tags as Tags
    from search.protocol import as_critic as as_critic
    from search.protocol import as_planner as as_planner
    from search.runs import run as run
    from search.setup import RunSpec as RunSpec
    from search.store import Imported as Imported
    from search.store import Recorded as Recorded
    from search.store import RunInfo as RunInfo
    from search.store import Store as Store
    from search.store import import_transcripts as import_transcripts
    from search.store import open_store as open_store
    from search.tree import Node as Node
    from search.tree import Tree as Tree

# Import the package now, so that a later import does not replace the function of the same name.
import_module("search.compare")
del globals()["compare"]
__getattr__, __dir__, __all__ = lazy_names(__name__)
