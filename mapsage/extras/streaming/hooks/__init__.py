"""Features from elsewhere in a training step, and heads that several ranks hold together.

The library next to it (`mapsage/extras/streaming/`) knows no MMEngine; these hooks bring it into a loop.
Importing the package registers them.
"""

from .feature_source_hook import FeatureSourceHook
from .head_replica_hook import HeadReplicaHook

__all__ = ['FeatureSourceHook', 'HeadReplicaHook']
