"""A stock MMSegmentation config, built by MMSegmentation's own training script."""

from __future__ import annotations

import sys
from pathlib import Path

import mmseg
import pytest
from support import check_finished, launch
from warm_python import warm_python

MIM = Path(mmseg.__file__).parent / '.mim'
# The whole of what a user adds.
MAPSAGE_LINES = """
custom_imports = dict(imports=['mapsage'])
runner_type = 'MapSageRunner'
"""
# What makes a stock recipe short: where the data is, sizes, and the number of iterations.
SHORT = [
    'train_dataloader.dataset.data_root={data}',
    'val_dataloader.dataset.data_root={data}',
    'train_dataloader.num_workers=0',
    'train_dataloader.persistent_workers=False',
    'val_dataloader.num_workers=0',
    'val_dataloader.persistent_workers=False',
    'train_dataloader.dataset.pipeline.2.scale=(128,64)',
    'train_dataloader.dataset.pipeline.3.crop_size=(64,64)',
    'val_dataloader.dataset.pipeline.1.scale=(64,64)',
    'model.data_preprocessor.size=(64,64)',
    'train_cfg.max_iters=3',
    'train_cfg.val_interval=3',
    'default_hooks.logger.interval=1',
]


def write_stock_config(path: Path) -> Path:
    """Inherit model, dataset, schedule and runtime files of MMSegmentation, and add two lines."""
    base = MIM / 'configs' / '_base_'
    parts = [
        'models/fcn_unet_s5-d16.py',
        'datasets/loveda.py',
        'default_runtime.py',
        'schedules/schedule_20k.py',
    ]
    lines = [
        f'_base_ = {[str(base / part) for part in parts]!r}',
        MAPSAGE_LINES,
        'crop_size = (64, 64)',
        'model = dict(decode_head=dict(num_classes=7), auxiliary_head=dict(num_classes=7),'
        '             test_cfg=dict(crop_size=(64, 64), stride=(42, 42)))',
    ]
    path.write_text('\n'.join(lines))
    return path


@pytest.mark.skipif(not MIM.is_dir(), reason='this mmseg ships no configs')
@pytest.mark.parametrize('ranks', [1, 2])
def test_trains_by_mmsegs_own_script(ranks: int, tiny_data: Path, tmp_path: Path) -> None:
    config = write_stock_config(tmp_path / 'stock.py')
    options = [line.format(data=tiny_data) for line in SHORT]
    script = [str(MIM / 'tools' / 'train.py'), str(config), '--work-dir', str(tmp_path / 'work')]
    python = [sys.executable, '-W', 'ignore']
    command = (
        python + script
        if ranks == 1
        else [
            *python,
            '-m',
            'torch.distributed.run',
            '--nproc_per_node',
            str(ranks),
            '--rdzv_backend',
            'c10d',
            '--rdzv_endpoint',
            'localhost:0',
            *script,
            '--launcher',
            'pytorch',
        ]
    )
    root = Path(__file__).resolve().parents[2]
    finished = launch(
        '--cfg-options',
        *options,
        command=command,
        environ={'PYTHONPATH': str(root), 'PYTHON_EXEC': warm_python()},
    )
    check_finished(finished)
    assert (tmp_path / 'work' / 'iter_3.pth').exists()
    assert f'world size {ranks}' in finished.output
    assert 'mIoU' in finished.output
