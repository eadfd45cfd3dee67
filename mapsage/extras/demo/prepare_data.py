"""Write LoveDA, Potsdam, Vaihingen, iSAID or an export of a labeling tool as images and masks.

python tools/prepare_data.py DATASET SOURCE --out DIR
python tools/prepare_data.py coco EXPORT --out DIR        polygons and masks of Roboflow, CVAT, Label Studio
python tools/prepare_data.py voc EXPORT --out DIR         colored masks of CVAT and Pascal VOC
python tools/prepare_data.py scenes SCENE... --out DIR    fast copies of scenes and labels
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from functools import partial
from pathlib import Path
from typing import Optional, Sequence

from mapsage.base.console import accept_any_text, examples

# As in mapsage.extras.demo.prepare.layouts and fast_copies, which import PyTorch.
_LAYOUTS = ('isaid', 'loveda', 'potsdam', 'vaihingen')
_DEFAULT_SIZE = '100G'


def parse_args(argv: Optional[Sequence[str]] = None) -> argparse.Namespace:
    """Parse a command line (default: ``sys.argv``)."""
    parser = argparse.ArgumentParser(
        description='Write a dataset in the folders and formats that MMSegmentation reads. Repeat '
        'the command to continue a run that was stopped.',
        **examples(__doc__),
    )
    parser.add_argument(
        'dataset',
        choices=_LAYOUTS,
        help='a published dataset; or coco or voc, the export of a labeling tool, or scenes, copies '
        'of scenes and labels that load fast: each of these three has other options (coco --help)',
    )
    parser.add_argument(
        'source',
        type=Path,
        help='folder of the downloaded archives, or of the files unpacked from them',
    )
    parser.add_argument('--out', type=Path, required=True, help='folder to write')
    parser.add_argument(
        '--clip-size',
        type=int,
        help='side length of a tile in pixels (default: '
        '512; isaid 896; loveda is not cut into tiles)',
    )
    parser.add_argument(
        '--stride',
        type=int,
        help='distance between tiles in pixels (default: the clip size; isaid 512)',
    )
    parser.add_argument(
        '--ignore-other-colors',
        action='store_true',
        help='ignore pixels whose '
        'label has a color that is no class (default: such a color is an error)',
    )
    parser.add_argument(
        '--workers',
        type=int,
        default=min(8, os.cpu_count() or 1),
        help='number of processes (default: %(default)s)',
    )
    return parser.parse_args(argv)


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the program with a command line (default: ``sys.argv``); return the exit status."""
    accept_any_text()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ['scenes']:
        return copy_scenes(arguments[1:])
    if arguments[:1] in (['coco'], ['voc']):
        return convert_export(arguments[0], arguments[1:])
    args = parse_args(arguments)
    from mapsage.extras.demo.prepare.archives import PrepareOptions, prepare_dataset
    from mapsage.extras.demo.prepare.source_files import PrepareError

    options = PrepareOptions(args.clip_size, args.stride, args.ignore_other_colors)
    try:
        result = prepare_dataset(
            args.dataset,
            args.source,
            args.out,
            options,
            args.workers,
            partial(print, file=sys.stderr, flush=True),
        )
    except (OSError, PrepareError) as error:
        print(f'error: {error}', file=sys.stderr)
        return 1
    images = ', '.join(f'{count} {split}' for split, count in result.images.items())
    ignored = f'; {result.other_colors} pixels of other colors are ignored' * bool(
        result.other_colors
    )
    print(
        f'{args.out}: {args.dataset}, images: {images}; {result.new_files} files written{ignored}'
        if result.new_files
        else f'{args.out}: already complete'
    )
    return 0


def convert_export(kind: str, arguments: Sequence[str]) -> int:
    """Write the images and masks of an export; return the exit status."""
    parser = argparse.ArgumentParser(
        prog=f'{Path(sys.argv[0]).name} {kind}',
        description='Write the export of a labeling tool as PNG images and masks, in the folders that '
        'docs/tutorials/own-folders.md trains on. A division that the export has is kept.',
    )
    parser.add_argument('source', type=Path, help='folder or .zip of the export')
    parser.add_argument('--out', type=Path, required=True, metavar='DIR', help='folder to write')
    parser.add_argument(
        '--val-share',
        type=float,
        default=0.2,
        metavar='SHARE',
        help='share of the images for validation, where the export has no division (default: 0.2)',
    )
    parser.add_argument(
        '--place',
        metavar='REGEX',
        help='images with the same first group in their names are of one place and stay in one part, '
        "such as '^(.+)_[0-9]+$' for tiles city_12.png (default: each image is a place)",
    )
    parser.add_argument('--seed', type=int, default=0, help='another seed, another division')
    if kind == 'coco':
        parser.add_argument(
            '--background',
            default='background',
            metavar='NAME',
            help='name of class 0, the pixels without an annotation (default: background)',
        )
        parser.add_argument(
            '--ignore-crowds',
            action='store_true',
            help='annotations with iscrowd=1 are no label (default: they have their category, '
            'because tools mark run-length masks so)',
        )
    else:
        parser.add_argument(
            '--ignore-other-colors',
            action='store_true',
            help='pixels of a color that is no class are no label (default: an error)',
        )
    args = parser.parse_args(arguments)
    if not 0 <= args.val_share < 1:
        parser.error(f'--val-share {args.val_share:g}: expected 0 or more and less than 1')
    if args.place is not None:
        try:
            re.compile(args.place)
        except re.error as error:
            parser.error(f'--place {args.place!r} is no regular expression: {error}')
    from mapsage.extras.demo.prepare.coco_export import read_coco
    from mapsage.extras.demo.prepare.exports import Division, write_export
    from mapsage.extras.demo.prepare.source_files import PrepareError
    from mapsage.extras.demo.prepare.voc_export import read_voc
    from mapsage.pictures.tiles import class_palette

    try:
        export = (
            read_coco(args.source, args.background, args.ignore_crowds)
            if kind == 'coco'
            else read_voc(args.source, args.ignore_other_colors)
        )
        written = write_export(export, args.out, Division(args.val_share, args.place, args.seed))
    except (OSError, PrepareError) as error:
        print(f'error: {error}', file=sys.stderr)
        return 1
    for note in export.notes:
        print(f'note: {note}')
    images = ', '.join(f'{count} {part}' for part, count in sorted(written.images.items()))
    print(f'{args.out}: images: {images}')
    total = max(1, int(written.pixels.sum()))
    for index, name in [*enumerate(export.classes), (255, 'no label')]:
        print(f'  {index:3} {name}: {100 * written.pixels[index] / total:.3g} % of the pixels')
    palette = class_palette(len(export.classes), export.palette or None).tolist()
    print('for the config (docs/tutorials/own-folders.md):')
    print(f'data_root = {str(args.out)!r}\nclasses = {export.classes!r}\npalette = {palette!r}')
    return 0


def copy_scenes(arguments: Sequence[str]) -> int:
    """Make fast copies of scenes; return the exit status."""
    parser = argparse.ArgumentParser(
        prog=f'{Path(sys.argv[0]).name} scenes',
        description='Copy scenes and label rasters into '
        "files that a training with fast_copy=dict(folder='DIR') reads several times faster "
        '(docs/tutorials/scenes.md). Repeat the command to continue one that was stopped.',
    )
    parser.add_argument(
        'scenes',
        nargs='+',
        help='files, folders and patterns of scenes and label '
        'rasters, and other names that GDAL opens',
    )
    parser.add_argument('--out', required=True, metavar='DIR', help='folder of the copies')
    parser.add_argument(
        '--max-size',
        default=_DEFAULT_SIZE,
        metavar='SIZE',
        help='largest size of the folder, such as 500G (default: %(default)s)',
    )
    args = parser.parse_args(arguments)
    from mapsage.datasets.geotiff.fast_copies import FastCopies, describe_report
    from mapsage.geo import GeoError, RasterBlockError, match

    try:
        copies = FastCopies(args.out, args.max_size)
        paths = [path for scene in args.scenes for path in match(scene)]
        if not paths:
            raise GeoError(
                f'no scenes in {" ".join(args.scenes)}; expected files, or folders that have some.'
            )
        report = copies.make(paths, partial(print, flush=True))
    except (OSError, GeoError, RasterBlockError) as error:
        print(f'error: {error}', file=sys.stderr)
        return 1
    print(*describe_report(report, copies.folder), f'{report.written} written now', sep='\n')
    return 0


def run() -> None:
    """Run the command line and exit."""
    sys.exit(main())
