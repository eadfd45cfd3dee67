"""Whether the packages that training needs are there, and how to install them here.
"""
from __future__ import annotations

import glob
import importlib.util
import os
import shlex
import shutil
import sys
from importlib import metadata
from typing import Dict, List, NamedTuple, Sequence, Tuple

# Each is looked for and none imported: one that is there and broken is to raise its own error.
_HOSTS = ('torch', 'mmengine', 'mmcv', 'mmseg')

# Distributions that bring a module: of the onedl forks, then upstream's.
_DISTRIBUTIONS = {
    'mmengine': ('onedl-mmengine', 'mmengine'),
    'mmcv': ('onedl-mmcv', 'mmcv-lite', 'mmcv'),
    'mmseg': ('onedl-mmsegmentation', 'mmsegmentation')}
_ONEDL_PYTHON = (3, 10)  # the oldest of the onedl forks

# NVIDIA's driver, on Jetson, under WSL.
_CUDA_FILES = ('/dev/nvidia*', '/dev/nvhost*', '/dev/nvmap', '/dev/dxg')
_GCU_FILES, _ROCM_FILES = ('/dev/gcu*', '/dev/dtu*'), ('/dev/kfd', )


class Machine(NamedTuple):
    """What decides which PyTorch a machine needs.

    Attributes:
        name: The accelerator that was found, in words.
        torch: Arguments of pip for its PyTorch; empty where it comes from the vendor.
        advice: What else to do; may be empty.
    """

    name: str
    torch: Tuple[str, ...]
    advice: str = ''


_GCU = Machine('Enflame GCU', (), 'PyTorch and torch_gcu come from Enflame: use its image, or '
               'install its wheels first.')
_ROCM = Machine('AMD GPU', (), 'Install the PyTorch for ROCm first: '
                'https://pytorch.org/get-started/locally')
_XLA = Machine('XLA device (PJRT_DEVICE is set)', ('torch==2.9.0', 'torch_xla==2.9.0'))
_CUDA = Machine('NVIDIA GPU', ('torch', ))
# The build for the CPU has a local version, +cpu, which pip takes for newer than the one for CUDA.
_CPU = Machine('no accelerator, CPU', (
    'torch', '--extra-index-url', 'https://download.pytorch.org/whl/cpu'))


def find_machine() -> Machine:
    """Return what the device files, programs and variables of this machine tell of its devices."""
    if any(map(glob.glob, _GCU_FILES)) or shutil.which('efsmi'):
        return _GCU
    if any(map(glob.glob, _CUDA_FILES)):
        return _CUDA
    if any(map(glob.glob, _ROCM_FILES)):
        return _ROCM
    return _XLA if os.environ.get('PJRT_DEVICE') else _CPU


def how_to_install(absent: Sequence[str]) -> str:
    """Return the line that installs the absent host packages into this Python, with its reason.

    Args:
        absent: What :func:`absent_hosts` returns.
    """
    machine = find_machine()
    xla = _is_there('torch_xla') or (machine is _XLA and 'torch' in absent)
    words = [sys.executable, '-m', 'pip', 'install', *_packages(absent, xla)]
    lines = [f'On this machine ({machine.name}; Python {sys.version_info[0]}.{sys.version_info[1]})'
             ', install them with:']
    if 'torch' in absent:
        words += machine.torch
        lines[:0] = filter(None, [machine.advice])
    return '\n'.join([*lines, '', '    ' + ' '.join(map(shlex.quote, words)), ''])


def _packages(absent: Sequence[str], xla: bool) -> List[str]:
    """Return what to give to pip for the absent MM packages: an extra, or some packages of one.

    The families have the same module names and cannot be mixed: the family that is there already,
    in part, is completed.
    """
    missing = [module for module in _DISTRIBUTIONS if module in absent]
    if not missing:
        return []
    there = [name for names in _DISTRIBUTIONS.values() for name in names if _is_installed(name)]
    if there:
        family = 'onedl' if there[0].startswith('onedl') else 'upstream'
        return _requirements(family, missing)
    family = 'upstream' if xla or sys.version_info < _ONEDL_PYTHON else 'onedl'
    return [f'mapsage[{family},demo]']


def _requirements(family: str, modules: Sequence[str]) -> List[str]:
    """Return the requirements of an extra, without those that bring other host modules."""
    others = [name for module, names in _DISTRIBUTIONS.items() if module not in modules
              for name in names]
    found: Dict[str, None] = {}
    for line in metadata.requires('mapsage') or []:
        requirement, _, marker = line.partition(';')
        name = requirement.translate(str.maketrans('<>=!~ ', '\n' * 6)).split('\n')[0]
        if family in marker and name not in others:
            found[requirement.strip()] = None
    return list(found)


def _is_installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def absent_hosts() -> List[str]:
    """Return the names of the host packages that are not installed."""
    return [name for name in _HOSTS if not _is_there(name)]


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # a finder that refuses it; a stand-in without a spec
        return False
