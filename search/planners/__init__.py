"""Search algorithms. Each is a frozen dataclass with a `plan` method.

`SinglePass`, `SelfConsistency`, `StepBeamSearch` and `MCTS` are the paper's algorithms. `BestOfN`, `PUCT`,
`SequentialHalving`, `DVTS`, `REBASE` and `AdaptiveBranching` are included for comparison. `Siblings`
samples trees for training. `ChosenRecipients` wraps a planner to select the recipients of messages. `Cascade` runs
planners in order of increasing cost until the answer is sufficiently certain.
"""

from typing import TYPE_CHECKING

from mas_gym.internal.lazy import lazy_names

if TYPE_CHECKING:
    from search.planners.adaptive import AdaptiveBranching as AdaptiveBranching
    from search.planners.beam_search import StepBeamSearch as StepBeamSearch
    from search.planners.best_of_n import BestOfN as BestOfN
    from search.planners.cascade import Cascade as Cascade
    from search.planners.chosen_recipients import ChosenRecipients as ChosenRecipients
    from search.planners.dvts import DVTS as DVTS
    from search.planners.halving import SequentialHalving as SequentialHalving
    from search.planners.mcts import MCTS as MCTS
    from search.planners.puct import PUCT as PUCT
    from search.planners.rebase import REBASE as REBASE
    from search.planners.self_consistency import SelfConsistency as SelfConsistency
    from search.planners.siblings import Siblings as Siblings
    from search.planners.single_pass import SinglePass as SinglePass

__getattr__, __dir__, __all__ = lazy_names(__name__)
