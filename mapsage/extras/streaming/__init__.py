"""Features of a frozen encoder, from where they are computed to the ranks that train the head.

A frozen encoder always returns the same features for the same image, so they can be computed
elsewhere: ahead of time (`cache/`), in a thread (`prefetch.py`) or on other ranks (`remote/`,
`wire/`). `source.py` has the interface that all of them implement; `build.py` builds the one that
the config names. `split_head/` is for heads that several ranks hold together.
"""

from mapsage_launcher.only_help import is_only_help

# The help of a program needs none of these.
if not is_only_help():
    from .cache.cached import Cached
    from .encoder_gate import FeatureSourceError
    from .prefetch import Prefetched
    from .remote.blocks import BlockError, BlockPool
    from .remote.roles import RoleError
    from .remote.sender import serve
    from .remote.streamed import Streamed
    from .source import Encode, Features, FeatureSource, Item, Local, StreamingError
    from .split_head.replica_features import ReplicaFeatures
    from .split_head.replicated import Replicated
    from .split_head.tensor_parallel import parallelize_head
    from .wire.link import Link, LinkError
    from .wire.opening import open_links

__all__ = [
    'BlockError',
    'BlockPool',
    'Cached',
    'Encode',
    'FeatureSource',
    'FeatureSourceError',
    'Features',
    'Item',
    'Link',
    'LinkError',
    'Local',
    'Prefetched',
    'ReplicaFeatures',
    'Replicated',
    'RoleError',
    'Streamed',
    'StreamingError',
    'open_links',
    'parallelize_head',
    'serve',
]
