"""tools/predict.py --pseudo-labels: predict unlabeled inputs, then make masks and a config of them.

The maps come from `mapsage.maps.prediction`, the masks from `pseudo_masks.py`, the config from
`joined_config.py`. Inputs that the datasets of the config already name are left out: images of the
training set have labels, and images of the other sets must stay unseen.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import math
import os
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence

from mmengine.config import Config
from mmengine.dataset import BaseDataset
from mmengine.registry import DefaultScope

from mapsage.base.files import atomic_write
from mapsage.commands.cli import LOADERS, read_config
from mapsage.commands.predict import map_options, open_model, run_prediction
from mapsage.engine.loading.build import build_dataset
from mapsage.engine.loading.data_checks import build_checked
from mapsage.extras.labels import joined_config
from mapsage.extras.labels.known_labels import KnownLabels
from mapsage.extras.labels.pseudo_masks import Kept, MapPair, table, write_masks
from mapsage.geo.places import PlaceInputs
from mapsage.host.dataset_parts import metainfo_of
from mapsage.maps.errors import PredictError
from mapsage.maps.map_model import PlaceSource
from mapsage.maps.model import check_labeling
from mapsage.maps.options import MapOptions
from mapsage.maps.prediction import Prediction, find_map_inputs
from mapsage_launcher.shipped import program

REPORT, CONFIG = 'pseudo_labels.json', 'pseudo_labels.py'
# Number of file names in a note.
_SHOWN = 3


def predict_pseudo_labels(
    args: argparse.Namespace, say: Callable[[str], None] = functools.partial(print, flush=True)
) -> int:
    """Predict maps, write masks and a config, and return the exit status.

    Args:
        args: Options of tools/predict.py, with ``pseudo_labels``.
        say: Function that prints a line; called on rank 0 only.

    Returns:
        0, or 3 if blocks of an input could not be read, which have no labels, or inputs were
        skipped.
    """
    args.confidence = True
    return _PseudoLabels(args, say).run()


class _PseudoLabels:
    """A prediction, and the masks of its confident pixels.

    Args:
        args: Options of tools/predict.py.
        say: Function that prints a line; called on rank 0 only.
    """

    def __init__(self, args: argparse.Namespace, say: Callable[[str], None]) -> None:
        self._args = args
        self._folder = Path(args.pseudo_labels).absolute()
        check_labeling(self._cfg, '--pseudo-labels')
        model = open_model(args, say)
        self._say = say if model.rank == 0 else lambda line: None
        # Without previews, which would take most of the time for hundreds of small images.
        self._prediction = Prediction(
            map_options(args, previews=False), model, say, self._find_unlabeled
        )

    def run(self) -> int:
        """Predict, write masks, report and config on rank 0, and return the exit status."""
        training_classes = tuple(metainfo_of(self._labeled).get('classes') or ())
        model = self._prediction.model
        if training_classes != tuple(model.classes.names):
            raise PredictError(
                f"the model's classes are {', '.join(model.classes.names)}, and "
                f"those of the config's training data "
                f'{", ".join(training_classes)}: masks of one are no labels for the '
                f'other. Give the config that the checkpoint was trained with.'
            )
        status = run_prediction(self._prediction, self._say)
        with model.fail_together('writing the pseudo-labels'):
            if model.rank == 0:
                self._write()
        return status

    @functools.cached_property
    def _cfg(self) -> Config:
        """Config of the training, without the accelerator that was chosen for the prediction."""
        args = argparse.Namespace(**{**vars(self._args), 'accelerator': None})
        return joined_config.without_unlabeled(read_config(args))

    def _find_unlabeled(self, options: MapOptions, places: Optional[PlaceSource]) -> Dict[str, str]:
        """Return the inputs without images that have labels or that scores are computed on.

        A partly labeled scene stays: existing labels replace pseudo-labels pixel by pixel.

        Raises:
            PredictError: If no input is left, or the folder holds somebody else's masks.
        """
        masks = self._folder / 'masks'
        if self._folder.is_dir() and masks.exists() and not (self._folder / REPORT).exists():
            raise PredictError(
                f'{masks} exists, and was not made with this command. Choose '
                f'another folder for --pseudo-labels.'
            )
        joined_config.labeled_dataset(self._cfg)
        self._labeled, *scored_datasets = (
            build_labeled_dataset(self._cfg, loader) for loader in LOADERS
        )
        labeled, scored = KnownLabels(self._labeled), KnownLabels(*scored_datasets)
        self._known = KnownLabels(self._labeled, *scored_datasets)
        inputs = find_map_inputs(options, places)
        labeled_inputs = {
            name: path
            for name, path in inputs.items()
            if path in labeled and not labeled.is_scene(path)
        }
        scored_inputs = {
            name: path for name, path in inputs.items() if path in scored and path not in labeled
        }
        for left_out, reason in (
            (labeled_inputs, 'labeled already, by the dataset of train_dataloader'),
            (scored_inputs, 'what val_dataloader or test_dataloader scores on'),
        ):
            if left_out:
                self._say(f'left out, as {reason}: {_first_paths(list(left_out.values()))}')
        unlabeled = {
            name: path
            for name, path in inputs.items()
            if name not in labeled_inputs and name not in scored_inputs
        }
        if not unlabeled:
            raise PredictError(
                f'no unlabeled input: all {len(inputs)} are in the datasets of '
                f'{self._args.config}, such as {next(iter(inputs.values()))}. Give '
                f'images or scenes that it does not name.'
            )
        return unlabeled

    def _write(self) -> None:
        """Write masks, report and config; rank 0 only."""
        masks = self._folder / 'masks'
        classes = self._prediction.model.classes
        try:
            masks.mkdir(parents=True, exist_ok=True)
            # The report marks the masks as made by this command, even if it is interrupted. An
            # earlier config goes, because it names other masks.
            atomic_write(self._folder / REPORT, b'{}\n')
            (self._folder / CONFIG).unlink(missing_ok=True)
            result = write_masks(
                self._map_pairs(),
                masks,
                classes.names,
                classes.palette,
                self._args.min_confidence,
                self._args.min_share,
                self._known,
            )
            self._report(result)
        except OSError as error:
            raise PredictError(
                f'cannot write into {self._folder}: {error}. Free space there, or '
                f'choose another folder for --pseudo-labels.'
            ) from error

    def _map_pairs(self) -> List[MapPair]:
        pairs = []
        setup = self._prediction.setup
        for name, path in self._prediction.mapped_inputs.items():
            outputs, scene = setup.outputs_of(name), setup.open_scene(path)
            with scene.raster:
                is_picture = scene.is_picture and os.path.exists(path)
            # `predict_pseudo_labels` has set the option.
            assert outputs.confidence is not None
            pairs.append(MapPair(name, path, outputs.map, outputs.confidence, is_picture))
        return pairs

    def _report(self, result: Kept) -> None:
        """Tell the user what the masks contain; write the report and the config."""
        names, args = self._prediction.model.classes.names, self._args
        for line in ('', *table(result, names)):
            self._say(line)
        for line in result.lost(names):
            self._say(f'warning: {line}')
        report: Dict[str, Any] = dict(
            min_confidence=args.min_confidence,
            min_share=args.min_share,
            classes=result.as_json(names),
            inputs=len(result.pairs),
            without_labels=[pair.path for pair in result.empty],
        )
        if not result.pairs:
            raise PredictError(
                'no pixel has a pseudo-label: the maps hold no data, all that they '
                'show is labeled already, or nothing is sure enough (see the '
                'table). Give other images or scenes, or lower --min-confidence.'
            )
        if result.empty:
            paths = [pair.path for pair in result.empty]
            self._say(f'no pixel is kept in {_first_paths(paths)}: left out of the config')
        self._write_config(result)
        text = json.dumps(report, indent=1, ensure_ascii=False) + '\n'
        atomic_write(self._folder / REPORT, text.encode('utf-8', 'backslashreplace'))
        self._say(f'{self._folder}: masks of {len(result.pairs)} input(s), {REPORT}, {CONFIG}')
        self._say(f'train on both: {program("train")} {self._folder / CONFIG}')

    def _work_dir(self) -> str:
        """Return a work dir for the new training that is not the folder of the checkpoint."""
        work_dir = os.path.join('work_dirs', self._folder.name)
        checkpoint_folder = os.path.realpath(os.path.dirname(self._args.checkpoint))
        is_taken = os.path.realpath(work_dir) == checkpoint_folder
        return f'{work_dir}_pseudo_labels' if is_taken else work_dir

    def _write_config(self, result: Kept) -> None:
        repeats: List[int] = []

        def choose_repeats(labeled: List[Any], added: List[Any]) -> int:
            with DefaultScope.overwrite_default_scope(self._cfg.get('default_scope', 'mmseg')):
                labeled_count, added_count = (
                    sum(
                        len(build_checked(build_dataset, copy.deepcopy(config)))
                        for config in configs
                    )
                    for configs in (labeled, added)
                )
            repeats.append(max(1, math.ceil(added_count / max(1, labeled_count))))
            return repeats[0]

        setup, path = self._prediction.setup, self._folder / CONFIG
        places = setup.places if isinstance(setup.places, PlaceInputs) else None
        joined = joined_config.join(
            self._cfg,
            result.pairs,
            self._folder,
            dict(metainfo_of(self._labeled)),
            max(setup.window),
            setup.bands,
            choose_repeats,
            self._work_dir(),
            places,
        )
        frequency = f', {repeats[0]} times in an epoch' if repeats[0] > 1 else ''
        joined_config.write_config(
            joined,
            path,
            (
                f'Labels and pseudo-labels: {_docstring_text(self._args.config)} on '
                f'{len(result.pairs)} more input(s).\n\n'
                f'Command:  python tools/train.py {_docstring_text(path)}\n'
                f'Labels:   those of the config{frequency}, so that they are not outnumbered;\n'
                f'          masks: confidence {self._args.min_confidence:g}, at least '
                f'{self._args.min_share:g} of each class, see {REPORT}\n'
                f'Score:    not yet run\n'
            ),
        )
        # Fails here, and not in the training, if the config cannot be read.
        Config.fromfile(str(path))


def build_labeled_dataset(cfg: Config, loader: str) -> Optional[BaseDataset]:
    """Build a loader's dataset; the labeled one of FixMatch's two; None if there is no dataset."""
    config = (joined_config.without_unlabeled(cfg).get(loader) or {}).get('dataset')
    if not isinstance(config, dict):
        return None
    with DefaultScope.overwrite_default_scope(cfg.get('default_scope', 'mmseg')):
        return build_checked(build_dataset, config)


def _first_paths(paths: Sequence[str]) -> str:
    more = f' and {len(paths) - _SHOWN} more' if len(paths) > _SHOWN else ''
    return ', '.join(paths[:_SHOWN]) + more


def _docstring_text(value: object) -> str:
    """Return a text that can stand in the docstring of a config."""
    return str(value).encode('utf-8', 'replace').decode().replace('\\', '/').replace('"', "'")
