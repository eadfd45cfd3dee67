"""Images of a folder, without labels.

For the unlabeled side of `SemiSupervisedDataset` (`joined.py`). Scenes with coordinates need
`GeoTiffDataset` without `labels` instead.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Dict, List, Sequence, Union

from mmseg.datasets import BaseSegDataset
from mmseg.registry import DATASETS

_SUFFIXES = ('.png', '.jpg', '.jpeg', '.bmp', '.webp', '.tif', '.tiff')


@DATASETS.register_module()
class UnlabeledImages(BaseSegDataset):
    """Images in folders and their subfolders, without labels.

    * Format: PNG, JPEG, BMP, WebP or TIFF, with the suffix in lower or upper case. Files with other
      suffixes and hidden files are skipped. For scenes with coordinates, or with more than three
      bands, use ``GeoTiffDataset`` without ``labels``.
    * Order: by path, so that it is the same on every machine.

    The pipeline ends with ``HideLabels``, transforms that move pixels, and ``PackUnlabeledInputs``.

    Args:
        folders: Path of a folder, or several, relative to ``data_root``.
        **kwargs: Arguments of ``BaseSegDataset``.

    Raises:
        ValueError: If a folder is missing, or the folders contain no image.
    """

    METAINFO: Dict[str, Any] = dict()

    def __init__(self, folders: Union[str, Sequence[str]], **kwargs: Any) -> None:
        self.folders = [folders] if isinstance(folders, (str, Path)) else list(folders)
        super().__init__(**kwargs)

    def load_data_list(self) -> List[Dict[str, Any]]:
        """Return one entry per image."""
        folders = [os.path.join(self.data_root or '', folder) for folder in self.folders]
        missing = [folder for folder in folders if not os.path.isdir(folder)]
        if missing:
            raise ValueError(
                f'folder {missing[0]!r} of unlabeled images does not exist; correct '
                'folders or data_root.'
            )
        paths = sorted(
            os.path.join(parent, name)
            for folder in folders
            for parent, _, names in os.walk(folder)
            for name in names
            if name.lower().endswith(_SUFFIXES) and not name.startswith('.')
        )
        if not paths:
            raise ValueError(
                f'no unlabeled image in {folders}; expected files that end in '
                f'{", ".join(_SUFFIXES)}.'
            )
        return [
            dict(img_path=path, label_map=None, reduce_zero_label=False, seg_fields=[])
            for path in paths
        ]
