"""Search algorithms. Each is a frozen dataclass with a `plan` method.

`SinglePass`, `SelfConsistency`, `StepBeamSearch` and `MCTS` are the paper's algorithms. `BestOfN`, `PUCT`,
`SequentialHalving`, `DVTS`, `REBASE` and `AdaptiveBranching` are included for comparison. `Siblings`
samples trees for training. `ChosenRecipients` wraps a planner to select the recipients of messages, and `ChosenArms`
wraps a planner to select the models that write the messages. `Cascade` runs planners in order of increasing cost until
the answer is sufficiently certain.
"""

from search.planners.adaptive import AdaptiveBranching
from search.planners.beam_search import StepBeamSearch
from search.planners.best_of_n import BestOfN
from search.planners.cascade import Cascade
from search.planners.chosen_arms import ChosenArms
from search.planners.chosen_recipients import ChosenRecipients
from search.planners.dvts import DVTS
from search.planners.halving import SequentialHalving
from search.planners.mcts import MCTS
from search.planners.puct import PUCT
from search.planners.rebase import REBASE
from search.planners.self_consistency import SelfConsistency
from search.planners.siblings import Siblings
from search.planners.single_pass import SinglePass

__all__ = [
    "DVTS",
    "MCTS",
    "PUCT",
    "REBASE",
    "AdaptiveBranching",
    "BestOfN",
    "Cascade",
    "ChosenArms",
    "ChosenRecipients",
    "SelfConsistency",
    "SequentialHalving",
    "Siblings",
    "SinglePass",
    "StepBeamSearch",
]
