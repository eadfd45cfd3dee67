"""Faults of files: what happens to them between a training and its resume, and scenes to be mapped.

What is random follows from the seed of the fault. ``tests/fault_runs.py`` judges what a run makes
of it.
"""

from __future__ import annotations

import os
import random
import shutil
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import cv2
import numpy as np
import rasterio
import torch
from fault_kinds import SCENES, Fault

# Escape sequences that set the title of a terminal and clear it.
ESCAPES = '\x1b]0;owned\x07\x1b[2J'

PREDICT_CONFIG = """
custom_imports = dict(imports=['mapsage', 'planted_faults'])
default_scope = 'mmseg'
crop_size = (64, 64)
test_pipeline = [dict(type='LoadImageFromFile'), dict(type='PackSegInputs')]
test_dataloader = dict(dataset=dict(
    type='BaseSegDataset', pipeline=test_pipeline,
    metainfo=dict(classes=('a', 'b', 'c'), palette=[[255, 0, 0], [0, 255, 0], [0, 0, 255]])))
model = dict(
    type='EncoderDecoder',
    data_preprocessor=dict(
        type='SegDataPreProcessor', mean=[0., 0., 0.], std=[255., 255., 255.], bgr_to_rgb=True),
    backbone=dict(type='PlantedImages'),
    decode_head=dict(
        type='FCNHead', in_channels=3, in_index=0, channels=3, num_convs=0, concat_input=False,
        dropout_ratio=0, num_classes=3, align_corners=False),
    train_cfg=dict(), test_cfg=dict(mode='whole'))
"""


@dataclass
class StoppedRun:
    """The files of a training that was killed before its last checkpoint.

    Attributes:
        folder: Folder of the fault; ``work`` in it is the work dir, ``data`` the data if the fault
            changes them.
        checkpoints: The checkpoints, newest first.
        last: Name of the checkpoint that was not written.
        struck_file: Name of the file that was struck.
    """

    folder: Path
    checkpoints: List[Path]
    last: str
    struck_file: str

    @property
    def work(self) -> Path:
        return self.folder / 'work'

    @property
    def newest(self) -> Path:
        return self.checkpoints[0]

    @property
    def marker(self) -> Path:
        """File that code of a checkpoint makes."""
        return self.folder / 'code was run'

    @property
    def thesis(self) -> Path:
        """Folder of a user, of which the run must leave every file as it is."""
        return self.folder / 'thesis'

    def wrong(self) -> List[str]:
        """Return what a run has done to files that are not its own, or what it has executed."""
        wrong = ['code of a checkpoint was run'] if self.marker.exists() else []
        if (
            not self.thesis.is_dir()
            or {path.name: path.read_text(errors='replace') for path in self.thesis.iterdir()}
            != _THESIS
        ):
            wrong.append("a user's files were changed or removed")
        return wrong


_THESIS = {'years.pth': 'years of work', 'more.txt': 'and more'}


def stop(whole: Path, folder: Path) -> StoppedRun:
    """Copy the work dir of a whole run as it was before the last checkpoint was written."""
    work = folder / 'work'
    shutil.copytree(
        str(whole), str(work), ignore=shutil.ignore_patterns('best_*', 'report*', 'preview*')
    )
    last, *checkpoints = sorted(work.glob('iter_*.pth'), key=lambda path: -int(path.stem[5:]))
    last.unlink()
    (work / 'last_checkpoint').write_text(str(checkpoints[0]))
    run = StoppedRun(folder, checkpoints, last.name, checkpoints[0].name)
    run.thesis.mkdir()
    for name, text in _THESIS.items():
        (run.thesis / name).write_text(text)
    return run


def strike(fault: Fault, run: StoppedRun) -> None:
    """Do to the files of a stopped run what a fault at rest does."""
    _STRIKES[fault.kind](fault, run, random.Random(fault.seed))


def _edit(path: Path, change: Callable[[Dict[str, Any]], Any]) -> None:
    """Change a checkpoint whose file stays whole."""
    checkpoint = torch.load(str(path), map_location='cpu', weights_only=False)
    change(checkpoint)
    torch.save(checkpoint, str(path))


def _flip_bit(fault: Fault, run: StoppedRun, dice: random.Random) -> None:
    for path in run.checkpoints[: 2 if fault.place == 'two checkpoints' else 1]:
        content = bytearray(path.read_bytes())
        begin, end = _part(path, content, fault.action, dice)
        content[dice.randrange(begin, end)] ^= 1 << dice.randrange(8)
        path.write_bytes(bytes(content))


def _part(path: Path, content: bytes, part: str, dice: random.Random) -> Tuple[int, int]:
    """Return the first byte of a part of a checkpoint, and the byte behind it."""
    with zipfile.ZipFile(str(path)) as archive:
        entries = archive.infolist()
        if part == 'directory':
            return archive.start_dir, len(content)
    tensors = sorted(
        (entry for entry in entries if '/data/' in entry.filename and entry.file_size > 64),
        key=lambda entry: entry.header_offset,
    )
    # The optimizer's tensors are saved last.
    entry = {
        'pickle': [entry for entry in entries if entry.filename.endswith('data.pkl')],
        'weights': tensors[: len(tensors) // 2],
        'optimizer': tensors[len(tensors) // 2 :],
    }[part]
    chosen = dice.choice(entry)
    header = chosen.header_offset
    begin = header + 30 + sum(struct.unpack('<HH', content[header + 26 : header + 30]))
    return begin, begin + chosen.file_size


class _RunsCode:
    """An object that runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self._command = command

    def __reduce__(self) -> Any:
        return os.system, (self._command,)


def _put_code(fault: Fault, run: StoppedRun, dice: random.Random) -> None:
    code = f'import os\nos.system("touch \'{run.marker}\'")\ngpu_ids = []\n'
    # The resumed run finds this module.
    (run.folder / 'planted_import.py').write_text(code)

    def put(checkpoint: Dict[str, Any]) -> None:
        meta = checkpoint['meta']
        if fault.action == 'pickle':
            meta['time'] = _RunsCode(f"touch '{run.marker}'")
        elif fault.action == 'meta.cfg':
            meta['cfg'] = checkpoint['message_hub']['runtime_info']['cfg'] = code
        else:
            meta['config'] = (
                code
                if fault.action == 'meta.config'
                else "custom_imports = dict(imports=['planted_import'])\n"
            )

    _edit(run.newest, put)


def _lead_elsewhere(fault: Fault, run: StoppedRun, dice: random.Random) -> None:
    best = {'file': run.thesis / 'years.pth', 'folder': run.thesis}.get(
        fault.action, run.work / 'best_mIoU_iter_1.pth'
    )
    if fault.action == 'link':
        best.symlink_to(dice.choice([run.thesis, run.thesis / 'years.pth']))

    def lead(checkpoint: Dict[str, Any]) -> None:
        hub = checkpoint['message_hub']
        if fault.action == 'kept checkpoints':
            (run.work / 'iter_').mkdir()
            # The first are more than the run keeps.
            hub['runtime_info']['keep_ckpt_ids'] = ['/../../thesis/years', *range(1, 12)]
        else:
            hub['runtime_info']['best_ckpt'] = str(best)

    _edit(run.newest, lead)


def _put_hostile_values(fault: Fault, run: StoppedRun, dice: random.Random) -> None:
    def put(checkpoint: Dict[str, Any]) -> None:
        meta, hub = checkpoint['meta'], checkpoint['message_hub']
        if fault.action == 'dataset_meta':
            meta['dataset_meta'] = hub['runtime_info']['dataset_meta'] = dice.choice(
                [ESCAPES, dict(classes=(ESCAPES,) * 7, palette=ESCAPES), dict(classes=-1), 7]
            )
        elif fault.action == 'counters':
            meta[dice.choice(['iter', 'epoch'])] = dice.choice([-3, '6', 2.5, [1], ESCAPES])
        elif fault.action == 'message hub':
            checkpoint['message_hub'] = dice.choice(
                [ESCAPES, [1], dict(log_scalars=ESCAPES, runtime_info=[], resumed_keys=7), {}]
            )
        else:
            names = sorted(set(checkpoint) - {'meta', 'state_dict', 'message_hub'})
            for holder, name in [
                (meta, 'reproducibility'),
                *((checkpoint, name) for name in names),
            ]:
                holder[name] = dice.choice([ESCAPES, -1, [1], {ESCAPES: 1}])

    _edit(run.newest, put)


def _copy_work_dir(fault: Fault, run: StoppedRun, dice: random.Random) -> None:
    """Let the work dir be a copy, whose last_checkpoint still leads to the original."""
    original = run.folder / 'original'
    shutil.copytree(str(run.work), str(original))
    path = original / run.newest.name
    (run.work / 'last_checkpoint').write_text(str(path))

    def change(checkpoint: Dict[str, Any]) -> None:
        for weight in checkpoint['state_dict'].values():
            weight += 1

    _edit(path, change)
    if fault.action == 'original gone':
        shutil.rmtree(str(original))
    elif fault.action == 'original trained on':
        path.rename(original / run.last)


def _put_link(fault: Fault, run: StoppedRun, dice: random.Random) -> None:
    run.struck_file = {'config': 'run.py', 'next checkpoint': run.last}.get(
        fault.action, fault.action
    )
    path = run.work / run.struck_file
    if path.exists():
        path.unlink()
    path.symlink_to(run.thesis / dice.choice(sorted(_THESIS)))


def _replace_image(fault: Fault, run: StoppedRun, dice: random.Random) -> None:
    path = dice.choice(sorted((run.folder / 'data/img_dir/train').iterdir()))
    image = cv2.imread(str(path))
    image[:] = (
        dice.randrange(256)
        if fault.action == 'smaller'
        else np.random.RandomState(fault.seed % 1000).randint(0, 256, image.shape)
    )
    cv2.imwrite(str(path), image)
    run.struck_file = path.name


def _change_samples(fault: Fault, run: StoppedRun, dice: random.Random) -> None:
    images, masks = (run.folder / 'data' / kind / 'train' for kind in ('img_dir', 'ann_dir'))
    name = dice.choice(sorted(path.name for path in images.iterdir()))
    for folder in (images, masks):
        if fault.action == 'removed':
            (folder / name).unlink()
        elif fault.action == 'added':
            shutil.copy(str(folder / name), str(folder / 'a new one.png'))
        else:
            (folder / name).rename(folder / 'another name.png')
    run.struck_file = name


def _swap_classes(fault: Fault, run: StoppedRun, dice: random.Random) -> None:
    names = ['background', 'building', 'road', 'water', 'barren', 'forest', 'agricultural']
    dice.shuffle(names)
    path = run.folder / 'run.py'
    path.write_text(
        path.read_text()
        + ''.join(
            f"{loader}_dataloader['dataset']['metainfo'] = dict(classes={names})\n"
            for loader in ('train', 'val')
        )
    )


_STRIKES: Dict[str, Callable[[Fault, StoppedRun, random.Random], None]] = {
    'flipped bit': _flip_bit,
    'code in a checkpoint': _put_code,
    'best checkpoint elsewhere': _lead_elsewhere,
    'hostile values': _put_hostile_values,
    'copied work dir': _copy_work_dir,
    'link in the work dir': _put_link,
    'image replaced': _replace_image,
    'other samples': _change_samples,
    'other classes': _swap_classes,
}


def write_scenes(folder: Path) -> Path:
    """Write scenes to be mapped, of 6 windows each."""
    folder.mkdir()
    noise = np.random.RandomState(0)
    for number in range(SCENES):
        with rasterio.open(
            str(folder / f'{number:02}.tif'),
            'w',
            driver='GTiff',
            width=160,
            height=96,
            count=3,
            dtype='uint8',
            crs='EPSG:32633',
            transform=rasterio.Affine(1, 0, 4e5 + 160 * number, 0, -1, 5e6),
            tiled=True,
            blockxsize=32,
            blockysize=32,
        ) as file:
            file.write(noise.randint(0, 256, (3, 96, 160)).astype(np.uint8))
    return folder


def write_predict_model(folder: Path) -> Tuple[Path, Path]:
    """Write the config and the checkpoint of a model whose map is the strongest band."""
    config, checkpoint = folder / 'bands.py', folder / 'bands.pth'
    config.write_text(PREDICT_CONFIG)
    torch.save(
        dict(
            meta={},
            state_dict={
                'decode_head.conv_seg.weight': torch.eye(3).view(3, 3, 1, 1),
                'decode_head.conv_seg.bias': torch.zeros(3),
            },
        ),
        str(checkpoint),
    )
    return config, checkpoint
