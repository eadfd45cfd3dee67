"""Write a trained model as one ONNX file for QGIS, Enflame's runtimes, or anything that reads ONNX.

    python tools/export.py CONFIG CHECKPOINT --out model.onnx [--target qgis|gcu|onnx]
    python tools/export.py CONFIG CHECKPOINT --card DIR    # with README, scores, weights, preview

The file is compared with the model on tiles of the validation set, and not written if it differs.

The order of work: check the names, load the model (`loading.py`), make and prove the file
(`proved_file.py`), write it with its sidecars and, with `--card`, its model card (`model_card.py`).
ONNX is imported inside `export_model`, so that a missing package is an error with the command that
installs it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Callable, List, Mapping, Optional, Sequence

from mapsage.commands import options

_INSTALL = "pip install 'onnx>=1.15' 'onnxruntime>=1.17'"


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the program with a command line (default: ``sys.argv``); return the exit status."""
    parser = options.build_parser('Write a trained model as one ONNX file.', doc=__doc__)
    parser.add_argument('checkpoint', help='path of the checkpoint')
    destination = parser.add_mutually_exclusive_group(required=True)
    destination.add_argument('--out', metavar='MODEL.onnx', help='name of the file')
    destination.add_argument(
        '--card',
        metavar='DIR',
        help='folder of a model card: model.onnx, README.md with the scores of a '
        'validation, model.safetensors, config.py, preview.png',
    )
    parser.add_argument(
        '--target',
        choices=['qgis', 'gcu', 'onnx'],
        help="reader of the file: QGIS' Deepness plugin, Enflame's runtimes, or "
        'others, as new as possible (default: qgis; onnx for models of several '
        'dates)',
    )
    parser.add_argument(
        '--window',
        type=int,
        metavar='PIXELS',
        help="side of the image (default: the config's training size, else 512)",
    )
    parser.add_argument(
        '--batch',
        type=int,
        metavar='N',
        help='number of images in a batch (default: any; for gcu 1)',
    )
    parser.add_argument(
        '--opset',
        type=int,
        metavar='N',
        help='version of the operators (default: 17, for gcu 13, for onnx 20)',
    )
    parser.add_argument(
        '--gsd',
        type=float,
        metavar='METERS',
        help='side of a pixel of the training, for QGIS (default: the pixel side '
        "of the val set's first image, if it is georeferenced)",
    )
    parser.add_argument(
        '--tiles',
        type=int,
        default=16,
        metavar='N',
        help='number of tiles that the file is compared on (default: 16)',
    )
    parser.add_argument(
        '--int8',
        action='store_true',
        help='8-bit integers, calibrated on as many other tiles; mIoU is printed '
        "next to float32's, and a file that loses more than a point is not "
        'written',
    )
    parser.add_argument('--overwrite', action='store_true', help='replace files that exist')
    args = parser.parse_args(argv)
    if args.tiles < 1:
        parser.error(f'--tiles {args.tiles}: expected 1 or more')
    if args.gsd is not None and not 0 < args.gsd < float('inf'):
        parser.error(f'--gsd {args.gsd:g}: expected a number of meters above 0')
    return export_model(args)


def export_model(args: argparse.Namespace, say: Callable[[str], None] = print) -> int:
    """Write an exported model, its sidecars and, if the options name one, its card.

    Args:
        args: ``config``, ``checkpoint``, ``out`` or ``card``, ``target``, ``window``, ``opset``,
            ``batch``, ``gsd``, ``tiles``, ``int8``, ``overwrite``, and the arguments of
            :func:`read_config`.
        say: Function that prints a line.

    Returns:
        0, the exit status.

    Raises:
        ExportError: If the model cannot be exported, or its export differs from it.
    """
    from mmengine.registry import DefaultScope

    from mapsage.commands.cli import read_config
    from mapsage.extras.export import loading, model_card
    from mapsage.extras.export.errors import ExportError
    from mapsage.extras.export.targets import choose_opset, choose_target
    from mapsage.maps.file_inputs import layout_of
    from mapsage.maps.model import place_settings

    out = Path(args.out or Path(args.card, 'model.onnx'))
    geoai, stac = Path(f'{out}.json'), out.with_suffix('.stac.json')
    messages: List[str] = []
    say = _recorded(say, messages)
    card_files = [Path(args.card, name) for name in model_card.FILES] if args.card else []
    _check_names([out, geoai, stac, *card_files], args.overwrite)
    try:
        from mapsage.extras.export import graph, metadata, proof, proved_file
    except ImportError as error:
        raise ExportError(f'{error}: an export needs {_INSTALL}') from error
    cfg = read_config(args)
    target = choose_target(args.target, place_settings(cfg) is not None)
    if args.int8 and target.name == 'gcu':
        raise ExportError(
            "--int8 with --target gcu: the integers of Enflame's provider for ONNX "
            'Runtime are not implemented. Leave out --int8; it computes in 16 bits.'
        )
    if args.int8 and place_settings(cfg) is not None:
        raise ExportError(
            '--int8: models of several dates are written in float32 only, because '
            'days and pixels would be integers of one scale. Leave out --int8.'
        )
    opset = choose_opset(target, args.opset, graph.most_opset())
    _make_folder(out.parent, '--card' if args.card else '--out')
    model, meta, description, reference = loading.load(cfg, args, target)
    dataset = loading.build_dataset(cfg)
    # Every second tile calibrates a file in 8 bits; such a tile is not used for the comparison.
    tiles = proof.take_tiles(
        dataset,
        description.window,
        args.tiles * (2 if args.int8 else 1),
        layout_of(description.places),
    )
    calibration, tiles = (tiles[::2], tiles[1::2]) if args.int8 else ([], tiles)
    gsd = args.gsd or loading.pixel_meters(dataset)
    with DefaultScope.overwrite_default_scope(cfg.get('default_scope', 'mmseg')):
        file = proved_file.export_float32(
            out, model, description, reference, target, opset, tiles, gsd, say
        )
    if args.int8:
        file = proved_file.export_int8(file, description, gsd, reference, calibration, tiles, say)
    architecture = loading.architecture(model)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    item = metadata.mlm_item(file, description, out.stem, out.name, architecture, parameters, gsd)
    card = (
        model_card.make_card(
            args,
            cfg,
            model,
            meta,
            description,
            reference,
            tiles,
            say,
            name=Path(args.card).absolute().name,
            architecture=architecture,
            parameters=parameters,
            gsd=gsd,
            proof=list(messages),
        )
        if args.card
        else {}
    )
    files = {
        out: file.SerializeToString(),
        stac: _json(item),
        **{out.with_name(name): content for name, content in card.items()},
    }
    kinds = {stac: ' (STAC MLM)'}
    # GeoAI reads images of one date.
    if description.places is None:
        files[geoai], kinds[geoai] = _json(metadata.geoai_sidecar(file, description)), ' (GeoAI)'
    _write(files)
    for line in loading.describe_file(out, file, description):
        say(line)
    say(
        'beside it: '
        + ', '.join(f'{path.name}{kinds.get(path, "")}' for path in files if path != out)
    )
    if gsd is None and target.name == 'qgis':
        say('note: the size of a pixel is not known, and QGIS asks for it; --gsd METERS says it')
    return 0


def _recorded(say: Callable[[str], None], messages: List[str]) -> Callable[[str], None]:
    """Return a function that calls ``say`` and also appends the line to ``messages``."""

    def say_and_record(line: str) -> None:
        messages.append(line)
        say(line)

    return say_and_record


def _check_names(paths: Sequence[Path], overwrite: bool) -> None:
    from mapsage.extras.export.errors import ExportError

    if paths[0].suffix != '.onnx':
        raise ExportError(f'--out {paths[0]}: expected a name that ends in .onnx.')
    for path in paths:
        if path.is_dir():
            raise ExportError(f'{path} is a folder: give another name.')
        if path.exists() and not overwrite:
            raise ExportError(f'{path} exists already: give another name, or add --overwrite.')


def _make_folder(folder: Path, option: str) -> None:
    """Create the folder of an option; raise an error now, and not after the work."""
    from mapsage.extras.export.errors import ExportError

    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=str(folder)):
            pass
    except OSError as error:
        raise ExportError(
            f'{option}: cannot write into {folder}: {error.strerror}. Name a folder '
            f'that is new or can be written.'
        ) from error


def _write(files: Mapping[Path, bytes]) -> None:
    """Write all files, the first one last, so that a program that waits for it finds the others."""
    from mapsage.base.files import atomic_write
    from mapsage.extras.export.errors import ExportError

    try:
        for path, content in reversed(list(files.items())):
            atomic_write(path, content)
    except OSError as error:
        raise ExportError(
            f'cannot write {next(iter(files))}: {error}. Free space there, or write elsewhere.'
        ) from error


def _json(content: Mapping[str, object]) -> bytes:
    return (json.dumps(content, indent=1) + '\n').encode()


def run() -> None:
    """Run the command line and exit."""
    from mapsage.commands import cli

    cli.run(main)
