"""Search algorithms, each a frozen dataclass with one method, `plan`.

The paper's: `SinglePass`, `SelfConsistency`, `StepBeamSearch`, `MCTS`. For comparison:
`BestOfN`, `PUCT`, `SequentialHalving`, `DVTS`, `REBASE`, `AdaptiveBranching`.
"""

from search.planners.adaptive import AdaptiveBranching
from search.planners.beam import StepBeamSearch
from search.planners.chains import BestOfN, SelfConsistency, SinglePass
from search.planners.halving import SequentialHalving
from search.planners.mcts import MCTS
from search.planners.puct import PUCT
from search.planners.trees import DVTS, REBASE

__all__ = [
    "DVTS",
    "MCTS",
    "PUCT",
    "REBASE",
    "AdaptiveBranching",
    "BestOfN",
    "SelfConsistency",
    "SequentialHalving",
    "SinglePass",
    "StepBeamSearch",
]
