"""MLflowVisBackend works without arguments, with a real MLflow."""

from __future__ import annotations

from pathlib import Path
from typing import Any, List

import numpy as np
import pytest
from support import on_host
from toy_runs import toy_train

pytestmark = on_host
mlflow = pytest.importorskip('mlflow', reason='pip install mlflow to run this')


@pytest.fixture(autouse=True)
def nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv('MLFLOW_TRACKING_URI', raising=False)
    (tmp_path / 'here').mkdir()
    monkeypatch.chdir(tmp_path / 'here')


def logged(uri: str) -> List[Any]:
    client = mlflow.MlflowClient(tracking_uri=uri)
    ids = [each.experiment_id for each in client.search_experiments()]
    return client.search_runs(ids, order_by=['attributes.start_time ASC'])


def train(folder: Path, **changes: Any) -> Any:
    return toy_train(
        folder,
        visualizer=dict(
            type='Visualizer', vis_backends=[dict(dict(type='MLflowVisBackend'), **changes)]
        ),
    )[0]


def test_two_runs_of_a_folder_go_into_its_database(tmp_path: Path) -> None:
    import time

    work_dir = tmp_path / 'my work 地图'
    for _ in range(2):
        runner = train(work_dir)
        time.sleep(1.1)  # folders are named by the second
    uri = f'sqlite:///{work_dir}/mlflow.db'
    first, second = logged(uri)
    assert second.info.run_name == runner.timestamp and second.info.status == 'FINISHED'
    client = mlflow.MlflowClient(tracking_uri=uri)
    assert client.get_experiment(first.info.experiment_id).name == work_dir.name
    losses = client.get_metric_history(second.info.run_id, 'loss')
    assert [each.step for each in losses] == list(range(1, 9))
    assert np.isfinite([each.value for each in losses]).all()
    assert second.data.params['train_cfg.max_iters'] == '8'
    uploaded = [each.path for each in client.list_artifacts(second.info.run_id)]
    assert 'config.py' in uploaded
    # neither the logs of the first run, nor the copies of them that it uploaded
    own = {runner.timestamp, f'{runner.timestamp}.py'}
    assert {path for path in uploaded if path.startswith('20')} == own
    assert 'mlflow-artifacts' not in uploaded
    # where the program was started, MLflow makes an empty folder
    assert not [path for path in Path().rglob('*') if path.is_file()]


def test_the_environments_store_and_the_configs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, named = (f'sqlite:///{tmp_path}/{name}.db' for name in ('given', 'named'))
    monkeypatch.setenv('MLFLOW_TRACKING_URI', given)
    train(tmp_path / 'one')
    assert len(logged(given)) == 1 and not (tmp_path / 'one' / 'mlflow.db').exists()
    train(tmp_path / 'two', tracking_uri=named, exp_name='mine')
    assert len(logged(given)) == 1 and len(logged(named)) == 1
