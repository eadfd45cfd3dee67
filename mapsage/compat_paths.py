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
    'mapsage.accelerator.probe': 'mapsage.accelerator.private_use1',
    'mapsage.accelerator.seeds': 'mapsage.accelerator.resolve',
    'mapsage.accelerator.sim': 'mapsage.extras.simulator.accelerator',
    'mapsage.accelerator.simulator': 'mapsage.extras.simulator',
    'mapsage.accelerator.xla_batch_norm': 'mapsage.accelerator.xla',
    'mapsage.accuracy': 'mapsage.extras.assess',
    'mapsage.change_classes': 'mapsage.geo.change_classes',
    'mapsage.commands.cache_features': 'mapsage.extras.streaming.feature_caching',
    'mapsage.commands.compare_checkpoints': 'mapsage.extras.forensics.compare_checkpoints',
    'mapsage.commands.configs': 'mapsage.commands.cli',
    'mapsage.commands.doctor.kernels': 'mapsage.extras.forensics.kernels',
    'mapsage.commands.doctor.operators': 'mapsage.extras.forensics.operator_report',
    'mapsage.commands.doctor.packages': 'mapsage.commands.doctor.environment',
    'mapsage.commands.doctor.tuning': 'mapsage.extras.forensics.tuning',
    'mapsage.commands.export_eomt': 'mapsage.extras.mask_transformers.export_eomt',
    'mapsage.commands.mirrored_test': 'mapsage.commands.test',
    'mapsage.commands.programs': 'mapsage.commands',
    'mapsage.commands.pseudo_labels': 'mapsage.extras.labels.pseudo_labels',
    'mapsage.commands.replay': 'mapsage.extras.forensics.replay',
    'mapsage.commands.stack_statistics': 'mapsage.commands.geotiff_statistics',
    'mapsage.commands.suggest_labels': 'mapsage.extras.labels.label_suggestions',
    'mapsage.datasets.change': 'mapsage.extras.change',
    'mapsage.datasets.demo': 'mapsage.extras.demo',
    'mapsage.datasets.mmrs1m': 'mapsage.extras.mmrs1m.dataset',
    'mapsage.datasets.mmrs1m_records': 'mapsage.extras.mmrs1m.records',
    'mapsage.datasets.prepare': 'mapsage.extras.demo.prepare',
    'mapsage.datasets.semi_supervised': 'mapsage.extras.labels.unlabeled',
    'mapsage.distributed.groups.replicas': 'mapsage.extras.streaming.split_head.replicas',
    'mapsage.distributed.nodes': 'mapsage.distributed',
    'mapsage.distributed.nodes.heartbeat': 'mapsage.extras.elastic.heartbeat',
    'mapsage.distributed.nodes.writer_lease': 'mapsage.engine.checkpoints.writer_lease',
    'mapsage.drawing': 'mapsage.pictures',
    'mapsage.drawing.area_plot': 'mapsage.extras.assess.area_plot',
    'mapsage.engine.checkpoints.clock': 'mapsage.engine.checkpoints.checkpoint_hook',
    'mapsage.engine.checkpoints.neighbor': 'mapsage.extras.elastic.neighbor',
    'mapsage.engine.config_file': 'mapsage.engine.config.file',
    'mapsage.engine.config_mistakes': 'mapsage.engine.config.mistakes',
    'mapsage.engine.config_report': 'mapsage.engine.config.report',
    'mapsage.engine.config_values': 'mapsage.engine.config.values',
    'mapsage.engine.guards.cross_check_hook': 'mapsage.extras.forensics.cross_check_hook',
    'mapsage.engine.guards.nodes_hook': 'mapsage.extras.elastic.nodes_hook',
    'mapsage.engine.guards.reproducibility_hook': 'mapsage.engine.guards.reproducibility',
    'mapsage.engine.loading.sensor_checks': 'mapsage.engine.loading.input_checks',
    'mapsage.engine.mask_annealing_hook': 'mapsage.extras.mask_transformers.annealing_hook',
    'mapsage.engine.node_settings': 'mapsage.extras.elastic.node_settings',
    'mapsage.engine.nodes': 'mapsage.extras.elastic.nodes',
    'mapsage.engine.runner_parts': 'mapsage.engine.runner',
    'mapsage.engine.start_and_end': 'mapsage.engine.startup',
    'mapsage.engine.virtual_settings': 'mapsage.engine.extensions.virtual_ranks',
    'mapsage.errors': 'mapsage.base.errors',
    'mapsage.evaluation.calibration': 'mapsage.extras.calibration.calibration_metric',
    'mapsage.evaluation.calibration_metric': 'mapsage.extras.calibration.calibration_metric',
    'mapsage.evaluation.change_metric': 'mapsage.extras.change.metric',
    'mapsage.evaluation.evaluated_images': 'mapsage.evaluation.confusion_matrix_metric',
    'mapsage.evaluation.rewards': 'mapsage.extras.labels.rewards.rewards',
    'mapsage.export': 'mapsage.extras.export',
    'mapsage.features': 'mapsage.extras.streaming',
    'mapsage.few_labels': 'mapsage.extras.labels.fixmatch',
    'mapsage.host.keyed_samples': 'mapsage.host.runner',
    'mapsage.host.loop_stage': 'mapsage.host.runner',
    'mapsage.host.metrics': 'mapsage.host.runner',
    'mapsage.host.optim_wrappers': 'mapsage.host.runner',
    'mapsage.labeling': 'mapsage.extras.labels',
    'mapsage.maps.background': 'mapsage.maps.strips',
    'mapsage.maps.planning': 'mapsage.maps.prediction',
    'mapsage.maps.strip_store': 'mapsage.maps.strips',
    'mapsage.models.backbones.earth': 'mapsage.extras.earth',
    'mapsage.models.backbones.earth.attention': 'mapsage.models.backbones.attention',
    'mapsage.models.backbones.recompute': 'mapsage.models.backbones.dinov3_blocks',
    'mapsage.models.backbones.siamese_backbone': 'mapsage.extras.change.siamese_backbone',
    'mapsage.models.lora.backbone': 'mapsage.models.lora.inject',
    'mapsage.models.lora.settings': 'mapsage.models.lora.adapted',
    'mapsage.models.mask_transformers': 'mapsage.extras.mask_transformers',
    'mapsage.models.necks': 'mapsage.extras.earth',
    'mapsage.models.semi_supervised': 'mapsage.extras.labels.fixmatch',
    'mapsage.operators': 'mapsage.extras.forensics.operators',
    'mapsage.pictures.area_plot': 'mapsage.extras.assess.area_plot',
    'mapsage.pictures.fonts': 'mapsage.pictures.canvas',
    'mapsage.places': 'mapsage.geo.places',
    'mapsage.report': 'mapsage.pictures.report',
    'mapsage.sampling.collapse': 'mapsage.sampling.statistics',
    'mapsage.sampling.hooks.group_reward_tuning': 'mapsage.extras.labels.rewards.group_reward_tuning',
    'mapsage.sampling.hooks.reward_workers': 'mapsage.extras.labels.rewards.reward_functions',
    'mapsage.sampling.hooks.tile_gallery': 'mapsage.sampling.hooks.sampling_report',
    'mapsage.sampling.keyed_groups': 'mapsage.sampling.judging',
    'mapsage.sampling.quantile': 'mapsage.sampling.validity',
    'mapsage.sampling.refill': 'mapsage.sampling.shortfall',
    'mapsage.sampling.step_log': 'mapsage.sampling.step',
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
    'mapsage.engine': {'MaskAnnealingHook': 'mapsage.extras.mask_transformers.annealing_hook'},
    'mapsage.engine.guards': {
        **dict.fromkeys(
            ('CrossCheckError', 'CrossCheckHook'), 'mapsage.extras.forensics.cross_check_hook'
        ),
        'NodesHook': 'mapsage.extras.elastic.nodes_hook',
    },
    'mapsage.distributed': dict.fromkeys(
        ('Replicas', 'make_replicas'), 'mapsage.extras.streaming.split_head.replicas'
    ),
    'mapsage.distributed.wrappers': {
        'HeadReplicas': 'mapsage.extras.streaming.split_head.replica_parallel'
    },
    'mapsage.datasets': {
        **dict.fromkeys(_CHANGE, 'mapsage.extras.change'),
        **dict.fromkeys(_DEMO, 'mapsage.extras.demo'),
        **dict.fromkeys(_UNLABELED, 'mapsage.extras.labels.unlabeled'),
        **dict.fromkeys(('LoadBoxPseudoMasks', 'MMRS1MDataset'), 'mapsage.extras.mmrs1m'),
    },
    'mapsage.evaluation': {
        **dict.fromkeys(
            ('ChangeMetric', 'change_scores', 'land_confusion', 'separated_kappa'),
            'mapsage.extras.change.metric',
        ),
        **dict.fromkeys(
            ('ComponentsFound', 'MeanReward', 'PolygonCount', 'UnbrokenLength'),
            'mapsage.extras.labels.rewards',
        ),
        **dict.fromkeys(
            ('CalibrationError', 'calibration_error', 'count_confidence', 'reliability'),
            'mapsage.extras.calibration.calibration_metric',
        ),
    },
    'mapsage.sampling.hooks': {'GroupRewardTuning': 'mapsage.extras.labels.rewards'},
    'mapsage.models': {
        **_BACKBONES,
        'TemporalPool': 'mapsage.extras.earth',
        **dict.fromkeys(
            ('EoMT', 'EoMTHead', 'MaskClassLoss', 'PMTHead'), 'mapsage.extras.mask_transformers'
        ),
    },
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
        """Restore the spec of a module; Python has replaced it with the spec of the old name."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def _new_name(name: str) -> Optional[str]:
    """Return the new name of a moved module or of a module in a moved package, else None."""
    names = name.split('.')
    for length in range(len(names), 1, -1):
        new = MODULES.get('.'.join(names[:length]))
        if new is not None:
            return '.'.join([new, *names[length:]])
    return None


def _attributes(package: str, names: Dict[str, str], lazy: Any) -> Any:
    """Return a package's ``__getattr__`` that knows moved names, and leaves others to its ``lazy`` one."""

    def __getattr__(name: str) -> Any:
        if name not in names:
            if lazy is not None:
                return lazy(name)
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
