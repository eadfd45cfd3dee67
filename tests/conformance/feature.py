"""A feature of MMEngine as data, and what many of them share."""

from __future__ import annotations

from typing import Any, Dict, NamedTuple, Tuple

Changes = Dict[str, Any]


class Feature(NamedTuple):
    """One feature.

    Attributes:
        name: Name of the test.
        changes: Values by dotted paths of the config; ``...`` removes the key.
        stages: For each Runner its own changes, and its methods that are called.
        core: Whether every leg runs it; the others are run by the main leg.
        preview: Whether MapSage's preview, a third of a second each, is drawn.
        fails: Part of the error with which both runs end; empty if they do not fail.
        differs: Why the runs are meant to end differently; docs/reference/conformance.md repeats
            it.
    """

    name: str
    changes: Changes = {}
    stages: Tuple[Tuple[Changes, str], ...] = (({}, 'train'),)
    core: bool = False
    preview: bool = False
    fails: str = ''
    differs: str = ''

    @property
    def text(self) -> str:
        """All that the feature sets, to look for names in it."""
        return repr((self.changes, self.stages))


TEST = (({}, 'test'),)
TRAIN_AND_TEST = (({}, 'train test'),)

EPOCHS: Changes = {
    'train_cfg': dict(type='EpochBasedTrainLoop', max_epochs=2, val_interval=1),
    'train_dataloader.sampler.type': 'DefaultSampler',
    'param_scheduler': [dict(type='StepLR', step_size=1, gamma=0.5, by_epoch=True)],
    'default_hooks.checkpoint': dict(type='CheckpointHook', interval=1),
    'default_hooks.logger': dict(type='LoggerHook', interval=1),
    'log_processor': dict(by_epoch=True, window_size=3),
}
