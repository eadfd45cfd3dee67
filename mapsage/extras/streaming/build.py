"""Builds the feature source that ``feature_source`` of a config names.

A setting of the config is a keyword argument of the builder for its type (``_local``,
``_prefetched``, ``_cached``, ``_streamed``), so the signatures are the list of settings and of
their defaults.
"""

from __future__ import annotations

import difflib
import inspect
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import nn

from mapsage.accelerator import Accelerator
from mapsage.distributed import all_ranks_or_none, open_channel
from mapsage.distributed.launcher import ENCODERS_VARIABLE
from mapsage.distributed.weights import total_digest, weight_digests
from mapsage.extras.streaming.split_head.replicas import Replicas

from .cache.cached import Cached
from .cache.index import read_index
from .cache.keys import ViewSeeds, hash_of, keys_of_run, sample_hashes
from .cache.shards import CacheError
from .encoder_gate import FeatureSourceError
from .prefetch import Prefetched
from .remote.blocks import BlockPool
from .remote.encoder_weights import share_encoder
from .remote.notices import Log, log_plainly
from .remote.roles import connect_store
from .remote.streamed import Streamed, check_settings
from .source import Encode, FeatureSource, Local
from .split_head.replica_features import ReplicaFeatures
from .split_head.replicated import Replicated
from .wire.link import Link
from .wire.opening import open_links

# Seconds without any message after which the other end of a link counts as lost. Encoding an item
# may take longer, because a separate thread sends heartbeats.
PEER_TIMEOUT = 120.0
# Default of pool_bytes on a rank that gets its features from another rank of its head replica. An
# item of any size passes through it.
_REPLICA_POOL_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Surroundings:
    """The parts of a run that a source is built from.

    Attributes:
        encoder: Frozen encoder, with its weights, on ``device``.
        encode: Function that encodes locally, in the run's precision.
        accelerator: Accelerator of the run.
        local_rank: Number of this rank on its machine.
        device: Device on which features are wanted.
        runner: Runner of the training.
        timeout: Seconds to wait for other ranks.
        log: Function that logs a text at a level of :mod:`logging`.
        replicas: Head replicas if several ranks train one head; None if each rank trains a whole
            head.
        cast_dtype: Dtype of mixed precision, or None.
        view_seeds: Seeds with which the samples are loaded, from :func:`view_seeds`; None if the
            training loader draws other seeds.
    """

    encoder: nn.Module
    encode: Encode
    accelerator: Accelerator
    local_rank: int
    device: torch.device
    runner: Any
    timeout: float
    log: Log = log_plainly
    replicas: Optional[Replicas] = None
    cast_dtype: Optional[torch.dtype] = None
    view_seeds: Optional[ViewSeeds] = None


def build_source(config: Mapping[str, Any], surroundings: Surroundings) -> FeatureSource:
    """Return the source that ``config`` describes.

    Args:
        config: ``feature_source`` of the run's config: ``type`` and the settings of that type.
        surroundings: Parts of the run that the source uses.

    Raises:
        FeatureSourceError: If its type or one of its settings is unknown, missing or out of range.
    """
    settings = dict(config)
    name = settings.pop('type', None)
    if name not in _BUILDERS:
        raise FeatureSourceError(
            f'feature_source.type={name!r}, expected one of '
            f'{", ".join(_BUILDERS)}.{_near(str(name), _BUILDERS)}'
        )
    build = _BUILDERS[name]
    known = {
        key: parameter
        for key, parameter in inspect.signature(build).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    for key in settings:
        if key not in known:
            raise FeatureSourceError(
                f'feature_source of type {name!r} has no setting {key!r}: expected '
                f'{", ".join(known) or "none"}.{_near(key, known)}'
            )
    missing = [
        key
        for key, parameter in known.items()
        if parameter.default is inspect.Parameter.empty and key not in settings
    ]
    if missing:
        raise FeatureSourceError(f'feature_source of type {name!r} needs {", ".join(missing)}.')
    try:
        return build(surroundings, **settings)
    except FeatureSourceError:
        raise
    except ValueError as error:
        raise FeatureSourceError(f'feature_source of type {name!r}: {error}') from error


def view_seeds(config: Mapping[str, Any], dataset: Any) -> Optional[ViewSeeds]:
    """Return the seeds that choose the cached view of a sample; None for a source without a cache.

    None is also returned for a cache that cannot be read, which is an error once the source is
    built. Collective over all ranks: the first one asks for the sizes of the dataset's files, and
    all compare what their datasets list.

    Raises:
        ValueError: On every rank, if the dataset does not list its samples, or not the same ones
            everywhere.
    """
    if config.get('type') != 'Cached' or 'folder' not in config:
        return None
    channel, view_plan = open_channel(), ''
    is_first = channel.rank == channel.ranks[0]
    with all_ranks_or_none('looking up the cached samples'):
        listed = hash_of(sample_hashes(dataset, sizes=False)) if len(channel.ranks) > 1 else ''
        try:
            index = read_index(Path(config['folder'])) if is_first else None
        except CacheError:
            index = None
        if index is not None:
            slots = index.slots(sample_hashes(dataset))
            view_plan = json.dumps(dict(seed=index.seed, views=index.views, slots=_runs(slots)))
    texts = channel.gather_texts(json.dumps([listed, view_plan]))
    lists = [json.loads(text)[0] for text in texts]
    differing = [rank for rank, samples in zip(channel.ranks, lists) if samples != lists[0]]
    if differing:
        raise ValueError(
            f'the training dataset of rank(s) {differing} lists other samples than '
            f'the dataset of rank {channel.ranks[0]}: all ranks must read the same '
            f'data.'
        )
    text = json.loads(texts[0])[1]
    if not text:
        return None
    plan = json.loads(text)
    return ViewSeeds(
        plan['seed'],
        plan['views'],
        tuple(
            first + index * step for first, step, count in plan['slots'] for index in range(count)
        ),
    )


def _runs(slots: Sequence[int]) -> List[List[int]]:
    """Return numbers as triples (first, step 0 or 1, count), because there may be a million."""
    runs: List[List[int]] = []
    for slot in slots:
        step = 0 if slot < 0 else 1
        if runs and runs[-1][1] == step and slot == runs[-1][0] + step * runs[-1][2]:
            runs[-1][2] += 1
        else:
            runs.append([slot, step, 1])
    return runs


def _local(around: Surroundings) -> FeatureSource:
    return Local(around.encode)


def _prefetched(around: Surroundings, *, depth: int = 2, timeout: float = 600.0) -> FeatureSource:
    return Prefetched(
        around.encode,
        depth,
        timeout,
        prepare=lambda: around.accelerator.set_device(around.local_rank),
        flush=around.accelerator.flush if around.accelerator.lazy else None,
    )


def _cached(
    around: Surroundings, *, folder: str, views: int = 1, load_images: bool = False
) -> FeatureSource:
    # The hook uses `load_images`, before the first sample is loaded.
    run = around.runner
    dataset = run.train_loop.dataloader.dataset
    slots = None if around.view_seeds is None else around.view_seeds.slots
    samples = sample_hashes(dataset) if slots is None else []
    channel = open_channel()
    with all_ranks_or_none('opening the cache of features'):
        keys = keys_of_run(run.cfg, samples, around.encoder, around.cast_dtype)
        return Cached(folder, views, around.device, keys, slots, channel.rank == channel.ranks[0])


def _streamed(
    around: Surroundings,
    *,
    encoders: int,
    accelerator: Optional[str] = None,
    pool_bytes: Optional[int] = None,
    block_bytes: int = 4 * 2**20,
    timeout: float = 600.0,
    peer_timeout: float = PEER_TIMEOUT,
    wire_dtype: Optional[str] = None,
    ahead: Optional[int] = None,
    local_fallback: bool = True,
    ranks_per_head: int = 1,
) -> FeatureSource:
    # Only encoder ranks use `accelerator`, in mapsage/extras/streaming/encoder_rank.py.
    if os.environ.get(ENCODERS_VARIABLE) != str(encoders):
        raise FeatureSourceError(
            f"feature_source of type 'Streamed' needs {encoders} rank(s) that encode, in addition "
            f'to ranks that train, but this process was started by itself or without a '
            f'launcher. Start the training with scripts/start_8card_training.sh, or give '
            f"--launcher to tools/train.py or to MMSegmentation's own tools/train.py. For one "
            f"process, use a source of type 'Prefetched' or 'Cached'."
        )
    # Checked before the links are opened, so that the encoders are not involved.
    wire = _dtype(wire_dtype)
    check_settings(pool_bytes, block_bytes, timeout, wire, ahead)
    if not peer_timeout > 0:
        raise ValueError(f'peer_timeout={peer_timeout!r}, expected a positive number of seconds.')
    heads, rank, replicas = int(os.environ['WORLD_SIZE']), int(os.environ['RANK']), around.replicas
    receivers = range(heads) if replicas is None else replicas.leaders()
    streamed: Optional[Streamed] = None
    if rank in receivers:
        links, digest = _meet_encoders(around, encoders, receivers, peer_timeout)
        streamed = Streamed(
            links,
            around.device,
            around.encode if local_fallback else None,
            digest,
            pool_bytes,
            block_bytes,
            timeout,
            wire,
            ahead,
            around.log,
        )
        if replicas is None:
            return streamed
    assert replicas is not None
    # The rank that receives from the encoders sends items on without blocks, but a pool has at
    # least one.
    blocks = 1 if streamed is not None else (pool_bytes or _REPLICA_POOL_BYTES) // block_bytes
    # The timeout is longer than one attempt, because the receiving rank ends an attempt and the
    # other ranks wait for the next one.
    return Replicated(
        ReplicaFeatures(
            replicas.group, BlockPool(blocks, block_bytes), around.device, 1.5 * timeout
        ),
        streamed,
        2 * encoders if ahead is None else ahead,
    )


def _meet_encoders(
    around: Surroundings, encoders: int, receivers: range, peer_timeout: float
) -> Tuple[List[Link], int]:
    """Connect to all encoders; return the links and the digest of the encoder's weights."""
    heads, rank = int(os.environ['WORLD_SIZE']), int(os.environ['RANK'])
    store = connect_store(around.timeout)
    if rank == 0:
        digest = share_encoder(around.encoder, store, 0, 1 + encoders, around.timeout)
    else:
        digest = total_digest(weight_digests(around.encoder))
    links = open_links(
        store, rank, range(heads, heads + encoders), receivers, around.timeout, peer_timeout
    )
    return [links[peer] for peer in sorted(links)], int(digest, 16)


def _dtype(name: Optional[str]) -> Optional[torch.dtype]:
    dtypes = {
        None: None,
        'float32': torch.float32,
        'float16': torch.float16,
        'bfloat16': torch.bfloat16,
    }
    if name not in dtypes:
        raise FeatureSourceError(
            f"wire_dtype={name!r}, expected None, 'float32', 'float16' or 'bfloat16'."
        )
    return dtypes[name]


_BUILDERS: Dict[str, Callable[..., FeatureSource]] = dict(
    Local=_local, Prefetched=_prefetched, Cached=_cached, Streamed=_streamed
)


def _near(name: str, known: Iterable[str]) -> str:
    matches = difflib.get_close_matches(name, list(known), 1)
    return f' Did you mean {matches[0]!r}?' if matches else ''
