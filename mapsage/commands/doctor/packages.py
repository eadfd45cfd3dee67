"""Installed packages: present, missing, or installed twice under different names."""

from __future__ import annotations

import importlib.util
import platform
from importlib import metadata
from typing import Dict, Iterator, Sequence

from mapsage_launcher.drivers import VENDOR_MODULES
from mapsage_launcher.hosts import DistutilsError, check_distutils

from .finding import Finding

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
