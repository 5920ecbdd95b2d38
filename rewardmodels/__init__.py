"""Reward models: labels from search, training, and critics that guide search.

`load_critic` loads a critic for `search.run`. `collect` mines preference pairs, labeled
states or outcomes from the trees of training searches, and `train` trains a critic on
them. torch is imported on first use.
"""

from rewardmodels.data.dataset import Example, LabeledTree, RewardData, collect, histogram, split, stored_trees
from rewardmodels.data.encode import state_parts, state_text
from rewardmodels.data.mining import Labeled, Pair, outcomes, pairs, pointwise, process_targets
from rewardmodels.hub import push_to_hub
from rewardmodels.model.trained_critics import LearnedCritic
from rewardmodels.training.config import PAPER, TINY, TrainingConfig
from rewardmodels.training.train_critic import Trained, train
from search.critic_registry import known_critics, load_critic
from search.critics import Ensemble

__all__ = [
    "PAPER",
    "TINY",
    "Ensemble",
    "Example",
    "Labeled",
    "LabeledTree",
    "LearnedCritic",
    "Pair",
    "RewardData",
    "Trained",
    "TrainingConfig",
    "collect",
    "histogram",
    "known_critics",
    "load_critic",
    "outcomes",
    "pairs",
    "pointwise",
    "process_targets",
    "push_to_hub",
    "split",
    "state_parts",
    "state_text",
    "stored_trees",
    "train",
]
