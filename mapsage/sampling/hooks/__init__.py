"""Dynamic sampling in a training step: the hook and its scores.

The library next to it (`mapsage/sampling/`) fills a batch without MMEngine; these hooks bring it
into a loop. Importing the package registers them.
"""

from .dynamic_sampling_hook import DynamicSamplingHook
from .model_score import ModelScore
from .sampled_steps import LoaderError
from .scoring import RewardScore

__all__ = ['DynamicSamplingHook', 'LoaderError', 'ModelScore', 'RewardScore']
