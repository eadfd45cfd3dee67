"""MMRS-1M: images with a class or with boxes; used for segmentation only on explicit request.

MMRS-1M has no masks. A segmentation training on it learns from boxes filled with their class, and
its scores say how well boxes are predicted. `records.py` parses the files.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional

import numpy as np
from mmcv.transforms import BaseTransform
from mmengine.logging import print_log
from mmseg.datasets import BaseSegDataset
from mmseg.registry import DATASETS, TRANSFORMS
from PIL import Image

from .records import (
    Box,
    Conversation,
    find_class,
    object_name,
    read_class,
    read_conversations,
    read_objects,
    undo_padding,
)

_REFUSAL = (
    'MMRS-1M has no segmentation masks: it is a vision-language set of captions, questions, image '
    'classes and boxes (docs/reference/datasets.md). Train on a set with masks (LoveDA, Potsdam, '
    "Vaihingen, iSAID, COCO polygons, GeoTIFF), or use its records with task='classification' or "
    "task='box'. "
    'With box_supervised=True, boxes filled with their class stand in for masks: scores then '
    'measure how well boxes are found, not how well objects are outlined.'
)


@DATASETS.register_module()
class MMRS1MDataset(BaseSegDataset):
    """The records of MMRS-1M, EarthGPT's instruction set, that suit tasks other than language.

    * Source: about one million image-text pairs made from 34 public sets, optical, SAR and
      infrared; captions, questions, classification, detection, visual grounding.
    * Format: a JSON list of ``{"image": path, "conversations": [...]}``. The paths, as written
      (``data/detection/...``), are relative to ``data_prefix['img_path']``.
    * Boxes: coordinates in 0..1 of the image padded centrally to a square; this class undoes the
      padding.
    * Masks: none. ``task='segmentation'`` is refused unless ``box_supervised=True``: then every
      box is filled with its class, a ring along its edge is ignored (255), the rest is background
      (0), and every log and ``metainfo['supervision']`` say ``box-supervised``. Smaller boxes are
      drawn over larger ones.
    * Terms: the terms of the 34 sources apply.

    A record that cannot be used is an error, never a guess. This holds for a missing image, a
    record of another form, and a name that is not a class. The message gives the file and the
    number of the record, counted from 0.

    Args:
        ann_file: Path of one JSON file, relative to ``data_root`` unless absolute.
        task: Task to read records for: ``'segmentation'``, ``'classification'`` or ``'box'``.
        box_supervised: Whether to make pseudo-masks from boxes.
        ignore_ring: Width in pixels that is ignored on each side of a box's edge.
        names: Mapping to classes for names that are spelled differently, for example
            ``{'storage tanks': 'storage_tank'}``.
        metainfo: Classes, as ``dict(classes=...)``. For masks ``classes[0]`` is the background;
            ``task='box'`` needs no classes.
        **kwargs: Arguments of ``BaseSegDataset``.

    Raises:
        ValueError: If a record cannot be used, or if ``task`` is segmentation and
            ``box_supervised`` is False.
    """

    def __init__(
        self,
        ann_file: str,
        task: str = 'segmentation',
        box_supervised: bool = False,
        ignore_ring: int = 3,
        names: Optional[Dict[str, str]] = None,
        metainfo: Optional[Dict[str, Any]] = None,
        **kwargs: Any,
    ) -> None:
        tasks = ('segmentation', 'classification', 'box')
        if task not in tasks:
            raise ValueError(f'task={task!r} is not offered; choose one of {tasks}')
        if task == 'segmentation' and not box_supervised:
            raise ValueError(_REFUSAL)
        if task != 'segmentation' and box_supervised:
            raise ValueError(f"box_supervised=True is for task='segmentation', not {task!r}")
        if ignore_ring < 0:
            raise ValueError(f'ignore_ring={ignore_ring} is negative; give pixels, 0 for none')
        if task != 'box' and not (metainfo or {}).get('classes'):
            raise ValueError(f'task={task!r} needs the classes: metainfo=dict(classes=(...))')
        self.task = task
        self.ignore_ring = ignore_ring
        self.names = {name.lower(): target for name, target in (names or {}).items()}
        super().__init__(ann_file=ann_file, metainfo=metainfo, **kwargs)
        if task == 'segmentation':
            self._metainfo['supervision'] = 'box-supervised'
            print_log(
                f'box-supervised: the masks of {self.ann_file} are filled boxes with an '
                f'ignored ring of {ignore_ring} pixels, no segmentation labels; scores '
                'against them are not segmentation scores',
                'current',
                logging.WARNING,
            )

    def load_data_list(self) -> List[Dict[str, Any]]:
        """Return one entry per record, in the order of the file."""
        path = Path(self.ann_file)
        return [
            self._build_entry(conversation, number, f'{path}: record {number}')
            for number, conversation in enumerate(read_conversations(path))
        ]

    def records(self) -> Iterator[Dict[str, Any]]:
        """Yield the content of each record, for programs other than a segmentation training.

        Yields:
            A dict with ``task``, ``image`` (path) and ``record`` (number). For classification it
            also has ``label``, a class name; for boxes ``objects``, dicts with ``phrase`` as
            written and ``box``, the corners x0, y0, x1, y1 in pixels of the image.
        """
        for index in range(len(self)):
            info = self.get_data_info(index)
            common = dict(task=self.task, image=info['img_path'], record=info['record'])
            if self.task == 'classification':
                yield dict(common, label=self.metainfo['classes'][info['gt_label']])
                continue
            with Image.open(info['img_path']) as image:
                width, height = image.size
            yield dict(
                common,
                objects=[
                    dict(phrase=phrase, box=undo_padding(Box(*box), width, height, info['where']))
                    for phrase, box in info['objects']
                ],
            )

    def _build_entry(self, conversation: Conversation, number: int, where: str) -> Dict[str, Any]:
        """Return the entry of a record; ``where`` names the record in error messages."""
        path = Path(self.data_prefix.get('img_path') or '') / conversation.image
        if not path.is_file():
            raise ValueError(
                f'{where}: the image {path} does not exist; check data_root='
                f'{self.data_root!r} and data_prefix={self.data_prefix}, or copy it'
            )
        info = dict(
            img_path=str(path),
            record=number,
            where=where,
            label_map=None,
            reduce_zero_label=self.reduce_zero_label,
            seg_fields=[],
        )
        if self.task == 'classification':
            name = read_class(conversation, where)
            return dict(info, gt_label=self._class_index(name, where, 0))
        objects = read_objects(conversation, where)
        info['objects'] = [(phrase, tuple(box)) for phrase, box in objects]
        if self.task == 'segmentation':
            info['labels'] = [
                self._class_index(object_name(phrase), where, 1) for phrase, _ in objects
            ]
            info['ignore_ring'] = self.ignore_ring
            info['ignore_index'] = self.ignore_index
        return info

    def _class_index(self, name: str, where: str, first: int) -> int:
        """Return the index of the class that ``name`` means; classes before ``first`` never match.

        Raises:
            ValueError: If the name matches no class.
        """
        classes = list(self._metainfo['classes'])
        index = find_class(self.names.get(name.lower(), name).lower(), classes[first:])
        if index < 0:
            raise ValueError(
                f'{where} names {name!r}, which is not one of the classes '
                f'{classes[first:]}; add it to metainfo, or map it with names='
                f'{{{name.lower()!r}: <class>}}'
            )
        return index + first


@TRANSFORMS.register_module()
class LoadBoxPseudoMasks(BaseTransform):
    """Transform that fills the boxes of ``MMRS1MDataset`` into ``gt_seg_map``, uint8 (H, W).

    Put it after ``LoadImageFromFile``: before resizing in training, after resizing in testing.

    Required keys: ``objects``, ``labels``, ``ignore_ring``, ``ignore_index``, ``where``,
    ``ori_shape``, ``seg_fields``. Added: ``gt_seg_map``.
    """

    def transform(self, results: Dict[str, Any]) -> Dict[str, Any]:
        """Add the mask to ``results``, and return them.

        Raises:
            ValueError: If a box lies outside its image.
        """
        height, width = results['ori_shape'][:2]
        boxes = [
            undo_padding(Box(*box), width, height, results['where'])
            for _, box in results['objects']
        ]
        mask = np.zeros((height, width), np.uint8)
        ring = results['ignore_ring']
        by_size = sorted(
            zip(boxes, results['labels']),
            key=lambda item: (item[0].x0 - item[0].x1) * (item[0].y1 - item[0].y0),
        )
        for box, label in by_size:
            x0, y0, x1, y1 = (round(edge) for edge in box)
            mask[max(y0 - ring, 0) : y1 + ring, max(x0 - ring, 0) : x1 + ring] = results[
                'ignore_index'
            ]
            mask[y0 + ring : max(y1 - ring, 0), x0 + ring : max(x1 - ring, 0)] = label
        results['gt_seg_map'] = mask
        results['seg_fields'].append('gt_seg_map')
        return results
