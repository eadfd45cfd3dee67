"""Runs end with a report, however they end, and a report never ends a run."""

from __future__ import annotations

import json
import os
import re
import signal
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Dict, List

import numpy as np
import pytest
import torch
from label_pairs import data_sample
from mmengine.evaluator import BaseMetric
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.registry import DATASETS, METRICS, MODELS
from support import UNDECODABLE, on_host
from toy_runs import log_of, toy_train

from mapsage.pictures.report import write_report
from mapsage.pictures.report.runs import read_runs

pytestmark = on_host


@MODELS.register_module(force=True)
class ReportedToy(BaseModel):
    """Sees class 1 where its skill says so; it fails at an iteration."""

    def __init__(self, fail_at: int = -1) -> None:
        super().__init__()
        self.skill = torch.nn.Parameter(torch.zeros(1))
        self.fail_at, self.steps = fail_at, 0

    def forward(self, inputs: Any, data_samples: Any = None, mode: str = 'tensor') -> Any:
        if mode == 'loss':
            self.steps += 1
            if self.steps == self.fail_at:
                raise RuntimeError('the <b>model</b> failed')
            return dict(loss=(self.skill - 1).square().sum(), loss_aux=self.skill.sum() * 0)
        for sample in data_samples:
            truth = sample.gt_sem_seg.data
            seen = truth * (torch.arange(8)[:, None] < 8 * self.skill.detach()) % 3
            sample.pred_sem_seg = type(sample.gt_sem_seg)(data=seen)
        return data_samples


@DATASETS.register_module(force=True)
class ReportedTiles(torch.utils.data.Dataset):
    def __init__(self, classes: Any = ('land', 'road & <path>', '水体')) -> None:
        self.metainfo = dict(classes=tuple(classes))

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Dict[str, Any]:
        labels = torch.arange(64).reshape(8, 8) % 3
        sample = data_sample(labels, labels)
        sample.set_metainfo(dict(number=int(index), img_path=f'tile {int(index)}'))
        return dict(inputs=torch.full((3, 8, 8), 0.1 * int(index)), data_samples=sample)


@METRICS.register_module(force=True)
class OddFigures(BaseMetric):
    """An evaluator of a user: figures that are no numbers, and a matrix of another kind."""

    matrix = 'none'
    default_prefix = 'odd'

    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results.append(0)

    def compute_metrics(self, results: list) -> Dict[str, Any]:
        return dict(words='three', undefined=float('nan'), tensor=np.float32(2.5))


def run(folder: Path, model: Any = None, **changes: Any) -> Any:
    tiles = dict(type='ReportedTiles', _delete_=True)
    return toy_train(
        folder,
        **{
            'model': dict(model or {}, type='ReportedToy', _delete_=True),
            'train_dataloader.dataset': tiles,
            'val_dataloader.dataset': tiles,
            'test_dataloader.dataset': tiles,
            'test_evaluator': dict(type='ConfusionMatrixMetric'),
            'val_evaluator': dict(type='ConfusionMatrixMetric'),
            'custom_hooks': [],
            'default_hooks.preview': None,  # which takes half a second
            'default_hooks.report': dict(type='RunReportHook'),
            'visualizer': dict(type='Visualizer', vis_backends=[dict(type='LocalVisBackend')]),
            'optim_wrapper.optimizer': dict(type='SGD', lr=0.05, momentum=0, _delete_=True),
            'train_cfg': dict(by_epoch=False, max_iters=8, val_interval=4),
            **changes,
        },
    )[0]


@pytest.fixture(autouse=True)
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    import toy_runs

    monkeypatch.setattr(toy_runs.Record, 'after_val_epoch', lambda *a, **k: None)
    monkeypatch.setattr(toy_runs.Record, 'after_test_epoch', lambda *a, **k: None)


class Elements(HTMLParser):
    """What a page has: its tags, what they load, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: List[str] = []
        self.loads: List[str] = []
        self.said = ''
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        self.loads += [value for name, value in attrs if name in ('src', 'href', 'xlink:href')]

    def handle_data(self, data: str) -> None:
        self.said += f'{data} '


def page_of(folder: Path) -> Elements:
    return Elements((folder / 'report.html').read_bytes().decode('utf-8'))


def record_of(runner: Any) -> Dict[str, Any]:
    return json.loads(Path(runner._log_dir, 'run.json').read_text())


def new_second(runner: Any) -> None:
    """Let the next start have another folder: they are named by the second."""
    import time

    while time.strftime('%Y%m%d_%H%M%S') == runner.timestamp:
        time.sleep(0.05)


def test_report_of_a_run_is_one_file_that_loads_nothing(tmp_path: Path) -> None:
    runner = run(tmp_path)
    page, record = page_of(tmp_path), record_of(runner)
    assert not {'script', 'link', 'iframe', 'b '} & set(page.tags)
    assert all(load.startswith('data:image/') for load in page.loads), page.loads
    for text in (
        'Curves',
        'Confusion',
        'road & <path>',
        '水体',
        'ReportedToy',
        'finished',
        '1 rank(s)',
        '8 of 8',
        'There is no run before this one',
    ):
        assert text in page.said or text in str(record), text
    assert page.tags.count('polyline') >= 6
    (metric,) = runner.val_evaluator.metrics
    assert record['status'] == 'finished' and record['end_iter'] == 8
    first, last = record['evaluations']
    assert last['tables'][0]['matrix'] == metric.matrix.tolist()
    assert 'matrix' not in first['tables'][0] and first['iteration'] == 4
    assert re.search(rf'mIoU {last["metrics"]["mIoU"]:.2f}', page.said)
    iou = last['tables'][0]['columns']['IoU']
    assert all(f'{value:.2f}' in page.said for value in iou) and len(set(iou)) > 1


def test_scores_by_class_of_the_hosts_metric_are_those_of_the_confusion_matrix(
    tmp_path: Path,
) -> None:
    both = [
        dict(type='mmseg.IoUMetric', iou_metrics=['mIoU'], prefix='host'),
        dict(type='ConfusionMatrixMetric', prefix='ours'),
    ]
    runner = run(tmp_path, val_evaluator=both)
    for evaluation in record_of(runner)['evaluations']:
        host, ours = evaluation['tables']
        assert (host['name'], host.get('matrix'), ours['name']) == ('host', None, 'ours')
        assert host['classes'] == ours['classes']
        for name, column in host['columns'].items():
            assert column == pytest.approx(ours['columns'][name], nan_ok=True)
    mean = np.nanmean([value for value in host['columns']['IoU'] if value is not None])
    assert evaluation['metrics']['host/mIoU'] == pytest.approx(mean, abs=0.006)
    page = page_of(tmp_path).said
    assert all(f'{value:.2f}' in page for value in host['columns']['IoU'])


def test_second_run_of_a_folder_is_compared_with_the_first(tmp_path: Path) -> None:
    first = run(tmp_path)
    new_second(first)
    second = run(tmp_path, **{'optim_wrapper.optimizer.lr': 0.1})
    page = page_of(tmp_path)
    before, now = (
        record_of(each)['evaluations'][-1]['tables'][0]['columns']['IoU']
        for each in (first, second)
    )
    assert before != now
    assert f'{now[1] - before[1]:+.2f}' in page.said
    assert 'optim_wrapper.optimizer.lr' in page.said
    assert [each.is_last for each in read_runs(tmp_path)] == [False, True]
    # an earlier run has a report of its own, in its folder
    path = write_report(Path(first._log_dir))
    assert path == Path(first._log_dir, 'report.html')
    assert 'pictures in the folder are of a later run' in path.read_text(encoding='utf-8')


def test_failed_run_and_its_resume_are_one_run(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match='failed'):
        run(tmp_path, dict(fail_at=7))
    page = page_of(tmp_path)
    assert 'RuntimeError: the <b>model</b> failed' in page.said
    (failed,) = read_runs(tmp_path)
    assert failed.iterations == 6 and len(failed.evaluations()) == 1
    new_second(type('Of', (), dict(timestamp=failed.starts[0].folder.name)))
    resumed = run(tmp_path, resume=True)
    (whole,) = read_runs(tmp_path)
    assert record_of(resumed)['begin_iter'] == 4
    assert [each.iteration for each in whole.evaluations()] == [4, 8]
    # iterations 5 and 6 of the first start were lost
    assert [x for x, _ in whole.curves()['loss']] == list(range(1, 9))
    assert 'in 2 starts' in page_of(tmp_path).said


class Unwritable(Hook):
    """Has a folder where the report goes, and a file where its notes go."""

    def before_run(self, runner: Any) -> None:
        Path(runner.work_dir, 'report.html').mkdir()


def test_report_that_fails_is_a_warning(tmp_path: Path) -> None:
    runner = run(tmp_path, custom_hooks=[Unwritable()])
    assert runner.iter == 8
    assert 'WARNING - report: IsADirectoryError' in log_of(runner)
    assert record_of(runner)['status'] == 'finished'


class AskedAt3(Hook):
    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if runner.iter == 2:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.usefixtures('signals_as_before')
def test_run_that_was_asked_to_stop(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        run(tmp_path, custom_hooks=[AskedAt3()])
    page = page_of(tmp_path)
    assert 'stopped at a request' in page.said and '3 of 8' in page.said
    assert 'no validation was run' in page.said and 'Error' not in page.said


class Killed(BaseException):
    """Nothing is called any more."""


class KilledAt5(Hook):
    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if runner.iter == 5:
            runner._hooks = []
            raise Killed


def test_run_that_is_killed_leaves_the_report_of_its_last_evaluation(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        run(tmp_path, custom_hooks=[KilledAt5()])
    page = page_of(tmp_path)
    assert 'no end recorded' in page.said and 'Validation after 4 steps' in page.said
    write_report(tmp_path)
    assert [x for x, _ in read_runs(tmp_path)[0].curves()['loss']] == [1, 2, 3, 4, 5]


class OwnEnd(Hook):
    def end_run(self) -> None:
        raise AssertionError('not called')


def test_users_hook_with_another_end_run_does_no_harm(tmp_path: Path) -> None:
    runner = run(tmp_path, custom_hooks=[OwnEnd()])
    assert 'OwnEnd.end_run: TypeError' in log_of(runner)
    assert (tmp_path / 'report.html').is_file()


def test_several_evaluators_and_figures_that_are_no_numbers(tmp_path: Path) -> None:
    run(
        tmp_path,
        val_evaluator=[
            dict(type='ConfusionMatrixMetric', prefix='one'),
            dict(type='OddFigures'),
            dict(type='ConfusionMatrixMetric', prefix='other', ignore_index=0),
        ],
    )
    page = page_of(tmp_path)
    (only,) = read_runs(tmp_path)
    final = only.final()
    assert [each.name for each in final.tables] == ['one', 'other']
    assert page.tags.count('table') >= 4 and 'could not be made' not in page.said
    assert set(final.metrics) >= {'one/mIoU', 'other/mIoU', 'odd/tensor'}
    assert 'odd/undefined' not in final.metrics and only.score()[0] == 'one/mIoU'


@pytest.mark.parametrize(
    'changes',
    [
        dict(val_dataloader=None, val_evaluator=None, val_cfg=None),
        {'visualizer.vis_backends': None},
        {'default_hooks.logger': None},
        {
            'train_cfg': dict(by_epoch=True, max_epochs=2, val_interval=1),
            'log_processor': None,
            'train_dataloader.sampler.type': 'DefaultSampler',
        },
    ],
)
def test_other_runs(tmp_path: Path, changes: Dict[str, Any]) -> None:
    run(tmp_path, **changes)
    page = page_of(tmp_path)
    (only,) = read_runs(tmp_path)
    assert 'could not be made' not in page.said and 'finished' in page.said
    if 'val_cfg' in changes:
        assert 'no validation was run' in page.said and only.score() == ('', [])
    elif 'visualizer.vis_backends' in changes:
        assert 'No training curves' in page.said and only.score()[1]
    elif 'train_cfg' in changes:  # 2 batches an epoch
        assert [each.iteration for each in only.evaluations()] == [2, 4]


def test_test_of_a_checkpoint_joins_the_run(tmp_path: Path) -> None:
    trained = run(tmp_path)
    new_second(trained)
    from toy_runs import toy_runner

    tiles = dict(type='ReportedTiles', _delete_=True)
    tester, _ = toy_runner(
        tmp_path,
        **{
            'model': dict(type='ReportedToy', _delete_=True),
            'test_dataloader.dataset': tiles,
            'test_evaluator': dict(type='ConfusionMatrixMetric'),
            'custom_hooks': [],
            'default_hooks.preview': None,
            'default_hooks.report': dict(type='RunReportHook'),
            'train_dataloader': None,
            'train_cfg': None,
            'optim_wrapper': None,
            'val_dataloader': None,
            'val_cfg': None,
            'val_evaluator': None,
            'load_from': str(tmp_path / 'iter_8.pth'),
        },
    )
    figures = tester.test()
    assert record_of(tester)['status'] == 'finished'
    assert f'mIoU {figures["mIoU"]:.2f}' in page_of(tmp_path).said
    (only,) = read_runs(tmp_path)
    (tested,) = only.evaluations('test')
    assert tested.metrics['mIoU'] == pytest.approx(figures['mIoU'])
    assert len(only.evaluations()) == 2 and only.iterations == 8
    assert only.last.folder.name == trained.timestamp


def test_switched_off(tmp_path: Path) -> None:
    runner = run(tmp_path, **{'default_hooks.report': None})
    assert not (tmp_path / 'report.html').exists()
    assert not Path(runner._log_dir, 'run.json').exists()


def test_names_in_another_encoding(tmp_path: Path) -> None:
    folder = tmp_path / '<b>one & two 地图'
    tiles = dict(type='ReportedTiles', classes=['a', UNDECODABLE, '</td><script>x'], _delete_=True)
    run(folder, **{'val_dataloader.dataset': tiles})
    page = page_of(folder)
    assert '<b>one & two 地图' in page.said and '\\udcb5\\udcd8' in page.said
    assert 'script' not in page.tags and '</td><script>x' in page.said
    moved = folder.rename(tmp_path / UNDECODABLE)  # MMEngine cannot train there
    write_report(moved)
    assert '\\udcb5\\udcd8' in page_of(moved).said
