"""Breaks one process of a launched run once, as MAPSAGE_TEST_FAULT says; see fault_runs.py."""
from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any, Dict

import torch
from mmcv.transforms import BaseTransform
from mmengine.hooks import Hook
from mmengine.model import is_model_wrapper
from mmengine.registry import HOOKS
from mmseg.registry import MODELS, TRANSFORMS

from mapsage.models import DINOv3ViT

TEXT = 'this fault was planted'
_FAULT: Dict[str, Any] = json.loads(os.environ.get('MAPSAGE_TEST_FAULT', '{}'))
_FOLDER = Path(os.environ.get('MAPSAGE_TEST_FOLDER', '/nowhere'))
# Of the launcher: an encoder rank keeps it, and loader workers inherit it.
_HERE = bool(_FAULT) and os.environ.get('RANK') == str(_FAULT['rank'])


def _is(*places: str) -> bool:
    return _HERE and _FAULT['place'] in places


def _mark() -> bool:
    """Note when and in which process the fault strikes; return whether it is the first time."""
    try:
        with open(_FOLDER / 'struck', 'x') as file:
            file.write(f'{time.time()} {os.getpid()}')
        return True
    except FileExistsError:
        return bool(_FAULT['again'])


def strike(*_: Any) -> None:
    """End, break or stop this process."""
    if not _mark():
        return
    kind = _FAULT['kind']
    if kind == 'kill' and _FAULT['how'] == 'exit':
        os._exit(3)
    elif kind == 'kill':
        os.kill(os.getpid(), getattr(signal, _FAULT['how']))
    elif kind == 'stop':
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == 'stall':
        time.sleep(3600)
    elif kind == 'exception':
        # with what the name of a file in another encoding becomes
        raise ArithmeticError(f"{TEXT} in a {_FAULT['place']} \udcb5\udcd8")


def _count() -> int:
    """Return how often this rank has come here, in all of its processes."""
    handle = os.open(str(_FOLDER / 'calls'), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(handle, b'.')
    size = os.fstat(handle).st_size
    os.close(handle)
    return size


def _to_nan(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
    return output * float('nan') if _mark() else output


@HOOKS.register_module()
class PlantedFault(Hook):
    """Strikes in the hooks, the model or the optimizer of one rank, in a given step."""

    def before_run(self, runner: Any) -> None:
        if _is('start'):
            strike()

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if not _HERE or runner.iter != _FAULT['step']:
            return
        head = _model(runner).decode_head
        if _is('hook before the step'):
            strike()
        elif _is('moment'):
            timer = threading.Timer(_FAULT['delay'], strike)
            timer.daemon = True
            timer.start()
        elif _is('forward'):
            head.conv_seg.register_forward_pre_hook(strike)
        elif _is('loss'):
            head.loss_decode.register_forward_hook(_to_nan)
        elif _is('gradient'):
            weight = next(each for each in head.parameters() if each.requires_grad)
            weight.register_hook(lambda gradient: _to_nan(None, None, gradient))
        elif _is('optimizer'):
            runner.optim_wrapper.optimizer.register_step_pre_hook(strike)

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None,
                         outputs: Any = None) -> None:
        if not _HERE or runner.iter != _FAULT['step']:
            return
        if _is('hook after the step'):
            strike()
        elif _is('weight') and _mark():
            weights = [each for each in _model(runner).parameters() if each.requires_grad]
            weights[-1].data.view(-1)[0] = float('nan')

    def before_save_checkpoint(self, runner: Any, checkpoint: dict) -> None:
        if _is('save') and runner.iter >= _FAULT['step']:
            strike()

    def before_val_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if _is('validation') and runner.iter > _FAULT['step']:
            strike()


@TRANSFORMS.register_module()
class PlantedTransform(BaseTransform):
    """Strikes in the loader of one rank, about when it loads the samples of a given step."""

    def transform(self, results: dict) -> dict:
        if _is('transform') and _count() > _FAULT['step'] * _FAULT['batch']:
            strike()
        return results


@MODELS.register_module()
class PlantedViT(DINOv3ViT):
    """Strikes in one encoder rank, at the item of a given number."""

    def forward(self, images: torch.Tensor) -> Any:
        features = super().forward(images)
        if _is('encoder') and _count() > _FAULT['step']:
            if _FAULT['kind'] == 'nan':
                return tuple(_to_nan(None, None, each) for each in features)
            strike()
        return features


@HOOKS.register_module()
class CheckpointWitness(Hook):
    """Rank 0 notes each checkpoint once it was written: its path, and the digest of the weights."""

    priority = 'LOWEST'

    def __init__(self) -> None:
        self._seen = ''

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None,
                         outputs: Any = None) -> None:
        self._look(runner)

    def after_train_epoch(self, runner: Any) -> None:
        self._look(runner)

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
    return hashlib.sha256(b''.join(
        name.encode() + value.cpu().numpy().tobytes() for name, value in state.items())).hexdigest()


def _model(runner: Any) -> Any:
    return runner.model.module if is_model_wrapper(runner.model) else runner.model
