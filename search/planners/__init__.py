"""Search algorithms, each a frozen dataclass with one method, `plan`."""

from search.planners.beam import StepBeamSearch
from search.planners.chains import BestOfN, SelfConsistency, SinglePass
from search.planners.mcts import MCTS

__all__ = ["MCTS", "BestOfN", "SelfConsistency", "SinglePass", "StepBeamSearch"]
