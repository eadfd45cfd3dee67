"""Three runs, and the files of ours that a reader of each opens: ``python walks.py predict|start|step``.

A file counts if one of its functions runs and calls a function of another file of ours, which a reader
then has to follow. Not counted are files whose functions only answer, code that runs while a module is
imported, and the libraries below the features: a reader takes their word for what they do. Threads count.
"""

from __future__ import annotations

import inspect
import os
import sys
import tempfile
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Callable, Dict, List

import numpy as np
from PIL import Image
from support import ROOT, write_tiny_config, write_tiny_data

from mapsage.commands import predict, train

_PACKAGES = tuple(f'{ROOT / name}/' for name in ('mapsage', 'mapsage_launcher'))
# Used like PyTorch: by their names and docstrings.
LIBRARIES = tuple(
    f'mapsage/{name}/' for name in ('accelerator', 'base', 'compat', 'distributed', 'geo', 'host')
)


def follow(run: Callable[[], Any], last: str, first: str = '') -> List[str]:
    """Run a function; return the files that a reader opens, in the order of their first call.

    Args:
        run: Function that runs the program.
        last: Function with whose call the walk ends, as ``path/of/file.py:name``.
        first: Function with whose call the walk begins; '' for the begin of ``run``.
    """
    leads: Dict[str, bool] = {}
    importing: Dict[int, int] = {}
    stacks: Dict[int, List[str]] = {}
    paths: Dict[CodeType, str] = {}
    state = 'on' if not first else 'before'

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal state
        if event not in ('call', 'return') or state == 'after':
            return
        code = frame.f_code
        if code not in paths:
            name = code.co_filename
            paths[code] = name[len(str(ROOT)) + 1 :] if name.startswith(_PACKAGES) else ''
        path, thread = paths[code], threading.get_ident()
        if not path:
            return
        # The code of a module or a class runs at its import.
        if not code.co_flags & inspect.CO_OPTIMIZED:
            importing[thread] = importing.get(thread, 0) + (1 if event == 'call' else -1)
            return
        if importing.get(thread):
            return
        stack = stacks.setdefault(thread, [])
        if event == 'return':
            del stack[-1:]
            return
        here = f'{path}:{code.co_name}'
        if state == 'on':
            leads.setdefault(path, False)
            if stack and stack[-1] != path:
                leads[stack[-1]] = True
            if here == last:
                leads[path] = True
                state = 'after'
        elif here == first:
            state, leads[path] = 'on', True
        stack.append(path)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    assert state == 'after', f'{last} was not reached: {state}'
    return [path for path, lead in leads.items() if lead and not path.startswith(LIBRARIES)]


def walk(name: str, folder: Path) -> List[str]:
    """Return the files of a walk.

    Args:
        name: Walk ``'predict'``, from the command line to the first finished strip; ``'start'``, from
            the command line to the training; or ``'step'``, from the loop's request for a batch to
            the batch of dynamic sampling.
        folder: Empty folder.
    """
    os.chdir(folder)
    hook = (
        "dict(type='DynamicSamplingHook', score=dict(type='LabelScore'), validity=dict(low=0.01))"
    )
    hooks = f'custom_hooks = [{hook}]\n' if name == 'step' else ''
    config = str(write_tiny_config(folder / 'c.py', write_tiny_data(folder / 'data'), hooks))
    device = ['--accelerator', 'cpu']

    def trained() -> None:
        train.main([config, *device, '--work-dir', 'w', '--cfg-options', 'train_cfg.max_iters=1'])

    if name == 'start':
        return follow(trained, 'mapsage/engine/runner.py:train')
    if name == 'step':
        return follow(
            trained,
            'mapsage/distributed/wrappers/rank_batches.py:pack_rank_batches',
            'mapsage/sampling/hooks/sampled_steps.py:__next__',
        )
    trained()
    # Values as of the training, which the passport of the model knows.
    pixels = np.random.RandomState(0).randint(60, 220, (150, 150, 3)).astype('uint8')
    Image.fromarray(pixels).save('scene.png')
    arguments = [config, 'w/iter_1.pth', 'scene.png', '--out', 'maps', *device]
    return follow(lambda: predict.main(arguments), 'mapsage/maps/strips.py:write')


if __name__ == '__main__':
    with tempfile.TemporaryDirectory() as path:
        print(*walk(sys.argv[1], Path(path)), sep='\n')
