"""Before the first loss a terminal shows the run's own lines; the log file gets all of them."""

from __future__ import annotations

import io
import logging
import warnings
from pathlib import Path
from typing import Iterator, Tuple

import mmengine.runner.runner
import pytest

from mapsage.engine.display.terminal import quiet_start


@pytest.fixture
def logger(tmp_path: Path) -> Iterator[Tuple[logging.Logger, io.StringIO, Path]]:
    """A logger with a terminal and a file; warnings are shown as before afterwards."""
    terminal, file, show = io.StringIO(), tmp_path / 'run.log', warnings.showwarning
    logger = logging.Logger('run', logging.INFO)
    logger.addHandler(logging.StreamHandler(terminal))
    logger.addHandler(logging.FileHandler(file))
    yield logger, terminal, file
    warnings.showwarning = show


def log_as_host(logger: logging.Logger, text: str) -> None:
    """Log a text as MMEngine's runner does."""
    path = str(mmengine.runner.runner.__file__)
    logger.handle(logger.makeRecord('run', logging.INFO, path, 1, text, (), None))


def log_a_start(logger: logging.Logger) -> None:
    log_as_host(logger, 'Checkpoints will be saved to x')
    logger.warning('The prefix is not set in metric class IoUMetric.')
    logger.info('Config:\na = 1')
    logger.info('model: EncoderDecoder')
    warnings.warn_explicit('of the host', UserWarning, mmengine.runner.runner.__file__, 1)
    logger.warning('a class does not occur')
    logger.info('Iter(train) [2/8]  loss: 1')
    log_as_host(logger, 'Saving checkpoint at 8 iterations')


def test_the_start_is_short_and_the_file_has_all(logger: Tuple) -> None:
    logger, terminal, file = logger
    quiet_start(logger, 'INFO')
    log_a_start(logger)
    assert terminal.getvalue().splitlines() == [
        'model: EncoderDecoder',
        'a class does not occur',
        'Iter(train) [2/8]  loss: 1',
        'Saving checkpoint at 8 iterations',
    ]
    text = file.read_text()
    assert 'Checkpoints will' in text and 'a = 1' in text and 'The prefix' in text
    assert 'UserWarning: of the host' in text


def test_a_validation_that_runs_first_shows_its_scores_only(logger: Tuple) -> None:
    logger, terminal, _ = logger
    quiet_start(logger, 'INFO')
    first = 'the validation after iteration 4 was not completed and runs first'
    logger.info(first, extra=dict(validates_first=True))
    scores = 'Iter(val) [6/6]    aAcc: 69.7800  mIoU: 48.8500'
    progress = 'Iter(val) [2/6]    eta: 0:00:01  time: 0.2335'
    for text in (progress, 'per class results:', '\n+---+\n+---+', scores, 'Config:\na = 1'):
        logger.info(text)
    assert terminal.getvalue().splitlines() == [first, scores]
    logger.info('Iter(train) [6/8]  loss: 1')
    logger.info(progress)
    assert terminal.getvalue().splitlines()[-1] == progress


def test_a_short_test_shows_the_table_of_its_classes(logger: Tuple) -> None:
    logger, terminal, _ = logger
    quiet_start(logger, 'INFO')
    scores = ['per class results:', '\n+---+\n+---+', 'Iter(test) [6/6]    aAcc: 69.7800']
    for text in ('Config:\na = 1', *scores):
        logger.info(text)
    assert terminal.getvalue() == '\n'.join(scores) + '\n'


def test_debug_shows_all(logger: Tuple) -> None:
    logger, terminal, file = logger
    quiet_start(logger, 'DEBUG')
    with pytest.warns(UserWarning):
        log_a_start(logger)
    assert terminal.getvalue() == file.read_text()


def test_many_warnings_are_counted_and_errors_pass(logger: Tuple) -> None:
    logger, terminal, file = logger
    quiet_start(logger, 'INFO')
    for number in range(20):
        logger.warning(f'warning {number}')
    logger.error('an error')
    lines = terminal.getvalue().splitlines()
    assert lines[-2:] == ['more warnings are in the log file.', 'an error'] and len(lines) == 7
    assert [f'warning {number}' for number in range(20)] == file.read_text().splitlines()[:-1]
