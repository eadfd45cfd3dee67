"""Predict maps, and make masks of what the model is sure of: tools/predict.py --pseudo-labels."""
from __future__ import annotations

import argparse
import copy
import functools
import json
import math
import os
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping

from mmengine.config import Config
from mmengine.registry import DefaultScope

from mapsage.atomic_write import atomic_write
from mapsage.engine.loading.build import build_dataset
from mapsage.engine.loading.data_checks import build_checked
from mapsage.labeling import joined_config
from mapsage.labeling.known_labels import KnownLabels
from mapsage.labeling.pseudo_masks import Kept, MapPair, table, write_masks
from mapsage.maps.errors import PredictError
from mapsage_launcher.shipped import program

from .config_checks import LOADERS, read_config
from .predict import Prediction

REPORT, CONFIG = 'pseudo_labels.json', 'pseudo_labels.py'
_SHOWN = 3  # names of files in a note


def predict_pseudo_labels(args: argparse.Namespace,
                          say: Callable[[str], None] = functools.partial(print, flush=True)
                          ) -> int:
    """Predict what the command line asks for, write masks and a config, and return the status.

    Args:
        args: Options of tools/predict.py, with ``pseudo_labels``.
        say: Function that prints a line; called on rank 0 only.

    Returns:
        0, or 3 when parts of an input could not be read; these have no labels.
    """
    args.confidence = True
    args.out = args.out or str(Path(args.pseudo_labels) / 'maps')
    return _PseudoLabels(args, say).run()


class _PseudoLabels(Prediction):
    """The maps of a prediction, and then the masks of what it is sure of."""

    _with_previews = False  # of hundreds of small images, they would take most of the time

    @functools.cached_property
    def _cfg(self) -> Config:
        """The config of the training, without what is for this prediction alone."""
        given = argparse.Namespace(**{**vars(self._args), 'accelerator': None})
        return joined_config.without_unlabeled(read_config(given))

    def find_inputs(self) -> Dict[str, str]:
        """Return the inputs without images that have labels, or that scores are computed on.

        A scene of which a part is labeled stays: its labels count where they are.
        """
        self._target = Path(self._args.pseudo_labels).absolute()
        if self._target.is_dir() and (self._target / 'masks').exists() \
                and not (self._target / REPORT).exists():
            raise PredictError(f'{self._target / "masks"} exists, and was not made with this '
                               f'command. Choose another folder for --pseudo-labels.')
        joined_config.labeled_dataset(self._cfg)
        self._labeled, *others = (build_dataset_of(self._cfg, loader) for loader in LOADERS)
        known, held_out = KnownLabels(self._labeled), KnownLabels(*others)
        self._known = KnownLabels(self._labeled, *others)
        found = super().find_inputs()
        taught = {name: path for name, path in found.items()
                  if path in known and not known.is_scene(path)}
        scored = {name: path for name, path in found.items()
                  if path in held_out and path not in known}
        for left_out, why in ((taught, 'labeled already, by the dataset of train_dataloader'),
                              (scored, 'what val_dataloader or test_dataloader scores on')):
            if left_out:
                self._say(f'left out, as {why}: {_some(list(left_out.values()))}')
        rest = {name: path for name, path in found.items()
                if name not in taught and name not in scored}
        if not rest:
            raise PredictError(f'no unlabeled input: all {len(found)} are in the datasets of '
                               f'{self._args.config}, such as {next(iter(found.values()))}. Give '
                               f'images or scenes that it does not name.')
        return rest

    def run(self) -> int:
        """Predict, write masks, report and config on rank 0, and return the exit status."""
        taught = tuple(_metainfo(self._labeled).get('classes') or ())
        if taught != tuple(self._classes.names):
            raise PredictError(f"the model's classes are {', '.join(self._classes.names)}, and "
                               f"those of the config's training data {', '.join(taught)}: masks of "
                               f'one are no labels for the other. Give the config that the '
                               f'checkpoint was trained with.')
        status = super().run()
        with self._together('writing the pseudo-labels'):
            if self._rank == 0:
                self._write()
        return status

    def _write(self) -> None:
        masks = self._target / 'masks'
        try:
            masks.mkdir(parents=True, exist_ok=True)
            atomic_write(self._target / REPORT, b'{}\n')  # these masks are ours from now on
            (self._target / CONFIG).unlink(missing_ok=True)  # of other masks, until it is done
            names = self._classes.names
            kept = write_masks(self._pairs(), masks, names, self._classes.palette,
                               self._args.min_confidence, self._args.min_share, self._known)
            self._report(kept)
        except OSError as error:
            raise PredictError(f'cannot write into {self._target}: {error}. Free space there, or '
                               f'choose another folder for --pseudo-labels.') from error

    def _pairs(self) -> List[MapPair]:
        pairs = []
        for name, path in self._inputs.items():
            if name in self._beside:
                continue
            outputs, scene = self._outputs(name), self._scene(path)
            with scene.raster:
                is_picture = scene.is_picture and os.path.exists(path)
            assert outputs.confidence is not None  # it was asked for
            pairs.append(MapPair(name, path, outputs.map, outputs.confidence, is_picture))
        return pairs

    def _report(self, kept: Kept) -> None:
        names, args = self._classes.names, self._args
        for line in ('', *table(kept, names)):
            self._say(line)
        for line in kept.lost(names):
            self._say(f'warning: {line}')
        report: Dict[str, Any] = dict(
            min_confidence=args.min_confidence, min_share=args.min_share, classes=kept.as_json(
                names), inputs=len(kept.pairs), without_labels=[pair.path for pair in kept.empty])
        if not kept.pairs:
            raise PredictError('no pixel has a pseudo-label: the maps hold no data, all that they '
                               'show is labeled already, or nothing is sure enough (see the '
                               'table). Give other images or scenes, or lower --min-confidence.')
        if kept.empty:
            self._say(f'no pixel is kept in {_some([pair.path for pair in kept.empty])}: left out '
                      f'of the config')
        self._write_config(kept)
        text = json.dumps(report, indent=1, ensure_ascii=False) + '\n'
        atomic_write(self._target / REPORT, text.encode('utf-8', 'backslashreplace'))
        self._say(f'{self._target}: masks of {len(kept.pairs)} input(s), {REPORT}, {CONFIG}')
        self._say(f'train on both: {program("train")} {self._target / CONFIG}')

    def _work_dir(self) -> str:
        """Return where the training writes: not into the folder of the run that predicts."""
        place = os.path.join('work_dirs', self._target.name)
        before = os.path.realpath(os.path.dirname(self._args.checkpoint))
        return f'{place}_pseudo_labels' if os.path.realpath(place) == before else place

    def _write_config(self, kept: Kept) -> None:
        repeats: List[int] = []

        def times(labeled: List[Any], added: List[Any]) -> int:
            with DefaultScope.overwrite_default_scope(self._cfg.get('default_scope', 'mmseg')):
                have, more = (sum(len(build_checked(build_dataset, copy.deepcopy(each)))
                                  for each in some) for some in (labeled, added))
            repeats.append(max(1, math.ceil(more / max(1, have))))
            return repeats[0]

        joined = joined_config.join(
            self._cfg, kept.pairs, self._target, dict(_metainfo(self._labeled)), max(self._window),
            self._bands, times, self._work_dir())
        again = f', {repeats[0]} times in an epoch' if repeats[0] > 1 else ''
        joined_config.write_config(joined, self._target / CONFIG, (
            f'Labels and pseudo-labels: {_plain(self._args.config)} on {len(kept.pairs)} more '
            f'input(s).\n\nCommand:  python tools/train.py {_plain(self._target / CONFIG)}\n'
            f'Labels:   those of the config{again}, so that they are not outnumbered;\n'
            f'          masks: confidence {self._args.min_confidence:g}, at least '
            f'{self._args.min_share:g} of each class, see {REPORT}\n'
            f'Score:    not yet run\n'))
        Config.fromfile(str(self._target / CONFIG))  # it can be read


def build_dataset_of(cfg: Config, loader: str) -> Any:
    """Return a dataset of the config, of FixMatch's the labeled part; None if it has none."""
    config = (joined_config.without_unlabeled(cfg).get(loader) or {}).get('dataset')
    if not isinstance(config, dict):
        return None
    with DefaultScope.overwrite_default_scope(cfg.get('default_scope', 'mmseg')):
        return build_checked(build_dataset, config)


def _metainfo(dataset: Any) -> Mapping[str, Any]:
    return getattr(dataset, 'metainfo', None) or {}


def _some(paths: List[str]) -> str:
    more = f' and {len(paths) - _SHOWN} more' if len(paths) > _SHOWN else ''
    return ', '.join(paths[:_SHOWN]) + more


def _plain(text: Any) -> str:
    """Return a text that can stand in the docstring of a config."""
    return str(text).encode('utf-8', 'replace').decode().replace('\\', '/').replace('"', "'")
