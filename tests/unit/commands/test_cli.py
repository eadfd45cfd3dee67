"""Options of the entry points and how errors end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mmengine.config import Config
from warm_python import warm_python

from mapsage.accelerator import AcceleratorError
from mapsage.commands import cli
from mapsage.commands import test as test_command
from mapsage.distributed import RankError
from mapsage.engine import DataError
from mapsage.engine.env_cfg import ConfigError
from mapsage.engine.guards import DeviceCheckError
from mapsage.evaluation import ConfusionMatrixMetric
from mapsage.extras.forensics.cross_check_hook import CrossCheckError
from mapsage_launcher.rank_notes import BROKEN_FILE, FINAL_FILE

ROOT = Path(__file__).resolve().parents[3]


def arguments(*words: Any) -> Any:
    return cli.build_parser('test').parse_args([str(word) for word in words])


def write(path: Path, text: str = 'model = dict(a=1)\n') -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    'env_cfg, options, backend',
    [
        (None, {}, 'auto'),
        ({}, {}, 'auto'),
        (dict(dist_cfg=None), {}, 'auto'),
        (dict(dist_cfg=dict(backend='nccl')), {}, 'auto'),
        (dict(accelerator='gcu', dist_cfg=dict(backend='eccl')), {}, 'auto'),
        (dict(accelerator='cpu', dist_cfg=dict(backend='gloo')), {}, 'gloo'),
        (dict(dist_cfg=dict(backend='gloo')), {'env_cfg.dist_cfg.backend': 'gloo'}, 'gloo'),
    ],
)
def test_the_command_lines_accelerator_takes_its_own_backend(
    env_cfg: Any, options: dict, backend: str
) -> None:
    cfg = Config({} if env_cfg is None else dict(env_cfg=env_cfg))
    cli.choose_accelerator(cfg, 'cpu', options)
    assert (cfg.env_cfg.accelerator, cfg.env_cfg.dist_cfg.backend) == ('cpu', backend)


def test_config_and_options_are_merged(tmp_path: Path) -> None:
    path = write(tmp_path / 'mine.py')
    cfg = cli.load_config(arguments(path, '--accelerator', 'cpu', '--cfg-options', 'model.a=2'))
    assert (cfg.model.a, cfg.launcher, cfg.runner_type) == (2, 'none', 'MapSageRunner')
    assert cfg.work_dir == os.path.join('work_dirs', 'mine')
    assert cfg.env_cfg.accelerator == 'cpu'


def test_work_dir_of_the_command_line_comes_first(tmp_path: Path) -> None:
    path = write(tmp_path / 'mine.py', "work_dir = 'a'\n")
    assert cli.load_config(arguments(path)).work_dir == 'a'
    assert cli.load_config(arguments(path, '--work-dir', 'b')).work_dir == 'b'


@pytest.mark.parametrize(
    'options, before, want',
    [
        ([], None, None),
        (['--local_rank', '1'], None, None),
        (['--launcher', 'pytorch'], None, None),
        (['--launcher', 'pytorch', '--local-rank', '1'], None, '1'),
        (['--launcher', 'pytorch', '--local_rank', '1'], '2', '2'),
    ],
)
def test_local_rank_is_set_by_a_launcher_only(
    options: list, before: Any, want: Any, monkeypatch: Any, tmp_path: Path
) -> None:
    monkeypatch.setenv('LOCAL_RANK', '')  # notes what to restore
    monkeypatch.delenv('LOCAL_RANK')
    if before is not None:
        monkeypatch.setenv('LOCAL_RANK', before)
    cli.load_config(arguments(write(tmp_path / 'mine.py'), *options))
    assert os.environ.get('LOCAL_RANK') == want


def test_missing_config_suggests_a_shipped_one(monkeypatch: Any, tmp_path: Path) -> None:
    (tmp_path / 'configs' / 'demo').mkdir(parents=True)
    write(tmp_path / 'configs' / 'demo' / 'unet_demo.py')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match='Did you mean configs/demo/unet_demo.py'):
        cli.load_config(arguments('configs/demo/unet_demp.py'))
    with pytest.raises(ConfigError, match='does not exist.*lists those that come with MapSage'):
        cli.load_config(arguments('x'))


def test_openmim_adds_no_options() -> None:
    # it takes a help with --gpus for that of an old program, and gives it --device
    assert '--gpus' not in cli.build_parser('Train.').format_help()


def tested() -> Config:
    return Config(
        dict(
            model=dict(type='M'),
            test_dataloader=dict(dataset=dict(pipeline=[1])),
            test_evaluator=dict(type='IoUMetric'),
        )
    )


@pytest.mark.parametrize(
    'metric',
    [
        'IoUMetric',
        'ConfusionMatrixMetric',
        'CityscapesMetric',
        'mmseg.IoUMetric',
        ConfusionMatrixMetric,
    ],
)
def test_masks_go_to_the_metric_that_writes_them(metric: Any) -> None:
    cfg = Config(dict(tested(), default_scope='mmseg'))
    cfg.test_evaluator = [dict(type='SingleClassBaseline'), dict(type=metric)]
    test_command.write_masks_to(cfg, 'out')
    assert 'output_dir' not in cfg.test_evaluator[0]
    assert cfg.test_evaluator[1].output_dir == 'out'
    assert cfg.test_evaluator[1].get('keep_results') is (
        True if metric == 'CityscapesMetric' else None
    )
    cfg.test_evaluator = dict(type='SingleClassBaseline')
    with pytest.raises(ConfigError, match='--out needs a metric with an output_dir'):
        test_command.write_masks_to(cfg, 'out')


def test_pictures_are_drawn_by_the_hook_without_one_in_the_config() -> None:
    cfg = tested()
    test_command.draw_predictions(cfg, 'shown', False, 2)
    assert cfg.default_hooks.visualization.draw and cfg.visualizer.save_dir == 'shown'
    assert 'show' not in cfg.default_hooks.visualization


def test_pictures_are_shown_by_the_configs_own_hook(monkeypatch: Any) -> None:
    cfg = tested()
    cfg.default_hooks = dict(visualization=dict(type='Mine', interval=7), timer=dict(type='T'))
    cfg.visualizer = dict(type='V', save_dir='before')
    monkeypatch.setenv('DISPLAY', ':0')
    test_command.draw_predictions(cfg, None, True, 0.5)
    assert cfg.default_hooks.visualization == dict(
        type='Mine', interval=7, draw=True, show=True, wait_time=0.5
    )
    assert cfg.default_hooks.timer.type == 'T' and cfg.visualizer.save_dir == 'before'


@pytest.mark.skipif(sys.platform != 'linux', reason='other systems need no DISPLAY')
def test_a_window_needs_a_display(monkeypatch: Any) -> None:
    for name in ('DISPLAY', 'WAYLAND_DISPLAY'):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match='--show needs a display.*--show-dir'):
        test_command.draw_predictions(tested(), None, True, 2)


@pytest.mark.parametrize(
    'given, mode',
    [
        (['c.py'], None),
        (['c.py', '--resume'], 'auto'),
        (['--resume', 'c.py'], 'auto'),
        (['c.py', '--resume', 'must'], 'must'),
        (['--resume', 'must', 'c.py', '--amp'], 'must'),
        (['c.py', '--resume=must'], 'must'),
        (['c.py', '--resume', '--amp'], 'auto'),
    ],
)
def test_resume_stands_anywhere_with_or_without_a_mode(given: list, mode: Any) -> None:
    parser = cli.build_parser('test')
    parser.add_argument('--amp', action='store_true')
    cli.add_resume(parser)
    args = parser.parse_args(cli.with_resume_mode(given))
    assert (args.config, args.resume, args.amp) == ('c.py', mode, '--amp' in given)


def test_a_test_has_a_folder_of_its_own(tmp_path: Path) -> None:
    work = tmp_path / 'another run'
    work.mkdir()
    cfg = Config(dict(work_dir='mine'))
    assert test_command.test_folder(cfg, str(work / 'iter_3.pth')) == str(work / 'test')
    assert test_command.test_folder(cfg, 'https://x.org/iter_3.pth') == os.path.join('mine', 'test')
    assert test_command.test_folder(cfg, str(tmp_path / 'gone' / 'w.pth')) == os.path.join(
        'mine', 'test'
    )


FAIL = """
from mapsage.accelerator import AcceleratorError
from mapsage.commands import cli, test as test_command
from mapsage.distributed import RankError
from mapsage_launcher.rank_notes import BROKEN_FILE, FINAL_FILE
from mapsage.engine import ConfigError
def main(argv):
    raise {error}
cli.run(main)
"""


def fail(folder: Path, error: str, **environ: str) -> subprocess.CompletedProcess:
    script = folder / 'fail.py'
    script.write_text(FAIL.format(error=error))
    return subprocess.run(
        [warm_python(), str(script)],
        stderr=subprocess.PIPE,
        timeout=60,
        universal_newlines=True,
        env={**os.environ, 'PYTHONPATH': str(ROOT), **environ},
    )


def test_a_users_mistake_is_one_line(tmp_path: Path) -> None:
    done = fail(tmp_path, "ConfigError('it says no')", RANK='1')
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1] == '[rank 1] ConfigError: it says no'
    assert '\nTraceback' not in f'\n{done.stderr}'  # torch 1.10 logs one inside JSON


def test_anything_else_has_its_traceback(tmp_path: Path) -> None:
    done = fail(tmp_path, "KeyError('x')")
    assert done.returncode == 1 and 'Traceback' in done.stderr and "KeyError: 'x'" in done.stderr


def test_interrupt_has_the_shells_status(tmp_path: Path) -> None:
    assert fail(tmp_path, 'KeyboardInterrupt').returncode == 130


def test_a_workers_traceback_is_taken_off() -> None:
    wrapped = DataError('Caught DataError in worker 0.\nTraceback:\n  ...\nDataError: bad mask\n')
    assert str(cli._without_worker_traceback(wrapped)) == 'bad mask'
    plain = DataError('bad mask')
    assert cli._without_worker_traceback(plain) is plain


@pytest.mark.parametrize(
    'error, kind',
    [
        (AcceleratorError('no card'), BROKEN_FILE),
        (ConfigError('no key'), FINAL_FILE),
        (RankError(1, 'ValueError', 'training'), ''),
        (ZeroDivisionError(), ''),
        # node 1 of three has ranks 2 and 3
        (DeviceCheckError('', {2: ['']}), BROKEN_FILE),
        (DeviceCheckError('', {2: [''], 3: ['']}), BROKEN_FILE),
        (DeviceCheckError('', {1: ['']}), ''),
        (DeviceCheckError('', {5: ['']}), ''),
        (DeviceCheckError('', {3: [''], 4: ['']}), FINAL_FILE),
        (DeviceCheckError('', {2: ['']}, compared=True), FINAL_FILE),
        # Either of two cards may be faulty: the machines of both leave.
        (CrossCheckError('', {3: [''], 4: ['']}), BROKEN_FILE),
        (CrossCheckError('', {4: ['']}), ''),
        (CrossCheckError('', {0: [''], 5: ['']}), ''),
    ],
)
def test_whose_fault_an_error_is(error: Exception, kind: str) -> None:
    assert cli._kind(error, dict(GROUP_RANK='1', LOCAL_WORLD_SIZE='2')) == kind
