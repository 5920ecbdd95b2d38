"""Search algorithms, each a frozen dataclass with one method, `plan`.

The paper's: `SinglePass`, `SelfConsistency`, `StepBeamSearch`, `MCTS`. For comparison:
`BestOfN`, `PUCT`, `SequentialHalving`, `DVTS`, `REBASE`, `AdaptiveBranching`. `ChosenRecipients`
gives any of them another rule for the recipients of messages.
"""

from search.planners.beams import DVTS, REBASE, BestOfN, SelfConsistency, SinglePass, StepBeamSearch
from search.planners.mcts import MCTS
from search.planners.variants import PUCT, AdaptiveBranching, ChosenRecipients, SequentialHalving

__all__ = [
    "DVTS",
    "MCTS",
    "PUCT",
    "REBASE",
    "AdaptiveBranching",
    "BestOfN",
    "ChosenRecipients",
    "SelfConsistency",
    "SequentialHalving",
    "SinglePass",
    "StepBeamSearch",
]
