"""Training of agents on the results of searches; `search.credit` computes advantages, and TRL provides the loss.

`train_agents` trains on demonstrations, preferences or credited samples, which `rewardmodels.agents.examples` reads
from a store. torch and TRL are imported on first use.
"""

from rewardmodels.agents.config import AgentConfig, agent_config
from rewardmodels.agents.examples import (
    CreditedSample,
    Demonstration,
    Preference,
    credited_samples,
    demonstrations,
    sampled_messages,
    sibling_pairs,
)
from rewardmodels.agents.train_agents import TrainedAgents, train_agents

__all__ = [
    "AgentConfig",
    "CreditedSample",
    "Demonstration",
    "Preference",
    "TrainedAgents",
    "agent_config",
    "credited_samples",
    "demonstrations",
    "sampled_messages",
    "sibling_pairs",
    "train_agents",
]
