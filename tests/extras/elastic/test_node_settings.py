"""Comparison of the nodes of a job, and the watch between them."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from mmengine.config import Config

from mapsage.extras.elastic import nodes
from mapsage.extras.elastic.heartbeat import node_place
from mapsage.extras.elastic.node_settings import different_settings, flat_config


def test_texts_of_a_config_are_those_of_any_process() -> None:
    flat = flat_config(dict(sizes={3, 1, 2}, cut=functools.partial(lambda: 0), names=set()))
    assert [flat[f'sizes.{number}'] for number in range(3)] == ['1', '2', '3']
    assert flat['names'] == 'set()'
    assert ' at 0x' not in flat['cut']


def test_under_open_mpi_the_node_of_slurm_is_that_of_mpirun() -> None:
    slurm = dict(SLURM_NODEID='1', SLURM_NNODES='2')
    assert node_place(slurm) == (1, 2)
    assert node_place(dict(slurm, OMPI_COMM_WORLD_RANK='3')) is None


def test_two_hosts_with_one_number_are_not_watched() -> None:
    facts = {rank: nodes.RankFacts(0, f'h{rank}', watch={'local': ''}) for rank in range(2)}
    with pytest.warns(UserWarning, match='several hosts the same node number'):
        nodes._watch_each_other(nodes.NodePlace(0, 2), facts, 0, None, 1.0)
    assert not nodes.has_heartbeat()


def test_a_process_by_itself_in_an_allocation_of_two_nodes_is_not_watched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nodes, 'node_place', lambda: nodes.NodePlace(0, 2))
    monkeypatch.setattr(nodes, 'describe_settings', None)  # would fail
    assert nodes.meet_nodes(Config(), '/', 1.0) == ''


def test_a_folder_that_cannot_be_read_is_not_seen(tmp_path: Path) -> None:
    (tmp_path / 'a').touch()
    assert nodes._lists(str(tmp_path), 'a')
    assert not nodes._lists(str(tmp_path / 'none'), 'a')


def test_a_data_root_that_differs_is_named_with_the_way_on() -> None:
    text = different_settings(
        {name: dict(config={'data_root': root}) for name, root in [('a', '/x/d'), ('b', '/y/d')]}
    )
    assert '  config data_root: /x/d on a; /y/d on b\n' in text
    assert text.endswith('such as a symbolic link.')
    assert 'link' not in different_settings({'a': dict(config={'k': '1'}), 'b': dict(config={})})
