"""Trainings and maps from Python: ``from mapsage import train, load_model, predict``.

They do what tools/train.py and tools/predict.py do, in this process, with the same bits.
"""

from __future__ import annotations

import argparse
import contextlib
import html
import io
import tempfile
from pathlib import Path
from typing import Any, Callable, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np

from mapsage.geo import Raster
from mapsage.geo.gdal_files import open_file
from mapsage.maps.errors import PredictError
from mapsage.maps.prediction import Prediction
from mapsage_launcher.shipped import find_config

from . import predict as predict_command
from . import train as train_command
from .checkpoint_model import CheckpointModel

PathName = Union[str, Path]


class MapPixels(NamedTuple):
    """The map of an image or scene.

    Attributes:
        classes: Class index of each pixel, uint8 ``(H, W)``; 255 without data.
        confidence: Probability of the class in percent, uint8 ``(H, W)``; 255 without data.
    """

    classes: np.ndarray
    confidence: np.ndarray


class Model:
    """A trained model that stays in memory; from :func:`load_model`.

    Attributes:
        classes: Names of the classes in the order of their indices.
        palette: RGB colors of the classes, uint8 ``(classes, 3)``.
    """

    def __init__(self, config: PathName, checkpoint: PathName, options: Mapping[str, Any]) -> None:
        # INPUT and --out are given for each prediction.
        self._args = _parse([config, checkpoint, 'none'], dict(options, out='none'))
        self._model = _LoadedModel(self._args, _say_nothing)
        self._model.load()
        self.classes: Tuple[str, ...] = self._model.classes.names
        self.palette: np.ndarray = self._model.classes.palette

    def predict(self, image: Union[np.ndarray, PathName]) -> MapPixels:
        """Return the map of an image.

        Args:
            image: Path of an image or scene, or the pixels ``(H, W)`` or ``(H, W, bands)`` in the
                order of the bands in a file, red first for photos.

        Raises:
            GeoError, PredictError: If the image cannot be read, or does not fit the model.
        """
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / 'image.tif'
            if isinstance(image, np.ndarray):
                _write_image(path, image)
            else:
                path = Path(image)
            self._args.inputs, self._args.out = [str(path)], str(Path(folder) / 'maps')
            self._args.confidence = True
            options = predict_command.map_options(self._args, previews=False)
            prediction = Prediction(options, self._model, _say_nothing)
            gaps = prediction.run()
            if gaps:
                raise PredictError(f'{path}: the map has gaps: {"; ".join(gaps)}.')
            (name,) = prediction.mapped_inputs
            outputs = prediction.setup.outputs_of(name)
            return MapPixels(*(_read_band(file) for file in (outputs.map, outputs.confidence)))


class _LoadedModel(CheckpointModel):
    """A model that is loaded and prepared for the first prediction only."""

    _is_loaded = _is_prepared = False

    def load(self) -> None:
        if not self._is_loaded:
            super().load()
            self._is_loaded = True

    def prepare(self, decisions: Mapping[str, Any]) -> None:
        if not self._is_prepared:
            super().prepare(decisions)
            self._is_prepared = True


def load_model(config: PathName, checkpoint: PathName, **options: Any) -> Model:
    """Load a trained model, to map images one after the other.

    Args:
        config: Path of the config, or the name of a shipped one.
        checkpoint: Path of the checkpoint.
        **options: Options of tools/predict.py, such as ``accelerator='cuda'``, ``window=512``,
            ``tta=True``.

    Raises:
        ConfigError, PredictError: If config and checkpoint do not fit together.
        TypeError: If tools/predict.py has no such option.
    """
    return Model(config, checkpoint, options)


def predict(
    config: PathName,
    checkpoint: PathName,
    scenes: Union[PathName, Sequence[PathName]],
    out: PathName,
    say: Callable[[str], None] = print,
    **options: Any,
) -> List[Path]:
    """Write the maps of images and scenes of any size, as tools/predict.py does.

    Args:
        config: Path of the config, or the name of a shipped one.
        checkpoint: Path of the checkpoint.
        scenes: Paths of images, scenes and folders of them.
        out: Folder of the maps.
        say: Function that prints a line.
        **options: Options of tools/predict.py, such as ``polygons=True``, ``window=512``.

    Returns:
        Paths of the maps.

    Raises:
        ConfigError, GeoError, PredictError: As tools/predict.py reports them.
        TypeError: If tools/predict.py has no such option.
    """
    inputs = [scenes] if isinstance(scenes, (str, Path)) else list(scenes)
    args = _parse([config, checkpoint, *inputs], dict(options, out=out))
    model = predict_command.open_model(args, say)
    prediction = Prediction(predict_command.map_options(args), model, say)
    predict_command.run_prediction(prediction, say)
    return [prediction.setup.outputs_of(name).map for name in prediction.mapped_inputs]


class TrainedRun(NamedTuple):
    """The files of a finished training. A notebook shows the report of the run.

    Attributes:
        config: The resolved config, with all settings.
        checkpoint: The best checkpoint, or the last one where none was chosen by a score.
        report: The report of the run, an HTML page.
    """

    config: Path
    checkpoint: Path
    report: Path

    def _repr_html_(self) -> str:
        page = html.escape(self.report.read_text(encoding='utf-8'))
        return f'<iframe srcdoc="{page}" style="width:100%;height:640px;border:0"></iframe>'


def train(
    config: PathName,
    work_dir: PathName,
    settings: Optional[Mapping[str, Any]] = None,
    **options: Any,
) -> TrainedRun:
    """Train a config in this process, as tools/train.py does on one device.

    Args:
        config: Path of the config, or the name of a shipped one.
        work_dir: Folder of logs, checkpoints and the report.
        settings: Settings of the config to change, by their paths: ``{'train_cfg.max_iters': 40}``.
        **options: Options of tools/train.py, such as ``accelerator='cuda'``, ``amp=True``,
            ``resume=True``.

    Raises:
        ConfigError, DataError: As tools/train.py reports them.
        TypeError: If tools/train.py has no such option.
    """
    args = _parse_with(
        lambda _: train_command.build_parser(), [config], dict(options, work_dir=work_dir)
    )
    args.cfg_options = dict(settings or {}) or None
    train_command.train(args)
    folder = Path(work_dir)
    # The newest of several best checkpoints is that of the last validation that was better.
    best = sorted(folder.glob('best_*.pth'), key=lambda path: path.stat().st_mtime_ns)
    last = (folder / 'last_checkpoint').read_text(encoding='utf-8').strip()
    name = Path(find_config(str(config))).name
    return TrainedRun(folder / name, [Path(last), *best][-1], folder / 'report.html')


def _parse(positional: Sequence[PathName], options: Mapping[str, Any]) -> Any:
    """Return the arguments of tools/predict.py."""
    return _parse_with(
        predict_command.build_parser, positional, options, predict_command.check_arguments
    )


def _parse_with(
    build_parser: Callable[[Sequence[str]], argparse.ArgumentParser],
    positional: Sequence[PathName],
    options: Mapping[str, Any],
    check: Callable[..., None] = lambda parser, args: None,
) -> Any:
    """Return the arguments of a program."""
    arguments = [str(value) for value in positional]
    for name, value in options.items():
        option = f'--{name.replace("_", "-")}'
        if isinstance(value, (list, tuple)):
            arguments += [option, *map(str, value)]
        elif value is True:
            arguments.append(option)
        elif value is not None and value is not False:
            arguments.append(f'{option}={value}')
    parser = build_parser(arguments)
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            args = parser.parse_args(arguments)
            check(parser, args)
    except SystemExit as error:
        message = errors.getvalue().strip().rpartition('error: ')[2]
        raise TypeError(f'{message} (options: {dict(options)})') from error
    return args


def _write_image(path: Path, image: np.ndarray) -> None:
    if image.ndim not in (2, 3) or not image.size or image.dtype.kind not in 'uif':
        raise PredictError(
            f'an array of shape {image.shape} and type {image.dtype}: expected pixels (height, width) '
            f'or (height, width, bands).'
        )
    bands = image[None] if image.ndim == 2 else image.transpose(2, 0, 1)
    # GDAL has no 16-bit floats.
    bands = bands.astype(np.float32) if bands.dtype == np.float16 else bands
    count, height, width = bands.shape
    profile = dict(driver='GTiff', width=width, height=height, count=count, dtype=bands.dtype)
    with open_file(path, 'w', photometric='MINISBLACK', **profile) as file:
        file.write(bands)


def _read_band(path: Any) -> np.ndarray:
    with Raster(path) as raster:
        (band,), _ = raster.read(0, 0, raster.width, raster.height)
    return np.asarray(band)


def _say_nothing(line: str) -> None:
    """Print nothing: a caller in Python has the result."""
