"""Draw samples of a config's dataset with their labels as overlays, augmentation included.

python tools/browse_dataset.py CONFIG [--split train|val|test] [--output-dir DIR]

Samples are loaded as the config's loader gives them to the model, so a mistake in the pipeline is
visible before a training. Images of more than 8 bits share one contrast, because differences
between samples would disappear otherwise.
"""

from __future__ import annotations

import argparse
import functools
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, List, Optional, Sequence

from mapsage.commands.options import ConfigOptions

if TYPE_CHECKING:
    from mmengine.config import Config

    from mapsage.pictures import LabeledImage

# Largest number of samples on a sheet.
_ON_A_SHEET = 24
# Number of pixels of each sample that decide the contrast, about.
_CONTRAST_PIXELS = 20000


def main(argv: Optional[Sequence[str]] = None) -> None:
    """Run the program with a command line (default: ``sys.argv``)."""
    parser = argparse.ArgumentParser(description='Draw samples of a dataset with their labels.')
    parser.add_argument('config', help='path of the config file')
    parser.add_argument(
        '--split',
        choices=['train', 'val', 'test'],
        default='train',
        help='loader whose dataset is drawn (default: train)',
    )
    parser.add_argument(
        '--output-dir',
        help='folder of the pictures (default: browse in the '
        "config's work_dir, else work_dirs/<config name>/browse)",
    )
    parser.add_argument(
        '--show-number',
        type=int,
        default=12,
        metavar='N',
        help='number of samples, spread over the dataset (default: 12)',
    )
    parser.add_argument(
        '--bands',
        type=int,
        nargs=3,
        metavar=('R', 'G', 'B'),
        help='channels of the image to show as red, green and blue, counted from 1 '
        '(default: bands=dict(rgb=...) of the backbone, else the first three)',
    )
    parser.add_argument(
        '--each', action='store_true', help='write a file for each sample, instead of one sheet'
    )
    parser.add_argument(
        '--not-show', action='store_true', help="MMSegmentation's option; windows are never opened"
    )
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        action=ConfigOptions,
        metavar='KEY=VALUE',
        help='overrides of settings of the config',
    )
    parser.set_defaults(launcher='none', local_rank=None, accelerator=None, work_dir=None)
    args = parser.parse_args(argv)
    from mapsage.commands import cli

    for path in browse(
        cli.load_config(args), args.split, args.output_dir, args.show_number, args.bands, args.each
    ):
        print(path)


def browse(
    cfg: Config,
    split: str = 'train',
    folder: Optional[str] = None,
    count: int = 12,
    bands: Optional[Sequence[int]] = None,
    separate: bool = False,
    say: Callable[[str], object] = functools.partial(print, flush=True),
) -> List[str]:
    """Draw samples of a split as its loader gives them, augmentation included.

    The samples are spread evenly over the dataset and are the same at every call, because the
    augmentation is drawn from the seed of the config, or 0.

    Args:
        cfg: Complete config.
        split: ``'train'``, ``'val'`` or ``'test'``.
        folder: Folder for the pictures; default: ``browse`` in the work dir.
        count: Largest number of samples.
        bands: Channels to show as red, green and blue, counted from 1; default: the config's
            ``shown_channels``, as in all pictures.
        separate: Whether every sample has its own file, instead of a place on a sheet.
        say: Function that prints a line about the scenes.

    Returns:
        Paths of the pictures.

    Raises:
        ConfigError: If the config has no such split, or its samples cannot be drawn.
        DataError: If the dataset or one of its samples cannot be loaded.
    """
    from mmengine.registry import DefaultScope

    from mapsage.base.random_state import same_random_numbers
    from mapsage.engine.env_cfg import ConfigError

    loader = f'{split}_dataloader'
    if not isinstance((cfg.get(loader) or {}).get('dataset'), dict):
        raise ConfigError(
            f'the config has no {loader} with a dataset, which --split {split} needs.'
        )
    if count < 1 or bands is not None and (len(bands) != 3 or min(bands) < 1):
        raise ConfigError(
            f'--show-number {count} and --bands {bands}: expected a number of '
            f'samples, and three channels counted from 1.'
        )
    with same_random_numbers(), DefaultScope.overwrite_default_scope(
        cfg.get('default_scope', 'mmengine')
    ):
        return _browse(
            cfg, split, folder or os.path.join(cfg.work_dir, 'browse'), count, bands, separate, say
        )


def _browse(
    cfg: Config,
    split: str,
    folder: str,
    count: int,
    bands: Optional[Sequence[int]],
    separate: bool,
    say: Callable[[str], object],
) -> List[str]:
    import numpy as np

    from mapsage.engine.env_cfg import ConfigError
    from mapsage.engine.loading.build import build_dataset, notes_on_scenes, score_once
    from mapsage.engine.loading.data_checks import build_checked, check_labels, explain_error
    from mapsage.engine.loading.keyed_loader import KeyedDataset
    from mapsage.host.dataset_parts import metainfo_of
    from mapsage.pictures import render_contact_sheet
    from mapsage.pictures.canvas import save_png

    dataset = build_checked(build_dataset, cfg[f'{split}_dataloader']['dataset'])
    if not hasattr(dataset, '__len__'):
        raise ConfigError(
            f'the dataset of --split {split} is a stream '
            f'({type(dataset).__name__}), whose samples have no numbers.'
        )
    if split != 'train':
        score_once(dataset)
    for _, text in notes_on_scenes(dataset):
        say(text)
    seed = (cfg.get('randomness') or {}).get('seed') or 0
    samples = KeyedDataset(dataset, check_labels, explain_error)
    numbers = np.unique(np.linspace(0, len(dataset) - 1, count).round().astype(int)).tolist()
    drawn = [
        _labeled(cfg, number, samples.load(number, (seed, number)), bands) for number in numbers
    ]
    drawn = _with_one_contrast(drawn)
    metainfo = metainfo_of(dataset)
    classes, palette = metainfo.get('classes') or _numbered_classes(drawn), metainfo.get('palette')
    title = f'{Path(cfg.filename or "config").stem}: {split}'
    subtitle = f'of {len(dataset):,} samples of {type(dataset).__name__}, as they reach the model'
    size = 1 if separate else _ON_A_SHEET
    paths = []
    for start in range(0, len(drawn), size):
        sheet = drawn[start : start + size]
        number = numbers[start] if separate else start // size + 1
        name = split if number == 1 and not separate else f'{split}_{number}'
        paths.append(os.path.join(folder, f'{name}.png'))
        save_png(
            paths[-1],
            render_contact_sheet(sheet, classes, palette, title, f'{len(sheet)} {subtitle}'),
        )
    return paths


def _labeled(cfg: Config, number: int, sample: Any, bands: Optional[Sequence[int]]) -> LabeledImage:
    """Return the shown channels ``(height, width, 3)`` of a sample, and its labels."""
    import numpy as np
    import torch

    from mapsage.datasets.label_score import label_map
    from mapsage.engine.env_cfg import ConfigError
    from mapsage.host.batch_images import choose_channels, shown_channels
    from mapsage.pictures import LabeledImage

    inputs = sample.get('inputs') if isinstance(sample, dict) else None
    if not isinstance(inputs, torch.Tensor) or inputs.ndim != 3:
        shape = tuple(inputs.shape) if isinstance(inputs, torch.Tensor) else type(inputs).__name__
        raise ConfigError(
            f'sample {number} has {shape} as its inputs and cannot be drawn; '
            f'expected one image (channels, height, width) from PackSegInputs.'
        )
    image = inputs.cpu().numpy().transpose(1, 2, 0)
    # Pixels without data are 0 and must not affect the contrast.
    if image.dtype != np.uint8:
        image = np.where((image == 0).all(2, keepdims=True), np.nan, image.astype(np.float32))
    if bands and max(bands) > image.shape[2]:
        raise ConfigError(f'--bands {bands}: sample {number} has {image.shape[2]} channels.')
    shown = (
        image[..., [band - 1 for band in bands]]
        if bands
        else choose_channels(image, shown_channels(cfg))
    )
    path = str(getattr(sample.get('data_samples'), 'metainfo', {}).get('img_path') or '')
    return LabeledImage(shown, label_map(sample), f'{number}   {os.path.basename(path)}'.rstrip())


def _with_one_contrast(samples: Sequence[LabeledImage]) -> List[LabeledImage]:
    """Return samples of 8 bits; other dtypes are stretched, each channel alike in all samples."""
    import numpy as np

    if all(sample.image.dtype == np.uint8 for sample in samples):
        return list(samples)
    pixels = [sample.image.reshape(-1, sample.image.shape[2]) for sample in samples]
    values = np.concatenate(
        [image[:: len(image) // _CONTRAST_PIXELS + 1] for image in pixels]
    ).astype(float)
    values = values[np.isfinite(values).all(1)]
    low, high = np.percentile(values, [2, 98], axis=0) if len(values) else (0.0, 1.0)
    width = np.where(np.asarray(high) > low, np.subtract(high, low), 1.0)
    return [
        replace(
            sample,
            image=np.nan_to_num(np.clip((sample.image - low) / width, 0, 1) * 255).astype(np.uint8),
        )
        for sample in samples
    ]


def _numbered_classes(samples: Sequence[LabeledImage]) -> List[str]:
    """Return names for the classes in the labels of a dataset that does not name them."""
    label_maps = [sample.labels for sample in samples if sample.labels is not None]
    largest = [labels[labels != 255].max(initial=-1) for labels in label_maps]
    return [f'class {index}' for index in range(int(max(largest, default=-1)) + 1)]


def run() -> None:
    """Run the command line and exit."""
    from mapsage.commands import cli

    cli.run(main)
