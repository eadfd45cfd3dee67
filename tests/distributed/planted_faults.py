"""Breaks one process of a launched run, as MAPSAGE_TEST_FAULT says; see fault_kinds.py.

The process that is struck writes a line into the file ``struck`` right before: what happens next is
compared with this record, and not with the plan.
"""

from __future__ import annotations

import builtins
import ctypes
import errno
import hashlib
import io
import json
import multiprocessing
import os
import random
import resource
import signal
import sys
import threading
import time
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Callable, Dict, Optional, Sequence, Tuple

import torch
import torch.distributed as dist
from mmcv.transforms import BaseTransform
from mmengine.dataset import pseudo_collate
from mmengine.dist import barrier
from mmengine.hooks import Hook
from mmengine.model import BaseModule, is_model_wrapper
from mmengine.registry import FUNCTIONS, HOOKS
from mmseg.evaluation import IoUMetric
from mmseg.registry import METRICS, MODELS, TRANSFORMS

from mapsage.accelerator import resolve_accelerator
from mapsage.distributed.channels import mesh
from mapsage.models import DINOv3ViT

TEXT = 'this fault was planted'
FOREVER = 3600
_FAULT: Dict[str, Any] = json.loads(os.environ.get('MAPSAGE_TEST_FAULT', '{}'))
_FOLDER = Path(os.environ.get('MAPSAGE_TEST_FOLDER', '/nowhere'))
# Of the launcher: an encoder rank keeps it, and loader workers inherit it.
_RANK = int(os.environ.get('RANK', '-1'))
# A broken sample is broken for every rank.
_HERE = bool(_FAULT) and (_RANK == _FAULT['rank'] or _FAULT['place'] == 'sample')


def _is(*places: str) -> bool:
    return _HERE and _FAULT['place'] in places


def record(fault: Dict[str, Any], folder: Path, rank: int, file: str = '') -> bool:
    """Record what strikes which process now; return whether it shall, as the first or again."""
    line = (
        json.dumps(
            dict(
                time=time.time(),
                pid=os.getpid(),
                rank=rank,
                kind=fault['kind'],
                action=fault['action'],
                place=fault['place'],
                file=file,
            )
        )
        + '\n'
    )
    try:
        handle = os.open(str(folder / 'struck'), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        if not fault['again']:
            return False
        handle = os.open(str(folder / 'struck'), os.O_WRONLY | os.O_APPEND)
    os.write(handle, line.encode())
    os.close(handle)
    return True


def _record() -> bool:
    return record(
        _FAULT, _FOLDER, _RANK, _victim().name if _FAULT['place'] == 'mapping' else _FAULT['place']
    )


def strike(*_: Any) -> None:
    """End, break or stop this process."""
    if _record():
        _ACTIONS[_FAULT['action']]()


def _raise() -> None:
    # with what the name of a file in another encoding becomes
    raise ArithmeticError(f'{TEXT} in a {_FAULT["place"]} \udcb5\udcd8')


def _raise_memory_error() -> None:
    raise MemoryError


def _raise_out_of_memory() -> None:
    raise RuntimeError(
        'DefaultCPUAllocator: not enough memory: you tried to allocate 99 bytes: out of memory'
    )


def _continue_when(condition: Callable[[], bool], seconds: float) -> None:
    """Stop this process; a child continues it when a condition holds, or after some seconds."""
    parent = os.getpid()
    if os.fork() == 0:
        end = time.monotonic() + seconds
        while not condition() and time.monotonic() < end:
            time.sleep(0.005)
        os.kill(parent, signal.SIGCONT)
        os._exit(0)
    os.kill(parent, signal.SIGSTOP)


def _others_gave_up() -> bool:
    return any(Path(os.environ['MAPSAGE_ERROR_NOTES']).glob('*-*'))


def _kill_worker() -> None:
    os.kill(multiprocessing.active_children()[0].pid or 0, signal.SIGKILL)


def _hang_in_c() -> None:
    ctypes.PyDLL(None).sleep(FOREVER)  # without letting other threads of the interpreter run


def _receive() -> None:
    dist.recv(torch.ones(3), src=(dist.get_rank() + 1) % dist.get_world_size())


def _reduce_on_the_card() -> None:
    dist.all_reduce(torch.ones(3, device=resolve_accelerator('sim').device(_RANK)))


def _close_mesh() -> None:
    for connections in list(mesh._meshes):
        for connection in list(connections._sockets):
            connection.shutdown(2)


def _forbid_descriptors() -> None:
    count = len(os.listdir('/proc/self/fd'))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (count - 1, hard))


def _forbid_large_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**14, resource.RLIM_INFINITY))


def _put_folders_in_place() -> None:
    work = Path(os.environ['MAPSAGE_TEST_FOLDER'], 'work')
    for name in [f'iter_{number}.pth' for number in range(1, 9)] + [
        f'epoch_{number}.pth' for number in range(1, 9)
    ]:
        if not (work / name).exists():
            (work / name).mkdir(parents=True)


def _ask_to_leave() -> None:
    words = _FAULT['action'].split()
    if len(words) == 1:  # the others are for the launcher, whose number the test knows
        os.kill(os.getpid(), getattr(signal, words[0]))
        time.sleep(0.1)


def _refuse_shared_memory() -> None:
    """Fail where a full /dev/shm does: while the worker's feeder thread pickles a batch."""

    def refuse(_: torch.Tensor) -> Any:
        raise RuntimeError(
            'unable to allocate shared memory(shm) for file </torch_1_2_3>: '
            'No space left on device (28)'
        )

    ForkingPickler.register(torch.Tensor, refuse)


class _FullFile(io.FileIO):
    """A file on a disk that has no room."""

    def write(self, data: Any) -> int:
        code = getattr(errno, _FAULT['action'])
        raise OSError(code, os.strerror(code))


def _fill_disk() -> None:
    """Refuse what is written from now on into files whose names contain the place of the fault."""
    true_open, true_statvfs = builtins.open, os.statvfs
    creates = _FAULT['action'] == 'no inodes'

    def open_full(
        file: Any,
        mode: str = 'r',
        buffering: int = -1,
        encoding: Optional[str] = None,
        **options: Any,
    ) -> Any:
        name = os.fspath(file) if isinstance(file, (str, os.PathLike)) else ''
        if _FAULT['place'] not in str(name) or mode.startswith('r'):
            return true_open(file, mode, buffering, encoding, **options)
        if creates:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
        raw = _FullFile(file, mode.replace('b', '').replace('t', ''))
        if not buffering:
            return raw
        buffer: Any = io.BufferedRandom(raw) if '+' in mode else io.BufferedWriter(raw)
        return buffer if 'b' in mode else io.TextIOWrapper(buffer, encoding)

    def statvfs_without_inodes(path: Any) -> Any:
        values = list(true_statvfs(path))
        values[6:8] = [0, 0]
        return os.statvfs_result(values)

    builtins.open = open_full
    if creates:
        os.statvfs = statvfs_without_inodes


def _victim() -> Path:
    """Return the scene that is struck: not one of the first, which may be finished."""
    scenes = sorted((_FOLDER / 'scenes').iterdir())
    return random.Random(_FAULT['seed']).choice(scenes[len(scenes) // 3 :])


def _cut(size: Optional[int] = None) -> None:
    path = _victim()
    os.truncate(str(path), path.stat().st_size // 2 if size is None else size)


def _obey_permissions() -> None:
    """Let the root user be refused what a mode forbids, as others are."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this thread
    data = (ctypes.c_uint32 * 6)()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.capget(header, data):
        raise OSError(ctypes.get_errno(), 'capget')
    data[0] &= ~0b110  # effective: CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    if libc.capset(header, data):
        raise OSError(ctypes.get_errno(), 'capset')


_ACTIONS: Dict[str, Callable[[], Any]] = {
    'SIGKILL': lambda: os.kill(os.getpid(), signal.SIGKILL),
    'SIGSEGV': lambda: os.kill(os.getpid(), signal.SIGSEGV),
    'SIGSTOP': lambda: os.kill(os.getpid(), signal.SIGSTOP),
    'SIGSTOP, continued late': lambda: _continue_when(_others_gave_up, 100),
    'SIGSTOP, continued': lambda: _continue_when(lambda: False, 4),
    'abort': os.abort,
    'sys.exit 0': lambda: sys.exit(0),
    'sys.exit 3': lambda: sys.exit(3),
    'os._exit 0': lambda: os._exit(0),
    'os._exit 3': lambda: os._exit(3),
    'exception': _raise,
    'MemoryError': _raise_memory_error,
    'RuntimeError': _raise_out_of_memory,
    'kill worker': _kill_worker,
    'hang': lambda: time.sleep(FOREVER),
    'sleep': lambda: time.sleep(4),
    'hang in C': _hang_in_c,
    'receive': _receive,
    'all-reduce on the card': _reduce_on_the_card,
    'close mesh': _close_mesh,
    'no descriptors': _forbid_descriptors,
    'small files': _forbid_large_files,
    'folders': _put_folders_in_place,
    'refuse batches': _refuse_shared_memory,
    'ENOSPC': _fill_disk,
    'EDQUOT': _fill_disk,
    'no inodes': _fill_disk,
    'unlink': lambda: _victim().unlink(),
    'rename': lambda: _victim().rename(_FOLDER / 'moved.tif'),
    'cut to the header': lambda: _cut(120),
    'cut to half': _cut,
    'emptied': lambda: _cut(0),
    'chmod 0': lambda: _victim().chmod(0),
    'SIGTERM': _ask_to_leave,
    'SIGUSR1': _ask_to_leave,
    'SIGTERM to the launcher': _ask_to_leave,
    'SIGUSR1 to the launcher': _ask_to_leave,
}
_NUMBERS = {'nan': float('nan'), 'inf': float('inf')}


def _count() -> int:
    """Return how often this rank has come here, in all of its processes."""
    handle = os.open(str(_FOLDER / 'calls'), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(handle, b'.')
    size = os.fstat(handle).st_size
    os.close(handle)
    return size


def _break_number(output: torch.Tensor) -> torch.Tensor:
    return output * _NUMBERS[_FAULT['action']] if _record() else output


if _is('import'):
    strike()
if _FAULT.get('action') == 'chmod 0' and not os.geteuid():
    _obey_permissions()


@HOOKS.register_module()
class PlantedFault(Hook):
    """Strikes in the hooks, the model or the optimizer of one rank, in a given step."""

    priority = 'HIGH'  # before the checks of the same step

    def __init__(self) -> None:
        self._validations = 0

    def before_run(self, runner: Any) -> None:
        if _is('start'):
            strike()

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if not _HERE or runner.iter != _FAULT['step']:
            return
        head = _model(runner).decode_head
        weight = next(each for each in head.parameters() if each.requires_grad)
        if _FAULT['action'] == 'shape':
            if _record():
                data_batch['inputs'] = [image[:2] for image in data_batch['inputs']]
        elif _is('before the step', 'scalars.json', '.pth'):
            strike()
        elif _is('moment'):
            timer = threading.Timer(_FAULT['delay'], strike)
            timer.daemon = True
            timer.start()
        elif _is('forward'):
            head.conv_seg.register_forward_pre_hook(strike)
        elif _is('loss'):
            head.loss_decode.register_forward_hook(lambda _, __, output: _break_number(output))
        elif _is('gradient'):
            weight.register_hook(_break_number)
        elif _is('backward'):
            weight.register_hook(strike)
        elif _is('optimizer'):
            runner.optim_wrapper.optimizer.register_step_pre_hook(strike)
        elif _is('log'):
            runner.log_processor.get_log_after_iter = strike

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        if not _HERE or runner.iter != _FAULT['step']:
            return
        if _is('after the step'):
            strike()
        elif _is('weight') and _record():
            weights = [each for each in _model(runner).parameters() if each.requires_grad]
            weights[-1].data.view(-1)[0] += _NUMBERS.get(_FAULT['action'], 1.0)

    def before_save_checkpoint(self, runner: Any, checkpoint: dict) -> None:
        if _is('save') and runner.iter >= _FAULT['step']:
            strike()

    def before_val(self, runner: Any) -> None:
        if _FAULT.get('scores') is None:
            return
        if _FAULT['seed'] % 2:
            # On all ranks, so that the checkpoint of this step is there when one of them ends.
            runner.finish_saves()
            barrier()
        self._strike_in_validation('before validation')

    def before_val_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if _is('validation') and runner.iter > _FAULT['step']:
            strike()
        self._strike_in_validation('in validation')

    def after_val_epoch(self, runner: Any, metrics: Optional[Dict[str, float]] = None) -> None:
        self._strike_in_validation('scored')

    def after_val(self, runner: Any) -> None:
        self._strike_in_validation('after validation')
        self._validations += 1

    def _strike_in_validation(self, place: str) -> None:
        if _is(place) and self._validations == _FAULT['step']:
            strike()


@TRANSFORMS.register_module()
class PlantedTransform(BaseTransform):
    """Strikes in the loader of one rank, about when it loads the samples of a given step.

    Or in a given sample, whoever loads it.
    """

    def transform(self, results: dict) -> dict:
        if _is('transform') and _count() > _FAULT['step'] * _FAULT['batch']:
            strike()
        if _is('sample') and Path(results['img_path']).stem == str(_FAULT['step']):
            strike()
        return results


@FUNCTIONS.register_module()
def planted_collate(samples: Any) -> Any:
    """Strike in the loader of one rank, when it makes the batch of a given step."""
    if _is('collate') and _count() > _FAULT['step']:
        strike()
    return pseudo_collate(samples)


@METRICS.register_module()
class PlantedMetric(IoUMetric):
    """Strikes in the metric of one rank, in the first validation behind a given step."""

    def process(self, data_batch: dict, data_samples: Any) -> None:
        if _is('metric') and _count() > _FAULT['step'] % 2:
            strike()
        super().process(data_batch, data_samples)


@HOOKS.register_module()
class PlantedScore(Hook):
    """Replaces the mIoU of the n-th validation by the n-th given score.

    Args:
        scores: The scores.
        every: Steps from one validation to the next.
    """

    priority = 'VERY_HIGH'

    def __init__(self, scores: Sequence[float], every: int) -> None:
        self._scores, self._every = scores, every

    def after_val_epoch(self, runner: Any, metrics: Optional[Dict[str, float]] = None) -> None:
        if metrics is not None:
            metrics['mIoU'] = self._scores[runner.iter // self._every - 1]


@MODELS.register_module()
class PlantedImages(BaseModule):
    """Hands images on, and strikes a scene at a batch of one rank that maps scenes."""

    def forward(self, images: torch.Tensor) -> Tuple[torch.Tensor]:
        time.sleep(0.05)
        if _is('mapping') and _count() > _FAULT['step']:
            strike()
        return (images,)


@MODELS.register_module()
class PlantedViT(DINOv3ViT):
    """Strikes in one encoder rank, at the item of a given number."""

    def forward(self, images: torch.Tensor) -> Any:
        features = super().forward(images)
        if _is('encoder') and _count() > _FAULT['step']:
            if _FAULT['action'] == 'nan':
                return tuple(_break_number(each) for each in features)
            strike()
        return features


@HOOKS.register_module()
class CheckpointWitness(Hook):
    """Rank 0 notes each checkpoint once it was written: its path, and the digest of the weights."""

    priority = 'LOWEST'

    def __init__(self) -> None:
        self._seen = ''

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        self._look(runner)

    def after_train_epoch(self, runner: Any) -> None:
        self._look(runner)

    def after_run(self, runner: Any) -> None:
        if not runner.rank and _FOLDER.is_dir():
            (_FOLDER / 'final').write_text(digest(_model(runner).state_dict()))

    def _look(self, runner: Any) -> None:
        if runner.rank or not _FOLDER.is_dir():
            return
        runner.finish_saves()
        last = Path(runner.work_dir, 'last_checkpoint')
        path = last.read_text() if last.exists() else ''
        if path != self._seen:
            self._seen = path
            with open(_FOLDER / 'checkpoints', 'a') as file:
                file.write(f'{digest(_model(runner).state_dict())} {path}\n')


def digest(state: Dict[str, torch.Tensor]) -> str:
    """Return a hash of the bytes of weights."""
    return hashlib.sha256(
        b''.join(name.encode() + value.cpu().numpy().tobytes() for name, value in state.items())
    ).hexdigest()


def _model(runner: Any) -> Any:
    return runner.model.module if is_model_wrapper(runner.model) else runner.model
