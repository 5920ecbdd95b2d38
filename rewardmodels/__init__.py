"""Reward models: labels from search, training, and critics that guide search.

`load_critic` loads a critic for `search.run`. `collect` mines preference pairs, labeled
states or outcomes from the trees of training searches, and `train` trains a critic on
them. torch is imported on first use.
"""

from typing import TYPE_CHECKING

from mas_gym.internal.lazy import lazy_names

if TYPE_CHECKING:
    from rewardmodels.data.dataset import Example as Example
    from rewardmodels.data.dataset import LabeledTree as LabeledTree
    from rewardmodels.data.dataset import RewardData as RewardData
    from rewardmodels.data.dataset import collect as collect
    from rewardmodels.data.dataset import histogram as histogram
    from rewardmodels.data.dataset import split as split
    from rewardmodels.data.dataset import stored_trees as stored_trees
    from rewardmodels.data.encode import state_parts as state_parts
    from rewardmodels.data.encode import state_text as state_text
    from rewardmodels.data.mining import Labeled as Labeled
    from rewardmodels.data.mining import Pair as Pair
    from rewardmodels.data.mining import outcomes as outcomes
    from rewardmodels.data.mining import pairs as pairs
    from rewardmodels.data.mining import pointwise as pointwise
    from rewardmodels.hub import push_to_hub as push_to_hub
    from rewardmodels.model.trained_critics import LearnedCritic as LearnedCritic
    from rewardmodels.training.config import PAPER as PAPER
    from rewardmodels.training.config import TINY as TINY
    from rewardmodels.training.config import TrainingConfig as TrainingConfig
    from rewardmodels.training.train_critic import Trained as Trained
    from rewardmodels.training.train_critic import train as train
    from search.critic_registry import known_critics as known_critics
    from search.critic_registry import load_critic as load_critic
    from search.critics import Ensemble as Ensemble

__getattr__, __dir__, __all__ = lazy_names(__name__)
