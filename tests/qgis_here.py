"""QGIS without a screen, where it is installed (Debian: python3-qgis): legends and labels."""

from __future__ import annotations

import functools
import json
import os
import subprocess
from pathlib import Path
from typing import Any, Dict, List, Optional

import pytest

_LEGENDS = Path(__file__).with_name('qgis_legends.py')
_LABELING = Path(__file__).with_name('qgis_labeling.py')


@functools.lru_cache(None)
def qgis_python() -> Optional[str]:
    """Return the Python that QGIS belongs to, or None."""
    for python in (os.environ.get('MAPSAGE_QGIS_PYTHON', ''), '/usr/bin/python3'):
        if (
            os.path.exists(python)
            and not subprocess.run(
                [python, '-c', 'import qgis'],
                env=_environ(),
                stderr=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            ).returncode
        ):
            return python
    return None


def read_legends(*sources: Any) -> List[Dict[str, Any]]:
    """Return what QGIS shows of each file, or skip the test without QGIS."""
    return _run(_LEGENDS, *sources)


def label_points(points: Path, labels: Dict[int, str]) -> int:
    """Label points of a plan in QGIS, or skip the test without QGIS; return how many it changed."""
    table = points.with_suffix('.json')
    table.write_text(json.dumps(labels), encoding='utf-8')
    return _run(_LABELING, points, table)


def _run(script: Path, *arguments: Any) -> Any:
    python = qgis_python()
    if python is None:
        pytest.skip('no QGIS here (apt-get install python3-qgis, or set MAPSAGE_QGIS_PYTHON)')
    done = subprocess.run(
        [python, str(script), *map(str, arguments)],
        env=_environ(),
        timeout=300,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        universal_newlines=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def _environ() -> Dict[str, str]:
    """The environment without what belongs to the Python of the tests."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(('PYTHON', 'PROJ', 'GDAL', 'VIRTUAL_ENV'))
    }
