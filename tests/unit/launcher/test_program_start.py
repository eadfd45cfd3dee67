"""The help of a command imports neither PyTorch nor anything else that takes long."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from support import ROOT

from mapsage.commands import check_weights, predict
from mapsage.extras.assess import assess
from mapsage.extras.demo import make_demo_data, prepare_data
from mapsage_launcher import command
from mapsage_launcher.only_help import is_only_help
from mapsage_launcher.program_start import asks_for_help, import_program

# What a help text must not import: all that is not the standard library, and not MapSage.
PROGRAM = """
import contextlib, io, sys
sys.path.insert(0, sys.argv[1])
from mapsage_launcher import command
before = set(sys.modules)
for name in sys.argv[2:]:
    text = io.StringIO()
    try:
        with contextlib.redirect_stdout(text):
            command.run_program(name, ['--help'])
    except SystemExit as ended:
        assert not ended.code, (name, ended.code)
    else:
        raise AssertionError(f'{name} --help goes on')
    assert text.getvalue().startswith(f'usage: mapsage {name} '), text.getvalue()
    assert 'options' in text.getvalue() or 'optional arguments' in text.getvalue(), name
    if name in ('train', 'test', 'predict', 'doctor', 'report', 'view', 'tune'):
        assert f'examples:\\n  python tools/{name}.py ' in text.getvalue(), text.getvalue()
    foreign = {module.split('.')[0] for module in sys.modules} & {
        'torch', 'numpy', 'mmengine', 'mmcv', 'mmseg', 'rasterio', 'shapely', 'cv2', 'PIL',
        'matplotlib', 'pyogrio', 'pyproj'}
    assert not foreign, f'{name} --help imports {foreign}'
print(len(set(sys.modules) - before))
"""
WORDS = [word for word in command.COMMANDS if word != 'rendezvous']


def test_help_of_every_command_imports_little() -> None:
    assert {'train', 'doctor', 'predict', 'view', 'browse_dataset', 'check_weights'} <= set(WORDS)
    done = subprocess.run(
        [sys.executable, '-c', PROGRAM, str(ROOT), *WORDS],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        universal_newlines=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    # The programs themselves, argparse and what it takes: 60 with Python 3.11.
    assert int(done.stdout) < 120


def test_the_list_of_commands_imports_the_standard_library_alone() -> None:
    program = (
        'import sys; from mapsage_launcher import command; sys.argv[1:] = ["--help"]\n'
        'try:\n    command.main()\n'
        'except SystemExit:\n    pass\n'
        'assert not {"torch", "mapsage", "numpy"} & set(sys.modules)'
    )
    subprocess.run(
        [sys.executable, '-c', program], check=True, cwd=str(ROOT), stdout=subprocess.DEVNULL
    )


def test_a_file_of_tools_prints_its_help() -> None:
    program = (
        'import runpy, sys; sys.argv = ["train.py", "-h"]\n'
        'try:\n    runpy.run_path("tools/train.py", run_name="__main__")\n'
        'except SystemExit:\n    pass\n'
        'assert "torch" not in sys.modules'
    )
    done = subprocess.run(
        [sys.executable, '-c', program],
        check=True,
        cwd=str(ROOT),
        env={'PYTHONPATH': 'tools'},
        stdout=subprocess.PIPE,
    )
    assert done.stdout.startswith(b'usage: train.py ')


def test_words_of_a_subcommand(monkeypatch: Any, capsys: pytest.CaptureFixture) -> None:
    for words, text in (
        (['assess', 'plan', '-h'], '--half-width'),
        (['prepare', 'scenes', '--help'], '--max-size'),
    ):
        monkeypatch.setattr(sys, 'argv', sys.argv)
        with pytest.raises(SystemExit) as ended:
            command.run_program(words[0], words[1:])
        assert not ended.value.code and text in capsys.readouterr().out
        assert not is_only_help()


@pytest.mark.parametrize(
    'words, expected',
    [
        ([], False),
        (['--help'], True),
        (['config.py', '-h'], True),
        (['--', '-h'], False),
        (['--helpful'], False),
    ],
)
def test_who_asks_for_help(words: Any, expected: bool) -> None:
    assert asks_for_help(words) is expected


def test_a_mistake_beside_help_is_still_a_usage_error(monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, 'argv', ['mapsage train', '--launcher', 'nobody', '--help'])
    with pytest.raises(SystemExit) as ended:
        import_program('mapsage.commands.train')()
    assert ended.value.code == 2


def test_constants_that_programs_repeat() -> None:
    """A help text names values of modules that it must not import."""
    from mapsage.datasets.geotiff.fast_copies import DEFAULT_SIZE
    from mapsage.extras.assess.allocation import ALLOCATIONS
    from mapsage.extras.demo import DemoParams, NeighborParams
    from mapsage.extras.demo.prepare.layouts import LAYOUTS
    from mapsage.maps.exported import RUNTIMES
    from mapsage.models.backbones import dinov3_reference, dinov3_weights

    assert assess._ALLOCATIONS == ALLOCATIONS
    assert predict._RUNTIMES == RUNTIMES
    assert prepare_data._LAYOUTS == tuple(sorted(LAYOUTS))
    assert prepare_data._DEFAULT_SIZE == DEFAULT_SIZE
    assert check_weights._ARCHS == tuple(dinov3_weights.ARCHS)
    assert check_weights._IMAGE == dinov3_reference.IMAGE
    assert make_demo_data._TILES.items() <= vars(DemoParams()).items()
    assert make_demo_data._NEIGHBOR_SIZE == NeighborParams().scene_size
