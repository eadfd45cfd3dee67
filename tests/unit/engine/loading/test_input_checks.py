"""Images against the settings of the data preprocessor: channels and sizes."""

from __future__ import annotations

import copy
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from mmengine.structures import PixelData
from mmseg.models import SegDataPreProcessor
from mmseg.structures import SegDataSample
from support import ROOT, launch

from mapsage.datasets import BandDataPreProcessor
from mapsage.engine.loading.data_checks import DataError
from mapsage.engine.loading.input_checks import watch_inputs


def batch(channels: int) -> Any:
    sample = SegDataSample(gt_sem_seg=PixelData(data=torch.zeros(1, 8, 8, dtype=torch.long)))
    return dict(inputs=[torch.ones(channels, 8, 8)] * 2, data_samples=[sample] * 2)


@pytest.mark.parametrize(
    'kind, means, channels, fits',
    [
        (SegDataPreProcessor, 3, 3, True),
        (SegDataPreProcessor, 1, 4, True),
        (SegDataPreProcessor, 0, 4, True),
        (SegDataPreProcessor, 3, 4, False),
        (BandDataPreProcessor, 4, 4, True),
        (BandDataPreProcessor, 4, 3, False),
        (BandDataPreProcessor, 3, 4, False),
    ],
)
@pytest.mark.parametrize('training', [True, False])
def test_mean_and_channels(
    kind: Any, means: int, channels: int, fits: bool, training: bool
) -> None:
    values = dict(mean=[1.0] * means, std=[1.0] * means) if means else {}
    model = torch.nn.Sequential(kind(size=(8, 8), **values))
    for each in (
        watch_inputs(model),
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        watch_inputs(model),
    ):
        assert len(each[0]._forward_pre_hooks) == 1
        if fits:
            assert each[0](batch(channels), training)['inputs'].shape == (2, channels, 8, 8)
            continue
        with pytest.raises(
            DataError,
            match=rf'{kind.__name__}\) has the mean .*for {means} '
            rf'channels, and got an image of {channels}',
        ):
            each[0](batch(channels), training)


@pytest.mark.parametrize('kind', [SegDataPreProcessor, BandDataPreProcessor])
@pytest.mark.parametrize(
    'settings, words',
    [
        ({}, r'neither size nor size_divisor.*size=\(8, 8\)'),
        (dict(size=(8, 8), size_divisor=4), r'size=\(8, 8\) and size_divisor=4'),
    ],
)
def test_a_size_to_pad_to(kind: Any, settings: dict, words: str) -> None:
    preprocessor = watch_inputs(torch.nn.Sequential(kind(**settings)))[0]
    with pytest.raises(DataError, match=words):
        preprocessor(batch(3), True)
    with pytest.raises(DataError, match=words):
        preprocessor(batch(3), training=True)  # as MMEngine's DDP calls it
    # without test_cfg, images of one size are only stacked
    assert preprocessor(batch(3), False)['inputs'].shape == (2, 3, 8, 8)
    tested = watch_inputs(torch.nn.Sequential(kind(size=(8, 8), test_cfg=dict(siz=8))))[0]
    assert tested(batch(3), True)['inputs'].shape == (2, 3, 8, 8)
    with pytest.raises(DataError, match=r'data_preprocessor\.test_cfg .* neither size nor'):
        tested(batch(3), False)


class PadsItself(SegDataPreProcessor):
    """A preprocessor of a user that needs no size."""

    def forward(self, data: Any, training: bool = False) -> Any:
        return dict(inputs=torch.stack(data['inputs']), data_samples=data['data_samples'])


def test_a_preprocessor_with_another_forward_needs_no_size() -> None:
    preprocessor = watch_inputs(torch.nn.Sequential(PadsItself()))[0]
    assert preprocessor(batch(3), True)['inputs'].shape == (2, 3, 8, 8)


def test_training_names_both(tiny_config: Path) -> None:
    tiny_config.write_text(
        tiny_config.read_text()
        + """
model['data_preprocessor'] = dict(type='BandDataPreProcessor', mean=[1.] * 4, std=[1.] * 4,
                                  pad_val=0, seg_pad_val=255, size=(64, 64))
"""
    )
    done = launch(
        command=[
            sys.executable,
            str(ROOT / 'tools/train.py'),
            str(tiny_config),
            '--work-dir',
            str(tiny_config.parent / 'work'),
        ]
    )
    assert done.status == 1
    assert 'has the mean [1.0, 1.0, 1.0, 1.0], for 4 channels, and got an image of 3' in done.output
    assert 'Traceback' not in done.output


@pytest.mark.parametrize('virtual_ranks', [None, 2])
def test_training_says_what_size_is_for(tiny_config: Path, virtual_ranks: Any) -> None:
    with open(tiny_config, 'a') as file:
        file.write(f'\nenv_cfg = dict(virtual_ranks={virtual_ranks})\n')
    tiny_config.write_text(tiny_config.read_text() + "del model['data_preprocessor']['size']\n")
    done = launch(
        command=[
            sys.executable,
            str(ROOT / 'tools/train.py'),
            str(tiny_config),
            '--work-dir',
            str(tiny_config.parent / 'work'),
        ]
    )
    assert done.status == 1 and 'neither size nor size_divisor' in done.output
    assert 'Traceback' not in done.output
