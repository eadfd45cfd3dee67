"""A rank that computes the features of a frozen encoder for the ranks that train the head.

With ``feature_source=dict(type='Streamed', encoders=2)`` the last two ranks of a job do not train:
each runs an :class:`EncoderRank` instead of a Runner, and belongs to no process group. The heads
see a job without these ranks, because :func:`take_role` changes the launcher's variables. How
images and features travel is in `mapsage/extras/streaming/remote/` and `mapsage/extras/streaming/wire/`.
"""

from __future__ import annotations

import os
from typing import List, Optional

import torch
from mmengine.config import Config
from mmengine.logging import MMLogger
from mmengine.optim import AmpOptimWrapper
from mmengine.registry import MODELS, OPTIM_WRAPPERS, DefaultScope
from mmengine.runner import set_random_seed

from mapsage.accelerator import Accelerator, AcceleratorError, resolve_accelerator
from mapsage.distributed import local_rank
from mapsage.distributed.groups.process_group import select_device
from mapsage.distributed.launcher import ENCODERS_VARIABLE
from mapsage.distributed.wrappers import place_module
from mapsage.distributed.wrappers.memory_layout import put_channels_last
from mapsage.distributed.wrappers.optim_wrapper import parse_dtype
from mapsage.engine import startup
from mapsage.engine.env_cfg import parse_env_cfg
from mapsage.extras.streaming import Features, open_links, serve
from mapsage.extras.streaming.build import PEER_TIMEOUT
from mapsage.extras.streaming.encoder_gate import as_levels, check_frozen
from mapsage.extras.streaming.remote.encoder_weights import share_encoder
from mapsage.extras.streaming.remote.roles import (
    ENCODER,
    Role,
    check_ranks_per_head,
    connect_store,
    split_ranks,
)
from mapsage_launcher.ranks.leftover_encoders import note_encoder
from mapsage_launcher.stop_request import asked_launcher, leave

# Role of this process, once it is known. A list, so that it can be filled later.
_roles: List[Role] = []


def take_role(cfg: Config) -> Optional[EncoderRank]:
    """Split the job's ranks into encoders and heads.

    On a head, the launcher's variables are changed to describe a job that consists of heads only.

    Args:
        cfg: Config with ``feature_source`` of type ``'Streamed'``. Its ``launcher`` is set to
            ``'pytorch'``, because only the variables of that launcher are updated.

    Returns:
        The encoder if this rank encodes; None if it trains the head.

    Raises:
        RoleError: If the launcher has started too few ranks, or if ``ranks_per_head`` does not
            divide the number of ranks that train.
    """
    launcher = cfg.get('launcher', 'none')
    if launcher == 'none':
        # Testing needs no encoders. Training fails when its feature source is built.
        return None
    # A process may build several Runners, but has one role.
    if not _roles:
        startup.identify_process(launcher, parse_env_cfg(cfg.get('env_cfg') or {}).port)
        encoders = cfg.feature_source.get('encoders', 1)
        role = split_ranks(encoders, os.environ, separate_devices=False)
        check_ranks_per_head(cfg.feature_source.get('ranks_per_head', 1), role.heads)
        if role.name == ENCODER and not _uses_one_accelerator(cfg):
            role = split_ranks(encoders, os.environ, separate_devices=True)
        os.environ.update(role.environ)
        os.environ[ENCODERS_VARIABLE] = str(role.encoders)
        _roles.append(role)
    cfg.launcher = 'pytorch'
    return EncoderRank(cfg, _roles[0]) if _roles[0].name == ENCODER else None


def _uses_one_accelerator(cfg: Config) -> bool:
    """Return whether encoders and heads run on the same kind of device."""
    heads = parse_env_cfg(cfg.get('env_cfg') or {}).accelerator
    encoders = cfg.feature_source.get('accelerator') or heads
    if encoders == heads:
        return True
    try:
        return resolve_accelerator(encoders).name == resolve_accelerator(heads).name
    except AcceleratorError:
        # If the encoders cannot use their accelerator, train() raises the error again.
        return False


class EncoderRank:
    """Replaces the Runner on a rank that encodes.

    The encoder is built from ``model.backbone`` and gets its weights from the first head.

    Args:
        cfg: Config of the run.
        role: Role of this process.
    """

    def __init__(self, cfg: Config, role: Role) -> None:
        self._cfg, self._role = cfg, role
        self.logger = MMLogger.get_instance(f'encoder {role.index}')

    def train(self) -> None:
        """Encode for the heads until they have finished.

        A signal that asks the ranks to stop does not end the encoder. It ends when its heads have
        left. Heads on this machine tell the launcher whether they left early or completed the run.
        On a machine without heads the launcher cannot know; if it was asked to stop, this method
        assumes that they left early.

        Raises:
            StoppedEarly: If the launcher was asked to stop and no head runs on this machine.
            FeatureSourceError: If the encoder is not frozen.
            WeightsDifferError: If the heads have built a different encoder.
            LinkError: If heads do not connect in time. Heads that disconnect later are only logged;
                an encoder without heads has no work left, and ends.
        """
        note_encoder()
        self._serve()
        if not self._role.local_heads and asked_launcher():
            raise leave()

    def _serve(self) -> None:
        cfg, role, source = self._cfg, self._role, self._cfg.feature_source
        env = parse_env_cfg(cfg.get('env_cfg') or {})
        accelerator = startup.choose_accelerator(source.get('accelerator') or env.accelerator)
        select_device(accelerator)
        device = accelerator.device(local_rank())
        _choose_kernels(cfg, accelerator)
        accelerator.set_float32_precision(env.float32_matmul_precision, env.cudnn_allow_tf32)
        with DefaultScope.overwrite_default_scope(cfg.get('default_scope', 'mmengine')):
            encoder = MODELS.build(cfg.model.backbone)
        check_frozen(encoder)
        if env.channels_last:
            put_channels_last(encoder)
        encoder = place_module(encoder, accelerator, local_rank())
        store = connect_store(env.timeout)
        digest = share_encoder(encoder, store, 1 + role.index, 1 + role.encoders, env.timeout)
        amp = _is_amp(cfg)
        cast_dtype = parse_dtype(cfg.optim_wrapper.get('dtype')) or accelerator.amp_dtype

        def encode(images: torch.Tensor) -> Features:
            if not amp:
                features = encoder(images)
            else:
                with accelerator.autocast(cast_dtype):
                    features = encoder(images)
            accelerator.flush()
            return as_levels(features, encoder)

        links = open_links(
            store,
            role.heads + role.index,
            range(role.heads, role.heads + role.encoders),
            range(0, role.heads, source.get('ranks_per_head', 1)),
            env.timeout,
            source.get('peer_timeout', PEER_TIMEOUT),
        )
        self.logger.info(
            f'encoder {role.index} of {role.encoders} on {device} serves '
            f'{role.heads} head rank(s), weights {digest}'
        )
        counts = serve(
            [links[peer] for peer in sorted(links)],
            encode,
            device,
            int(digest, 16),
            self.logger.log,
        )
        numbers = ', '.join(f'{name} {value:.4g}' for name, value in counts.items())
        self.logger.info(f'encoder {role.index} has finished: {numbers}')

    def val(self) -> None:
        """Do nothing, because heads encode locally when they evaluate."""

    test = val


def _choose_kernels(cfg: Config, accelerator: Accelerator) -> None:
    """Choose kernels as the Runner of a head does, so that both compute the same bits."""
    if (cfg.get('env_cfg') or {}).get('cudnn_benchmark'):
        torch.backends.cudnn.benchmark = True
    randomness = dict(cfg.get('randomness') or {})
    if randomness.get('deterministic'):
        accelerator.make_deterministic()
        set_random_seed(randomness.get('seed'), deterministic=True)


def _is_amp(cfg: Config) -> bool:
    kind = cfg.optim_wrapper.get('type', 'OptimWrapper')
    with DefaultScope.overwrite_default_scope(cfg.get('default_scope', 'mmengine')):
        wrapper = OPTIM_WRAPPERS.get(kind) if isinstance(kind, str) else kind
    return isinstance(wrapper, type) and issubclass(wrapper, AmpOptimWrapper)
