"""A newcomer's folders of PNG images and masks, by the config of docs/tutorials/own-folders.md."""
from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
from support import ROOT, check_finished, launch, main_leg

pytestmark = main_leg


def write_tiles(root: Path) -> None:
    """Write 40 tiles of 200 x 200 pixels with masks of the values 0, 1, 2 and 255."""
    random = np.random.RandomState(0)
    for number in range(40):
        mask = np.zeros((200, 200), np.uint8)
        image = random.randint(90, 130, (200, 200, 3)).astype(np.uint8)
        for value, (height, width) in ((1, (50, 40)), (2, (30, 60))):
            top, left = random.randint(0, 140, 2)
            mask[top:top + height, left:left + width] = value
        image[mask == 1], image[mask == 2] = (40, 40, 200), (200, 80, 20)
        mask[:6] = 255
        for kind, pixels in (('images', image), ('masks', mask)):
            folder = root / kind / ('train' if number < 30 else 'val')
            folder.mkdir(parents=True, exist_ok=True)
            assert cv2.imwrite(str(folder / f'tile_{number:02}.png'), pixels)


def documented_config() -> str:
    text = (ROOT / 'docs/tutorials/own-folders.md').read_text()
    return re.search(r'```python\n(_base_.*?)```', text, re.S).group(1)  # type: ignore[union-attr]


def test_the_documented_config(tmp_path: Path) -> None:
    """As it stands, but for the folder and the length, with the doctor before the training."""
    write_tiles(tmp_path / 'data/tiles')
    text = documented_config()
    for here, there in (("'data/tiles'", repr(str(tmp_path / 'data/tiles'))),
                        ('max_iters = 2000 ', 'max_iters = 4 '), ('end=50', 'end=2'),
                        ('begin=50', 'begin=2'), ('val_interval=500', 'val_interval=4'),
                        ('../_base_', str(ROOT / 'configs/_base_'))):
        assert here in text
        text = text.replace(here, there)
    config = tmp_path / 'tiles.py'
    config.write_text(text)
    doctor = subprocess.run([sys.executable, str(ROOT / 'tools/doctor.py'), str(config)],
                            stdout=subprocess.PIPE, universal_newlines=True, timeout=300)
    assert doctor.returncode == 0, doctor.stdout
    assert 'train_dataloader: 30 samples, one step with the first' in doctor.stdout
    assert ' problem ' not in doctor.stdout and 'num_classes' not in doctor.stdout
    done = launch(command=[sys.executable, str(ROOT / 'tools/train.py'), str(config),
                           '--work-dir', str(tmp_path / 'work')])
    check_finished(done)
    assert 'mIoU' in done.output and 'water' in done.output
    assert 'Traceback' not in done.output
