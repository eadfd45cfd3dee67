"""MMRS-1M: image classes and boxes of 34 public sets, see docs/reference/datasets.md."""

from .dataset import LoadBoxPseudoMasks, MMRS1MDataset

__all__ = ['LoadBoxPseudoMasks', 'MMRS1MDataset']
