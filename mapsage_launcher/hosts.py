"""Finds missing packages that training needs, and the command that installs them here.

The "hosts" are PyTorch and the MM packages. They are not dependencies of the wheel, because PyTorch
comes from the accelerator's vendor, and the MM packages exist in two families of distributions with
the same module names. No host is imported here: a package that is installed but broken shall raise
its own error.
"""

from __future__ import annotations

import glob
import importlib.util
import os
import re
import shlex
import shutil
import sys
from importlib import metadata
from typing import Dict, List, NamedTuple, Sequence, Tuple

from mapsage_launcher.errors import UserError

_HOSTS = ('torch', 'mmengine', 'mmcv', 'mmseg')

# Distributions that contain a module: the onedl fork, then upstream's.
_DISTRIBUTIONS = {
    'mmengine': ('onedl-mmengine', 'mmengine'),
    'mmcv': ('onedl-mmcv', 'mmcv-lite', 'mmcv'),
    'mmseg': ('onedl-mmsegmentation', 'mmsegmentation'),
}
# The oldest Python version of the onedl forks.
_ONEDL_PYTHON = (3, 10)

# Device files of NVIDIA's driver, also on Jetson and under WSL.
_CUDA_FILES = ('/dev/nvidia*', '/dev/nvhost*', '/dev/nvmap', '/dev/dxg')
_GCU_FILES, _ROCM_FILES = ('/dev/gcu*', '/dev/dtu*'), ('/dev/kfd',)


class DistutilsError(UserError, ImportError):
    """MMEngine would find no ``distutils``."""

    on_every_rank = True


class Machine(NamedTuple):
    """The PyTorch that a machine needs.

    Attributes:
        name: Name of the machine's accelerator, for a sentence.
        torch: Arguments of pip that install its PyTorch; empty if it comes from the vendor.
        advice: What else to do; may be empty.
    """

    name: str
    torch: Tuple[str, ...]
    advice: str = ''


_GCU = Machine(
    'Enflame GCU',
    (),
    'PyTorch and torch_gcu come from Enflame: use its image, or install its wheels first.',
)
_ROCM = Machine(
    'AMD GPU', (), 'Install the PyTorch for ROCm first: https://pytorch.org/get-started/locally'
)
_XLA = Machine('XLA device (PJRT_DEVICE is set)', ('torch==2.9.0', 'torch_xla==2.9.0'))
_CUDA = Machine('NVIDIA GPU', ('torch',))
# The CPU build has the local version +cpu, which pip considers newer than the CUDA build.
_CPU = Machine(
    'no accelerator, CPU', ('torch', '--extra-index-url', 'https://download.pytorch.org/whl/cpu')
)


def find_machine() -> Machine:
    """Return what this machine needs, from its device files, programs and variables."""
    if any(map(glob.glob, _GCU_FILES)) or shutil.which('efsmi'):
        return _GCU
    if any(map(glob.glob, _CUDA_FILES)):
        return _CUDA
    if any(map(glob.glob, _ROCM_FILES)):
        return _ROCM
    return _XLA if os.environ.get('PJRT_DEVICE') else _CPU


def how_to_install(absent: Sequence[str]) -> str:
    """Return the command that installs missing host packages into this Python, with its reason.

    Args:
        absent: Names of the missing packages, from :func:`absent_hosts`.
    """
    machine = find_machine()
    xla = _is_importable('torch_xla') or (machine is _XLA and 'torch' in absent)
    command = [sys.executable, '-m', 'pip', 'install', *_packages(absent, xla)]
    lines = [
        f'On this machine ({machine.name}; Python {sys.version_info[0]}.{sys.version_info[1]})'
        ', install them with:'
    ]
    if 'torch' in absent:
        command += machine.torch
        lines[:0] = filter(None, [machine.advice])
    return '\n'.join([*lines, '', '    ' + ' '.join(map(shlex.quote, command)), ''])


def _packages(absent: Sequence[str], xla: bool) -> List[str]:
    """Return pip's arguments for the missing MM packages: an extra, or some packages of an extra.

    The families cannot be mixed. If some packages of a family are installed, that family is
    completed.
    """
    missing = [module for module in _DISTRIBUTIONS if module in absent]
    if not missing:
        return []
    installed = [name for names in _DISTRIBUTIONS.values() for name in names if _is_installed(name)]
    if installed:
        family = 'onedl' if installed[0].startswith('onedl') else 'upstream'
        return _requirements(family, missing)
    family = 'upstream' if xla or sys.version_info < _ONEDL_PYTHON else 'onedl'
    return [f'mapsage[{family},demo]']


def _requirements(family: str, modules: Sequence[str]) -> List[str]:
    """Return the requirements of an extra, except the ones with other host modules.

    Args:
        family: Name of the extra.
        modules: Host modules to install.
    """
    excluded = [
        name for module, names in _DISTRIBUTIONS.items() if module not in modules for name in names
    ]
    # The keys of a dictionary are unique and keep their order.
    requirements: Dict[str, None] = {}
    for line in metadata.requires('mapsage') or []:
        requirement, _, marker = line.partition(';')
        oldest = re.search(r'python_version >= "(\d+)\.(\d+)"', marker)
        if oldest and sys.version_info[:2] < tuple(map(int, oldest.groups())):
            continue
        name = requirement.translate(str.maketrans('<>=!~ ', '\n' * 6)).split('\n')[0]
        if family in marker and name not in excluded:
            requirements[requirement.strip()] = None
    return list(requirements)


def _is_installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def check_distutils() -> None:
    """Check that MMEngine finds ``distutils``, with which it logs the environment of a run.

    Python has it up to 3.11. For newer versions setuptools has a copy.

    Raises:
        DistutilsError: If it is missing.
    """
    if not _is_importable('distutils'):
        version = '.'.join(map(str, sys.version_info[:2]))
        raise DistutilsError(
            f'MMEngine imports distutils, which Python {version} lacks and setuptools provides: '
            f'{shlex.quote(sys.executable)} -m pip install setuptools'
        )


def absent_hosts() -> List[str]:
    """Return the names of the host packages that are not installed."""
    return [name for name in _HOSTS if not _is_importable(name)]


def _is_importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        # A finder that refuses the name, or a stand-in module without a spec.
        return False
