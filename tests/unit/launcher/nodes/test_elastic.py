"""Settings of elastic jobs, and what an agent leaves behind."""
from __future__ import annotations

import os
from collections import namedtuple
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from socket_table import listening
from torch.distributed.elastic.agent.server.api import WorkerState
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousTimeoutError
from torch.distributed.launcher import api

from mapsage_launcher.nodes import elastic, elastic_agent
from mapsage_launcher.rendezvous import open_store
from mapsage_launcher.stop_request import has_left

SETTINGS = elastic.Settings(nodes=(2, 3), host='127.0.0.1', port=29400, run_id='job')


@pytest.mark.parametrize('error, closes', [
    (RendezvousTimeoutError, False), (RendezvousConnectionError, False), (RuntimeError, True)])
def test_a_machine_that_gives_up_waiting_leaves_the_rendezvous_open(
        error: Any, closes: bool, tmp_path: Path) -> None:
    closed = []
    handler = SimpleNamespace(num_nodes_waiting=lambda: 0, get_run_id=str,
                              shutdown=lambda: closed.append(1))
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


@pytest.mark.parametrize('first_round, step, note, alone', [
    (0, None, elastic.FINAL_FILE, False), (0, None, '', False), (0, 7, '', False),
    (2, None, elastic.FINAL_FILE, True), (2, None, '', True), (2, 0, '', False),
    (0, None, elastic.BROKEN_FILE, True), (0, 7, elastic.BROKEN_FILE, True)])
def test_a_machine_that_never_helped_or_is_broken_ends_alone(
        first_round: int, step: Any, note: str, alone: bool, tmp_path: Path,
        capsys: pytest.CaptureFixture[str]) -> None:
    closed = []
    handler = SimpleNamespace(num_nodes_waiting=lambda: 0, get_run_id=str,
                              shutdown=lambda: closed.append(1))
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
    assert ('which leaves the job' in capsys.readouterr().out) == (note == elastic.BROKEN_FILE)


def test_a_machine_that_found_no_place_is_a_spare(tmp_path: Path) -> None:
    spec = SimpleNamespace(local_addr='', rdzv_handler=SimpleNamespace(
        num_nodes_waiting=None, get_run_id=str))

    class Base:
        def __init__(self, spec: Any) -> None:
            pass

        def run(self) -> None:  # as torch's own, when the rendezvous ends while it waits
            return None

    with pytest.raises(elastic_agent.SpareError):
        elastic_agent.agent_class(Base, tmp_path, SETTINGS)(spec).run()


@pytest.mark.parametrize('others, words', [
    (1, 'needs 3 machines, and 2 came'), (3, 'which takes 3 machines, and this one found no place'),
    (0, 'needs 3 machines, and 1 came')])
@pytest.mark.parametrize('address', ['addr', 'fqdn'])  # of torch 2 and torch 1.10
def test_a_machine_that_waits_in_vain_says_for_what(others: int, words: str, address: str) -> None:
    node = namedtuple('node', [address, 'pid'])
    state = SimpleNamespace(participants={node(f'10.0.0.{i}', 7): i for i in range(others)})
    handler = SimpleNamespace(_state_holder=SimpleNamespace(state=state),
                              _this_node=node('10.0.0.9', 8))
    settings = elastic.Settings(nodes=(3, 3), host='login0', port=1, run_id='job')
    text = elastic_agent._waited_in_vain(settings, [handler])
    assert words in text and '10.0.0.9 (launcher 8)' in text


@pytest.mark.parametrize('end', ['complete', 'stopped', 'failed'])
def test_a_machine_that_waited_ends_as_the_job_did(
        end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, 'LocalElasticAgent', api.LocalElasticAgent)  # run() replaces it
    membership = SimpleNamespace(was_complete=lambda: end == 'complete',
                                 was_stopped=lambda: end == 'stopped')

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


@pytest.mark.parametrize('arguments', [
    ['a/fcn.py', '--launcher', 'pytorch', '--work-dir', '/shared/runs/1'],
    ['/home/b/fcn.py', '--work-dir=/shared/runs/1/'],
    ['fcn.py', '--work-dir', 'overridden', '--work-dir', '/shared//runs/1', '--resume']])
def test_one_job_has_one_name_on_all_machines(arguments: Any) -> None:
    name = elastic.job_name(['fcn.py', '--work-dir', '/shared/runs/1'])
    assert elastic.job_name(arguments) == name
    assert name.startswith('fcn-') and '/' not in name  # torch makes a folder of that name
    environ = dict(RENDEZVOUS='login0')
    assert elastic.read_settings('2:3', environ, name).run_id == name
    assert elastic.read_settings('2:3', dict(environ, RDZV_ID='mine'), name).run_id == 'mine'


def test_two_jobs_have_two_names() -> None:
    jobs = [['fcn.py'], ['unet.py'], ['fcn.py', '--work-dir', 'a'], ['fcn.py', '--work-dir', 'b'],
            ['unet.py', '--work-dir', 'a'], [], ['--resume']]
    names = [elastic.job_name(each) for each in jobs]
    assert len(set(names)) == len(jobs) - 1 and names[-1] == names[-2] == 'mapsage'


def test_a_store_at_an_address_of_this_machine() -> None:
    settings = elastic.Settings(nodes=(2, 3), host='127.0.0.2', port=1, run_id='job')
    assert elastic.own_address(settings) == '127.0.0.1'


@pytest.mark.parametrize('place', ['::1', 'fd00::1:29400', 'fd00::a'])
def test_an_ipv6_address_has_brackets(place: str) -> None:
    with pytest.raises(elastic.ElasticError, match='in brackets'):
        elastic.read_settings('2:3', dict(RENDEZVOUS=place))
    assert elastic.read_settings('2:3', dict(RENDEZVOUS='[fd00::a]:7')).host == 'fd00::a'
    assert elastic.read_settings('2:3', dict(RENDEZVOUS='[fd00::a]')).port == 29400


@pytest.mark.skipif('master_listen_fd' not in (dist.TCPStore.__init__.__doc__ or ''),
                    reason='of newer versions of torch')
@pytest.mark.parametrize('host, address', [
    ('localhost', '127.0.0.1'), ('127.0.0.1', '127.0.0.1'), ('::1', '::1')])
def test_the_store_listens_at_one_address(host: str, address: str) -> None:
    before = set(listening([os.getpid()]))
    store, printed, warning = open_store(host, 0)
    client = dist.TCPStore(address, store.port, is_master=False, wait_for_workers=False,
                           timeout=timedelta(seconds=20))
    client.set('key', 'value')
    assert store.get('key') == b'value' and warning == '' and printed == address
    opened = set(listening([os.getpid()])) - before
    assert {(each.address, each.port) for each in opened} == {(address, store.port)}
