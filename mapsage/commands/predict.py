"""Predict maps of images and scenes of any size: on one device, or as one rank of a launcher.

python tools/predict.py CONFIG CHECKPOINT INPUT... --out DIR [--confidence] [--polygons]
bash scripts/predict.sh CONFIG CHECKPOINT INPUT... --out DIR      all cards of this machine
python tools/predict.py --model MODEL.onnx INPUT... --out DIR     without PyTorch
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Callable, Mapping, Optional, Sequence, Tuple

from mapsage.base.console import accept_any_text, examples
from mapsage.commands import options
from mapsage_launcher.extras import extensions_of

if TYPE_CHECKING:
    from mapsage.maps.map_model import MapModel
    from mapsage.maps.options import MapOptions
    from mapsage.maps.prediction import Prediction

# As in mapsage.maps.exported, which imports GDAL.
_RUNTIMES = ('onnxruntime', 'openvino')
# Exit status if maps have holes where blocks could not be read, or inputs were skipped.
PARTIAL = 3


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the program with a command line (default: ``sys.argv``); return the exit status."""
    parser = build_parser(argv)
    args = parser.parse_args(argv)
    check_arguments(parser, args)
    for extension in extensions_of('predict'):
        if extension.is_asked(args):
            return extension.run(args)
    return predict(args)


def is_exported(argv: Optional[Sequence[str]]) -> bool:
    """Return whether a command line names an exported model; the process's own if None."""
    arguments = sys.argv[1:] if argv is None else argv
    return any(argument.split('=')[0] == '--model' for argument in arguments)


def build_parser(argv: Optional[Sequence[str]]) -> argparse.ArgumentParser:
    """Return the parser; without CONFIG and CHECKPOINT if the command line has ``--model``.

    Args:
        argv: Arguments of the program; None for the arguments of the process.
    """
    about = 'Predict maps of images and scenes of any size.'
    if is_exported(argv):
        parser = argparse.ArgumentParser(description=about, **examples(__doc__))
    else:
        parser = options.build_parser(about, doc=__doc__)
        parser.add_argument('checkpoint', help='path of the checkpoint')
    parser.add_argument(
        '--allow-remote',
        action='store_true',
        help='contact servers that a file of an input folder names, such as a '
        'mosaic (VRT); servers on the command line are contacted in any case',
    )
    parser.add_argument(
        '--model',
        metavar='MODEL.onnx',
        help='file of tools/export.py, in place of CONFIG and CHECKPOINT',
    )
    parser.add_argument(
        '--runtime',
        choices=_RUNTIMES,
        default=_RUNTIMES[0],
        help='program that runs --model (default: onnxruntime)',
    )
    parser.add_argument(
        'inputs',
        nargs='+',
        metavar='INPUT',
        help='images, folders of images, scenes, and other names that GDAL opens: '
        'https://..., s3://..., s3://BUCKET/FOLDER/, /vsizip/..., subdatasets',
    )
    parser.add_argument(
        '--out',
        help='folder of the maps; s3://BUCKET/FOLDER/ (gs, az) gets them when they are finished',
    )
    _add_window_options(parser)
    _add_file_options(parser)
    for extension in extensions_of('predict'):
        extension.add_options(parser)
    parser.add_argument('--overwrite', action='store_true', help='make existing maps again')
    add_shard_option(parser)
    parser.add_argument(
        '--skip-broken',
        action='store_true',
        help='skip inputs that cannot be read and map the others; exit status 3',
    )
    return parser


def add_shard_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--shard``."""
    parser.add_argument(
        '--shard',
        metavar='I/N',
        help='where this job of N begins, I from 0; it helps the others when it is done (default: '
        'from SLURM_ARRAY_TASK_ID or JOB_COMPLETION_INDEX, else 0/1)',
    )


def shard_of(shard: Optional[str], environ: Mapping[str, str] = os.environ) -> Tuple[int, int]:
    """Return which of how many jobs this is, by ``--shard`` or by the scheduler of an array.

    Args:
        shard: Text of the option, or None.
        environ: Variables of the environment.

    Raises:
        PredictError: If the text or a variable is no such number.
    """
    from mapsage.maps.errors import PredictError

    if shard is not None:
        source, numbers = f'--shard {shard}', shard.split('/')
    elif environ.get('SLURM_ARRAY_TASK_ID'):
        names = ('SLURM_ARRAY_TASK_ID', 'SLURM_ARRAY_TASK_COUNT', 'SLURM_ARRAY_TASK_MIN')
        numbers = [environ.get(name) or '0' for name in names]
        source = ', '.join(f'{name}={environ.get(name, "")}' for name in names)
        # Tasks of an array with a step, or 3,7,9, are spread by their number as well as possible.
        if all(number.isdecimal() for number in numbers):
            task, count, least = map(int, numbers)
            numbers = [str((task - least) % max(1, count)), str(max(1, count))]
    elif environ.get('JOB_COMPLETION_INDEX'):
        # Kubernetes does not say how many there are. Fractions of the golden ratio lie far apart.
        index = environ['JOB_COMPLETION_INDEX']
        source = f'JOB_COMPLETION_INDEX={index}'
        numbers = [index]
        if index.isdecimal():
            numbers = [str(int(int(index) * 0.6180339887 % 1 * 1000)), '1000']
    else:
        return 0, 1
    if len(numbers) != 2 or not all(number.isdecimal() for number in numbers):
        raise PredictError(f'{source}: expected I/N, which of how many jobs this is, such as 0/8.')
    part, parts = map(int, numbers)
    if not 0 <= part < parts:
        raise PredictError(f'{source}: expected 0 to {parts - 1} of {parts} jobs.')
    return part, parts


def _add_window_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--window',
        type=int,
        metavar='PIXELS',
        help="side of a window (default: the config's training size, else 512)",
    )
    parser.add_argument(
        '--overlap',
        type=int,
        metavar='PIXELS',
        help='overlap of neighboring windows (default: a quarter of a window)',
    )
    parser.add_argument(
        '--scale',
        type=float,
        metavar='FACTOR',
        help='factor by which scenes are resized for the model (default: the test '
        "pipeline's Resize, else 1)",
    )
    parser.add_argument(
        '--gsd',
        type=options.pixel_size,
        metavar='METERS',
        help='size of the pixels that the model was trained on, instead of --scale; auto: as its '
        'passport says',
    )
    options.add_scene_options(parser)
    parser.add_argument(
        '--batch-size',
        type=int,
        metavar='N',
        help='number of windows predicted at a time (default: as many as four of '
        '512 pixels hold, sixteen on a card; fewer when memory runs out)',
    )
    parser.add_argument(
        '--amp',
        action='store_true',
        default=None,
        help='16-bit floats where the model allows them: bfloat16, on cuda float16 (default: on a '
        'card of cuda with 16-bit matrix units)',
    )
    parser.add_argument('--no-amp', dest='amp', action='store_false', help='32-bit floats')
    parser.add_argument(
        '--compile',
        action='store_true',
        help='translate the model with torch.compile first, which takes a minute or more: for long jobs',
    )
    parser.add_argument(
        '--bands',
        type=int,
        nargs='+',
        metavar='N',
        help='bands of the scene, counted from 1; for a model of three bands in '
        'the order red, green, blue (default: all but alpha)',
    )
    parser.add_argument(
        '--aoi',
        metavar='FILE',
        help='polygons of an area of interest, in any CRS; only windows that touch '
        'them are predicted, and the map has no data outside them',
    )
    parser.add_argument(
        '--mosaic',
        metavar='NAME',
        help='make one map NAME.tif of all inputs, neighbors on the ground; where '
        'they overlap, the first one wins',
    )
    parser.add_argument(
        '--tta', action='store_true', help='average over each window and its three mirror images'
    )


def _add_file_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--confidence', action='store_true', help='also write NAME_confidence.tif, in percent'
    )
    parser.add_argument(
        '--probabilities',
        action='store_true',
        help='also write NAME_probabilities.tif, a band for each class, in steps of 0.004',
    )
    parser.add_argument('--polygons', action='store_true', help='also write NAME.gpkg')
    parser.add_argument(
        '--min-area',
        type=float,
        default=0,
        metavar='PIXELS',
        help='area below which a region gets no polygon (default: 0)',
    )
    parser.add_argument(
        '--simplify',
        type=float,
        default=1,
        metavar='PIXELS',
        help='tolerance of the outlines; 0 follows the pixels (default: 1)',
    )
    parser.add_argument(
        '--skip-class',
        nargs='+',
        default=[],
        metavar='NAME',
        help='classes without polygons, such as the background',
    )


def check_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End the program with the parser's error if options contradict each other."""
    if args.model is not None and args.amp:
        parser.error('--amp is for checkpoints: an exported model computes in float32')
    if args.model is not None and args.compile:
        parser.error('--compile is for checkpoints: the runtime of an exported model does that')
    # An option of options.build_parser, which the parser of an exported model lacks.
    if getattr(args, 'work_dir', None):
        parser.error('--work-dir is for training and testing; maps go into --out')
    if args.batch_size is not None and args.batch_size < 1:
        parser.error(f'--batch-size {args.batch_size}: expected 1 or more')
    if args.mosaic is not None and (Path(args.mosaic).name != args.mosaic or not args.mosaic):
        parser.error(f'--mosaic {args.mosaic!r}: expected the name of the map, without a folder')
    if args.mosaic is not None and args.skip_broken:
        parser.error(
            '--skip-broken with --mosaic: one map of all inputs needs all of them; leave '
            'the broken ones out'
        )
    if args.scale is not None and args.gsd is not None:
        parser.error('--scale and --gsd say the same in two ways: give one of them')
    for option, value in (('--scale', args.scale), ('--gsd', args.gsd)):
        if value not in (None, 'auto') and not 0 < value < float('inf'):
            parser.error(f'{option} {value:g}: expected a number above 0')
    if not (0 <= args.min_area < float('inf') and 0 <= args.simplify < float('inf')):
        parser.error(
            f'--min-area {args.min_area:g} and --simplify {args.simplify:g}: expected '
            'pixels, 0 or more'
        )
    if (args.min_area, args.simplify, args.skip_class) != (0, 1, []) and not args.polygons:
        parser.error('--min-area, --simplify and --skip-class shape polygons: add --polygons')
    for extension in extensions_of('predict'):
        extension.check_options(parser, args)
    if not args.out:
        parser.error('--out is missing: the folder of the maps')


def predict(
    args: argparse.Namespace, say: Callable[[str], None] = functools.partial(print, flush=True)
) -> int:
    """Predict maps and return the exit status.

    Args:
        args: Options of tools/predict.py.
        say: Function that prints a line; called on rank 0 only.

    Returns:
        0, or :data:`PARTIAL` if blocks of an input could not be read or inputs were skipped.
    """
    from mapsage.maps.prediction import Prediction

    model = open_model(args, say)
    return run_prediction(Prediction(map_options(args), model, say), say)


def run_prediction(prediction: Prediction, say: Callable[[str], None]) -> int:
    """Make the maps, update the report of the run they belong to, and return the exit status."""
    from mapsage.commands.report import refresh_report

    gaps = prediction.run()
    status = 0
    if gaps:
        status = PARTIAL
        text = f'partial: {"; ".join(gaps)}; status {status}'
        say(text)
        prediction.model.note_for_launcher(text)
    if prediction.model.rank == 0:
        refresh_report(prediction.setup.folder.parent, say)
    return status


def map_options(args: argparse.Namespace, previews: bool = True) -> MapOptions:
    """Return the options of the maps from the command line.

    Args:
        args: Options of tools/predict.py.
        previews: Whether maps have a preview.
    """
    from mapsage.maps.options import MapOptions

    shard, shards = shard_of(args.shard)
    return MapOptions(
        inputs=args.inputs,
        out=args.out,
        allow_remote=args.allow_remote,
        mosaic=args.mosaic,
        aoi=args.aoi,
        bands=args.bands,
        scale=args.scale,
        gsd=args.gsd,
        units=args.units,
        trust_scenes=args.trust_scenes,
        tta=args.tta,
        confidence=args.confidence,
        probabilities=args.probabilities,
        polygons=args.polygons,
        min_area=args.min_area,
        simplify=args.simplify,
        skip_class=args.skip_class,
        overwrite=args.overwrite,
        skip_broken=args.skip_broken,
        previews=previews,
        shard=shard,
        shards=shards,
    )


def open_model(args: argparse.Namespace, say: Callable[[str], None]) -> MapModel:
    """Return the model that the command line names, not loaded yet."""
    if args.model is not None:
        from mapsage.maps.exported import ExportedModel

        return ExportedModel(
            args.model, args.runtime, args.overlap, args.batch_size, args.tta, args.window
        )
    from mapsage.commands.checkpoint_model import CheckpointModel

    return CheckpointModel(args, say)


def run() -> None:
    """Run the command line and exit with its status, or 1 after an error.

    With an exported model, errors are printed here, because `cli.run` needs PyTorch.
    """
    if not is_exported(None):
        from mapsage.commands import cli

        cli.run(main)
        return
    from mapsage.geo import GeoError, RasterBlockError
    from mapsage.maps.errors import PredictError

    accept_any_text()
    # A crash in native code prints its stack.
    faulthandler.enable()
    try:
        status = main(None)
    except KeyboardInterrupt:
        # 128 + SIGINT, as a shell reports it.
        status = 130
    except (GeoError, PredictError, RasterBlockError) as error:
        print(error, file=sys.stderr, flush=True)
        status = 1
    sys.exit(status or 0)
