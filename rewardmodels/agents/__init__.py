"""Training of agents on the results of searches; `search.credit` computes advantages, and TRL provides the loss.

`train_agents` trains on demonstrations, preferences or credited samples, which `rewardmodels.agents.examples` reads
from a store. torch and TRL are imported on first use.
"""

from typing import TYPE_CHECKING

from mas_gym.internal.lazy import lazy_names

if TYPE_CHECKING:
    from rewardmodels.agents.config import AgentConfig as AgentConfig
    from rewardmodels.agents.config import agent_config as agent_config
    from rewardmodels.agents.examples import CreditedSample as CreditedSample
    from rewardmodels.agents.examples import Demonstration as Demonstration
    from rewardmodels.agents.examples import Preference as Preference
    from rewardmodels.agents.examples import credited_samples as credited_samples
    from rewardmodels.agents.examples import demonstrations as demonstrations
    from rewardmodels.agents.examples import sampled_messages as sampled_messages
    from rewardmodels.agents.examples import sibling_pairs as sibling_pairs
    from rewardmodels.agents.training import TrainedAgents as TrainedAgents
    from rewardmodels.agents.training import train_agents as train_agents

__getattr__, __dir__, __all__ = lazy_names(__name__)
