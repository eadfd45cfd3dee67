"""The model of a prediction from an exported file, in one process, without PyTorch."""
from __future__ import annotations

import argparse
import faulthandler
import hashlib
import os
import sys
from contextlib import nullcontext
from typing import Any, Callable, Dict, Optional, Sequence

from mapsage.console import accept_any_text, examples
from mapsage.geo import GeoError, RasterBlockError
from mapsage.maps.errors import PredictError
from mapsage.maps.exported import RUNTIMES, ExportedPredictor
from mapsage.maps.strips import Predictor

_BLOCK = 1 << 20


def is_exported(argv: Optional[Sequence[str]]) -> bool:
    """Return whether the command line, or that of the process, names an exported model."""
    words = sys.argv[1:] if argv is None else argv
    return any(word.split('=')[0] == '--model' for word in words)


def build_parser(about: str, argv: Optional[Sequence[str]],
                 doc: Optional[str] = None) -> argparse.ArgumentParser:
    """Return a parser that takes an exported model, or a config and a checkpoint.

    Args:
        about: What the program does.
        argv: Its arguments; those of the process if None.
        doc: Docstring with examples for the help.
    """
    if is_exported(argv):
        parser = argparse.ArgumentParser(description=about, **examples(doc))
    else:
        from . import cli  # which needs PyTorch
        parser = cli.build_parser(about, doc=doc)
        parser.add_argument('checkpoint', help='path of the checkpoint')
    parser.add_argument('--allow-remote', action='store_true',
                        help='ask servers that a file of an input folder names, such as a mosaic '
                        '(VRT); what the command line names is asked for in any case')
    parser.add_argument('--model', metavar='MODEL.onnx',
                        help='file of tools/export.py, in place of CONFIG and CHECKPOINT')
    parser.add_argument('--runtime', choices=RUNTIMES, default=RUNTIMES[0],
                        help='program that runs --model (default: onnxruntime)')
    return parser


class ExportedModel:
    """Implements :class:`mapsage.commands.predict.MapModel` by a file of tools/export.py."""

    rank, world_size = 0, 1

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        ranks = os.environ.get('WORLD_SIZE', '1')
        if ranks not in ('', '1'):
            raise PredictError(f'--model with WORLD_SIZE={ranks}: an exported model runs in one '
                               f'process, and each rank would write the same maps. Start python '
                               f'tools/predict.py without a launcher; unset WORLD_SIZE if it is '
                               f'left from one.')

    def load(self) -> None:
        """Open the file.

        Raises:
            PredictError: If it cannot be opened, or has windows of another size.
        """
        args = self._args
        predictor = ExportedPredictor(args.model, args.runtime, args.overlap, args.batch_size,
                                      args.tta)
        self.predictor: Predictor = predictor
        self._description, self._device = predictor.description, predictor.device
        description = predictor.description
        side = description.window
        if args.window not in (None, side):
            raise PredictError(f'--window {args.window}: {args.model} takes windows of {side} '
                               f'pixels. Export it again with --window {args.window}.')
        self.classes, self.bands = description.as_classes(), description.bands
        self.window, self.window_from = (side, side), f'those of {args.model}'
        self.overlap, self.batch_size = predictor.overlap, predictor.batch_size

    def settings(self) -> Dict[str, Any]:
        """Return what of the model a map depends on, as JSON holds it."""
        digest = hashlib.sha256()
        with open(self._args.model, 'rb') as file:
            for block in iter(lambda: file.read(_BLOCK), b''):
                digest.update(block)
        return dict(checkpoint=self._description.checkpoint, model=digest.hexdigest())

    def describe(self) -> str:
        """Return what computes, the end of a line."""
        return f'; {self._device}'

    def together(self, what: str) -> Any:
        """Return a context; there is one rank."""
        return nullcontext()

    def share(self, text: str) -> str:
        """Return the text."""
        return text

    def note(self, text: str) -> None:
        """Do nothing: there is no launcher."""


def run(main: Callable[[Optional[Sequence[str]]], Optional[int]]) -> None:
    """Run the entry point; with an exported model without PyTorch, whose errors are printed once.

    The exit status is 1 after an error, else what ``main`` returns.
    """
    if not is_exported(None):
        from . import cli
        cli.run(main)
        return
    accept_any_text()
    faulthandler.enable()  # a crash in native code says where
    try:
        status = main(None)
    except KeyboardInterrupt:
        status = 130  # 128 + SIGINT, as a shell reports it
    except (GeoError, PredictError, RasterBlockError) as error:
        print(error, file=sys.stderr, flush=True)  # noqa: T201
        status = 1
    sys.exit(status or 0)
