"""Reading DINOv3 weight files: their format, variant and training data, and the key renames.

A file goes through :func:`read_checkpoint` (original names), :func:`convert` (names of this
backbone) and :func:`fit` (exactly the model's keys). Every missing, unused or misshapen tensor is
an error, because MMEngine's non-strict loading would leave random weights behind.

Sources: facebookresearch/dinov3@6876159 (hub), transformers 4.57.6 and 5.23.0
(``models/dinov3_vit``; 5.x prefixes the layers with ``model.``), timm 1.0.31 (``models/eva.py``).
"""

from __future__ import annotations

import re
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch

from .weight_files import State, WeightsError, read_tensors

__all__ = [
    'ARCHS',
    'NORMALIZATION',
    'Arch',
    'State',
    'WeightsError',
    'convert',
    'describe',
    'detect_format',
    'fit',
    'looks_like',
    'read_checkpoint',
    'training_data',
    'variant_of',
]

# Where the official files are, for messages.
_ORIGIN = (
    'The official files are at https://github.com/facebookresearch/dinov3 (after accepting '
    'their license); put them into weights/, or name their folder: MAPSAGE_DINOV3=<folder>.'
)


class Arch(NamedTuple):
    """Structure of a DINOv3 ViT; all of them have patches of 16 x 16 pixels.

    ``feedforward_channels`` is the actual hidden width, for gated MLPs too. ``qkv_bias`` refers to
    queries and values only; keys never have a bias.
    """

    embed_dims: int
    num_layers: int
    num_heads: int
    feedforward_channels: int
    gated_mlp: bool = False
    num_registers: int = 4
    qkv_bias: bool = True


# Source: dinov3/hub/backbones.py; the width of a SwiGLU is 2/3 of embed_dims * ffn_ratio
# (layers/ffn_layers.py).
ARCHS: Dict[str, Arch] = {
    'small': Arch(384, 12, 6, 1536),
    'small+': Arch(384, 12, 6, 1536, gated_mlp=True),
    'base': Arch(768, 12, 12, 3072),
    'large': Arch(1024, 24, 16, 4096),
    'huge+': Arch(1280, 32, 20, 5120, gated_mlp=True),
    '7B': Arch(4096, 40, 32, 8192, gated_mlp=True, qkv_bias=False),
}

# (mean, std) of RGB in 0..255: ImageNet's for web; from the official README for sat493m.
NORMALIZATION: Dict[str, Tuple[Sequence[float], Sequence[float]]] = {
    'web': ((123.675, 116.28, 103.53), (58.395, 57.12, 57.375)),
    'sat493m': ((109.65, 104.805, 75.48), (54.315, 39.78, 36.465)),
}

# Each format has a key that no other format has.
_SIGNATURES = (
    ('mapsage', re.compile(r'rope\.periods')),
    ('huggingface', re.compile(r'embeddings\.cls_token')),
    ('hub', re.compile(r'blocks\.\d+\.ls1\.gamma')),
    ('timm', re.compile(r'blocks\.\d+\.gamma_1')),
)

# Keys that only pre-training needs: the mask token, and the norm of local crops' class tokens.
_UNUSED = re.compile(r'(embeddings\.)?mask_token|local_cls_norm\.(weight|bias)')

_RENAMES: Dict[str, Sequence[Tuple[str, str]]] = {
    'mapsage': (),
    'hub': (
        (r'^storage_tokens$', 'register_tokens'),
        (r'^patch_embed\.proj\.', 'patch_embed.'),
        (r'^rope_embed\.periods$', 'rope.periods'),
        (r'\.ls([12])\.gamma$', r'.gamma_\1'),
    ),
    'timm': (
        (r'^reg_token$', 'register_tokens'),
        (r'^patch_embed\.proj\.', 'patch_embed.'),
    ),
    'huggingface': (
        (r'^embeddings\.(cls_token|register_tokens)$', r'\1'),
        (r'^embeddings\.patch_embeddings\.', 'patch_embed.'),
        (r'^(model\.)?layer\.(\d+)\.', r'blocks.\2.'),
        (r'\.attention\.([qkv])_proj\.bias$', r'.attn.\1_bias'),
        (r'\.attention\.([qkv])_proj\.weight$', r'.attn.\1_weight'),
        (r'\.attention\.o_proj\.', '.attn.proj.'),
        (r'\.layer_scale([12])\.lambda1$', r'.gamma_\1'),
    ),
}
_GATED_MLP = {
    'timm': (('fc1_g', 'w1'), ('fc1_x', 'w2'), ('fc2', 'w3')),
    'huggingface': (('gate_proj', 'w1'), ('up_proj', 'w2'), ('down_proj', 'w3')),
}
_PLAIN_MLP = {'huggingface': (('up_proj', 'fc1'), ('down_proj', 'fc2'))}


def read_checkpoint(path: str, prefix: str = '') -> State:
    """Read the tensors of a file or folder to the CPU, under their original names.

    Arguments and errors are those of :func:`mapsage.models.backbones.weight_files.read_tensors`.
    """
    return read_tensors(path, prefix, model='a DINOv3 ViT', origin=_ORIGIN)


def detect_format(state: State) -> str:
    """Return the format: 'hub', 'huggingface', 'timm' or 'mapsage' (saved from this backbone).

    Raises:
        WeightsError: If no key is typical of one of these formats.
    """
    for name, signature in _SIGNATURES:
        if any(signature.fullmatch(key) for key in state):
            return name
    raise WeightsError(
        f'not a DINOv3 ViT: the keys begin with {sorted(state)[:5]}; expected the names of the '
        'official hub, Hugging Face, timm or this backbone. If the keys have a prefix, name it: '
        "init_cfg=dict(type='Pretrained', checkpoint=..., prefix='backbone.')"
    )


def convert(state: State) -> State:
    """Rename a checkpoint's tensors to this backbone's names; unknown keys keep their names.

    Only tensors that the backbone does not need are dropped: ``mask_token`` and
    ``local_cls_norm``, which only pre-training uses, empty register tokens, and the bias of the
    attention keys, after a check that it is zero.

    Raises:
        WeightsError: If a tensor is not finite, two tensors get the same name, or the bias of the
            attention keys is not zero; the message lists the names.
    """
    source_format = detect_format(state)
    not_finite = [
        key
        for key, value in state.items()
        if value.is_floating_point() and not bool(torch.isfinite(value).all())
    ]
    if not_finite:
        raise WeightsError(
            f'not finite: {not_finite}; the file is damaged or was saved before it '
            'had weights (an unset bias_mask is NaN). Download it again'
        )
    gated = any(
        '.mlp.w3.' in key or '.mlp.fc1_g.' in key or '.mlp.gate_proj.' in key for key in state
    )
    mlp_names = (_GATED_MLP if gated else _PLAIN_MLP).get(source_format, ())
    renames = [
        *_RENAMES[source_format],
        *((rf'\.mlp\.{old}\.', f'.mlp.{new}.') for old, new in mlp_names),
    ]
    converted: State = {}
    duplicates: List[str] = []
    for key, value in state.items():
        if _UNUSED.fullmatch(key) and source_format != 'mapsage':
            continue
        for pattern, replacement in renames:
            key = re.sub(pattern, replacement, key)
        if key in converted:
            duplicates.append(key)
        if key != 'register_tokens' or value.numel():
            converted[key] = value
    if duplicates:
        raise WeightsError(
            f'the file has two tensors for each of these names: {duplicates}; it '
            'mixes the names of two formats'
        )
    _split_hub_bias(converted)
    _join_projections(converted)
    return converted


def fit(state: State, target: Mapping[str, torch.Tensor], arch: Arch) -> Tuple[State, List[str]]:
    """Select exactly the keys of a backbone from a converted checkpoint.

    Blocks that the backbone does not build are dropped. Keys that some formats lack are filled in:
    RoPE periods and pixel statistics with the computed values, and the biases of queries and
    values with zeros, if the file has none of them (timm's names without ``_qkvb`` mean that).

    Args:
        state: Converted checkpoint.
        target: State dict of the backbone.
        arch: Structure of the whole model, including blocks that are not built.

    Returns:
        State dict to load, and the keys that were filled in, for the log.

    Raises:
        WeightsError: If the weights are of another variant, or keys are missing, left over or of
            another shape; the message lists all of them.
    """
    built = {int(key.split('.')[1]) for key in target if key.startswith('blocks.')}
    unbuilt = tuple(f'blocks.{i}.' for i in range(len(built), arch.num_layers))
    fitted = {
        key: value for key, value in state.items() if not unbuilt or not key.startswith(unbuilt)
    }
    _check_variant(state, arch)
    filled = [key for key in ('rope.periods', 'pixel_mean', 'pixel_std') if key not in fitted]
    if not any(key.endswith(('attn.q_bias', 'attn.v_bias')) for key in state):
        filled += [key for key in target if key.endswith(('attn.q_bias', 'attn.v_bias'))]
    for key in filled:
        if key in target:
            is_bias = key.endswith('_bias')
            fitted[key] = torch.zeros_like(target[key]) if is_bias else target[key].clone()
    # The backbone was built with final_norm=False.
    if 'norm.weight' not in target:
        fitted = {key: value for key, value in fitted.items() if not key.startswith('norm.')}
    missing, left_over = sorted(set(target) - set(fitted)), sorted(set(fitted) - set(target))
    shapes = [
        f'{key} {tuple(fitted[key].shape)} instead of {tuple(target[key].shape)}'
        for key in target
        if key in fitted and fitted[key].shape != target[key].shape
    ]
    if missing or left_over or shapes:
        raise WeightsError(
            f'the weights do not fit: missing {missing}, left over {left_over}, of '
            f'another shape {shapes}; arch={describe(arch)}, the weights look like '
            f'{looks_like(state)}'
        )
    return fitted, [key for key in filled if key in target]


def looks_like(state: State) -> str:
    """Return the probable variant of a converted checkpoint, for messages."""
    try:
        return repr(variant_of(state))
    except WeightsError:
        return str(_read_structure(state))


def variant_of(state: State) -> str:
    """Return the name in :data:`ARCHS` of a converted checkpoint's architecture.

    Raises:
        WeightsError: If it matches none of them.
    """
    structure = _read_structure(state)
    names = [name for name, arch in ARCHS.items() if structure.items() <= arch._asdict().items()]
    if len(names) != 1:
        raise WeightsError(
            f'a DINOv3 ViT with {structure}, expected one of {list(ARCHS)}; for a '
            'file of another size, set arch to a dict'
        )
    return names[0]


def describe(arch: Arch) -> str:
    """Return the name of an architecture, or its fields if it has no name."""
    names = [name for name, known in ARCHS.items() if known == arch]
    return repr(names[0]) if names else str(dict(arch._asdict()))


def training_data(path: str, state: State, arch: Arch) -> Tuple[Optional[str], str]:
    """Return which images the weights were trained on, which decides their normalization.

    Args:
        path: Path of the weights; official file names contain ``sat493m`` or ``lvd1689m``.
        state: Checkpoint under its original names.
        arch: Structure of the model.

    Returns:
        ``'web'``, ``'sat493m'``, or None if unknown, and the reason as text.
    """
    if detect_format(state) == 'hub' and arch == ARCHS['large']:
        # Of the two ViT-L files, only the one for satellite images has this norm, even if renamed.
        local = any(key.startswith('local_cls_norm.') for key in state)
        return (
            'sat493m' if local else 'web',
            f'the file has {"a" if local else "no"} local_cls_norm',
        )
    for name in reversed(re.split(r'[/\\]', path)):
        if 'sat493m' in name:
            return 'sat493m', f'the name {name!r}'
        if 'lvd1689m' in name:
            return 'web', f'the name {name!r}'
    if arch in [ARCHS[name] for name in ('small', 'small+', 'base', 'huge+')]:
        return 'web', f'satellite weights exist for large and 7B only, this is {describe(arch)}'
    return None, f'neither its keys nor {path!r} tell'


def _read_structure(state: State) -> Dict[str, object]:
    """Return the fields of :class:`Arch` that the tensors of a converted checkpoint reveal."""
    blocks = [int(key.split('.')[1]) for key in state if re.match(r'blocks\.\d+\.', key)]
    gated = 'blocks.0.mlp.w1.weight' in state
    width = state.get('blocks.0.mlp.w1.weight' if gated else 'blocks.0.mlp.fc1.weight')
    fields: Dict[str, object] = dict(num_layers=max(blocks, default=-1) + 1, gated_mlp=gated)
    if 'cls_token' in state:
        fields['embed_dims'] = state['cls_token'].shape[-1]
    if width is not None:
        fields['feedforward_channels'] = width.shape[0]
    return fields


def _check_variant(state: State, arch: Arch) -> None:
    structure, expected = _read_structure(state), arch._asdict()
    # The number of layers is not compared, because a backbone may build fewer; a wrong number
    # appears as missing or left-over keys.
    different = [
        key
        for key in ('embed_dims', 'feedforward_channels', 'gated_mlp')
        if key in structure and structure[key] != expected[key]
    ]
    if different:
        raise WeightsError(
            f'the weights look like {looks_like(state)}, but arch={describe(arch)} '
            f'(different {", ".join(different)}); set arch to match the weights'
        )


def _split_hub_bias(state: State) -> None:
    """Replace ``qkv.bias``, (3 embed_dims,), and its ``bias_mask`` by ``q_bias`` and ``v_bias``."""
    for key in [key for key in state if key.endswith('.attn.qkv.bias')]:
        bias = state.pop(key)
        bias = bias * state.pop(f'{key}_mask', torch.ones_like(bias)).to(bias.dtype)
        base = key[: -len('qkv.bias')]
        state[f'{base}q_bias'], state[f'{base}k_bias'], state[f'{base}v_bias'] = bias.chunk(3)
    for key in [key for key in state if key.endswith('.attn.k_bias')]:
        # Compared with 0 first, because any() of a parameter fails in torch 1.10.
        if bool((state[key] != 0).any()):
            raise WeightsError(
                f'{key} is not zero, but DINOv3 masks the bias of its attention '
                'keys; these are weights of another model'
            )
        del state[key]


def _join_projections(state: State) -> None:
    """Replace Hugging Face's three weights, (embed_dims, embed_dims), by one ``qkv.weight``."""
    for key in [key for key in state if key.endswith('.attn.q_weight')]:
        base = key[: -len('q_weight')]
        keys = [f'{base}{letter}_weight' for letter in 'qkv']
        if all(key in state for key in keys):
            state[f'{base}qkv.weight'] = torch.cat([state.pop(key) for key in keys])
