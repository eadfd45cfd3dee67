"""Import paths of version 0.5 that work for one more version, with a DeprecationWarning.

A row of ``MODULES`` is a module or package that has moved, a row of ``NAMES`` a public name that
its package no longer exports. Remove this file and its call in ``__init__.py`` with version 0.7.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Dict, Optional, Sequence

MODULES: Dict[str, str] = {
    'mapsage.accelerator.sim': 'mapsage.extras.simulator.accelerator',
    'mapsage.accelerator.simulator': 'mapsage.extras.simulator',
    'mapsage.accuracy': 'mapsage.extras.assess',
    'mapsage.change_classes': 'mapsage.geo.change_classes',
    'mapsage.commands.cache_features': 'mapsage.extras.streaming.cache_features',
    'mapsage.commands.doctor.kernels': 'mapsage.extras.forensics.kernels',
    'mapsage.commands.doctor.operators': 'mapsage.extras.forensics.operator_report',
    'mapsage.commands.doctor.tuning': 'mapsage.extras.forensics.tuning',
    'mapsage.commands.pseudo_labels': 'mapsage.extras.labels.pseudo_labels',
    'mapsage.commands.replay': 'mapsage.extras.forensics.replay',
    'mapsage.commands.suggest_labels': 'mapsage.extras.labels.suggest_labels',
    'mapsage.datasets.change': 'mapsage.extras.change',
    'mapsage.datasets.demo': 'mapsage.extras.demo',
    'mapsage.datasets.prepare': 'mapsage.extras.demo.prepare',
    'mapsage.datasets.semi_supervised': 'mapsage.extras.labels.unlabeled',
    'mapsage.distributed.groups.replicas': 'mapsage.extras.streaming.split_head.replicas',
    'mapsage.drawing': 'mapsage.pictures',
    'mapsage.engine.guards.cross_check_hook': 'mapsage.extras.forensics.cross_check_hook',
    'mapsage.engine.guards.nodes_hook': 'mapsage.extras.elastic.nodes_hook',
    'mapsage.engine.nodes': 'mapsage.extras.elastic.nodes',
    'mapsage.errors': 'mapsage.base.errors',
    'mapsage.evaluation.change_metric': 'mapsage.extras.change.metric',
    'mapsage.export': 'mapsage.extras.export',
    'mapsage.features': 'mapsage.extras.streaming',
    'mapsage.few_labels': 'mapsage.extras.labels.fixmatch',
    'mapsage.labeling': 'mapsage.extras.labels',
    'mapsage.models.backbones.earth': 'mapsage.extras.earth',
    'mapsage.models.backbones.earth.attention': 'mapsage.models.backbones.attention',
    'mapsage.models.backbones.siamese_backbone': 'mapsage.extras.change.siamese_backbone',
    'mapsage.models.semi_supervised': 'mapsage.extras.labels.fixmatch',
    'mapsage.operators': 'mapsage.extras.forensics.operators',
    'mapsage.places': 'mapsage.geo.places',
    'mapsage.report': 'mapsage.pictures.report',
    'mapsage.stacks': 'mapsage.geo.stacks',
    'mapsage.viewer': 'mapsage.extras.viewer',
    'mapsage.wrappers': 'mapsage.distributed.wrappers',
    'mapsage.wrappers.replica_parallel': 'mapsage.extras.streaming.split_head.replica_parallel',
}
_CHANGE = (
    'ChangeDataError',
    'ChangeDataset',
    'ExchangeDates',
    'JitterDates',
    'LoadChangeLabels',
    'LoadChangePair',
    'ShiftDate',
)
_DEMO = (
    'CROP_CLASSES',
    'CROP_PALETTE',
    'ChangeParams',
    'CropParams',
    'DemoParams',
    'DemoScene',
    'NeighborParams',
    'draw_scene',
    'write_change_pairs',
    'write_crop_places',
    'write_demo_data',
    'write_neighbor_scenes',
)
_UNLABELED = (
    'HideLabels',
    'LabeledUnlabeledSampler',
    'PackUnlabeledInputs',
    'SemiSupervisedDataset',
    'UnlabeledImages',
)
_BACKBONES = {
    **dict.fromkeys(
        ('DOFA', 'EarthSensorError', 'OlmoEarth', 'PrithviEO', 'TerraMind'), 'mapsage.extras.earth'
    ),
    'SiameseBackbone': 'mapsage.extras.change',
}
NAMES: Dict[str, Dict[str, str]] = {
    'mapsage.engine.guards': {
        **dict.fromkeys(
            ('CrossCheckError', 'CrossCheckHook'), 'mapsage.extras.forensics.cross_check_hook'
        ),
        'NodesHook': 'mapsage.extras.elastic.nodes_hook',
    },
    'mapsage.distributed': dict.fromkeys(
        ('Replicas', 'make_replicas'), 'mapsage.extras.streaming.split_head.replicas'
    ),
    'mapsage.distributed.wrappers': dict.fromkeys(
        ('HeadReplicas', 'whole_model'), 'mapsage.extras.streaming.split_head.replica_parallel'
    ),
    'mapsage.datasets': {
        **dict.fromkeys(_CHANGE, 'mapsage.extras.change'),
        **dict.fromkeys(_DEMO, 'mapsage.extras.demo'),
        **dict.fromkeys(_UNLABELED, 'mapsage.extras.labels.unlabeled'),
    },
    'mapsage.evaluation': dict.fromkeys(
        ('ChangeMetric', 'change_scores', 'land_confusion', 'separated_kappa'),
        'mapsage.extras.change.metric',
    ),
    'mapsage.models': _BACKBONES,
    'mapsage.models.backbones': _BACKBONES,
}


def keep_old_paths() -> None:
    """Let old import paths lead to the new ones."""
    if not any(isinstance(finder, _MovedModules) for finder in sys.meta_path):
        # Before Python's own finder, which would load a second copy of a moved submodule.
        sys.meta_path.insert(0, _MovedModules())
    for package, names in NAMES.items():
        if package in sys.modules:
            module = vars(sys.modules[package])
            module['__getattr__'] = _attributes(package, names, module.get('__getattr__'))


class _MovedModules(MetaPathFinder, Loader):
    """Finds a moved module under its old name; both names are the same module."""

    def find_spec(
        self, fullname: str, path: Optional[Sequence[str]], target: Optional[ModuleType] = None
    ) -> Optional[ModuleSpec]:
        if not fullname.startswith('mapsage.') or _new_name(fullname) is None:
            return None
        return ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new = _new_name(spec.name)
        assert new is not None
        _warn(spec.name, new)
        module = importlib.import_module(new)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give a module back its own spec, which Python has replaced by that of the old name."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def _new_name(name: str) -> Optional[str]:
    """Return the new name of a moved module or of a module in a moved package, else None."""
    parts = name.split('.')
    for length in range(len(parts), 1, -1):
        new = MODULES.get('.'.join(parts[:length]))
        if new is not None:
            return '.'.join([new, *parts[length:]])
    return None


def _attributes(package: str, names: Dict[str, str], original: Any) -> Any:
    def __getattr__(name: str) -> Any:
        if name not in names:
            if original is not None:
                return original(name)
            raise AttributeError(f'module {package!r} has no attribute {name!r}')
        _warn(f'{package}.{name}', f'{names[name]}.{name}')
        return getattr(importlib.import_module(names[name]), name)

    return __getattr__


def _warn(old: str, new: str) -> None:
    warnings.warn(
        f'{old} has moved to {new}; the old path works until version 0.7',
        DeprecationWarning,
        stacklevel=3,
    )
