"""`import mapsage` loads little that MMSegmentation has not loaded already."""

from __future__ import annotations

import subprocess
import sys

from support import ROOT

# What a training of MMSegmentation imports, then MapSage: the third-party packages that it adds.
PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
# `compat` imports the hosts, some of which it mends first.
import mapsage_launcher.only_help as start
with start.only_help():
    import mapsage
import mapsage.compat
import torch, mmengine.runner, mmseg.datasets, mmseg.engine, mmseg.evaluation
import mmseg.models, mmseg.structures, mmseg.visualization
before = set(sys.modules)
import importlib
importlib.reload(mapsage)
added = set(sys.modules) - before
files = {name: getattr(sys.modules[name], '__file__', None) or '' for name in added}
print('PACKAGES', *sorted({name.split('.')[0] for name, file in files.items()
                           if 'site-packages' in file}))
print('OURS', *sorted(name for name in added if name.startswith('mapsage.')))
"""
# Rasters and coordinates, which `GeoTiffDataset` is made of, and weights, if no host reads them.
RASTER_PACKAGES = {
    'affine',
    'attr',
    'attrs',
    'certifi',
    'click',
    'click_plugins',
    'cligj',
    'pyparsing',
    'pyproj',
    'rasterio',
    'safetensors',
    'shapely',
}
# Rooms that no training needs: pages, maps, exports, commands.
IDLE_ROOMS = ('viewer', 'commands', 'maps', 'export', 'labeling', 'accuracy', 'operators')


def test_import_adds_raster_packages_only_and_no_idle_room() -> None:
    done = subprocess.run(
        [sys.executable, '-W', 'ignore', '-c', PROGRAM, str(ROOT)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        universal_newlines=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = {line.split()[0]: set(line.split()[1:]) for line in done.stdout.splitlines() if line}
    # pyogrio would import pandas, which takes longer than all modules of MapSage.
    assert lines['PACKAGES'] <= RASTER_PACKAGES, lines['PACKAGES'] - RASTER_PACKAGES
    idle = {name for name in lines['OURS'] if name.split('.')[1] in IDLE_ROOMS}
    assert not idle, idle
    assert 'mapsage.geo.vector_file' not in lines['OURS']
    assert 'mapsage.datasets.geotiff.dataset' in lines['OURS']
