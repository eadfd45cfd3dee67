"""Head replicas under the launcher: what several ranks train together is what one rank trains."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional

import pytest
import torch
from replica_runs import CLOSE, STEPS, TRAINING, Run, check_close, streamed
from support import Launch, check_finished, launch, main_leg, write_tiny_config

pytestmark = main_leg


class Trainings:
    """Trains variants of one config, each in a folder of its own."""

    def __init__(self, config: Path) -> None:
        self.config = config

    def write(self, name: str, source: Optional[Dict[str, Any]], extra: str = '') -> Path:
        path = self.config.with_name(f'{name}.py')
        path.write_text(
            self.config.read_text() + extra + (f'feature_source = {source!r}\n' if source else '')
        )
        return path

    def train(
        self,
        name: str,
        source: Optional[Dict[str, Any]],
        ranks: int,
        *options: str,
        extra: str = '',
    ) -> Run:
        path, work = self.write(name, source, extra), self.config.with_name(name)
        check_finished(launch(path, '--work-dir', work, *options, ranks=ranks))
        return Run(work)


@pytest.fixture(scope='module')
def trainings(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    return Trainings(
        write_tiny_config(tmp_path_factory.mktemp('replicas') / 'base.py', tiny_data, TRAINING)
    )


@pytest.fixture(scope='module')
def alone(trainings: Trainings) -> Run:
    return trainings.train('alone', None, 1)


@pytest.fixture(scope='module')
def one_replica(trainings: Trainings) -> Run:
    return trainings.train('one', streamed(2, 2), 4)


@pytest.mark.long
def test_one_replica_trains_what_one_rank_trains(alone: Run, one_replica: Run) -> None:
    check_close(one_replica, alone)


def test_two_replicas_train_what_two_ranks_train(trainings: Trainings) -> None:
    check_close(trainings.train('two', streamed(1, 2), 5), trainings.train('pair', None, 2))


MIXED = """
optim_wrapper.update(type='AmpOptimWrapper', accumulative_counts=2)
"""


@pytest.mark.long
def test_a_replica_of_four_ranks_in_mixed_precision(trainings: Trainings) -> None:
    four = trainings.train('four', streamed(1, 4), 5, extra=MIXED)
    whole = trainings.train('whole', None, 1, extra=MIXED)
    assert four.losses == pytest.approx(whole.losses, rel=0.02)  # bfloat16 has three digits
    assert [state['step'] for state in four.optimizer['state'].values()] == [STEPS // 2] * 4


def test_one_process_reads_what_a_replica_wrote(
    trainings: Trainings, alone: Run, one_replica: Run
) -> None:
    config, work = trainings.config.with_name('one.py'), trainings.config.with_name('one_process')
    tested = launch(
        command=[
            sys.executable,
            'tools/test.py',
            str(config),
            str(one_replica.path),
            '--work-dir',
            str(work / 'test'),
            '--accelerator',
            'cpu',
        ]
    )
    check_finished(tested)
    score = re.findall(r'mIoU: ([0-9.]+)', tested.output)[-1]
    assert float(score) == pytest.approx(one_replica.scores[-1], abs=0.005)
    shutil.copy(str(one_replica.path.with_name('iter_5.pth')), str(work))
    check_finished(
        launch(
            command=[
                sys.executable,
                'tools/train.py',
                str(config),
                '--work-dir',
                str(work),
                '--resume',
                '--encoders',
                '0',
                '--accelerator',
                'cpu',
            ]
        )
    )
    resumed = Run(work)
    assert resumed.losses == pytest.approx(alone.losses[5:], rel=1e-5)
    for name, weight in alone.weights.items():
        assert torch.allclose(resumed.weights[name], weight, **CLOSE), name


def test_a_killed_run_goes_on_with_the_same_bits(trainings: Trainings, one_replica: Run) -> None:
    work = trainings.config.with_name('killed')
    path = trainings.write('killed', streamed(2, 2), 'train_cfg.update(max_iters=100000)\n')
    run = Launch(path, '--work-dir', work, ranks=4)
    run.wait_for(work / 'iter_5.pth')
    for rank in run.ranks():
        os.kill(rank, signal.SIGKILL)
    assert run.finish().left_running == []
    (work.with_name('resumed')).mkdir()  # without what was written before the kill came
    shutil.copy(str(work / 'iter_5.pth'), str(work.with_name('resumed')))
    resumed = trainings.train('resumed', streamed(2, 2), 4, '--resume')
    assert resumed.losses == one_replica.losses[5:] and resumed.scores == one_replica.scores
    for name, weight in one_replica.weights.items():
        assert torch.equal(resumed.weights[name], weight), name
    assert all(map(torch.equal, resumed.moments(), one_replica.moments()))


@pytest.mark.parametrize(
    'ranks, source, extra, words',
    [
        (4, streamed(1, 2), '', ['RoleError', 'ranks_per_head=2 does not divide the 3 rank(s)']),
        (
            3,
            streamed(1, 2),
            "custom_hooks = [dict(type='EMAHook')]\n",
            ['FeatureSourceError', 'ranks_per_head=2 with EMAHook', 'ranks_per_head=1'],
        ),
    ],
    ids=['rest', 'EMA'],
)
def test_what_a_replica_cannot_do(
    ranks: int,
    source: Dict[str, Any],
    extra: str,
    words: List[str],
    trainings: Trainings,
    tmp_path: Path,
) -> None:
    config = trainings.write(f'wrong{ranks}', source, extra)
    finished = launch(config, '--work-dir', tmp_path / 'work', ranks=ranks)
    assert finished.status != 0 and finished.left_running == []
    for word in words:
        assert word in finished.final_error, finished.output[-4000:]
