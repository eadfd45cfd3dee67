"""Features of a frozen encoder, from where they are computed to the ranks that train the head."""
from .arriving import Arriving
from .blocks import BlockError, BlockPool
from .cache import Cached
from .link import Link, LinkError, open_links
from .prefetch import Prefetched
from .replica import ReplicaFeatures
from .replicated import Replicated
from .roles import RoleError
from .sender import serve
from .source import Encode, Features, FeatureSource, InPlace, Item, StreamingError
from .streamed import Streamed
from .tensor_parallel import parallelize_head

__all__ = [
    'Arriving', 'BlockError', 'BlockPool', 'Cached', 'Encode', 'Features', 'FeatureSource',
    'InPlace', 'Item', 'Link', 'LinkError', 'Prefetched', 'ReplicaFeatures', 'Replicated',
    'RoleError', 'Streamed', 'StreamingError', 'open_links', 'parallelize_head', 'serve'
]
