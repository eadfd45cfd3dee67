"""An EoMT as a folder that transformers reads: weights, config and image processor.

Source: transformers 5.23.0, ``models/eomt_dinov3`` and ``models/eomt/image_processing_eomt.py``.
"""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

import torch

from mapsage.models.backbones.dinov3_weights import State, WeightsError

from . import published

WEIGHTS_FILE, CONFIG_FILE = 'model.safetensors', 'config.json'
PROCESSOR_FILE = 'preprocessor_config.json'
_LOSS_KEY = 'criterion.empty_weight'  # weights of the classes in their loss


class Exported(NamedTuple):
    """What was written.

    Attributes:
        tensors: Number of tensors in the file.
        numbers: Number of numbers in them.
        left_out: Names of the model's tensors that are not in it, sorted.
    """

    tensors: int
    numbers: int
    left_out: List[str]


def write_huggingface(model: Any, folder: Path, image_size: int, classes: Sequence[str]
                      ) -> Exported:
    """Write an EoMT for ``EomtDinov3ForUniversalSegmentation.from_pretrained``.

    The file is read back, and every tensor of the model compared with it by its bits.

    Blocks whose masks count in evaluation here (probability above 0.5) get the probability 1, the
    others 0: transformers would otherwise draw masks at random in evaluation too.

    Args:
        model: EoMT without adapters, for the bands red, green, blue.
        folder: Folder of the files, which is made.
        image_size: Side of the images in pixels, a multiple of 16, which transformers fixes.
        classes: Names of the classes in the order of their indices.

    Raises:
        WeightsError: If transformers cannot describe the model, or a tensor is not in the file as
            it is in the model.
    """
    from safetensors.torch import load_file, save_file
    head, backbone = model.decode_head, model.backbone
    if image_size < 16 or image_size % 16:
        raise WeightsError(f'image_size={image_size}, expected a multiple of 16 pixels')
    config = published.huggingface_config(backbone.arch, head, image_size)
    own = dict(model.state_dict())
    own['decode_head.attn_mask_probs'] = (own['decode_head.attn_mask_probs'] > .5).float()
    state = published.to_huggingface(own)
    state[_LOSS_KEY] = torch.ones(head.num_classes + 1)
    state[_LOSS_KEY][-1] = head.loss_decode.no_object_weight
    folder.mkdir(parents=True, exist_ok=True)
    save_file({key: value.detach().cpu().contiguous() for key, value in state.items()},
              str(folder / WEIGHTS_FILE), metadata=dict(format='pt'))
    left_out = _compare(load_file(str(folder / WEIGHTS_FILE)), own, set(state))
    names = dict(enumerate(map(str, classes)))
    _write(folder / CONFIG_FILE, dict(
        config, model_type='eomt_dinov3', architectures=['EomtDinov3ForUniversalSegmentation'],
        dtype='float32', id2label=names, label2id={name: key for key, name in names.items()}))
    _write(folder / PROCESSOR_FILE, _processor(model, image_size))
    return Exported(len(state), sum(value.numel() for value in state.values()), left_out)


def _compare(written: State, own: State, wanted: Any) -> List[str]:
    """Return the model's tensors that a file rightly lacks; raise unless all others are in it."""
    if set(written) != wanted:
        raise WeightsError(f'{WEIGHTS_FILE} has other keys than were written: '
                           f'{sorted(set(written) ^ wanted)[:5]}')
    parts = published.split(written)
    back = {f'{where}.{key}': value for where, part in (
        ('decode_head', parts.head), ('backbone', parts.encoder)) for key, value in part.items()}
    differs = [key for key, value in back.items()
               if key not in own or not torch.equal(value, own[key].detach().cpu())]
    left_out = sorted(set(own) - set(back))
    lost = [key for key in left_out if not published.is_not_exported(key)]
    if differs or lost:
        raise WeightsError(f'{WEIGHTS_FILE} does not hold the weights of the model: {differs[:5]} '
                           f'differ, {lost[:5]} are missing')
    return left_out


def _processor(model: Any, image_size: int) -> Dict[str, Any]:
    """Return the settings of EomtImageProcessor: tiles of the size along the long side, averaged.
    """
    mean, std = _pixels(model)
    return dict(
        image_processor_type='EomtImageProcessor', do_resize=True, do_split_image=True,
        do_pad=False, size=dict(shortest_edge=image_size, longest_edge=None), resample=2,
        do_rescale=True, rescale_factor=1 / 255, do_normalize=True, image_mean=mean, image_std=std)


def _pixels(model: Any) -> Tuple[List[float], List[float]]:
    """Return mean and std of the bands in 0..1."""
    owner, prefix = (model.backbone, 'pixel_') if model.backbone.normalization is not None else (
        model.data_preprocessor, '')
    mean, std = (getattr(owner, f'{prefix}{name}', None) for name in ('mean', 'std'))
    if mean is None or std is None:
        return [0.] * 3, [1 / 255] * 3  # nobody normalizes
    values = [[round(float(each) / 255, 6) for each in value.flatten()] for value in (mean, std)]
    return values[0], values[1]


def _write(path: Path, content: Dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + '\n', encoding='utf-8')
