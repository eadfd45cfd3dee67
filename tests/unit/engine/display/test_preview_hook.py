"""preview.png after a real validation: which samples, which colors, and when it fails."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any, Dict, List, Tuple

import cv2
import numpy as np
import pytest
import rasterio
import torch
from mmengine.structures import BaseDataElement, PixelData

from mapsage.engine.display import PreviewHook, preview_hook
from mapsage.host.batch_images import channels_of_dates
from mapsage.pictures import PreviewSample


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> List[Dict[str, Any]]:
    """Record what is handed to the renderer, which still runs."""
    calls: List[Dict[str, Any]] = []
    render = preview_hook.save_preview

    def record(
        path: str, samples: Any, classes: Any, palette: Any, title: str, subtitle: str
    ) -> None:
        calls.append(
            dict(
                path=path,
                samples=samples,
                classes=classes,
                palette=palette,
                title=title,
                subtitle=subtitle,
            )
        )
        render(path, samples, classes, palette, title, subtitle)

    monkeypatch.setattr(preview_hook, 'save_preview', record)
    return calls


def log_of(folder: Path) -> str:
    return next(folder.glob('*/*.log')).read_text()


def names(call: Dict[str, Any]) -> List[str]:
    return [sample.name for sample in call['samples']]


def test_validation_in_training_writes_the_richest_samples(
    tmp_path: Path, tiny_run: ModuleType, saved: List[Dict[str, Any]]
) -> None:
    tiny_run.build_runner(str(tmp_path), [PreviewHook(max_images=3)]).train()
    # Image i holds i % 3 + 1 classes: 2 and 5 hold three, 1 is the first that holds two.
    assert names(saved[0]) == ['2.png', '5.png', '1.png']
    assert saved[0]['classes'] == tiny_run.METAINFO['classes']
    assert 'iteration 4' in saved[0]['subtitle'] and 'mIoU 42.50' in saved[0]['subtitle']
    picture = cv2.imread(str(tmp_path / 'preview.png'))
    assert picture is not None and picture.shape[1] > 4 * 400
    assert f'preview: {tmp_path / "preview.png"}' in log_of(tmp_path)


def test_sample_holds_rgb_image_truth_and_prediction(
    tmp_path: Path, tiny_run: ModuleType, saved: List[Dict[str, Any]]
) -> None:
    tiny_run.build_runner(str(tmp_path), [PreviewHook(max_images=1)]).val()
    sample: PreviewSample = saved[0]['samples'][0]
    assert sample.image[0, 0].tolist() == [102, 0, 0]  # image 2: red, in RGB order
    assert sample.truth is not None
    assert sample.truth[0].tolist() == [255] * 16
    assert sample.truth[1, :3].tolist() == [0, 1, 2]
    assert not sample.prediction.any()


def test_each_evaluation_starts_afresh(
    tmp_path: Path, tiny_run: ModuleType, saved: List[Dict[str, Any]]
) -> None:
    runner = tiny_run.build_runner(str(tmp_path), [PreviewHook(max_images=2)])
    runner.val()
    runner.test()
    assert [names(call) for call in saved] == [['2.png', '5.png']] * 2
    assert 'validation' in saved[0]['subtitle'] and 'test' in saved[1]['subtitle']
    assert 'iteration' not in saved[1]['subtitle']


def test_only_rank_zero_looks(
    tmp_path: Path, tiny_run: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preview_hook, 'is_main_process', lambda: False)
    hook = PreviewHook()
    tiny_run.build_runner(str(tmp_path), [hook]).val()
    assert not (tmp_path / 'preview.png').exists()
    assert not hook._chosen


def test_a_picture_that_cannot_be_written_is_a_warning(
    tmp_path: Path, tiny_run: ModuleType
) -> None:
    runner = tiny_run.build_runner(str(tmp_path), [PreviewHook()])
    (tmp_path / 'preview.png').mkdir()
    runner.train()
    assert runner.iter == 4
    assert 'preview.png was not written' in log_of(tmp_path)
    assert not list(tmp_path.glob('.preview-*'))


def test_a_programming_error_is_not_hidden(
    tmp_path: Path, tiny_run: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise KeyError('a bug')

    monkeypatch.setattr(preview_hook, 'save_preview', broken)
    with pytest.raises(KeyError, match='a bug'):
        tiny_run.build_runner(str(tmp_path), [PreviewHook()]).val()


def output(path: str, original: Tuple[int, int], **meta: Any) -> BaseDataElement:
    sample = BaseDataElement(metainfo=dict(img_path=path, ori_shape=original, **meta))
    sample.pred_sem_seg = PixelData(data=torch.zeros((1,) + original, dtype=torch.long))
    return sample


def consider(hook: PreviewHook, sample: BaseDataElement, inputs: torch.Tensor) -> PreviewSample:
    batch = dict(inputs=[inputs], data_samples=[sample])
    hook._consider(dict(classes=('a', 'b')), batch, 0, sample)
    return hook._chosen[0].sample


def test_unreadable_image_falls_back_to_unpadded_inputs() -> None:
    inputs = torch.zeros(3, 12, 12, dtype=torch.uint8)
    inputs[2, :8, :6] = 200  # the third channel of BGR is red
    kept = consider(PreviewHook(), output('s3://bucket/a.png', (32, 24), img_shape=(8, 6)), inputs)
    assert kept.image.shape == (8, 6, 3)
    assert kept.image.reshape(-1, 3).tolist() == [[200, 0, 0]] * 48
    assert kept.truth is None
    assert kept.prediction.shape == (32, 24)


def test_a_window_of_a_scene_shows_the_window(tmp_path: Path) -> None:
    path = str(tmp_path / 'scene.png')
    cv2.imwrite(path, np.zeros((64, 64, 3), dtype=np.uint8))
    inputs = torch.full((3, 16, 16), 77, dtype=torch.uint8)
    hook = PreviewHook()
    assert consider(hook, output(path, (16, 16)), inputs).image.max() == 77
    assert path in hook._not_the_sample


@pytest.mark.parametrize('bands', [2, 4, 8])
def test_large_scenes_of_other_bands_are_shown(bands: int, tmp_path: Path) -> None:
    sample = output('absent.tif', (1100, 1050), img_shape=(1100, 1050))
    seen = consider(PreviewHook(), sample, torch.rand(bands, 1100, 1050))
    assert seen.image.shape[2] == 3 and seen.image.dtype == np.uint8


def test_sixteen_bit_files_are_stretched(tmp_path: Path) -> None:
    path = str(tmp_path / 'a.png')
    ramp = np.linspace(500, 3000, 256).astype(np.uint16).reshape(16, 16)
    cv2.imwrite(path, ramp)
    kept = consider(PreviewHook(), output(path, (16, 16)), torch.zeros(1, 1, 1))
    assert kept.image.dtype == np.uint8
    assert kept.image.min() == 0 and kept.image.max() == 255


def test_memory_is_bounded_for_large_images() -> None:
    kept = consider(
        PreviewHook(), output('', (3000, 1500)), torch.zeros(3, 3000, 1500, dtype=torch.uint8)
    )
    assert max(kept.image.shape[:2]) == 1024
    assert kept.prediction.shape == (1024, 512)


def test_images_that_cannot_be_had_are_left_out_until_the_next_evaluation(
    tmp_path: Path, tiny_run: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = tiny_run.build_runner(str(tmp_path), [PreviewHook()])
    with monkeypatch.context() as broken:
        broken.setattr(preview_hook, 'image_in_batch', lambda batch, index, channels: None)
        broken.setattr(preview_hook, '_read_rgb', lambda path: None)
        runner.val()
    # Three warnings and no more: a broken set of 10,000 images does not fill the log.
    assert log_of(tmp_path).count('meta_keys of PackSegInputs') == 3
    assert not (tmp_path / 'preview.png').exists()
    runner.val()
    assert (tmp_path / 'preview.png').exists()


@pytest.mark.parametrize('arguments', [dict(max_images=0), dict(input_channel_order='gbr')])
def test_wrong_arguments_are_refused(arguments: Dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        PreviewHook(**arguments)


@pytest.mark.parametrize('bands', [3, 1])
def test_a_pair_shows_both_dates(bands: int) -> None:
    sensors = dict(image=dict(bands=list(range(1, bands + 1)), max_dates=2))
    hook = PreviewHook()
    hook._date_channels = channels_of_dates(
        dict(model=dict(data_preprocessor=dict(type='StackDataPreProcessor', sensors=sensors)))
    )
    # Bands of the first date, bands of the second date, valid pixels.
    inputs = torch.arange(2 * bands + 2, dtype=torch.uint8)[:, None, None].repeat(1, 16, 16)
    shown = consider(hook, output('absent.png', (16, 16)), inputs)
    assert shown.after is not None
    assert shown.image[0, 0].tolist() == ([0, 1, 2] if bands == 3 else [0] * 3)
    assert shown.after[0, 0].tolist() == ([3, 4, 5] if bands == 3 else [1] * 3)


def test_other_models_have_no_two_dates() -> None:
    assert channels_of_dates({}) == ()
    for sensors in (
        dict(a=dict(bands=[1], max_dates=3)),
        dict(a=dict(bands=[1]), b=dict(bands=[1])),
    ):
        assert channels_of_dates(dict(model=dict(data_preprocessor=dict(sensors=sensors)))) == ()


def test_geotiffs_are_read_without_opencv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cv2, 'imread', None)
    paths = [str(tmp_path / name) for name in ('tile.tif', 'broken.TIF', 'scene.tif')]
    for path, side in zip(paths, (16, 16, 64)):
        with rasterio.open(
            path,
            'w',
            driver='GTiff',
            dtype='uint8',
            count=4,
            width=side,
            height=side,
            crs='EPSG:32631',
            nodata=0,
            transform=rasterio.Affine(0.5, 0, 4e5, 0, -0.5, 5e6),
        ) as file:
            file.write(
                np.arange(10, 50, 10, dtype=np.uint8)[:, None, None].repeat(side, 1).repeat(side, 2)
            )
    Path(paths[1]).write_bytes(b'II*\0no picture')
    hook = PreviewHook()
    inputs = torch.full((3, 16, 16), 77, dtype=torch.uint8)
    assert consider(hook, output(paths[0], (16, 16)), inputs).image[3, 3].tolist() == [10, 20, 30]
    for path in paths[1:]:
        assert consider(PreviewHook(), output(path, (16, 16)), inputs).image.max() == 77
