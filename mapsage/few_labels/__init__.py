"""Training with few labels: the step of FixMatch, and what the log says about pseudo-labels.

The model's side is `mapsage/models/semi_supervised/`, the data's is
`mapsage/datasets/semi_supervised/`. Importing the package registers the hook.
"""
from .fixmatch_hook import FixMatchHook, SemiSupervisedError

__all__ = ['FixMatchHook', 'SemiSupervisedError']
