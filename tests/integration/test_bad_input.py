"""Each mistake of a user's: one clear error, a non-zero status everywhere, nothing left running."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable

import cv2
import numpy as np
import pytest
import torch
from support import ROOT, Finished, launch, on_host, write_tiny_config, write_tiny_data
from warm_python import warm_python

pytestmark = on_host


def expect_error(finished: Finished, *words: str) -> None:
    assert finished.status != 0, finished.output[-4000:]
    assert finished.left_running == []
    for word in words:
        assert word in finished.final_error, finished.output[-6000:]


def test_missing_config() -> None:
    expect_error(launch('configs/demo/no_such.py'), 'configs/demo/no_such.py does not exist')


def test_a_folder_that_cannot_hold_the_demo(tmp_path: Path) -> None:
    (tmp_path / 'data').write_text('a file')
    done = subprocess.run(
        [warm_python(), str(ROOT / 'tools/make_demo_data.py'), 'data/demo'],
        cwd=str(tmp_path),
        stderr=subprocess.PIPE,
        universal_newlines=True,
        timeout=100,
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith('error: data/demo cannot be written'), done.stderr


def test_unknown_env_cfg_key(tiny_config: Path, tmp_path: Path) -> None:
    finished = launch(
        tiny_config, '--work-dir', tmp_path, '--cfg-options', 'env_cfg.acelerator=cpu'
    )
    expect_error(finished, 'rank', "unknown key 'acelerator'", "Did you mean 'accelerator'?")


def test_absent_accelerator(tiny_config: Path, tmp_path: Path) -> None:
    finished = launch(tiny_config, '--work-dir', tmp_path, environ={'ACCELERATOR': 'gcu'})
    expect_error(finished, "accelerator 'gcu' cannot be used here: torch_gcu is not installed")


def test_unusable_backend(tiny_config: Path, tmp_path: Path) -> None:
    finished = launch(
        tiny_config,
        '--work-dir',
        tmp_path,
        '--accelerator',
        'cpu',
        '--cfg-options',
        'env_cfg.dist_cfg.backend=eccl',
    )
    expect_error(finished, "backend 'eccl' cannot be used on accelerator 'cpu'", 'auto, gloo')


def test_busy_port(tiny_config: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(('', 0))
        taken.listen()
        port = taken.getsockname()[1]
        finished = launch(
            tiny_config,
            '--work-dir',
            tmp_path,
            environ={'NNODES': '2', 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(port)},
        )
    expect_error(finished, f'MASTER_PORT={port} is in use')


def remove(root: Path) -> None:
    shutil.rmtree(root)


def empty(root: Path) -> None:
    for path in (root / 'img_dir' / 'train').iterdir():
        path.unlink()


def lose_mask(root: Path) -> None:
    (root / 'ann_dir' / 'train' / '5.png').unlink()


def write_bad_label(root: Path) -> None:
    mask = np.full((64, 64), 2, np.uint8)
    mask[:3, :3] = 9
    cv2.imwrite(str(root / 'ann_dir' / 'train' / '0.png'), mask)


def truncate_image(root: Path) -> None:
    path = root / 'img_dir' / 'train' / '0.png'
    path.write_bytes(path.read_bytes()[:500])


def truncate_mask(root: Path) -> None:
    path = root / 'ann_dir' / 'train' / '0.png'
    path.write_bytes(path.read_bytes()[:20])


@pytest.mark.parametrize(
    'spoil, words',
    [
        (remove, ['img_dir/train', 'does not exist']),
        (empty, ['found no samples', '.png']),
        (lose_mask, ['1 of the masks', 'ann_dir/train/5.png']),
        (write_bad_label, ['ann_dir/train/0.png holds the value 9 (9 pixel(s))', '1 to 7']),
        (truncate_image, ['img_dir/train/0.png (500 bytes) cannot be decoded']),
        (truncate_mask, ['ann_dir/train/0.png (20 bytes) cannot be decoded']),
    ],
)
def test_bad_data(spoil: Callable[[Path], Any], words: list, tmp_path: Path) -> None:
    data = write_tiny_data(tmp_path / 'data', train=8)
    spoil(data)
    config = write_tiny_config(tmp_path / 'tiny.py', data)
    # with workers, so that the error crosses a process on its way to the rank
    finished = launch(
        config, '--work-dir', tmp_path / 'work', '--cfg-options', 'train_dataloader.num_workers=1'
    )
    expect_error(finished, 'DataError', *words)


CARELESS = """
custom_imports = dict(imports=['mapsage', 'fault_hooks'])
train_pipeline.insert(2, dict(type='Careless'))
train_dataloader['dataset']['pipeline'] = train_pipeline
"""


@pytest.mark.parametrize('ranks, workers', [(1, 0), (2, 1)])
def test_a_bug_in_a_users_transform_shows_its_line(
    ranks: int, workers: int, tiny_data: Path, tmp_path: Path
) -> None:
    config = write_tiny_config(tmp_path / 'tiny.py', tiny_data, CARELESS)
    command = None if ranks > 1 else [sys.executable, 'tools/train.py']
    finished = launch(
        config,
        '--work-dir',
        tmp_path / 'work',
        '--accelerator',
        'cpu',
        '--cfg-options',
        f'train_dataloader.num_workers={workers}',
        ranks=ranks,
        command=command,
        environ={'PYTHONPATH': str(Path(__file__).parent)},
    )
    assert finished.status == 1 and finished.left_running == []
    said = finished.final_error if ranks > 1 else finished.output
    for words in (
        'SampleError: cannot load sample',
        'img_dir/train/3.png',
        "KeyError: 'gt_depth'",
        f'{Path(__file__).parent}/fault_hooks.py", line ',
        "results['depth'] = results['gt_depth'] / 2",
    ):
        assert words in said, finished.output[-6000:]


def test_resume_must_without_checkpoint(tiny_config: Path, tmp_path: Path) -> None:
    finished = launch(tiny_config, '--work-dir', tmp_path / 'work', '--resume', 'must')
    expect_error(finished, 'ResumeError', 'holds no checkpoint')


def test_resume_falls_back_from_a_truncated_checkpoint(tiny_config: Path, tmp_path: Path) -> None:
    work = tmp_path / 'work'
    first = launch(tiny_config, '--work-dir', work)
    assert first.status == 0, first.output[-4000:]
    newest = work / 'iter_10.pth'
    newest.write_bytes(newest.read_bytes()[:-1000])
    second = launch(tiny_config, '--work-dir', work, '--resume', '--verbose')
    assert second.status == 0, second.output[-4000:]
    assert 'iter_10.pth is truncated or damaged' in second.output
    assert 'iter: 5' in second.output

    (work / 'iter_5.pth').write_bytes(b'')
    newest.write_bytes(newest.read_bytes()[:100])
    third = launch(tiny_config, '--work-dir', work, '--resume')
    expect_error(third, 'none of the 2 checkpoint(s) can be read')


RAISE_ON_RANK_1 = """
custom_imports = dict(imports=['mapsage', 'fault_hooks'])
custom_hooks = [dict(type='{hook}')]
default_hooks['report'] = dict(type='RunReportHook')
"""


@pytest.mark.parametrize(
    'hook, words',
    [
        ('RaiseOnRank1', ['rank 1 failed first', 'KeyError', 'only rank 1 sees this']),
        ('NonFiniteOnRank1', ['rank 1', 'NonFiniteLossError', 'loss']),
    ],
)
def test_one_rank_fails(hook: str, words: list, tiny_data: Path, tmp_path: Path) -> None:
    config = write_tiny_config(tmp_path / 'tiny.py', tiny_data, RAISE_ON_RANK_1.format(hook=hook))
    finished = launch(
        config, '--work-dir', tmp_path / 'work', environ={'PYTHONPATH': str(Path(__file__).parent)}
    )
    expect_error(finished, *words)
    assert not (tmp_path / 'work' / 'iter_5.pth').exists()
    report = (tmp_path / 'work' / 'report.html').read_text(encoding='utf-8')
    if hook == 'RaiseOnRank1':  # rank 0 is ended, or loses its peer a moment before
        assert '>no end recorded' in report or '>failed<' in report
    else:
        assert words[-1] in report


def test_a_checkpoint_of_another_model_is_not_tested(tiny_config: Path, tmp_path: Path) -> None:
    other = tmp_path / 'other.pth'
    torch.save(dict(state_dict={'backbone.stem': torch.zeros(3)}), str(other))
    finished = launch(
        tiny_config,
        other,
        '--work-dir',
        tmp_path / 'work',
        command=[sys.executable, 'tools/test.py'],
    )
    assert finished.status == 1, finished.output[-4000:]
    assert "other.pth does not fit the config's model: " in finished.output
    assert '1 left over: backbone.stem' in finished.output and 'Iter(test)' not in finished.output
    assert 'Traceback' not in finished.output
