"""What tests share: tiny data, a tiny config, and the user's own launcher."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterable, List, Optional

import cv2
import numpy as np
import pytest
import torch
from warm_python import rank_start, warm_python

ROOT = Path(__file__).resolve().parents[1]
REAL_DATA = ROOT.parent / 'shared' / 'data'
SCRIPT = ROOT / 'scripts' / 'start_8card_training.sh'

ON_CUDA_DOUBLE = importlib.util.find_spec('cuda_double') is not None

# For files about processes and messages, which no device of the xla and cuda legs makes different.
on_host = pytest.mark.skipif(
    importlib.util.find_spec('torch_xla') is not None or ON_CUDA_DOUBLE,
    reason='the main and t20 legs run this; time is short on the xla and cuda legs',
)

# Where the other legs would run the same code for minutes.
ON_MAIN_LEG = tuple(map(int, torch.__version__.split('.')[:2])) >= (2, 10) and not ON_CUDA_DOUBLE
main_leg = pytest.mark.skipif(
    not ON_MAIN_LEG, reason='the main leg runs this; time is short on the others'
)


def no_simulated_cards() -> Optional[str]:
    """Why a test of simulated cards does not run here, or None; not on the xla leg.

    There, tests/contract, one file with ranks and one with launches try the simulator with another
    version of torch. They ask the simulator itself.
    """
    from mapsage.extras import simulator

    if importlib.util.find_spec('torch_xla') is not None:
        return 'the main leg runs this; time is short on the xla leg'
    return simulator.why_unavailable()


UNDECODABLE = b'\xb5\xd8'.decode('utf-8', 'surrogateescape')  # a GBK name, as os.listdir gives
PATIENT = 300.0  # seconds: a test that waits for this deadline is a test that fails

# A UNet of 30,000 parameters without batch statistics, on 64x64 tiles in LoveDA's layout.
# fmt: off
TINY_CONFIG = '''
custom_imports = dict(imports=['mapsage'])
runner_type = 'MapSageRunner'
default_scope = 'mmseg'
env_cfg = dict(accelerator='auto', dist_cfg=dict(backend='auto', timeout=120))
randomness = dict(seed=7)
norm_cfg = dict(type='GN', num_groups=4)
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', reduce_zero_label=True),
    dict(type='RandomFlip', prob=0.5),
    dict(type='PhotoMetricDistortion'),
    dict(type='PackSegInputs')]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', reduce_zero_label=True),
    dict(type='PackSegInputs')]
train_dataloader = dict(
    batch_size=2, num_workers=0, sampler=dict(type='InfiniteSampler', shuffle=True),
    dataset=dict(
        type='LoveDADataset', data_root={data_root!r}, pipeline=train_pipeline,
        data_prefix=dict(img_path='img_dir/train', seg_map_path='ann_dir/train')))
val_dataloader = dict(
    batch_size=1, num_workers=0, sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type='LoveDADataset', data_root={data_root!r}, pipeline=test_pipeline,
        data_prefix=dict(img_path='img_dir/val', seg_map_path='ann_dir/val')))
test_dataloader = val_dataloader
val_evaluator = dict(type='IoUMetric', iou_metrics=['mIoU'])
test_evaluator = val_evaluator
model = dict(
    type='EncoderDecoder',
    data_preprocessor=dict(
        type='SegDataPreProcessor', mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375],
        bgr_to_rgb=True, pad_val=0, seg_pad_val=255, size=(64, 64)),
    backbone=dict(
        type='UNet', base_channels=8, num_stages=3, strides=(1, 1, 1), enc_num_convs=(1, 1, 1),
        dec_num_convs=(1, 1), downsamples=(True, True), enc_dilations=(1, 1, 1),
        dec_dilations=(1, 1), norm_cfg=norm_cfg),
    decode_head=dict(
        type='FCNHead', in_channels=8, in_index=2, channels=8, num_convs=1, concat_input=False,
        dropout_ratio=0, num_classes=7, norm_cfg=norm_cfg, align_corners=False,
        loss_decode=dict(type='CrossEntropyLoss')),
    train_cfg=dict(), test_cfg=dict(mode='whole'))
optim_wrapper = dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=0.1, momentum=0.9))
param_scheduler = [dict(type='PolyLR', eta_min=1e-4, power=0.9, begin=0, end=10, by_epoch=False)]
train_cfg = dict(type='IterBasedTrainLoop', max_iters=10, val_interval=10)
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')
default_hooks = dict(
    logger=dict(type='LoggerHook', interval=1, log_metric_by_epoch=False),
    preview=None, report=None,  # which take half of the time of such a run
    checkpoint=dict(type='CheckpointHook', by_epoch=False, interval=5))
log_processor = dict(by_epoch=False)
'''
# fmt: on


def write_tiny_data(root: Path, train: int = 16, val: int = 4, size: int = 64) -> Path:
    """Write images and masks of two blobs a tile under ``root`` in LoveDA's layout."""
    random = np.random.RandomState(0)
    for split, count in (('train', train), ('val', val)):
        for kind in ('img_dir', 'ann_dir'):
            (root / kind / split).mkdir(parents=True)
        for number in range(count):
            mask = np.full((size, size), 1 + number % 7, np.uint8)
            center = int(random.randint(size)), size // 2
            cv2.circle(mask, center, size // 4, 1 + number * 3 % 7, -1)
            image = cv2.applyColorMap(mask * 30, cv2.COLORMAP_JET)
            noise = random.randint(0, 40, image.shape).astype(np.uint8)
            cv2.imwrite(str(root / 'img_dir' / split / f'{number}.png'), cv2.add(image, noise))
            cv2.imwrite(str(root / 'ann_dir' / split / f'{number}.png'), mask)
    return root


def write_tiny_config(path: Path, data_root: Path, extra: str = '') -> Path:
    """Write the tiny config, with ``extra`` lines of Python at its end; ranks may do so at once."""
    partial = path.with_name(f'{path.name}.{os.getpid()}')
    partial.write_text(TINY_CONFIG.replace('{data_root!r}', repr(str(data_root))) + extra)
    partial.replace(path)
    return path


def rest_is_long(cases: Iterable[Any], *daily: Any) -> List[Any]:
    """Return the cases of a parameter; those that are not among ``daily`` are marked `long`."""
    assert set(daily) <= set(cases), daily
    return [case if case in daily else pytest.param(case, marks=pytest.mark.long) for case in cases]


def chosen(request: pytest.FixtureRequest, parameter: str) -> List[Any]:
    """Return the values of a parameter that this session tries in the file of a fixture."""
    return [
        item.callspec.params[parameter]
        for item in request.session.items
        if item.path == request.path and parameter in item.fixturenames
    ]


def count_class_pixels(dataset: Any) -> np.ndarray:
    """Return the labeled pixels of each class over a dataset, int64 (num_classes,)."""
    counts = np.zeros(len(dataset.metainfo['classes']), np.int64)
    for sample in dataset:
        labels = sample['data_samples'].gt_sem_seg.data.numpy().ravel()
        counts += np.bincount(labels[labels != dataset.ignore_index], minlength=len(counts))
    return counts


@dataclass
class Finished:
    """A launcher that has ended."""

    status: int
    output: str
    seconds: float
    left_running: List[str]

    @property
    def final_error(self) -> str:
        """What it printed from the last ``error:`` on."""
        _, mark, after = f'\n{self.output}'.rpartition('\nerror:')
        return mark + after if mark else ''


class Launch:
    """Runs scripts/start_8card_training.sh as a user would, in this leg's Python.

    Args:
        arguments: What follows the script's name.
        ranks: NPROC_PER_NODE; None to leave it to the launcher.
        environ: More environment variables.
        command: Another command than the script.
        cold: Start as a user does, from nothing, instead of forking every process from the test
            session's: where the processes themselves are what is tested.
    """

    def __init__(
        self,
        *arguments: Any,
        ranks: Optional[int] = 2,
        environ: Optional[Dict[str, str]] = None,
        command: Optional[List[str]] = None,
        cold: bool = False,
    ) -> None:
        self._mark = f'MAPSAGE_TEST_MARK={uuid.uuid4().hex}'
        name, value = self._mark.split('=')
        python = sys.executable if cold else warm_python()
        if command and command[0] == sys.executable:
            command = [python, *command[1:]]
        settings = {
            'MAPSAGE_PYTHON': python,
            'OMP_NUM_THREADS': '1',
            'PJRT_DEVICE': 'CPU',
            name: value,
            **(environ or {}),
        }
        if ranks is not None:
            settings['NPROC_PER_NODE'] = str(ranks)
        if torch.version.cuda is not None:
            settings.setdefault('ACCELERATOR', 'cpu')  # what means the cards says so
        dropped = [
            'RANK',
            'WORLD_SIZE',
            'LOCAL_RANK',
            'MASTER_ADDR',
            'MASTER_PORT',
            'PYTHON_EXEC',
            'NPROC_PER_NODE',
        ]
        if cold:
            dropped.append(rank_start.ADDRESS)
        inherited = {k: v for k, v in os.environ.items() if k not in dropped}
        self._start = time.monotonic()
        self.process = subprocess.Popen(
            [*(command or ['bash', str(SCRIPT)]), *map(str, arguments)],
            env={**inherited, **settings},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            universal_newlines=True,
            errors='replace',
            cwd=str(ROOT),
            start_new_session=True,
        )

    def finish(self, timeout: float = PATIENT) -> Finished:
        """Wait for the end; kill everything and fail when it takes longer than ``timeout`` s."""
        try:
            output, _ = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self._kill_all()
            output, _ = self.process.communicate()
            raise AssertionError(f'still running after {timeout} s:\n{output[-20_000:]}') from None
        seconds = time.monotonic() - self._start
        # A killed process may take an instant to leave the process table.
        deadline = time.monotonic() + 20
        while self.running() and time.monotonic() < deadline:
            time.sleep(0.1)
        left = list(self.running().values())
        self._kill_all()
        return Finished(self.process.returncode, output, seconds, left)

    def running(self) -> Dict[int, str]:
        """Return the processes of this launch that still run: pid to command line."""
        found = {}
        for entry in Path('/proc').iterdir():
            if not entry.name.isdigit():
                continue
            try:
                if self._mark.encode() in (entry / 'environ').read_bytes():
                    command = (entry / 'cmdline').read_bytes().replace(b'\0', b' ').decode()
                    if command:  # a zombie has none
                        found[int(entry.name)] = command.strip()
            except OSError:
                continue
        return found

    def ranks(self) -> List[int]:
        """Return the pids of the training ranks, without their data workers."""
        commands = {
            pid: cmd
            for pid, cmd in self.running().items()
            if 'tools/train.py' in cmd and 'launch.py' not in cmd
        }
        return sorted(pid for pid in commands if self._parent(pid) not in commands)

    def wait_for(self, path: Path, timeout: float = PATIENT) -> None:
        """Wait until ``path`` exists."""
        deadline = time.monotonic() + timeout
        while not path.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self._kill_all()
                output, _ = self.process.communicate()
                raise AssertionError(f'{path} did not appear:\n{output[-4000:]}')
            time.sleep(0.05)

    @staticmethod
    def _parent(pid: int) -> int:
        return int(Path(f'/proc/{pid}/stat').read_text().rsplit(')', 1)[1].split()[1])

    def _kill_all(self) -> None:
        for pid in self.running():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


def launch(
    *arguments: Any,
    ranks: Optional[int] = 2,
    timeout: float = PATIENT,
    environ: Optional[Dict[str, str]] = None,
    command: Optional[List[str]] = None,
    cold: bool = False,
) -> Finished:
    """Start and finish a :class:`Launch`."""
    return Launch(*arguments, ranks=ranks, environ=environ, command=command, cold=cold).finish(
        timeout
    )


def check_finished(finished: Finished) -> None:
    """Assert that a launch ended well and left nothing."""
    assert finished.status == 0, finished.output[-6000:]
    assert finished.left_running == []


def why_no_make() -> str:
    """Return why the doubles of other makes cannot run here, '' if they can.

    They are devices of the simulator under other names, in processes where it is not loaded.
    """
    from mapsage.extras.simulator.build import compiler

    version = tuple(map(int, torch.__version__.split('+')[0].split('.')[:2]))
    if version < (2, 13) or compiler() is None or torch.version.cuda is not None:
        return 'the simulated backend is for the main leg, with a C++ compiler'
    return ''
