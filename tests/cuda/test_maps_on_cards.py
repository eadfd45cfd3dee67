"""Test, predict and export with a device: the numbers and maps are those of the CPU."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, List, Tuple

import numpy as np
import pytest
import rasterio
import torch
from cards import launch_on_cards, logged, run_tool
from color_model import paint, write_checkpoint, write_config, write_scene
from map_runs import read
from mmengine.config import Config
from support import check_finished, write_tiny_config

from mapsage.accelerator import resolve_accelerator
from mapsage.commands import predict
from mapsage.commands.checkpoint_model import CheckpointModel, choose_precision

TRANSFORM = rasterio.Affine(0.5, 0, 500000, 0, -0.5, 5000000)
SHORT = """
train_cfg = dict(type='IterBasedTrainLoop', max_iters=2, val_interval=2)
default_hooks['preview'] = None
default_hooks['checkpoint']['interval'] = 2
"""


@pytest.fixture(scope='module')
def trained(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Tuple[Path, Path]:
    """Config and checkpoint of a training on two devices."""
    folder = tmp_path_factory.mktemp('trained')
    config = write_tiny_config(folder / 'tiny.py', tiny_data, SHORT)
    check_finished(launch_on_cards(config, '--work-dir', folder / 'run'))
    return config, folder / 'run' / 'iter_2.pth'


@pytest.fixture(scope='module')
def colors(tmp_path_factory: pytest.TempPathFactory) -> Tuple[Path, Path]:
    """Config and checkpoint of a model whose map is known to the pixel."""
    folder = tmp_path_factory.mktemp('colors')
    return write_config(folder), write_checkpoint(folder)


def scores(output: str) -> List[str]:
    return re.findall(r'(?:aAcc|mIoU|mAcc): ([0-9.]+)', output)


def test_a_test_has_the_scores_of_the_validation_and_of_the_cpu(
    trained: Any, tmp_path: Path
) -> None:
    ranks = launch_on_cards(
        *trained, '--work-dir', tmp_path / 'ranks', command=['bash', 'scripts/test.sh']
    )
    cpu = run_tool('test', *trained, '--work-dir', tmp_path / 'cpu', accelerator='cpu')
    for finished in (ranks, cpu):
        check_finished(finished)
    assert 'accelerator cuda (2 device(s)' in ranks.output
    assert len(scores(cpu.output)) >= 3 and scores(ranks.output) == scores(cpu.output)
    (validated,) = logged(trained[1].parent, 'mIoU')
    assert validated == pytest.approx(float(scores(cpu.output)[1]), abs=0.005)


def test_a_card_with_little_memory_gives_the_same_map(colors: Any, tmp_path: Path) -> None:
    classes, maps = paint(500, 900), {}
    scene = write_scene(tmp_path / 'field.tif', classes, transform=TRANSFORM)
    for memory in ('1024', '16'):  # MiB
        finished = run_tool(
            'predict',
            *colors,
            scene,
            '--out',
            tmp_path / memory,
            '--confidence',
            '--window',
            256,
            '--batch-size',
            16,
            environ={'CUDA_DOUBLE_MEMORY': memory},
        )
        check_finished(finished)
        batches = re.findall(
            r'out of memory with (\d+) windows .*goes on with (\d+)', finished.output
        )
        assert batches[:1] == ([('16', '8')] if memory == '16' else []), finished.output
        maps[memory] = [
            (tmp_path / memory / name).read_bytes()
            for name in ('field.tif', 'field_confidence.tif', 'field.json')
        ]
    assert maps['16'] == maps['1024']
    np.testing.assert_array_equal(read(tmp_path / '16' / 'field.tif'), classes)


@pytest.mark.parametrize(
    'options, capability, precision',
    [
        ((), '9.0', ', in float16 where that serves'),
        (('--no-amp',), '9.0', ''),
        ((), '6.1', ''),
        (('--amp',), '6.1', ', in float16 where that serves'),
    ],
)
def test_16_bits_are_the_default_where_the_card_multiplies_them_faster(
    colors: Any, tmp_path: Path, options: Any, capability: str, precision: str
) -> None:
    classes = paint(90, 150)
    scene = write_scene(tmp_path / 'field.tif', classes, transform=TRANSFORM)
    finished = run_tool(
        'predict',
        *colors,
        scene,
        '--out',
        tmp_path / 'maps',
        *options,
        environ={'CUDA_DOUBLE_CAPABILITY': capability},
    )
    check_finished(finished)
    assert re.search(rf' at a time{precision}; cuda \(', finished.output), finished.output
    np.testing.assert_array_equal(read(tmp_path / 'maps' / 'field.tif'), classes)


def test_ranks_on_cards_share_the_scenes(colors: Any, tmp_path: Path) -> None:
    scenes = [
        write_scene(tmp_path / f'{number}.tif', paint(90, 150 + 30 * number), transform=TRANSFORM)
        for number in range(3)
    ]
    finished = launch_on_cards(
        *colors,
        *scenes,
        '--out',
        tmp_path / 'maps',
        '--amp',
        command=['bash', 'scripts/predict.sh'],
    )
    check_finished(finished)
    assert 'cuda (2 device(s)' in finished.output and 'on 2 rank(s)' in finished.output
    for number in range(3):
        np.testing.assert_array_equal(
            read(tmp_path / 'maps' / f'{number}.tif'), paint(90, 150 + 30 * number)
        )


def test_what_was_trained_on_cards_exports_to_the_same_map(
    trained: Any, tiny_data: Path, tmp_path: Path
) -> None:
    model, image = tmp_path / 'model.onnx', tiny_data / 'img_dir' / 'val' / '0.png'
    finished = run_tool('export', *trained, '--out', model, '--tiles', 2)
    check_finished(finished)
    assert 'equal pixels 100.0000 %' in finished.output
    check_finished(run_tool('predict', *trained, image, '--no-amp', '--out', tmp_path / 'card'))
    check_finished(
        launch_on_cards(
            '--model',
            model,
            image,
            '--out',
            tmp_path / 'exported',
            command=[sys.executable, 'tools/predict.py'],
        )
    )
    card, exported = (read(tmp_path / name / '0.tif') for name in ('card', 'exported'))
    assert len(np.unique(card)) > 1
    np.testing.assert_array_equal(card, exported)


def test_memory_that_cannot_be_pinned_is_ordinary_memory(monkeypatch: Any) -> None:
    def refuse(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError('CUDA error: out of memory')
        return empty(*size, **options)

    empty = torch.empty
    accelerator = resolve_accelerator('cuda')
    scores = torch.arange(12, dtype=torch.float32, device='cuda').reshape(3, 4)
    assert accelerator.host_buffer((3, 4), torch.float32).is_pinned()
    monkeypatch.setattr(torch, 'empty', refuse)
    assert not accelerator.host_buffer((3, 4), torch.float32).is_pinned()
    assert torch.equal(accelerator.copy_to_host(scores)(), torch.arange(12.0).reshape(3, 4))


@pytest.mark.parametrize('option, last', [('--amp', True), ('--no-amp', False)])
def test_convolutions_in_16_bits_have_channels_last(trained: Any, option: str, last: bool) -> None:
    arguments = [*map(str, trained), 'none', '--out', 'none', option, '--accelerator', 'cuda']
    model = CheckpointModel(predict.build_parser(arguments).parse_args(arguments), print)
    model.load()
    kernels = [
        parameter
        for parameter in model.predictor._model.parameters()
        if parameter.dim() == 4 and parameter.shape[1] > 1 and parameter.shape[2] > 1
    ]
    layouts = {parameter.is_contiguous(memory_format=torch.channels_last) for parameter in kernels}
    assert kernels and layouts == {last}


def test_a_card_without_the_16_bits_of_the_training_takes_its_own(monkeypatch: Any) -> None:
    config = Config(dict(optim_wrapper=dict(type='AmpOptimWrapper', dtype='bfloat16')))
    card = resolve_accelerator('cuda')
    assert choose_precision(config, card) == torch.bfloat16
    monkeypatch.setattr(torch.cuda, 'is_bf16_supported', lambda *_, **__: False)
    assert choose_precision(config, card) == torch.float16
