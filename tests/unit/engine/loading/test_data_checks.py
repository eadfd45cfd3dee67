"""A mistake in a dataset is found and its file named, on real files."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, Iterator, List

import cv2
import numpy as np
import pytest
import torch
from mmengine.dataset import BaseDataset, ClassBalancedDataset
from mmengine.fileio import LocalBackend, register_backend
from mmengine.registry import DATASETS, init_default_scope
from mmseg.models.decode_heads import FCNHead, STDCHead
from support import write_tiny_data
from torch import nn
from torch.utils.data import IterableDataset

from mapsage.datasets import LabelScore
from mapsage.engine.loading.data_checks import (
    DataError,
    SampleError,
    band_order_note,
    build_checked,
    check_labels,
    explain_error,
    head_differences,
)
from mapsage.engine.loading.keyed_loader import KeyedDataset
from mapsage.host.dataset_parts import innermost, parts, reads_remotely


def config(root: Path, **more: Any) -> dict:
    return dict(
        type='LoveDADataset',
        data_root=str(root),
        data_prefix=dict(img_path='img_dir/train', seg_map_path='ann_dir/train'),
        pipeline=[
            dict(type='LoadImageFromFile'),
            dict(type='LoadAnnotations', reduce_zero_label=True),
            dict(type='PackSegInputs'),
        ],
        **more,
    )


def build(cfg: dict) -> Any:
    init_default_scope('mmseg')
    return DATASETS.build(cfg)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_tiny_data(tmp_path / 'data', train=3, val=1, size=16)


def test_good_data_passes(root: Path) -> None:
    dataset = build_checked(build, config(root))
    for index in range(len(dataset)):
        check_labels(dataset, index, dataset[index])


def test_missing_folder(root: Path) -> None:
    shutil.rmtree(str(root))
    with pytest.raises(DataError, match='img_dir/train does not exist'):
        build_checked(build, config(root))


def test_empty_folder(root: Path) -> None:
    for path in (root / 'img_dir' / 'train').iterdir():
        path.unlink()
    with pytest.raises(DataError, match='found no samples'):
        build_checked(build, config(root))


@pytest.mark.parametrize(
    'suffix, words',
    [
        (
            None,
            r"img_suffix='\.jpg'.* img_dir/train holds 3 file\(s\) that end in \.png: "
            r"set img_suffix='\.png'",
        ),
        ('.jpg', r"img_suffix='\.jpg'.*holds 3 file\(s\) that end in \.png"),
    ],
)
def test_images_with_another_suffix(root: Path, suffix: Any, words: str) -> None:
    """MMSegmentation's own default is .jpg."""
    cfg = dict(config(root), type='BaseSegDataset', metainfo=dict(classes=('a', 'b')))
    cfg.update({} if suffix is None else dict(img_suffix=suffix))
    with pytest.raises(DataError, match=words.replace('img_dir', '.*img_dir')):
        build_checked(build, cfg)


def test_missing_masks_are_counted(root: Path) -> None:
    for name in ('0.png', '2.png'):
        (root / 'ann_dir' / 'train' / name).unlink()
    with pytest.raises(DataError, match=r'2 of the masks .* 3 samples .*ann_dir/train/0.png'):
        build_checked(build, config(root))


@pytest.mark.parametrize('value, reported', [(8, 8), (200, 200), (255, 255)])
def test_label_outside_the_classes(root: Path, value: int, reported: int) -> None:
    path = root / 'ann_dir' / 'train' / '1.png'
    mask = cv2.imread(str(path), cv2.IMREAD_GRAYSCALE)
    mask[:2, :3] = value
    cv2.imwrite(str(path), mask)
    dataset = build(config(root))
    if value == 255:
        check_labels(dataset, 1, dataset[1])  # 255 means ignored, before the shift as after it
        return
    with pytest.raises(DataError, match=rf'1.png holds the value {reported} \(6 pixel'):
        check_labels(dataset, 1, dataset[1])


@pytest.mark.parametrize('channels', [3, 4])
def test_a_mask_in_colors(root: Path, channels: int) -> None:
    """Saved as RGB or RGBA, with values that are class indices in each channel."""
    path = root / 'ann_dir' / 'train' / '1.png'
    cv2.imwrite(str(path), np.ones((16, 16, channels), np.uint8))
    dataset = build(config(root))
    with pytest.raises(DataError, match=rf'1\.png has {channels} channels, expected one'):
        check_labels(dataset, 1, dataset[1])


def spoil_error(dataset: Any, index: int) -> str:
    with pytest.raises(Exception) as caught:
        dataset[index]
    return str(explain_error(dataset, index, caught.value))


@pytest.mark.parametrize('kind', ['img_dir', 'ann_dir'])
def test_corrupt_file_is_named(root: Path, kind: str) -> None:
    path = root / kind / 'train' / '1.png'
    dataset = build(config(root))
    path.write_bytes(path.read_bytes()[:20])
    said = spoil_error(dataset, 1)
    assert f'{path} (20 bytes) cannot be decoded' in said and 'sample 1 of LoveDADataset' in said


def test_file_that_vanished(root: Path) -> None:
    path = root / 'img_dir' / 'train' / '1.png'
    dataset = build(config(root))
    os.unlink(str(path))
    assert f'{path} does not exist' in spoil_error(dataset, 1)


class Careless:
    """A user's transform with a bug."""

    def __call__(self, results: dict) -> dict:
        return dict(depth=results['gt_depth'])  # the line that a user must see


def test_a_bug_in_a_transform_keeps_its_traceback(root: Path) -> None:
    for dataset in (
        build(config(root)),
        build(dict(type='RepeatDataset', times=2, dataset=config(root))),
    ):
        pipeline = getattr(dataset, 'dataset', dataset).pipeline
        pipeline.transforms.insert(1, Careless())
        with pytest.raises(SampleError) as caught:
            KeyedDataset(dataset, check_labels, explain_error)[1]
        said = str(caught.value)
        assert said.startswith('cannot load sample 1 of LoveDADataset (img_path=')
        assert f'{root}/img_dir/train/1.png' in said and "KeyError: 'gt_depth'" in said
        assert f'File "{__file__}"' in said and 'the line that a user must see' in said
        assert isinstance(caught.value.__cause__, KeyError)


def test_a_bug_is_not_blamed_on_a_mask_that_nothing_reads_or_on_a_format(root: Path) -> None:
    shutil.rmtree(str(root / 'ann_dir'))
    cfg = config(root)
    cfg['pipeline'] = [dict(type='LoadImageFromFile')]
    dataset = build(cfg)
    dataset.pipeline.transforms.append(Careless())
    assert isinstance(caught_from(dataset, 0), SampleError)

    class Arrays(list):
        """Images of a format of the user's own."""

        pipeline = [Careless()]

        def get_data_info(self, index: int) -> dict:
            return dict(img_path=str(root / 'a.npy'))

        def __getitem__(self, index: Any) -> Any:
            return self.pipeline[0]({})

    (root / 'a.npy').write_bytes(b'numbers')
    assert isinstance(caught_from(Arrays([0]), 0), SampleError)


def caught_from(dataset: Any, index: Any) -> Exception:
    try:
        dataset[index]
    except Exception as error:
        return explain_error(dataset, index, error)
    raise AssertionError('loaded')


class Faulty:
    """A dataset whose every answer is an error, also that about its samples."""

    def get_data_info(self, index: int) -> dict:
        raise RuntimeError('no info')

    def __getitem__(self, index: Any) -> Any:
        raise RuntimeError('x' * 9000)


@pytest.mark.parametrize('index', [0, (32, 0), None])
def test_the_report_of_an_error_does_not_fail(index: Any) -> None:
    error = caught_from(Faulty(), index)
    assert isinstance(error, SampleError) and f'sample {index} of Faulty' in str(error)


def test_what_mapsage_refuses_needs_no_traceback(root: Path) -> None:
    dataset = build(config(root))
    refused = DataError('refused')
    assert explain_error(dataset, 0, refused) is refused
    dataset.pipeline.transforms.insert(0, LabelsOf())
    error = caught_from(dataset, 0)
    assert type(error) is DataError and 'expected' in str(error) and 'File' not in str(error)


class LabelsOf:
    """A transform that uses a part of MapSage, and uses it wrongly."""

    def __call__(self, results: dict) -> dict:
        return dict(score=LabelScore(metric='no such'))


WRAPPERS = [
    lambda inner: dict(type='RepeatDataset', times=40000, dataset=inner),
    lambda inner: dict(type='ConcatDataset', datasets=[inner, inner]),
    lambda inner: dict(type='ClassBalanced', oversample_thr=0.9, dataset=inner),
    lambda inner: dict(
        type='MultiImageMixDataset', dataset=inner, pipeline=[dict(type='PackSegInputs')]
    ),
    lambda inner: dict(type='RepeatDataset', times=3, dataset=dict(type='Named', dataset=inner)),
]


@DATASETS.register_module()
class ClassBalanced(ClassBalancedDataset):
    """With classes, which MMSegmentation's datasets do not list."""

    def _get_repeat_factors(self, dataset: Any, repeat_thr: float) -> list:
        return [1 + index % 2 for index in range(len(dataset))]


@register_backend('moved')
class Moved(LocalBackend):
    """Reads from another place than the paths say, as MMEngine's remote backends can."""

    def __init__(self, path_mapping: dict) -> None:
        self.path_mapping = path_mapping

    def _of(self, path: str) -> str:
        for there, here in self.path_mapping.items():
            path = str(path).replace(there, here)
        return path

    def get(self, filepath: str) -> bytes:
        return super().get(self._of(filepath))

    def exists(self, filepath: str) -> bool:
        return super().exists(self._of(filepath))

    def list_dir_or_file(self, dir_path: str, *args: Any, **kwargs: Any) -> Any:
        return super().list_dir_or_file(self._of(dir_path), *args, **kwargs)


@DATASETS.register_module()
class Named(BaseDataset):
    """A user's own wrapper."""

    def __init__(self, dataset: dict) -> None:
        self.dataset = DATASETS.build(dataset)
        super().__init__(pipeline=[])

    def load_data_list(self) -> list:
        return [self.dataset.get_data_info(index) for index in range(len(self.dataset))]

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


@pytest.mark.parametrize('wrap', WRAPPERS)
def test_wrapped_datasets_are_checked_as_they_are_alone(wrap: Any, root: Path) -> None:
    dataset = build_checked(build, wrap(config(root, ignore_index=254)))
    last = len(dataset) - 1
    assert innermost(dataset, last)[0].ignore_index == 254 and innermost(dataset, last)[1] == 2
    sample = innermost(dataset, last)[0][2]
    labels = sample['data_samples'].gt_sem_seg.data
    labels[0, :2] = 254
    check_labels(dataset, last, sample)
    labels[0, :2] = 253
    with pytest.raises(DataError, match='2.png holds the value 254 '):
        check_labels(dataset, last, sample)

    there = dict(backend='moved', path_mapping={'/mnt/data': str(root)})
    mapped = dict(config(root, backend_args=there), data_root='/mnt/data')
    for transform in mapped['pipeline'][:2]:
        transform['backend_args'] = there
    dataset = build_checked(build, wrap(mapped))
    assert torch.equal(innermost(dataset, last)[0][2]['inputs'], sample['inputs'])
    on_transforms = config(root)
    on_transforms['pipeline'][0]['backend_args'] = there
    assert reads_remotely(build(on_transforms))

    os.unlink(str(root / 'ann_dir/train/2.png'))
    with pytest.raises(DataError, match='1 of the masks its 3 samples'):
        build_checked(build, wrap(config(root)))


class Merged:
    """A user's wrapper, which knows classes that the dataset inside does not."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.metainfo = dict(classes=tuple('abcdefghijkl'))

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        sample = self.dataset[index]
        sample['data_samples'].gt_sem_seg.data[0, :2] = 11
        return sample


def test_a_wrapper_may_change_the_classes(root: Path) -> None:
    dataset = Merged(build(config(root)))
    assert innermost(dataset, 1) == (dataset.dataset, 1)
    KeyedDataset(dataset, check_labels, explain_error)[1]
    dataset.metainfo = dict(classes=tuple('abc'))
    with pytest.raises(DataError, match=r'train/1.png holds the value 12 \('):
        KeyedDataset(dataset, check_labels, explain_error)[1]


class Held(list):
    """What a user's dataset may hold as ``dataset``, and what says nothing about files."""


def test_a_dataset_that_holds_something_else_speaks_for_itself(root: Path) -> None:
    dataset = build(config(root))
    dataset.dataset = Held(range(3))
    assert innermost(dataset, 1) == (dataset, 1) and list(parts(dataset)) == [dataset]


def test_a_file_is_checked_once_however_often_it_is_repeated(root: Path) -> None:
    asked = []

    def build_counting(cfg: dict) -> Any:
        dataset = build(cfg)
        ask = dataset.dataset.get_data_info
        dataset.dataset.get_data_info = lambda index: asked.append(index) or ask(index)
        return dataset

    assert len(build_checked(build_counting, WRAPPERS[0](config(root)))) == 120000
    assert asked == [0, 1, 2]


@pytest.mark.parametrize(
    'pipeline, checked',
    [
        ([], True),
        ([dict(type='LoadAnnotations')], True),
        ([dict(type='TestTimeAug', transforms=[[dict(type='LoadAnnotations')]])], True),
        (None, False),
    ],
)
def test_masks_count_only_where_the_pipeline_loads_them(
    pipeline: Any, checked: bool, root: Path
) -> None:
    shutil.rmtree(str(root / 'ann_dir'))
    cfg = config(root)
    if pipeline is None:
        cfg['pipeline'] = [dict(type='LoadImageFromFile'), dict(type='PackSegInputs')]
    elif pipeline:
        cfg['pipeline'] = [dict(type='LoadImageFromFile'), *pipeline]
    if checked:
        with pytest.raises(DataError, match='3 of the masks'):
            build_checked(build, cfg)
    else:
        assert len(build_checked(build, cfg)) == 3
        (root / 'img_dir/train/1.png').unlink()
        dataset = build(cfg)
        assert len(dataset) == 2


def test_a_bug_while_a_dataset_is_built_keeps_its_traceback(root: Path) -> None:
    def raises(_: dict) -> None:
        int('a number')  # a user's own load_data_list

    with pytest.raises(ValueError, match='invalid literal') as caught:
        build_checked(raises, dict(type='X'))
    assert type(caught.value) is ValueError


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_a_stream_has_no_samples_to_count() -> None:
    stream = Stream()
    assert build_checked(lambda _: stream, dict(type='Stream')) is stream


def test_other_value_errors_pass() -> None:
    def raises(_: dict) -> None:
        raise ValueError('depth must be positive')

    with pytest.raises(ValueError, match='depth must be positive'):
        build_checked(raises, dict(type='X'))


def test_scenes_in_the_order_of_the_file_and_a_model_that_turns_them_round() -> None:
    def note(bands: Any, turns: bool, loader: str = 'LoadGeoTiffWindow') -> Any:
        dataset = dict(pipeline=[dict(type=loader)], **({'bands': bands} if bands else {}))
        return band_order_note(
            dict(
                model=dict(data_preprocessor=dict(bgr_to_rgb=turns)),
                val_dataloader=dict(dataset=dataset),
                test_dataloader=None,
            )
        )

    assert 'val_dataloader: LoadGeoTiffWindow gives the bands as [1, 2, 3]' in note(None, True)
    assert 'set bands=[3, 2, 1]' in note([1, 2, 3], True)
    assert note([3, 2, 1], True) is None and note(None, False) is None
    assert note(None, True, 'LoadImageFromFile') is None and band_order_note({}) is None


class UsersBoundaryHead(STDCHead):
    """A user's head for boundaries."""


@pytest.mark.parametrize(
    'kind, texts',
    [
        (STDCHead, []),
        (UsersBoundaryHead, []),
        (FCNHead, ['model.auxiliary_head.0 (FCNHead) has num_classes=2']),
    ],
)
def test_a_head_for_boundaries_has_two_classes(kind: Any, texts: List[str], root: Path) -> None:
    init_default_scope('mmseg')
    heads = [kind(in_channels=2, channels=2, num_convs=1, num_classes=2, concat_input=False)]
    model = nn.Module()
    model.auxiliary_head = nn.ModuleList(heads)
    differences = list(head_differences(model, build(config(root))))
    assert [text.split(',')[0] for fails, text in differences if fails] == texts
    assert len(differences) == len(texts)


def _load(cfg: dict) -> List[Any]:
    """Load the samples of a dataset as a loader's worker does."""
    dataset = KeyedDataset(build(cfg), check_labels, explain_error)
    return [dataset[index] for index in range(len(dataset))]


CROP = dict(type='RandomCrop', crop_size=(8, 8))
SIZES = r'mask .*/ann_dir/train/1\.png has 8x8 pixels and image .*/img_dir/train/1\.png 16x16'


@pytest.mark.parametrize(
    'change',
    [
        lambda cfg: cfg,
        lambda cfg: dict(type='RepeatDataset', times=2, dataset=cfg),
        lambda cfg: dict(
            type='MultiImageMixDataset',
            dataset=cfg,
            pipeline=[
                dict(type='RandomMosaic', prob=1, img_scale=(16, 16)),
                dict(type='PackSegInputs'),
            ],
        ),
    ],
    ids=['alone', 'repeated', 'mosaics'],
)
@pytest.mark.parametrize('zero', [True, False])
def test_a_mask_of_another_size_is_named(root: Path, change: Any, zero: bool) -> None:
    """RandomCrop takes the same place of both, as if the mask fitted."""
    cv2.imwrite(str(root / 'ann_dir/train/1.png'), np.full((8, 8), 1, np.uint8))
    cfg = config(root, reduce_zero_label=zero)
    pack = [] if change(cfg).get('type') == 'MultiImageMixDataset' else [cfg['pipeline'][-1]]
    cfg['pipeline'] = [dict(type='LoadImageFromFile'), dict(type='LoadAnnotations'), CROP, *pack]
    cfg = change(
        dict(
            cfg,
            type='BaseSegDataset',
            img_suffix='.png',
            seg_map_suffix='.png',
            metainfo=dict(classes=tuple('abcdefgh')),
        )
    )
    with pytest.raises(DataError, match=SIZES):
        _load(cfg)


def test_a_mask_may_have_the_size_before_or_after_a_resize(root: Path) -> None:
    """A test pipeline resizes the image only; a training may load small masks after a resize."""
    cfg = config(root)
    cfg['pipeline'].insert(1, dict(type='Resize', scale=(8, 8)))
    assert [tuple(sample['inputs'].shape[1:]) for sample in _load(cfg)] == [(8, 8)] * 3
    for path in (root / 'ann_dir/train').iterdir():
        cv2.imwrite(str(path), np.full((8, 8), 1, np.uint8))
    assert len(_load(cfg)) == 3
    cv2.imwrite(str(root / 'ann_dir/train/1.png'), np.full((12, 8), 1, np.uint8))
    with pytest.raises(DataError, match='has 8x12 pixels and image .* 16x16'):
        _load(cfg)
