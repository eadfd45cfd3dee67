"""The progress bar in a real pseudo-terminal, and nothing of it anywhere else."""

from __future__ import annotations

import glob
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any, List, Optional, Tuple

import pytest
from fake_terminal import BAR, COLOR, FakeTerminal
from warm_python import warm_python

from mapsage.engine.display import ProgressBarHook

REPOSITORY = Path(__file__).resolve().parents[3]
DEADLINE = 60.0
ITERATION_LINE = re.compile(r'(Iter|Epoch)\(train\)')


def environment() -> dict:
    paths = [str(REPOSITORY), os.environ.get('PYTHONPATH', '')]
    return dict(
        os.environ,
        PYTHONPATH=os.pathsep.join(filter(None, paths)),
        OMP_NUM_THREADS='1',
        COLUMNS='120',
        LINES='40',
        PYTHONIOENCODING='utf-8',
        TERM='xterm-256color',
    )


def run_in_terminal(
    script: str, arguments: List[str], interrupt_at: Optional[str] = None
) -> Tuple[int, str]:
    """Run the script in a pseudo-terminal; return its exit status and all it wrote there.

    ``interrupt_at`` is a pattern: Ctrl-C comes once it has been written.
    """
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [warm_python(), script] + arguments,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environment(),
        start_new_session=True,
        # a shell's background job is born deaf to Ctrl-C
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    os.close(slave)
    written, interrupted, end = b'', False, time.monotonic() + DEADLINE
    try:
        while time.monotonic() < end:
            if select.select([master], [], [], 0.1)[0]:
                try:
                    chunk = os.read(master, 65536)
                except OSError:  # Linux: the last process has closed its side
                    break
                if not chunk:
                    break
                written += chunk
            if interrupt_at and not interrupted and re.search(interrupt_at.encode(), written):
                os.kill(process.pid, signal.SIGINT)
                interrupted = True
        status = process.wait(timeout=max(1.0, end - time.monotonic()))
        return status, COLOR.sub('', written.decode())
    finally:
        process.kill()
        process.wait()
        os.close(master)


def log_text(work_dir: Path) -> str:
    (log,) = glob.glob(str(work_dir / '*' / '*.log'))
    return Path(log).read_text()


@pytest.fixture(scope='module')
def iteration_run(tmp_path_factory: Any, tiny_run_script: str) -> Tuple[str, str]:
    """Return (terminal, log file) of 20 iterations with two validations."""
    work_dir = tmp_path_factory.mktemp('iterations')
    status, terminal = run_in_terminal(tiny_run_script, [str(work_dir)])
    assert status == 0, terminal[-2000:]
    return terminal, log_text(work_dir)


def test_terminal_shows_iteration_eta_and_loss(iteration_run: Tuple[str, str]) -> None:
    terminal, log = iteration_run
    drawn = [line for line in re.split(r'[\r\n]', terminal) if BAR in line and '7/20' in line]
    assert drawn, terminal[-2000:]
    logged = re.search(r'Iter\(train\) \[ 1/20\].* loss: ([\d.]+)', log)
    assert logged is not None
    assert re.search(r'eta \d:\d\d:\d\d  loss 1\.\d{4}  lr 1\.00e-02', drawn[0])
    first = [line for line in re.split(r'[\r\n]', terminal) if BAR in line and ' 1/20' in line]
    assert f'loss {logged.group(1)}' in first[0]


def test_iteration_lines_go_to_the_file_only(iteration_run: Tuple[str, str]) -> None:
    terminal, log = iteration_run
    assert len(ITERATION_LINE.findall(log)) == 20
    assert not ITERATION_LINE.search(terminal)
    assert len(re.findall(r'Iter\(val\)', log)) == 8  # two validations: three batches, one result
    assert len(re.findall(r'Iter\(val\)', terminal)) == 2


def test_other_output_is_printed_above_the_bar(iteration_run: Tuple[str, str]) -> None:
    terminal, _ = iteration_run
    for text in ('mIoU: 42.5', 'a line printed by the model', 'a warning of the model'):
        position = terminal.index(text)
        assert BAR in terminal[position:], f'{text} came after the last bar'
        line_start = max(terminal.rfind(mark, 0, position) for mark in '\n\r')
        assert BAR not in terminal[line_start:position], f'{text} was written into the bar'


def test_validation_has_its_own_bar(iteration_run: Tuple[str, str]) -> None:
    terminal, _ = iteration_run
    assert re.search(f'val +[^\r\n]*{BAR}[^\r\n]* 2/3', terminal)


def test_last_bar_is_complete_and_cursor_was_never_hidden(iteration_run: Tuple[str, str]) -> None:
    terminal, _ = iteration_run
    assert '20/20' in terminal[terminal.rindex('train') :]
    assert '\x1b[?25l' not in terminal


def test_keyboard_interrupt_gives_the_terminal_back(tmp_path: Path, tiny_run_script: str) -> None:
    status, terminal = run_in_terminal(
        tiny_run_script,
        [str(tmp_path), '--max', '1000', '--seconds', '0.05'],
        interrupt_at=r' ([3-9]|\d\d+)/1000',
    )  # the bar is not drawn at every step
    assert status != 0
    assert terminal.index('Traceback') > terminal.rindex(BAR)
    assert terminal.rstrip().endswith('KeyboardInterrupt')


def test_streams_are_restored_when_the_caller_catches(
    tmp_path: Path, tiny_run: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = FakeTerminal(tmp_path / 'terminal')
    monkeypatch.setattr(sys, 'stdout', terminal)
    monkeypatch.setenv('TERM', 'xterm')
    runner = tiny_run.build_runner(
        str(tmp_path / 'run'), [ProgressBarHook(0)], tiny_run.TinyModel(crash_at=2)
    )
    handler = runner.logger.handlers[0]
    with pytest.raises(RuntimeError, match='crashed'):
        runner.train()
    assert BAR in terminal.text()
    assert sys.stdout is terminal
    assert handler.stream is terminal
    assert not [item for item in handler.filters if type(item).__name__ == '_HideIterationLines']


def test_epochs_are_counted(
    tmp_path: Path, tiny_run: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = FakeTerminal(tmp_path / 'terminal')
    monkeypatch.setattr(sys, 'stdout', terminal)
    monkeypatch.setenv('TERM', 'xterm')
    train_cfg = dict(by_epoch=True, max_epochs=3, val_interval=3)
    tiny_run.build_runner(
        str(tmp_path / 'run'),
        [ProgressBarHook(0)],
        train_cfg=train_cfg,
        log_processor=dict(by_epoch=True),
    ).train()
    text = terminal.text()
    assert re.search(f'epoch 2/3 [^\r\n]*{BAR}[^\r\n]* 4/9', text)
    assert not ITERATION_LINE.search(text)
    assert len(ITERATION_LINE.findall(log_text(tmp_path / 'run'))) == 9


def test_lost_terminal_does_not_end_the_training(
    tmp_path: Path, tiny_run: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = FakeTerminal(tmp_path / 'terminal', fails_after=BAR)
    monkeypatch.setattr(sys, 'stdout', terminal)
    monkeypatch.setenv('TERM', 'xterm')
    runner = tiny_run.build_runner(str(tmp_path / 'run'), [ProgressBarHook(0)])
    runner.train()
    assert runner.iter == 4
    assert 'the run continues without the bar' in log_text(tmp_path / 'run')
    assert sys.stdout is terminal


def test_without_a_terminal_nothing_changes(
    tmp_path: Path, tiny_run: ModuleType, capsys: pytest.CaptureFixture
) -> None:
    with_hook = tiny_run.build_runner(str(tmp_path / 'with'), [ProgressBarHook(0)])
    streams = [handler.stream for handler in with_hook.logger.handlers]
    with_hook.train()
    output = capsys.readouterr().out
    assert len(ITERATION_LINE.findall(output)) == 4
    assert BAR not in output
    assert [handler.stream for handler in with_hook.logger.handlers] == streams
    assert 'run' not in vars(with_hook.train_loop)


def test_other_ranks_show_nothing(
    tmp_path: Path, tiny_run: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = FakeTerminal(tmp_path / 'terminal')
    monkeypatch.setattr(sys, 'stdout', terminal)
    monkeypatch.setenv('TERM', 'xterm')
    monkeypatch.setattr('mapsage.engine.display.progress_hook.is_main_process', lambda: False)
    tiny_run.build_runner(str(tmp_path / 'run'), [ProgressBarHook(0)]).train()
    assert BAR not in terminal.text()


def test_test_loop_has_a_bar_and_shows_its_metrics(
    tmp_path: Path, tiny_run: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = FakeTerminal(tmp_path / 'terminal')
    monkeypatch.setattr(sys, 'stdout', terminal)
    monkeypatch.setenv('TERM', 'xterm')
    tiny_run.build_runner(str(tmp_path / 'run'), [ProgressBarHook(0)]).test()
    text = terminal.text()
    assert re.search(f'test [^\r\n]*{BAR}[^\r\n]* 3/3', text)
    assert len(re.findall(r'Iter\(test\)', text)) == 1
    assert sys.stdout is terminal


def test_negative_interval_is_refused() -> None:
    with pytest.raises(ValueError, match='refresh_interval=-1'):
        ProgressBarHook(refresh_interval=-1)
