"""Export of an EoMT as a folder that transformers reads: weights, config, image processor.

The export reads its file back and compares it bit by bit, so a finished export is known to be
complete. Key renames are in ``published.py``.

Source: transformers 5.23.0, ``models/eomt_dinov3`` and ``models/eomt/image_processing_eomt.py``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Sequence, Set, Tuple

import torch
from mmseg.models.segmentors import EncoderDecoder

from mapsage.models.backbones.dinov3_weights import State, WeightsError

from . import published

WEIGHTS_FILE, CONFIG_FILE = 'model.safetensors', 'config.json'
PROCESSOR_FILE = 'preprocessor_config.json'
# Class weights of the loss in transformers.
_LOSS_KEY = 'criterion.empty_weight'


class Exported(NamedTuple):
    """Summary of an export.

    Attributes:
        tensors: Number of tensors in the file.
        numbers: Number of elements in them.
        left_out: Sorted names of the model's tensors that are not in the file.
    """

    tensors: int
    numbers: int
    left_out: List[str]


def write_huggingface(
    model: EncoderDecoder, folder: Path, image_size: int, classes: Sequence[str]
) -> Exported:
    """Write an EoMT for ``EomtDinov3ForUniversalSegmentation.from_pretrained``.

    The file is read back, and every tensor of the model is compared with it bit by bit.

    The mask probability of a block becomes 1 if the block masks in evaluation here (above 0.5), and
    0 otherwise, because transformers would draw masks at random in evaluation too.

    Args:
        model: EoMT without adapters, for the bands red, green, blue.
        folder: Folder of the files, created if missing.
        image_size: Side of the images in pixels, a multiple of 16; it is fixed in transformers.
        classes: Names of the classes, in the order of their indices.

    Raises:
        WeightsError: If transformers cannot describe the model, or a tensor in the file differs
            from the model's.
    """
    from safetensors.torch import load_file, save_file

    head, backbone = model.decode_head, model.backbone
    if image_size < 16 or image_size % 16:
        raise WeightsError(f'image_size={image_size}, expected a multiple of 16 pixels')
    config = published.huggingface_config(backbone.arch, head, image_size)
    weights = dict(model.state_dict())
    weights['decode_head.attn_mask_probs'] = (weights['decode_head.attn_mask_probs'] > 0.5).float()
    state = published.to_huggingface(weights)
    state[_LOSS_KEY] = torch.ones(head.num_classes + 1)
    state[_LOSS_KEY][-1] = head.loss_decode.no_object_weight
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {key: value.detach().cpu().contiguous() for key, value in state.items()},
        str(folder / WEIGHTS_FILE),
        metadata=dict(format='pt'),
    )
    left_out = _check_written(load_file(str(folder / WEIGHTS_FILE)), weights, set(state))
    names = dict(enumerate(map(str, classes)))
    _write_json(
        folder / CONFIG_FILE,
        dict(
            config,
            model_type='eomt_dinov3',
            architectures=['EomtDinov3ForUniversalSegmentation'],
            dtype='float32',
            id2label=names,
            label2id={name: key for key, name in names.items()},
        ),
    )
    _write_json(folder / PROCESSOR_FILE, _processor_config(model, image_size))
    return Exported(len(state), sum(value.numel() for value in state.values()), left_out)


def _check_written(written: State, weights: State, expected: Set[str]) -> List[str]:
    """Check that a file has all weights of a model, and return the keys that are not exported.

    Args:
        written: Tensors read back from the file.
        weights: State dict of the model.
        expected: Keys that the file must have.
    """
    if set(written) != expected:
        raise WeightsError(
            f'{WEIGHTS_FILE} has other keys than were written: '
            f'{sorted(set(written) ^ expected)[:5]}'
        )
    imported = published.split_checkpoint(written)
    restored = {f'decode_head.{key}': value for key, value in imported.head.items()}
    restored.update((f'backbone.{key}', value) for key, value in imported.encoder.items())
    different = [
        key
        for key, value in restored.items()
        if key not in weights or not torch.equal(value, weights[key].detach().cpu())
    ]
    left_out = sorted(set(weights) - set(restored))
    lost = [key for key in left_out if not published.is_not_exported(key)]
    if different or lost:
        raise WeightsError(
            f"{WEIGHTS_FILE} does not have the model's weights: {different[:5]} "
            f'differ, {lost[:5]} are missing'
        )
    return left_out


def _processor_config(model: EncoderDecoder, image_size: int) -> Dict[str, Any]:
    """Return the config of EomtImageProcessor.

    It resizes the short side to ``image_size``, splits the long side into overlapping tiles, and
    averages their predictions.
    """
    mean, std = _read_normalization(model)
    return dict(
        image_processor_type='EomtImageProcessor',
        do_resize=True,
        do_split_image=True,
        do_pad=False,
        size=dict(shortest_edge=image_size, longest_edge=None),
        resample=2,
        do_rescale=True,
        rescale_factor=1 / 255,
        do_normalize=True,
        image_mean=mean,
        image_std=std,
    )


def _read_normalization(model: EncoderDecoder) -> Tuple[List[float], List[float]]:
    """Return mean and std of the bands, for pixel values in 0..1."""
    owner, prefix = (
        (model.backbone, 'pixel_')
        if model.backbone.normalization is not None
        else (model.data_preprocessor, '')
    )
    mean, std = (getattr(owner, f'{prefix}{name}', None) for name in ('mean', 'std'))
    # The model expects pixel values in 0..255 as they are.
    if mean is None or std is None:
        return [0.0] * 3, [1 / 255] * 3
    scaled = [
        [round(float(value) / 255, 6) for value in statistic.flatten()] for statistic in (mean, std)
    ]
    return scaled[0], scaled[1]


def _write_json(path: Path, content: Dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + '\n', encoding='utf-8')
