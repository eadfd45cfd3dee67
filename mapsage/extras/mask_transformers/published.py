"""Key renames between published EoMT and PMT checkpoints, MapSage and transformers.

Import goes through :func:`split_checkpoint`, which renames the keys, and :func:`fit_head`, which
checks them; :func:`to_huggingface` is the export. A key that no rule renames keeps its name, so
:func:`select_weights` reports it instead of dropping it.

Sources: tue-mps/eomt@7bd19dd and tue-mps/pmt@54d73c9 (module names, deltas, what a checkpoint
omits); transformers 5.23.0 (``models/eomt_dinov3``).
"""

from __future__ import annotations

import re
from typing import Any, Collection, Dict, List, Mapping, NamedTuple, Sequence, Tuple

import torch

from mapsage.models.backbones.dinov3_weights import Arch, State, WeightsError, convert

from .query_head import QueryHead

Renames = Sequence[Tuple[str, str]]


class Published(NamedTuple):
    """A published checkpoint, split and renamed.

    Attributes:
        kind: Format: 'eomt' or 'pmt' for the authors' files, or 'huggingface'.
        head: Tensors of the decode head, under MapSage's names.
        encoder: Tensors of the encoder, under the names of ``DINOv3ViT``; empty if the checkpoint
            has none.
    """

    kind: str
    head: State
    encoder: State


# Each format has a key that no other format has.
_SIGNATURES = {
    'network.q.weight': 'eomt',
    'network.decoder.q.weight': 'pmt',
    'query.weight': 'huggingface',
}
# Keys that only training needs, or that the model's config determines.
_UNUSED = re.compile(
    r'criterion\.empty_weight|network\.encoder\.pixel_(mean|std)|pixel_(mean|std)'
    r'|network\.encoder\.backbone\.rope_embeddings\..*|network\.rope\..*'
)
_HEAD: Dict[str, Renames] = {
    'eomt': (
        (r'^network\.q\.', 'queries.'),
        (r'^network\.(class_head|mask_head|upscale|attn_mask_probs)\b', r'\1'),
    ),
    'pmt': (
        (r'^network\.decoder\.q\.', 'queries.'),
        (r'^network\.decoder\.(class_head|mask_head|upscale|attn_mask_probs)\b', r'\1'),
        (r'^network\.decoder\.decoder_norm\.', 'norm.'),
        (r'^network\.decoder\.lateral_projections\.(\d+)\.', r'laterals.\1.mlp.'),
        (r'^network\.decoder\.scalers\.(\d+)$', r'laterals.\1.scale'),
        (r'^network\.bn\.(\d+)\.', r'laterals.\1.norm.'),
    ),
    'huggingface': (
        (r'^query\.', 'queries.'),
        (r'^class_predictor\.', 'class_head.'),
        (r'^mask_head\.fc1\.', 'mask_head.0.'),
        (r'^mask_head\.fc2\.', 'mask_head.2.'),
        (r'^mask_head\.fc3\.', 'mask_head.4.'),
        (r'^upscale_block\.block\.(\d+)\.layernorm2d\.', r'upscale.\1.norm.'),
        (r'^upscale_block\.block\.', 'upscale.'),
    ),
}
# Renames to the names of transformers' DINOv3, which convert() of dinov3_weights.py understands.
_ENCODER: Dict[str, Renames] = {
    'eomt': (
        (r'^network\.encoder\.backbone\.patch_embed\.', 'embeddings.'),
        (r'^network\.encoder\.backbone\.blocks\.', 'layer.'),
        (r'^network\.encoder\.backbone\.norm\.', 'norm.'),
    ),
    'pmt': ((r'^network\.decoder\.blocks\.', 'layer.'),),
    'huggingface': (
        (r'^(embeddings\..*)$', r'\1'),
        (r'^layers\.', 'layer.'),
        (r'^layernorm\.', 'norm.'),
    ),
}
# Renames to the names of transformers, for the export.
_EXPORT: Renames = (
    (r'^decode_head\.queries\.', 'query.'),
    (r'^decode_head\.class_head\.', 'class_predictor.'),
    (r'^decode_head\.mask_head\.0\.', 'mask_head.fc1.'),
    (r'^decode_head\.mask_head\.2\.', 'mask_head.fc2.'),
    (r'^decode_head\.mask_head\.4\.', 'mask_head.fc3.'),
    (r'^decode_head\.upscale\.(\d+)\.norm\.', r'upscale_block.block.\1.layernorm2d.'),
    (r'^decode_head\.upscale\.', 'upscale_block.block.'),
    (r'^decode_head\.attn_mask_probs$', 'attn_mask_probs'),
    (r'^backbone\.patch_embed\.', 'embeddings.patch_embeddings.'),
    (r'^backbone\.(cls_token|register_tokens)$', r'embeddings.\1'),
    (r'^backbone\.norm\.', 'layernorm.'),
    (r'^backbone\.blocks\.', 'layers.'),
    (r'\.gamma_([12])$', r'.layer_scale\1.lambda1'),
    (r'\.attn\.proj\.', '.attention.o_proj.'),
    (r'\.attn\.([qv])_bias$', r'.attention.\1_proj.bias'),
    (r'\.mlp\.fc1\.', '.mlp.up_proj.'),
    (r'\.mlp\.fc2\.', '.mlp.down_proj.'),
    (r'\.mlp\.w1\.', '.mlp.gate_proj.'),
    (r'\.mlp\.w2\.', '.mlp.up_proj.'),
    (r'\.mlp\.w3\.', '.mlp.down_proj.'),
)
# Keys that transformers computes itself or keeps in the image processor.
_NOT_EXPORTED = re.compile(r'backbone\.(rope\.periods|pixel_mean|pixel_std)|data_preprocessor\..*')


def split_checkpoint(state: State) -> Published:
    """Split a published checkpoint into head and encoder, and rename their keys.

    Raises:
        WeightsError: If the checkpoint has another format, or a tensor is not finite.
    """
    # torch.compile adds '._orig_mod' to the names.
    state = {key.replace('._orig_mod', ''): value for key, value in state.items()}
    kinds = [kind for key, kind in _SIGNATURES.items() if key in state]
    if not kinds:
        raise WeightsError(
            f'not an EoMT or PMT: the keys begin with {sorted(state)[:5]}; expected one of '
            f'{list(_SIGNATURES)}. To load a checkpoint of a MapSage run, use load_from'
        )
    kind = kinds[0]
    head: State = {}
    encoder: State = {}
    for key, value in state.items():
        if _UNUSED.fullmatch(key):
            continue
        encoder_key = _rename(key, _ENCODER[kind])
        # In files of transformers, the embeddings already have the target names.
        is_encoder = encoder_key != key or (kind == 'huggingface' and key.startswith('embeddings.'))
        if is_encoder:
            encoder[encoder_key] = value
        else:
            head[_rename(key, _HEAD[kind])] = value
    if kind == 'pmt':
        # The decoder's blocks have the layout of DINOv3's blocks, so convert() renames them. The
        # extra key makes convert() recognize the format.
        blocks = convert({'embeddings.cls_token': torch.zeros(1), **encoder})
        del blocks['cls_token']
        return Published(kind, {**head, **blocks}, {})
    return Published(kind, head, convert(encoder) if encoder else {})


def select_weights(
    weights: State, target: Mapping[str, torch.Tensor], module: str, optional: Collection[str] = ()
) -> State:
    """Return a state dict with exactly the keys of a module.

    Args:
        weights: Tensors of the checkpoint, under MapSage's names.
        target: State dict of the module.
        module: Name of the module, for the message.
        optional: Keys that keep the module's value if the checkpoint lacks them.

    Raises:
        WeightsError: If keys are missing, left over or of another shape; the message lists all of
            them.
    """
    missing = sorted(set(target) - set(weights) - set(optional))
    left_over = sorted(set(weights) - set(target))
    shapes = [
        f'{key} {tuple(weights[key].shape)} instead of {tuple(target[key].shape)}'
        for key in target
        if key in weights and weights[key].shape != target[key].shape
    ]
    if missing or left_over or shapes:
        hint = (
            '. The number of classes is different: to skip the class head, set '
            'class_head=False in init_cfg'
            if any(shape.startswith('class_head') for shape in shapes)
            else ''
        )
        raise WeightsError(
            f'the weights of the {module} do not fit: missing {missing}, left over '
            f'{left_over}, of another shape {shapes}{hint}'
        )
    return {key: weights.get(key, value) for key, value in target.items()}


def fit_head(published: Published, head: Mapping[str, torch.Tensor], class_head: bool) -> State:
    """Return the state dict of a decode head with a checkpoint's weights.

    Args:
        published: Published checkpoint.
        head: State dict of the head.
        class_head: Whether to load the class head too.

    Raises:
        WeightsError: If keys do not fit.
    """
    weights = {
        key: value
        for key, value in published.head.items()
        if class_head or not key.startswith('class_head.')
    }
    optional: List[str] = ['rope.periods']
    optional += [key for key in head if key.startswith('class_head.') and not class_head]
    state = select_weights(weights, head, 'decode head', [key for key in optional if key in head])
    # Delta checkpoints store buffers as differences too; the probabilities started at 1, so a
    # difference is below 0.
    probabilities = state['attn_mask_probs']
    state['attn_mask_probs'] = torch.where(probabilities < 0, 1 + probabilities, probabilities)
    return state


def add_delta(base: Mapping[str, torch.Tensor], delta: State) -> State:
    """Return the sum of an encoder and its delta; keys that the delta lacks stay unchanged."""
    return {
        key: value + delta[key].to(value.dtype) if key in delta else value
        for key, value in base.items()
    }


def to_huggingface(state: Mapping[str, torch.Tensor]) -> State:
    """Rename an EoMT's state dict to the names of ``EomtDinov3ForUniversalSegmentation``.

    Raises:
        WeightsError: If a key has no counterpart there, such as a key of another model.
    """
    exported: State = {}
    unknown = []
    for key, value in state.items():
        if _NOT_EXPORTED.fullmatch(key):
            continue
        name = _rename(key, _EXPORT)
        if name.endswith('.attn.qkv.weight'):
            base = name[: -len('attn.qkv.weight')]
            for letter, projection in zip('qkv', value.chunk(3)):
                exported[f'{base}attention.{letter}_proj.weight'] = projection.clone()
        elif name.startswith(('decode_head.', 'backbone.')) or name == key:
            unknown.append(key)
        else:
            exported[name] = value.clone()
    if unknown or 'query.weight' not in exported:
        raise WeightsError(
            f'these are not the weights of an EoMT on a DINOv3ViT: {unknown[:5]} '
            'have no name in transformers'
        )
    return exported


def is_not_exported(key: str) -> bool:
    """Return whether :func:`to_huggingface` skips a key of an EoMT.

    transformers computes such values itself or keeps them in the image processor.
    """
    return _NOT_EXPORTED.fullmatch(key) is not None


def huggingface_config(arch: Arch, head: QueryHead, image_size: int) -> Dict[str, Any]:
    """Return the arguments of ``EomtDinov3Config`` for a model.

    transformers has one setting for the activation of gated MLPs and of mask heads. It cannot
    describe models with gated MLPs (SiLU), because their mask heads use GELU.

    Args:
        arch: Structure of the backbone.
        head: Decode head, an ``EoMTHead``.
        image_size: Side of the images in pixels, which is fixed in transformers.

    Raises:
        WeightsError: If the backbone has gated MLPs.
    """
    if arch.gated_mlp:
        raise WeightsError(
            'EomtDinov3 of transformers has one activation for gated MLPs (SiLU) '
            'and mask heads (here GELU), so its output would be different. Only '
            "'small', 'base' and 'large' can be exported"
        )
    loss = head.loss_decode
    return dict(
        hidden_size=arch.embed_dims,
        num_hidden_layers=arch.num_layers,
        num_attention_heads=arch.num_heads,
        intermediate_size=arch.feedforward_channels,
        hidden_act='gelu',
        num_register_tokens=arch.num_registers,
        query_bias=arch.qkv_bias,
        key_bias=False,
        value_bias=arch.qkv_bias,
        layer_norm_eps=1e-5,
        image_size=image_size,
        patch_size=16,
        num_upscale_blocks=len(head.upscale),
        num_blocks=len(head.attn_mask_probs),
        num_queries=head.num_queries,
        mask_weight=loss.weights[0],
        dice_weight=loss.weights[1],
        class_weight=loss.weights[2],
        no_object_weight=loss.no_object_weight,
        id2label={number: str(number) for number in range(head.num_classes)},
    )


def _rename(key: str, renames: Renames) -> str:
    for pattern, replacement in renames:
        key = re.sub(pattern, replacement, key)
    return key
