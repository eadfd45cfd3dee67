"""A rank that computes the features of a frozen encoder for the ranks that train the head."""
from __future__ import annotations

import os
from typing import Optional

import mmengine.device.utils
import torch
from mmengine.config import Config
from mmengine.logging import MMLogger
from mmengine.registry import MODELS, DefaultScope

from mapsage.accelerator import resolve_accelerator, set_current_accelerator
from mapsage.distributed import apply_launcher_environment, local_rank
from mapsage.distributed.process_group import check_ranks_fit
from mapsage.hooks.encoder_gate import check_frozen
from mapsage.hooks.feature_sources import SILENCE
from mapsage.streaming import Features, open_links, serve
from mapsage.streaming.roles import (
    ENCODER,
    ENCODERS_VARIABLE,
    Role,
    connect_store,
    split_ranks,
)
from mapsage.streaming.weights import share_encoder
from mapsage.wrappers import place_module

from .env_cfg import parse_env_cfg
from .optim_wrapper import parse_dtype


def take_role(cfg: Config) -> Optional[EncoderRank]:
    """Split the job's ranks into encoders and heads; return the encoder if this rank is one.

    A head's launcher variables are set so that it sees the heads alone.

    Args:
        cfg: With ``feature_source`` of type ``'Streamed'``; ``launcher`` is set to ``'pytorch'``,
            whose variables hold the truth from now on.

    Raises:
        RoleError: If the launcher started too few ranks.
    """
    launcher = cfg.get('launcher', 'none')
    if launcher == 'none':
        return None  # may be a test of the model; a training says what is missing
    apply_launcher_environment(launcher)
    source = cfg.feature_source
    wanted = parse_env_cfg(cfg.get('env_cfg') or {}).accelerator
    own = source.get('accelerator') or wanted
    role = split_ranks(source.get('encoders', 1), os.environ,
                       resolve_accelerator(own).name != resolve_accelerator(wanted).name)
    os.environ.update(role.environ)
    os.environ[ENCODERS_VARIABLE] = str(role.encoders)
    cfg.launcher = 'pytorch'
    return EncoderRank(cfg, role) if role.name == ENCODER else None


class EncoderRank:
    """Stands where a Runner would on a rank that encodes; it is in no process group.

    The encoder is built from ``model.backbone``, and gets its weights from the first head.

    Args:
        cfg: The config of the run.
        role: What this process is.
    """

    def __init__(self, cfg: Config, role: Role) -> None:
        self._cfg, self._role = cfg, role
        self.logger = MMLogger.get_instance(f'encoder {role.index}')

    def train(self) -> None:
        """Encode for the heads until they have finished.

        Raises:
            FeatureSourceError: If something in the encoder trains.
            WeightsDifferError: If the heads built another encoder.
            LinkError: If heads do not come, or all go away without a word.
        """
        cfg, role, source = self._cfg, self._role, self._cfg.feature_source
        env = parse_env_cfg(cfg.get('env_cfg') or {})
        accelerator = set_current_accelerator(
            resolve_accelerator(source.get('accelerator') or env.accelerator))
        mmengine.device.utils.DEVICE = accelerator.device_type
        check_ranks_fit(accelerator, int(os.environ['LOCAL_WORLD_SIZE']))
        accelerator.set_device(local_rank())
        device = accelerator.device(local_rank())
        with DefaultScope.overwrite_default_scope(cfg.get('default_scope', 'mmengine')):
            encoder = MODELS.build(cfg.model.backbone)
        check_frozen(encoder)
        encoder = place_module(encoder, accelerator, local_rank())
        store = connect_store(env.timeout)
        digest = share_encoder(encoder, store, 1 + role.index, 1 + role.encoders, env.timeout)
        amp = cfg.optim_wrapper.get('type') == 'AmpOptimWrapper'
        cast_dtype = parse_dtype(cfg.optim_wrapper.get('dtype')) or accelerator.amp_dtype

        def encode(images: torch.Tensor) -> Features:
            if not amp:
                features = tuple(encoder(images))
            else:
                with accelerator.autocast(cast_dtype):
                    features = tuple(encoder(images))
            accelerator.flush()
            return features

        links = open_links(store, role.heads + role.index,
                           range(role.heads, role.heads + role.encoders), range(role.heads),
                           env.timeout, source.get('silence', SILENCE))
        self.logger.info(f'encoder {role.index} of {role.encoders} on {device} serves '
                         f'{role.heads} head rank(s), weights {digest}')
        counts = serve([links[peer] for peer in sorted(links)], encode, device, int(digest, 16))
        told = ', '.join(f'{name} {value:.4g}' for name, value in counts.items())
        self.logger.info(f'encoder {role.index} has finished: {told}')

    def val(self) -> None:
        """Do nothing: heads encode in place when they evaluate."""

    test = val

