"""Environment variables that contradict the run or that no software reads, and installed packages.

The launcher's variables are not checked here but by `mapsage.distributed.resolve_strategy`.
Packages are present, missing, or installed twice under different names.
"""

from __future__ import annotations

import importlib.util
import platform
from importlib import metadata
from typing import Dict, Iterator, List, Mapping, Optional, Sequence

from mapsage.accelerator import Accelerator
from mapsage_launcher.drivers import VENDOR_MODULES
from mapsage_launcher.hosts import DistutilsError, check_distutils

from .finding import Finding

# Variables that training scripts for Enflame cards set, but that none of Enflame's sources reads
# (torch_gcu 1.10 and 2.10, ModelZoo, vllm-gcu), and what to use instead.
_UNREAD = {
    'GCU_VISIBLE_DEVICES': 'TOPS_VISIBLE_DEVICES hides devices',
    'GCU_DEVICE_COUNT': 'NPROC_PER_NODE says how many ranks start',
    'GCU_DISABLE_AMP': 'AMP is off unless --amp or AmpOptimWrapper asks for it',
    'GCU_MEMORY_FRACTION': 'a smaller batch needs less memory',
    'ECCL_BACKEND': 'env_cfg.dist_cfg.backend chooses the backend',
    'ECCL_DEVICE_TYPE': 'env_cfg.accelerator or ACCELERATOR chooses the device',
    'PTEX_DDP_BACKEND': 'env_cfg.dist_cfg.backend chooses the backend',
}
# Variables that scripts/*.sh read and Python programs do not, and the options to use instead.
_SCRIPTS_ONLY = {'ACCELERATOR': '--accelerator', 'WORK_DIR': '--work-dir'}


def check_environment(
    environ: Mapping[str, str], accelerator: Optional[Accelerator], launcher: str = 'none'
) -> List[Finding]:
    """Return wrong or misleading variables; empty if there are none.

    Args:
        environ: Environment of the process.
        accelerator: Accelerator of the run, or None if no accelerator can be used.
        launcher: Name of the launcher that has started this process.
    """
    findings: List[Finding] = []
    if accelerator is not None:
        findings += _check_masks(environ, accelerator, launcher)
        problem = accelerator.environment_problem(environ)
        if problem is not None:
            findings.append(Finding('problem', problem))
    for name, instead in _UNREAD.items():
        if name in environ:
            findings.append(
                Finding(
                    'note',
                    f'{name}={environ[name]}: no Enflame software that we know reads this',
                    f'unset it; {instead}',
                )
            )
    if 'ENFLAME_VISIBLE_DEVICES' in environ:
        findings.append(
            Finding(
                'note',
                f'ENFLAME_VISIBLE_DEVICES={environ["ENFLAME_VISIBLE_DEVICES"]}: read by the '
                f'container runtime only',
                'inside the container TOPS_VISIBLE_DEVICES hides devices',
            )
        )
    if launcher == 'none':
        for name, option in _SCRIPTS_ONLY.items():
            if environ.get(name):
                findings.append(
                    Finding(
                        'note',
                        f'{name}={environ[name]}: for scripts/*.sh only',
                        f'give {option} {environ[name]} here',
                    )
                )
    if accelerator is not None and accelerator.simulated and environ.get('MAPSAGE_SIM_FAULTS'):
        findings.append(
            Finding(
                'note',
                f'MAPSAGE_SIM_FAULTS={environ["MAPSAGE_SIM_FAULTS"]}: the simulator will fail '
                f'on purpose',
                'unset it to train',
            )
        )
    return findings


def _check_masks(
    environ: Mapping[str, str], accelerator: Accelerator, launcher: str
) -> Iterator[Finding]:
    """Yield a finding for each variable that hides devices from the ranks of this machine."""
    per_node = environ.get('LOCAL_WORLD_SIZE', '1')
    ranks = int(per_node) if launcher != 'none' and per_node.isdecimal() else 1
    for name in accelerator.masks:
        if name not in environ:
            continue
        devices = [device.strip() for device in environ[name].split(',') if device.strip()]
        if len(set(devices)) < len(devices):
            yield Finding(
                'problem', f'{name}={environ[name]} names a device twice', 'name each once'
            )
        elif len(devices) == 1 < ranks:
            yield Finding(
                'ok',
                f'{name}={environ[name]} shows this rank one card, which no other '
                f'rank of this machine may have',
            )
        elif len(devices) < ranks:
            yield Finding(
                'problem',
                f'{name}={environ[name]} shows {len(devices)} device(s) to each of the '
                f'{ranks} ranks of this machine',
                f'name {ranks} devices, unset it, or start NPROC_PER_NODE={max(1, len(devices))}',
            )
        else:
            yield Finding('ok', f'{name}={environ[name]}')


# Distributions that install the same module: if two are installed, one has overwritten the other.
_DISTRIBUTIONS = {
    'torch': ('torch',),
    'mmengine': ('onedl-mmengine', 'mmengine', 'mmengine-lite'),
    'mmcv': ('onedl-mmcv', 'mmcv', 'mmcv-lite', 'mmcv-full'),
    'mmseg': ('onedl-mmsegmentation', 'mmsegmentation'),
    'numpy': ('numpy',),
}
# Of the plugins of other makes, the section of accelerators says that none is installed.
_NAMED_IF_ABSENT = ('torch_gcu', 'torch_xla')


def check_installed() -> Iterator[Finding]:
    """Yield a finding for Python, for each module that MapSage needs, and for each vendor's."""
    yield Finding('ok', f'python {platform.python_version()} on {platform.platform()}')
    for module, distributions in _DISTRIBUTIONS.items():
        versions = _versions(distributions)
        installed = ', '.join(f'{name} {version}' for name, version in versions.items())
        if len(versions) > 1:
            yield Finding(
                'problem',
                f'{installed}: each brings the module {module}',
                'pip uninstall all of them, then install one (requirements.txt)',
            )
        elif versions or importlib.util.find_spec(module):
            yield Finding('ok', installed or f'{module}, not from a package')
        else:
            yield Finding(
                'problem',
                f'{module} is not installed',
                f'bash scripts/setup_env.sh, or pip install {distributions[0]}',
            )
    try:
        check_distutils()
    except DistutilsError as error:
        yield Finding('problem', str(error))
    for vendor in VENDOR_MODULES:
        present = importlib.util.find_spec(vendor) is not None
        if not present and vendor in _NAMED_IF_ABSENT:
            yield Finding('no', f'{vendor} is not installed')
        elif present:
            version = next(iter(_versions((vendor,)).values()), 'of unknown version')
            yield Finding('ok', f'{vendor} {version}')


def _versions(distributions: Sequence[str]) -> Dict[str, str]:
    """Return the versions of the installed ones among some distributions."""
    versions: Dict[str, str] = {}
    for name in distributions:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
