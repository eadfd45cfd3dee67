"""Which driver ranks may use is told from files alone."""

from __future__ import annotations

from pathlib import Path
from typing import Optional

import pytest

from mapsage_launcher import drivers


@pytest.mark.parametrize(
    'vendor, torch, files, accelerator, expected',
    [
        (None, 'cuda = None', True, None, None),
        (None, "cuda = '12.8'", False, None, None),
        (None, "cuda = '12.8'", True, None, 'cuda'),
        (None, "cuda = '12.8'", True, 'cuda', 'cuda'),
        (None, "cuda = '12.8'", True, 'cpu', None),
        (None, "cuda = '12.8'", True, 'sim', None),
        (None, "cuda = None\nhip = '6.1'", True, 'auto', 'cuda'),
        ('torch_gcu', 'cuda = None', False, 'cpu', 'torch_gcu'),
        ('torch_xla', 'cuda = None', False, None, 'torch_xla'),
        ('torch_npu', 'cuda = None', False, 'auto', 'torch_npu'),
        ('torch_opt', 'cuda = None', False, None, 'torch_opt'),
    ],
)
def test_possible_driver(
    vendor: Optional[str],
    torch: str,
    files: bool,
    accelerator: Optional[str],
    expected: Optional[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed = {}
    for name in filter(None, ['torch', vendor]):
        (tmp_path / name).mkdir()
        # importing it would fail the test
        (tmp_path / name / '__init__.py').write_text('raise AssertionError')
        installed[name] = tmp_path / name / '__init__.py'
    (tmp_path / 'torch' / 'version.py').write_text(torch)
    (tmp_path / 'nvidia0').write_text('')
    monkeypatch.setattr(drivers, '_CUDA_FILES', [str(tmp_path / 'nvidia*')] if files else [])
    monkeypatch.setattr(
        drivers.importlib.util,
        'find_spec',
        lambda name: (
            drivers.importlib.util.spec_from_file_location(name, installed[name])
            if name in installed
            else None
        ),
    )
    # A plugin of no table is known by the entry point that it declares.
    info = tmp_path / 'torch_opt-1.0.dist-info'
    info.mkdir()
    (info / 'entry_points.txt').write_text('[torch.backends]\ntorch_opt = torch_opt:_autoload\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    assert drivers.possible_driver(accelerator) == expected
