"""A stage of training with rewards of drawn label maps: rewards, the loss, a metric, a picture.

`group_reward_tuning.py` is both the score of `DynamicSamplingHook` and the change of the model's
loss; `group_reward.py` has its formulas. `rewards.py` has the reward functions, which
`reward_functions.py` calls, in processes of their own if asked.
"""

from .group_reward_tuning import GroupRewardTuning
from .mean_reward import MeanReward
from .rewards import ComponentsFound, PolygonCount, UnbrokenLength

__all__ = ['ComponentsFound', 'GroupRewardTuning', 'MeanReward', 'PolygonCount', 'UnbrokenLength']
