"""Predict maps of images and scenes of any size: on one device, or as one rank of a launcher.

    python tools/predict.py CONFIG CHECKPOINT INPUT... --out DIR [--confidence] [--polygons]
    bash scripts/predict.sh CONFIG CHECKPOINT INPUT... --out DIR      all cards of this machine
    python tools/predict.py --model MODEL.onnx INPUT... --out DIR     without PyTorch
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mapsage.commands import predict, predict_exported, pseudo_label_options  # noqa: E402


def main(argv=None) -> int:
    parser = predict_exported.build_parser('Predict maps of images and scenes of any size.', argv,
                                           __doc__)
    parser.add_argument('inputs', nargs='+', metavar='INPUT',
                        help='images, folders of images, scenes, and other names that GDAL opens: '
                        'https://..., s3://..., /vsizip/..., subdatasets')
    parser.add_argument('--out', help='folder of the maps (with --pseudo-labels, default: its '
                        'folder maps)')
    parser.add_argument('--window', type=int, metavar='PIXELS',
                        help="side of a window (default: the config's training size, else 512)")
    parser.add_argument('--overlap', type=int, metavar='PIXELS',
                        help='overlap of neighboring windows (default: a quarter of a window)')
    parser.add_argument('--scale', type=float, metavar='FACTOR',
                        help='size that the model sees a scene in, as a multiple of its own '
                        "(default: the test pipeline's Resize, else 1)")
    parser.add_argument('--gsd', type=float, metavar='METERS',
                        help='size of the pixels that the model was trained on, instead of --scale')
    parser.add_argument('--batch-size', type=int, metavar='N',
                        help='number of windows predicted at a time (default: as many as four of '
                        '512 pixels hold, sixteen on a card; fewer when memory runs out)')
    parser.add_argument('--amp', action='store_true',
                        help='16-bit floats where the model allows them: bfloat16, on cuda float16')
    parser.add_argument('--bands', type=int, nargs='+', metavar='N',
                        help='bands of the scene, counted from 1; for a model of three bands in '
                        'the order red, green, blue (default: all but alpha)')
    parser.add_argument('--aoi', metavar='FILE',
                        help='polygons of an area of interest, in any CRS; only windows that touch '
                        'them are predicted, and the map has no data beside them')
    parser.add_argument('--mosaic', metavar='NAME',
                        help='make one map NAME.tif of all inputs, neighbors on the ground; where '
                        'they overlap, the first counts')
    parser.add_argument('--tta', action='store_true',
                        help='average over each window and its three mirror images')
    parser.add_argument('--confidence', action='store_true',
                        help='also write NAME_confidence.tif, in percent')
    parser.add_argument('--probabilities', action='store_true',
                        help='also write NAME_probabilities.tif, a band a class, in steps of 0.004')
    parser.add_argument('--polygons', action='store_true', help='also write NAME.gpkg')
    parser.add_argument('--min-area', type=float, default=0, metavar='PIXELS',
                        help='area below which a region gets no polygon (default: 0)')
    parser.add_argument('--simplify', type=float, default=1, metavar='PIXELS',
                        help='tolerance of the outlines; 0 keeps those of the pixels (default: 1)')
    parser.add_argument('--skip-class', nargs='+', default=[], metavar='NAME',
                        help='classes without polygons, such as the background')
    pseudo_label_options.add_arguments(parser)
    parser.add_argument('--overwrite', action='store_true',
                        help='make maps again that exist already')
    parser.add_argument('--skip-broken', action='store_true',
                        help='map the other inputs where some cannot be read; exit status 3')
    args = parser.parse_args(argv)
    if args.model is not None and args.amp:
        parser.error('--amp is for checkpoints: an exported model computes in float32')
    if getattr(args, 'work_dir', None):
        parser.error('--work-dir is for training and testing; maps go into --out')
    if args.batch_size is not None and args.batch_size < 1:
        parser.error(f'--batch-size {args.batch_size}: expected 1 or more')
    if args.mosaic is not None and (Path(args.mosaic).name != args.mosaic or not args.mosaic):
        parser.error(f'--mosaic {args.mosaic!r}: expected the name of the map, without a folder')
    if args.mosaic is not None and args.skip_broken:
        parser.error('--skip-broken with --mosaic: one map of all inputs needs all of them; leave '
                     'the broken ones out')
    if args.scale is not None and args.gsd is not None:
        parser.error('--scale and --gsd say the same in two ways: give one of them')
    for name in ('scale', 'gsd'):
        value = getattr(args, name)
        if value is not None and not 0 < value < float('inf'):
            parser.error(f'--{name} {value:g}: expected a number above 0')
    if not (0 <= args.min_area < float('inf') and 0 <= args.simplify < float('inf')):
        parser.error(f'--min-area {args.min_area:g} and --simplify {args.simplify:g}: expected '
                     'pixels, 0 or more')
    if (args.min_area, args.simplify, args.skip_class) != (0, 1, []) and not args.polygons:
        parser.error('--min-area, --simplify and --skip-class shape polygons: add --polygons')
    pseudo_label_options.check_arguments(parser, args)
    if args.pseudo_labels:
        from mapsage.commands.pseudo_labels import predict_pseudo_labels  # which needs PyTorch
        return predict_pseudo_labels(args)
    return predict.predict(args)


if __name__ == '__main__':
    predict_exported.run(main)
