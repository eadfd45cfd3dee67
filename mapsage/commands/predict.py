"""tools/predict.py: options to a prediction, and its result to an exit status.

The work is done by `mapsage.maps.prediction.Prediction`; the options are in `programs/predict.py`.
With `--model` (an exported file) the program must run on machines without PyTorch, so modules that
import it are imported inside functions here.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Callable

from mapsage.maps.exported import ExportedModel
from mapsage.maps.map_model import MapModel
from mapsage.maps.options import MapOptions
from mapsage.maps.prediction import Prediction

from .report import refresh_report

# Exit status if maps have holes where blocks could not be read, or inputs were skipped.
PARTIAL = 3


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
    model = open_model(args, say)
    return run_prediction(Prediction(map_options(args), model, say), say)


def run_prediction(prediction: Prediction, say: Callable[[str], None]) -> int:
    """Make the maps, update the report of the run they belong to, and return the exit status."""
    gaps = prediction.run()
    status = 0
    if gaps:
        status = PARTIAL
        text = f'partial: {"; ".join(gaps)}; status {status}'
        say(text)
        prediction.model.note_for_launcher(text)
    if prediction.model.rank == 0:
        refresh_report(Path(prediction.options.out).parent, say)
    return status


def map_options(args: argparse.Namespace, previews: bool = True) -> MapOptions:
    """Return the options of the maps from the command line.

    Args:
        args: Options of tools/predict.py.
        previews: Whether maps have a preview.
    """
    return MapOptions(
        inputs=args.inputs,
        out=args.out,
        allow_remote=args.allow_remote,
        mosaic=args.mosaic,
        aoi=args.aoi,
        bands=args.bands,
        scale=args.scale,
        gsd=args.gsd,
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
    )


def open_model(args: argparse.Namespace, say: Callable[[str], None]) -> MapModel:
    """Return the model that the command line names, not loaded yet."""
    if args.model is not None:
        return ExportedModel(
            args.model, args.runtime, args.overlap, args.batch_size, args.tta, args.window
        )
    from .checkpoint_model import CheckpointModel

    return CheckpointModel(args, say)
