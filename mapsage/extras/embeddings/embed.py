"""Write the features of an encoder as maps of vectors: embeddings of scenes of any size.

python tools/embed.py CONFIG [CHECKPOINT] INPUT... --out DIR [--dims 64] [--upsample]
bash scripts/embed.sh CONFIG [CHECKPOINT] INPUT... --out DIR      all cards of this machine
"""

from __future__ import annotations

import argparse
from typing import Optional, Sequence

from mapsage.commands import options
from mapsage.commands.predict import add_shard_option

# As torch.save writes them; anything else that follows the config is an input.
_CHECKPOINT_SUFFIXES = ('.pth', '.pt', '.ckpt')


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the program with a command line (default: ``sys.argv``); return the exit status."""
    parser = build_parser()
    args = parser.parse_args(argv)
    args.checkpoint = None
    if args.inputs[0].lower().endswith(_CHECKPOINT_SUFFIXES):
        args.checkpoint, *args.inputs = args.inputs
    check_arguments(parser, args)
    from mapsage.extras.embeddings.embedding_maps import embed

    return embed(args)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = options.build_parser(
        'Write the features of an encoder as maps of vectors: embeddings of scenes of any size.',
        doc=__doc__,
    )
    parser.add_argument(
        'inputs',
        nargs='+',
        metavar='INPUT',
        help='checkpoint of the model (.pth) if its weights are not those that the config names, '
        'then images, folders of images and scenes, or places, as in tools/predict.py',
    )
    parser.add_argument('--out', required=True, help='folder of the embeddings')
    parser.add_argument(
        '--layer',
        default='backbone',
        help='module whose features are written: backbone (its last level, the default), '
        'backbone:0 (a level), backbone:all (all levels, at the finest), neck, decode_head (what '
        'its classifier sees), or any path of a module',
    )
    parser.add_argument(
        '--dims',
        type=int,
        metavar='N',
        help='number of principal components of the vectors that are written (default: all '
        'components of the encoder); they are fitted on a sample of the inputs and kept in '
        'OUT/pca.json',
    )
    parser.add_argument(
        '--pca',
        metavar='FILE',
        help='take the principal components of this pca.json or embedding, so that vectors of '
        'other scenes can be compared with its own',
    )
    parser.add_argument(
        '--upsample',
        action='store_true',
        help="a vector for every pixel, interpolated (default: one every encoder's stride)",
    )
    parser.add_argument(
        '--window',
        type=int,
        metavar='PIXELS',
        help="side of a window with its margin (default: the config's training size, else 512)",
    )
    parser.add_argument(
        '--margin',
        type=int,
        metavar='PIXELS',
        help='context on each side of a window that is computed and not written (default: an '
        'eighth of a window)',
    )
    parser.add_argument(
        '--overlap',
        type=int,
        metavar='PIXELS',
        help='overlap of neighboring windows inside their margins, which is blended (default: a '
        'quarter)',
    )
    parser.add_argument(
        '--scale', type=float, metavar='FACTOR', help='factor by which scenes are resized'
    )
    parser.add_argument(
        '--gsd',
        type=options.pixel_size,
        metavar='METERS',
        help='size of the pixels that the encoder was trained on, instead of --scale',
    )
    options.add_scene_options(parser)
    parser.add_argument(
        '--bands',
        type=int,
        nargs='+',
        metavar='N',
        help='bands of the scene, counted from 1 (default: all but alpha)',
    )
    parser.add_argument(
        '--batch-size', type=int, metavar='N', help='number of windows computed at a time'
    )
    parser.add_argument(
        '--amp',
        action='store_true',
        help='16-bit floats where the model allows them: bfloat16, on cuda float16',
    )
    parser.add_argument(
        '--allow-remote',
        action='store_true',
        help='contact servers that a file of an input folder names, such as a mosaic (VRT)',
    )
    parser.add_argument('--overwrite', action='store_true', help='make existing embeddings again')
    add_shard_option(parser)
    return parser


def check_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End the program with the parser's error if options contradict each other."""
    if not args.inputs:
        parser.error('no INPUT follows the checkpoint')
    for option, number, least in (
        # A unit vector of one component has no direction.
        ('--dims', args.dims, 2),
        ('--window', args.window, 1),
        ('--batch-size', args.batch_size, 1),
    ):
        if number is not None and number < least:
            parser.error(f'{option} {number}: expected {least} or more')
    if args.scale is not None and args.gsd is not None:
        parser.error('--scale and --gsd say the same in two ways: give one of them')
    for option, value in (('--scale', args.scale), ('--gsd', args.gsd)):
        if value not in (None, 'auto') and not 0 < value < float('inf'):
            parser.error(f'{option} {value:g}: expected a number above 0')


def run() -> None:
    """Run the command line and exit with its status, or 1 after an error."""
    from mapsage.commands import cli

    cli.run(main)
