"""Labeled and unlabeled samples in one training set, and in each batch of it.

`joined.py` has the dataset, `sampler.py` the composition of batches, and `transforms.py` hides the
labels of unlabeled samples. The loss is in `fixmatch/`.
"""

from .joined import SemiSupervisedDataset
from .named_samples import named_samples
from .sampler import LabeledUnlabeledSampler
from .transforms import HideLabels, PackUnlabeledInputs
from .unlabeled_images import UnlabeledImages

__all__ = [
    'HideLabels',
    'LabeledUnlabeledSampler',
    'PackUnlabeledInputs',
    'SemiSupervisedDataset',
    'UnlabeledImages',
    'named_samples',
]
