"""Dynamic sampling in a training step: the hook, its scores, and rewards for groups of samples.

The library next to it (`mapsage/sampling/`) fills a batch without MMEngine; these hooks bring it
into a loop. Importing the package registers them.
"""

from .dynamic_sampling_hook import DynamicSamplingHook
from .group_reward_tuning import GroupRewardTuning
from .model_score import ModelScore
from .sampled_steps import LoaderError
from .scoring import RewardScore

__all__ = ['DynamicSamplingHook', 'GroupRewardTuning', 'LoaderError', 'ModelScore', 'RewardScore']
