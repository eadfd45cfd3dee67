"""Settings and names of elastic jobs."""

from __future__ import annotations

from typing import Any

import pytest

from mapsage_launcher.nodes import elastic


@pytest.mark.parametrize(
    'arguments',
    [
        ['a/fcn.py', '--launcher', 'pytorch', '--work-dir', '/shared/runs/1'],
        ['/home/b/fcn.py', '--work-dir=/shared/runs/1/'],
        ['fcn.py', '--work-dir', 'overridden', '--work-dir', '/shared//runs/1', '--resume'],
    ],
)
def test_one_job_has_one_name_on_all_machines(arguments: Any) -> None:
    name = elastic.job_name(['fcn.py', '--work-dir', '/shared/runs/1'])
    assert elastic.job_name(arguments) == name
    assert name.startswith('fcn-') and '/' not in name  # torch makes a folder of that name
    environ = dict(RENDEZVOUS='login0')
    assert elastic.read_settings('2:3', environ, name).run_id == name
    assert elastic.read_settings('2:3', dict(environ, RDZV_ID='mine'), name).run_id == 'mine'


def test_two_jobs_have_two_names() -> None:
    jobs = [
        ['fcn.py'],
        ['unet.py'],
        ['fcn.py', '--work-dir', 'a'],
        ['fcn.py', '--work-dir', 'b'],
        ['unet.py', '--work-dir', 'a'],
        [],
        ['--resume'],
    ]
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
