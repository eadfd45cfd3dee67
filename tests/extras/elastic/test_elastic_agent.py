"""The agent of elastic jobs: who leaves, who waits, and what is restarted."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.api import WorkerState
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousTimeoutError
from torch.distributed.launcher import api

from mapsage_launcher import rank_notes
from mapsage_launcher.nodes import elastic, elastic_agent
from mapsage_launcher.stop_request import has_left

pytestmark = pytest.mark.usefixtures('own_environment')  # of MAPSAGE_RESTART

SETTINGS = elastic.Settings(nodes=(2, 3), host='127.0.0.1', port=29400, run_id='job')


@pytest.mark.parametrize(
    'error, closes',
    [(RendezvousTimeoutError, False), (RendezvousConnectionError, False), (RuntimeError, True)],
)
def test_a_machine_that_gives_up_waiting_leaves_the_rendezvous_open(
    error: Any, closes: bool, tmp_path: Path
) -> None:
    closed = []
    handler = SimpleNamespace(
        num_nodes_waiting=lambda: 0, get_run_id=str, shutdown=lambda: closed.append(1)
    )
    spec = SimpleNamespace(rdzv_handler=handler, local_addr='')

    class Base:
        def __init__(self, spec: Any) -> None:
            self._worker_group = SimpleNamespace(spec=spec)

        def run(self) -> None:
            raise error('no')

    agent = elastic_agent.agent_class(Base, tmp_path, SETTINGS)(spec)
    with pytest.raises(error):
        agent.run()
    handler.shutdown()
    assert bool(closed) == closes


@pytest.mark.parametrize(
    'first_round, step, note, alone',
    [
        (0, None, rank_notes.FINAL_FILE, False),
        (0, None, '', False),
        (0, 7, '', False),
        (2, None, rank_notes.FINAL_FILE, True),
        (2, None, '', True),
        (2, 0, '', False),
        (0, None, rank_notes.BROKEN_FILE, True),
        (0, 7, rank_notes.BROKEN_FILE, True),
    ],
)
def test_a_machine_that_never_helped_or_is_broken_ends_alone(
    first_round: int,
    step: Any,
    note: str,
    alone: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    closed = []
    handler = SimpleNamespace(
        num_nodes_waiting=lambda: 0, get_run_id=str, shutdown=lambda: closed.append(1)
    )
    spec = SimpleNamespace(rdzv_handler=handler, local_addr='', max_restarts=3)
    failed = SimpleNamespace(state=WorkerState.FAILED, failures={}, is_failed=lambda: True)

    class Base:
        def __init__(self, spec: Any) -> None:
            self._worker_group, self._remaining_restarts = SimpleNamespace(spec=spec), 3

        def _monitor_workers(self, worker_group: Any) -> Any:
            return failed

        def run(self) -> Any:
            return self._monitor_workers(self._worker_group)

    if note:
        (tmp_path / note).touch()
    if step is not None:
        with open(tmp_path / elastic.STEP_FILE, 'wb') as file:
            elastic.write_step(file.fileno(), step)
    agent = elastic_agent.agent_class(Base, tmp_path, SETTINGS)(spec)
    agent._membership.first_round = first_round
    assert agent.run() is failed
    handler.shutdown()
    assert bool(closed) != alone
    assert agent._remaining_restarts == (0 if note else 3)
    assert ('which leaves the job' in capsys.readouterr().out) == (note == rank_notes.BROKEN_FILE)


def test_a_machine_that_found_no_place_is_a_spare(tmp_path: Path) -> None:
    spec = SimpleNamespace(
        local_addr='', rdzv_handler=SimpleNamespace(num_nodes_waiting=None, get_run_id=str)
    )

    class Base:
        def __init__(self, spec: Any) -> None:
            pass

        def run(self) -> None:  # as torch's own, when the rendezvous ends while it waits
            return None

    with pytest.raises(elastic_agent.SpareError):
        elastic_agent.agent_class(Base, tmp_path, SETTINGS)(spec).run()


@pytest.mark.parametrize(
    'others, words',
    [
        (1, 'needs 3 machines, and 2 came'),
        (3, 'which takes 3 machines, and this one found no place'),
        (0, 'needs 3 machines, and 1 came'),
    ],
)
@pytest.mark.parametrize('address', ['addr', 'fqdn'])  # of torch 2 and torch 1.10
def test_a_machine_that_waits_in_vain_says_for_what(others: int, words: str, address: str) -> None:
    node = namedtuple('node', [address, 'pid'])
    state = SimpleNamespace(participants={node(f'10.0.0.{i}', 7): i for i in range(others)})
    handler = SimpleNamespace(
        _state_holder=SimpleNamespace(state=state), _this_node=node('10.0.0.9', 8)
    )
    settings = elastic.Settings(nodes=(3, 3), host='login0', port=1, run_id='job')
    text = elastic_agent._waited_in_vain(settings, [handler])
    assert words in text and '10.0.0.9 (launcher 8)' in text


@pytest.mark.parametrize('end', ['complete', 'stopped', 'failed'])
def test_a_machine_that_waited_ends_as_the_job_did(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, 'LocalElasticAgent', api.LocalElasticAgent)  # run() replaces it
    membership = SimpleNamespace(
        was_complete=lambda: end == 'complete', was_stopped=lambda: end == 'stopped'
    )

    def launch(args: Any) -> None:
        raise elastic_agent.SpareError(membership)

    def run() -> None:
        elastic_agent.run(SimpleNamespace(run=launch), SimpleNamespace(), SETTINGS, tmp_path)

    if end == 'failed':
        with pytest.raises(elastic.ElasticError, match='on another machine'):
            run()
    else:
        run()
    assert has_left(tmp_path) == (end == 'stopped')
