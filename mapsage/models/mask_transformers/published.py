"""Published weights of EoMT and PMT under our names, and EoMT's under those of transformers.

Sources: tue-mps/eomt@7bd19dd and tue-mps/pmt@54d73c9 (names of modules, deltas, what a checkpoint
leaves out); transformers 5.23.0 (``models/eomt_dinov3``). A name that is not known stays as it is,
so that :func:`select` lists it.
"""
from __future__ import annotations

import re
from typing import Any, Collection, Dict, List, Mapping, NamedTuple, Sequence, Tuple

import torch

from mapsage.models.backbones.dinov3_weights import State, WeightsError, convert

Renames = Sequence[Tuple[str, str]]


class Published(NamedTuple):
    """A checkpoint's parts.

    Attributes:
        kind: Format, 'eomt' and 'pmt' by the authors' names, or 'huggingface'.
        head: Tensors of the decode head under our names.
        encoder: Tensors of the encoder under the names of ``DINOv3ViT``; empty if there are none.
    """

    kind: str
    head: State
    encoder: State


# A key that occurs in this format and in no other.
_SIGNATURES = {'network.q.weight': 'eomt', 'network.decoder.q.weight': 'pmt',
               'query.weight': 'huggingface'}
# What training alone needs, and what a model's own config decides.
_UNUSED = re.compile(r'criterion\.empty_weight|network\.encoder\.pixel_(mean|std)|pixel_(mean|std)'
                     r'|network\.encoder\.backbone\.rope_embeddings\..*|network\.rope\..*')
_HEAD: Dict[str, Renames] = {
    'eomt': ((r'^network\.q\.', 'queries.'),
             (r'^network\.(class_head|mask_head|upscale|attn_mask_probs)\b', r'\1')),
    'pmt': ((r'^network\.decoder\.q\.', 'queries.'),
            (r'^network\.decoder\.(class_head|mask_head|upscale|attn_mask_probs)\b', r'\1'),
            (r'^network\.decoder\.decoder_norm\.', 'norm.'),
            (r'^network\.decoder\.lateral_projections\.(\d+)\.', r'laterals.\1.mlp.'),
            (r'^network\.decoder\.scalers\.(\d+)$', r'laterals.\1.scale'),
            (r'^network\.bn\.(\d+)\.', r'laterals.\1.norm.')),
    'huggingface': ((r'^query\.', 'queries.'), (r'^class_predictor\.', 'class_head.'),
                    (r'^mask_head\.fc1\.', 'mask_head.0.'), (r'^mask_head\.fc2\.', 'mask_head.2.'),
                    (r'^mask_head\.fc3\.', 'mask_head.4.'),
                    (r'^upscale_block\.block\.(\d+)\.layernorm2d\.', r'upscale.\1.norm.'),
                    (r'^upscale_block\.block\.', 'upscale.')),
}
# To the names of transformers' DINOv3.
_ENCODER: Dict[str, Renames] = {
    'eomt': ((r'^network\.encoder\.backbone\.patch_embed\.', 'embeddings.'),
             (r'^network\.encoder\.backbone\.blocks\.', 'layer.'),
             (r'^network\.encoder\.backbone\.norm\.', 'norm.')),
    'pmt': ((r'^network\.decoder\.blocks\.', 'layer.'), ),
    'huggingface': ((r'^(embeddings\..*)$', r'\1'), (r'^layers\.', 'layer.'),
                    (r'^layernorm\.', 'norm.')),
}
# To the names of transformers, for the export.
_EXPORT: Renames = (
    (r'^decode_head\.queries\.', 'query.'), (r'^decode_head\.class_head\.', 'class_predictor.'),
    (r'^decode_head\.mask_head\.0\.', 'mask_head.fc1.'),
    (r'^decode_head\.mask_head\.2\.', 'mask_head.fc2.'),
    (r'^decode_head\.mask_head\.4\.', 'mask_head.fc3.'),
    (r'^decode_head\.upscale\.(\d+)\.norm\.', r'upscale_block.block.\1.layernorm2d.'),
    (r'^decode_head\.upscale\.', 'upscale_block.block.'),
    (r'^decode_head\.attn_mask_probs$', 'attn_mask_probs'),
    (r'^backbone\.patch_embed\.', 'embeddings.patch_embeddings.'),
    (r'^backbone\.(cls_token|register_tokens)$', r'embeddings.\1'),
    (r'^backbone\.norm\.', 'layernorm.'), (r'^backbone\.blocks\.', 'layers.'),
    (r'\.gamma_([12])$', r'.layer_scale\1.lambda1'), (r'\.attn\.proj\.', '.attention.o_proj.'),
    (r'\.attn\.([qv])_bias$', r'.attention.\1_proj.bias'), (r'\.mlp\.fc1\.', '.mlp.up_proj.'),
    (r'\.mlp\.fc2\.', '.mlp.down_proj.'), (r'\.mlp\.w1\.', '.mlp.gate_proj.'),
    (r'\.mlp\.w2\.', '.mlp.up_proj.'), (r'\.mlp\.w3\.', '.mlp.down_proj.'))
# What transformers computes itself, or keeps in the image processor.
_NOT_EXPORTED = re.compile(r'backbone\.(rope\.periods|pixel_mean|pixel_std)|data_preprocessor\..*')


def split(state: State) -> Published:
    """Return the parts of a checkpoint under our names.

    Raises:
        WeightsError: If it is of none of the formats, or a tensor is not finite.
    """
    state = {key.replace('._orig_mod', ''): value for key, value in state.items()}  # compiled
    kinds = [kind for key, kind in _SIGNATURES.items() if key in state]
    if not kinds:
        raise WeightsError(
            f'no EoMT or PMT: the keys begin with {sorted(state)[:5]}; expected one of '
            f'{list(_SIGNATURES)}. A checkpoint of a MapSage run is loaded by load_from')
    kind = kinds[0]
    head: State = {}
    encoder: State = {}
    for key, value in state.items():
        if _UNUSED.fullmatch(key):
            continue
        inner = _renamed(key, _ENCODER[kind])
        is_encoder = inner != key or (kind == 'huggingface' and key.startswith('embeddings.'))
        if is_encoder:
            encoder[inner] = value
        else:
            head[_renamed(key, _HEAD[kind])] = value
    if kind == 'pmt':
        # The decoder's blocks have the layout of the encoder's, which this key stands for.
        blocks = convert({'embeddings.cls_token': torch.zeros(1), **encoder})
        del blocks['cls_token']
        return Published(kind, {**head, **blocks}, {})
    return Published(kind, head, convert(encoder) if encoder else {})


def select(found: State, wanted: Mapping[str, torch.Tensor], what: str,
           optional: Collection[str] = ()) -> State:
    """Return exactly the wanted keys of a part.

    Args:
        found: Tensors under our names.
        wanted: Tensors to be replaced.
        what: Name of the part, for the message.
        optional: Keys that keep their own value where ``found`` lacks them.

    Raises:
        WeightsError: If keys are missing, left over or of another shape; it lists all of them.
    """
    missing = sorted(set(wanted) - set(found) - set(optional))
    left = sorted(set(found) - set(wanted))
    shapes = [f'{key} {tuple(found[key].shape)} instead of {tuple(wanted[key].shape)}'
              for key in wanted if key in found and found[key].shape != wanted[key].shape]
    if missing or left or shapes:
        hint = ('. Another number of classes: class_head=False in init_cfg leaves the class head '
                'as it is' if any(each.startswith('class_head') for each in shapes) else '')
        raise WeightsError(f'the weights of the {what} do not fit: missing {missing}, left over '
                           f'{left}, of another shape {shapes}{hint}')
    return {key: found.get(key, value) for key, value in wanted.items()}


def fitted_head(published: Published, head: Mapping[str, torch.Tensor], class_head: bool) -> State:
    """Return the state dict of a decode head from a checkpoint.

    A mask probability below 0 is the difference from the 1 that it began with, as delta checkpoints
    store buffers.

    Args:
        published: Parts of the checkpoint.
        head: State dict of the head.
        class_head: Whether to take the class head too, and not only the rest.

    Raises:
        WeightsError: If keys do not fit.
    """
    found = {key: value for key, value in published.head.items()
             if class_head or not key.startswith('class_head.')}
    kept: List[str] = ['rope.periods']
    kept += [key for key in head if key.startswith('class_head.') and not class_head]
    state = select(found, head, 'decode head', [key for key in kept if key in head])
    probabilities = state['attn_mask_probs']
    state['attn_mask_probs'] = torch.where(probabilities < 0, 1 + probabilities, probabilities)
    return state


def added(base: Mapping[str, torch.Tensor], delta: State) -> State:
    """Return the sum of an encoder and its delta; keys that only the base has stay."""
    return {key: value + delta[key].to(value.dtype) if key in delta else value
            for key, value in base.items()}


def to_huggingface(state: Mapping[str, torch.Tensor]) -> State:
    """Return an EoMT's state dict under the names of ``EomtDinov3ForUniversalSegmentation``.

    Raises:
        WeightsError: If a key has no name there, such as a key of another model.
    """
    theirs: State = {}
    unknown = []
    for key, value in state.items():
        if _NOT_EXPORTED.fullmatch(key):
            continue
        name = _renamed(key, _EXPORT)
        if name.endswith('.attn.qkv.weight'):
            base = name[:-len('attn.qkv.weight')]
            for letter, part in zip('qkv', value.chunk(3)):
                theirs[f'{base}attention.{letter}_proj.weight'] = part.clone()
        elif name.startswith(('decode_head.', 'backbone.')) or name == key:
            unknown.append(key)
        else:
            theirs[name] = value.clone()
    if unknown or 'query.weight' not in theirs:
        raise WeightsError(f'these weights are not those of an EoMT on a DINOv3ViT: {unknown[:5]} '
                           'have no name in transformers')
    return theirs


def is_not_exported(key: str) -> bool:
    """Return whether :func:`to_huggingface` leaves out a key of an EoMT, as transformers computes
    it or has it in the image processor.
    """
    return _NOT_EXPORTED.fullmatch(key) is not None


def huggingface_config(arch: Any, head: Any, image_size: int) -> Dict[str, Any]:
    """Return the arguments of ``EomtDinov3Config`` for a model.

    transformers computes gated MLPs and the mask heads with one activation, so that models with
    gated MLPs, whose mask heads have a GELU, cannot be described.

    Args:
        arch: Structure of the backbone, an ``Arch``.
        head: Decode head, an ``EoMTHead``.
        image_size: Side of the images in pixels, which that model needs to know.

    Raises:
        WeightsError: If the backbone has gated MLPs.
    """
    if arch.gated_mlp:
        raise WeightsError('EomtDinov3 of transformers has one activation for gated MLPs (SiLU) '
                           'and mask heads (here GELU), so that it would compute something else. '
                           "Only 'small', 'base' and 'large' can be exported")
    loss = head.loss_decode
    return dict(
        hidden_size=arch.embed_dims, num_hidden_layers=arch.num_layers,
        num_attention_heads=arch.num_heads, intermediate_size=arch.feedforward_channels,
        hidden_act='gelu',
        num_register_tokens=arch.num_registers, query_bias=arch.qkv_bias, key_bias=False,
        value_bias=arch.qkv_bias, layer_norm_eps=1e-5, image_size=image_size, patch_size=16,
        num_upscale_blocks=len(head.upscale), num_blocks=len(head.attn_mask_probs),
        num_queries=head.num_queries, mask_weight=loss.weights[0], dice_weight=loss.weights[1],
        class_weight=loss.weights[2], no_object_weight=loss.no_object_weight,
        id2label={number: str(number) for number in range(head.num_classes)})


def _renamed(key: str, renames: Renames) -> str:
    for pattern, replacement in renames:
        key = re.sub(pattern, replacement, key)
    return key
