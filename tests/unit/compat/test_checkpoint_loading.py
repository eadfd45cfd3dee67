"""What a checkpoint may hold, and what is said about one that holds anything else."""

from __future__ import annotations

import collections
import datetime
import functools
import http.server
import io
import os
import pickle
import random
import re
import struct
import sys
import threading
import types
import zipfile
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Tuple

import mmengine.runner
import numpy as np
import pytest
import torch
from mmengine.config import ConfigDict
from mmengine.logging import HistoryBuffer, MessageHub
from mmengine.optim.scheduler.param_scheduler import OneCycleParamScheduler
from mmengine.registry import PARAM_SCHEDULERS
from mmengine.runner.checkpoint import CheckpointLoader
from mmengine.structures import BaseDataElement, InstanceData, LabelData, PixelData

from mapsage.base.errors import UserError
from mapsage.compat.checkpoint_contents import check_loadable
from mapsage.compat.checkpoint_loading import (
    DamagedCheckpointError,
    UnsafeCheckpointError,
    load_from_local,
)


def genuine() -> dict:
    """What MMEngine's Runner writes."""
    hub = MessageHub('genuine')
    for value in (3.0, 2.0, 1.0):
        hub.update_scalar('train/loss', value)
    hub.update_info('iter', 7)
    hub.update_info('best', np.float64(0.5))
    model = torch.nn.BatchNorm2d(3)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(2, 3, 4, 4)).sum().backward()
    optimizer.step()
    return dict(
        meta=dict(seed=1, iter=7, epoch=0, dataset_meta=dict(palette=np.arange(6).reshape(2, 3))),
        state_dict=model.state_dict(),
        message_hub=hub.state_dict(),
        optimizer=optimizer.state_dict(),
        extra=[torch.ones(2, dtype=torch.bfloat16), torch.empty(0), torch.tensor(True)],
    )


def save(path: Path, content: Any, legacy: bool = False) -> str:
    torch.save(content, str(path), _use_new_zipfile_serialization=not legacy)
    return str(path)


@pytest.mark.parametrize('legacy', [False, True])
def test_genuine_checkpoint_comes_back(tmp_path: Path, legacy: bool) -> None:
    want = genuine()
    got = CheckpointLoader.load_checkpoint(save(tmp_path / 'a.pth', want, legacy), 'cpu')
    for name, tensor in want['state_dict'].items():
        assert torch.equal(got['state_dict'][name], tensor)
    assert str(got['optimizer']) == str(want['optimizer'])
    assert all(torch.equal(a, b) for a, b in zip(got['extra'], want['extra']))
    assert np.array_equal(got['meta']['dataset_meta']['palette'], [[0, 1, 2], [3, 4, 5]])
    best = got['message_hub']['runtime_info']['best']
    assert best == 0.5 and isinstance(best, np.float64)
    buffer = got['message_hub']['log_scalars']['train/loss']
    assert isinstance(buffer, HistoryBuffer)
    assert (buffer.mean(), buffer.min(), buffer.current()) == (2, 1, 1)
    assert buffer.statistics('max') == 3  # through the pickled statistics methods


@pytest.mark.parametrize('code', '?bhilqBHILQefd')
def test_numpy_scalars_and_arrays(tmp_path: Path, code: str) -> None:
    content = [np.dtype(code).type(1), np.ones((2, 2), code), np.ones((2, 3), code, order='F')]
    got = load_from_local(save(tmp_path / 'a.pth', content))
    for one, other in zip(got, content):
        assert one.dtype == other.dtype and np.array_equal(one, other)


class Call:
    """Pickles as a call."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Tuple[Any, ...]:
        return self.call


def attacks(mark: str) -> List[Any]:
    touch = f'touch {mark}'
    return [
        Call(os.system, touch),
        Call(eval, f'open({mark!r}, "w")'),
        Call(exec, f'open({mark!r}, "w")'),
        Call(open, mark, 'w'),
        Call(functools.partial(os.system, touch)),
        Call(getattr, Call(__import__, 'os'), 'system'),
        Call(getattr, HistoryBuffer, '__init__'),
        Call(getattr, HistoryBuffer, '__globals__'),
        Call(getattr, Call(getattr, HistoryBuffer, 'mean'), '__globals__'),
        Call(Call(getattr, Call(getattr, HistoryBuffer, 'mean'), '__globals__').__class__, touch),
        Call(collections.defaultdict, Call(functools.partial, os.system, touch)),
        Call(torch.load, mark),
        Call(torch.hub.load, 'a/b', 'c'),
        Call(pickle.loads, b'.'),
        Call(np.load, mark),
        Call(np.fromfile, mark),
        Call(torch.save, 1, mark),
        Call(torch.FloatStorage.from_file, mark, True, 10),
    ]


@pytest.mark.parametrize('legacy', [False, True])
@pytest.mark.parametrize('number', range(len(attacks(''))))
def test_attack_is_refused_and_does_not_run(tmp_path: Path, number: int, legacy: bool) -> None:
    mark = tmp_path / 'executed'
    content = dict(genuine(), surprise=attacks(str(mark))[number])
    path = save(tmp_path / 'a.pth', content, legacy)
    with pytest.raises(UnsafeCheckpointError):
        CheckpointLoader.load_checkpoint(path, map_location='cpu')
    assert not mark.exists()


def test_attack_without_torch_is_refused(tmp_path: Path) -> None:
    mark = tmp_path / 'executed'
    (tmp_path / 'a.pth').write_bytes(pickle.dumps(Call(os.system, f'touch {mark}')))
    with pytest.raises((UnsafeCheckpointError, RuntimeError)):
        load_from_local(str(tmp_path / 'a.pth'))
    assert not mark.exists()


# Pickles no Python object gives: a call of what a call returned, and an attribute of an allowed
# class in one dotted name (protocol 4).
CHAIN = b"\x80\x02cbuiltins\ngetattr\n(cbuiltins\n__import__\n(S'os'\ntRS'system'\ntR(S'%s'\ntR."
DOTTED = (
    b'\x80\x04\x8c\x1fmmengine.logging.history_buffer'
    b'\x8c\x22HistoryBuffer.__init__.__globals__\x93.'
)


@pytest.mark.parametrize('evil', [CHAIN, DOTTED], ids=['chain', 'dotted'])
def test_written_by_hand(tmp_path: Path, evil: bytes) -> None:
    mark, path = tmp_path / 'executed', tmp_path / 'a.pth'
    torch.save({'a': 1}, str(path))
    replace_in_zip(path, 'data.pkl', evil.replace(b'%s', f'touch {mark}'.encode()))
    with pytest.raises((UnsafeCheckpointError, RuntimeError)):
        load_from_local(str(path))
    assert not mark.exists()


def replace_in_zip(path: Path, end: str, content: bytes) -> None:
    with zipfile.ZipFile(str(path)) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(str(path), 'w', zipfile.ZIP_STORED) as archive:
        for name, data in parts.items():
            archive.writestr(name, content if name.endswith(end) else data)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match='does not exist'):
        load_from_local(str(tmp_path / 'none.pth'))


def test_home_is_expanded_as_by_the_host(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv('HOME', str(tmp_path))
    save(tmp_path / 'a.pth', dict(a=1))
    assert CheckpointLoader.load_checkpoint('~/a.pth', 'cpu') == dict(a=1)


@pytest.mark.parametrize(
    'content',
    [
        b'',
        b'\0' * 1000,
        b'version https://git-lfs.github.com/spec/v1\noid sha256:4d\nsize 12\n',
        b'<!DOCTYPE html><html></html>',
        b'hello world',
        b'{"message": "Not Found"}',
    ],
    ids=['empty', 'zeros', 'lfs', 'html', 'text', 'json'],
)
def test_no_checkpoint_at_all(tmp_path: Path, content: bytes) -> None:
    """A download that went wrong is damaged; nobody is told to trust its author."""
    (tmp_path / 'a.pth').write_bytes(content)
    # A command prints it as a sentence, without a traceback.
    with pytest.raises(DamagedCheckpointError, match='truncated or damaged') as caught:
        load_from_local(str(tmp_path / 'a.pth'))
    assert isinstance(caught.value, RuntimeError) and isinstance(caught.value, UserError)


@pytest.mark.parametrize('legacy', [False, True])
def test_truncated(tmp_path: Path, legacy: bool) -> None:
    path = tmp_path / 'a.pth'
    whole = Path(save(path, genuine(), legacy)).read_bytes()
    for length in range(1, len(whole), len(whole) // 40):
        path.write_bytes(whole[:length])
        # A bare pickle cut in the middle of a name asks for a name that is not allowed.
        errors = (RuntimeError, UnsafeCheckpointError) if legacy else RuntimeError
        with pytest.raises(errors, match='truncated or damaged|could run code'):
            load_from_local(str(path))


def test_flipped_bytes_end_in_one_of_two_errors(tmp_path: Path) -> None:
    """Whatever is wrong, a run that resumes must be able to pass over the file."""
    path, chance = tmp_path / 'a.pth', random.Random(0)
    whole = io.BytesIO()
    torch.save(genuine(), whole)
    start = whole.getvalue().find(b'\x80\x02')  # damage the pickle, not the padding
    for _ in range(250):
        damaged = bytearray(whole.getvalue())
        for _ in range(3):
            damaged[start + chance.randrange(1500)] = chance.randrange(256)
        path.write_bytes(bytes(damaged))
        try:
            load_from_local(str(path))
        except (RuntimeError, UnsafeCheckpointError):
            pass


@pytest.mark.parametrize(
    'content', [genuine, lambda: dict(state_dict=dict(a=torch.ones(9, 9)))], ids=['run', 'weights']
)
def test_one_flipped_bit_is_noticed(content: Any, tmp_path: Path) -> None:
    path = tmp_path / 'a.pth'
    whole = Path(save(path, content())).read_bytes()
    with zipfile.ZipFile(str(path)) as archive:
        entries = archive.infolist()
    for entry in entries:
        # The local header has 30 bytes, the name, and an extra field.
        start = (
            entry.header_offset
            + 30
            + sum(struct.unpack('<HH', whole[entry.header_offset + 26 : entry.header_offset + 30]))
        )
        damaged = bytearray(whole)
        damaged[start + entry.file_size // 2] ^= 0x10
        path.write_bytes(bytes(damaged))
        if entry.file_size:
            with pytest.raises(RuntimeError, match='truncated or damaged.*Bad CRC-32'):
                CheckpointLoader.load_checkpoint(str(path), 'cpu')


@pytest.mark.skipif(
    not hasattr(torch.serialization, 'set_crc32_options'),
    reason='this torch always writes the checksums',
)
def test_a_file_without_checksums_comes_back(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        path = save(tmp_path / 'a.pth', dict(a=torch.ones(3)))
    finally:
        torch.serialization.set_crc32_options(True)
    assert torch.equal(load_from_local(path)['a'], torch.ones(3))


class StorageClient:
    """A client of a storage of objects, which is a folder."""

    def __init__(self, **_: Any) -> None:
        pass

    def Get(self, path: str) -> bytes:
        return Path(path.replace('s3:/', '')).read_bytes()


def test_other_loaders_of_the_host_execute_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    """MMEngine's own cache and its storage of objects."""
    mark = tmp_path / 'executed'
    save(tmp_path / 'good.pth', genuine())
    save(tmp_path / 'evil.pth', dict(genuine(), surprise=Call(os.system, f'touch {mark}')))
    monkeypatch.setenv('MMENGINE_HOME', str(tmp_path))
    (tmp_path / 'open_mmlab.json').write_text('{"good": "good.pth", "evil": "evil.pth"}')
    package = types.ModuleType('petrel_client')
    package.client = types.SimpleNamespace(Client=StorageClient)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, 'petrel_client', package)
    for start, end in (('open-mmlab://', ''), (f's3:/{tmp_path}/', '.pth')):
        assert CheckpointLoader.load_checkpoint(f'{start}good{end}', 'cpu')['meta']['seed'] == 1
        with pytest.raises(UnsafeCheckpointError):
            CheckpointLoader.load_checkpoint(f'{start}evil{end}', 'cpu')
    assert not mark.exists()


@pytest.fixture
def served(tmp_path: Path) -> Any:
    """A folder and the address of a web server on this machine that serves it."""
    folder = tmp_path / 'served'
    folder.mkdir()
    handler = functools.partial(QuietHandler, directory=str(folder))
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield folder, f'http://127.0.0.1:{server.server_address[1]}'
    server.shutdown()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        """Say nothing."""


def test_downloads_are_read_as_local_files_are(
    served: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    folder, address = served
    monkeypatch.setenv('TORCH_HOME', str(tmp_path / 'hub'))
    mark = tmp_path / 'executed'
    save(folder / 'good.pth', genuine())
    save(folder / 'evil.pth', dict(genuine(), surprise=Call(os.system, f'touch {mark}')))
    got = CheckpointLoader.load_checkpoint(f'{address}/good.pth', map_location='cpu')
    assert got['meta']['seed'] == 1
    with pytest.raises(UnsafeCheckpointError):
        CheckpointLoader.load_checkpoint(f'{address}/evil.pth', map_location='cpu')
    assert not mark.exists()


OPTIONS: Dict[str, Dict[str, Any]] = dict(
    Cosine=dict(T_max=5),
    CosineRestart=dict(periods=[3, 3], restart_weights=[1, 0.5], eta_min=0),
    Exponential=dict(gamma=0.9),
    MultiStep=dict(milestones=[2, 2, 4]),
    Step=dict(step_size=2),
    OneCycle=dict(eta_max=0.1, total_steps=9),
)


def schedulers() -> Iterator[Any]:
    """One of every kind that MMEngine registers, in the middle of its work."""
    for name, kind in PARAM_SCHEDULERS.module_dict.items():
        if not kind.__module__.startswith('mmengine.'):
            continue
        weight = torch.nn.Parameter(torch.ones(1))
        options = next(
            (
                OPTIONS[key]
                for key in (
                    'CosineRestart',
                    'Cosine',
                    'Exponential',
                    'MultiStep',
                    'OneCycle',
                    'Step',
                )
                if key in name
            ),
            {},
        )
        if name.endswith('ParamScheduler'):
            options = dict(options, param_name='lr')
        scheduler = kind(torch.optim.SGD([weight], lr=0.1, momentum=0.9), **options)
        scheduler.optimizer.step()
        scheduler.step(*([dict(loss=1.0)] if 'Plateau' in name else []))
        yield scheduler


def test_every_scheduler_of_the_host_comes_back(tmp_path: Path) -> None:
    names = []
    for scheduler in schedulers():
        state = scheduler.state_dict()
        check_loadable(dict(param_schedulers=[state]))
        assert load_from_local(save(tmp_path / 'a.pth', state)) == state
        names.append(type(scheduler).__name__)
    assert {'OneCycleLR', 'MultiStepLR', 'PolyLR', 'ReduceOnPlateauLR'} <= set(names)


def hosts_own() -> Dict[str, Any]:
    return dict(
        config=ConfigDict(sensor=dict(name='S2', bands=[dict(gain=1.5)], size=(2, 3))),
        counter=collections.Counter(a=2),
        ordered=collections.OrderedDict(a=1),
        some={1, 'a'},
        fixed=frozenset([1]),
        number=1 + 2j,
        raw=b'abc',
        no_bytes=b'',
        empty=np.zeros((0, 3)),
        buffer=bytearray(b'abc'),
        element=BaseDataElement(metainfo=dict(path='a.png'), label=torch.ones(2)),
        pixels=PixelData(data=torch.ones(1, 2, 2)),
        instances=InstanceData(boxes=torch.ones(1, 4)),
        label=LabelData(item=torch.ones(1)),
        size=torch.Size([2, 3]),
        dtype=torch.float32,
    )


@pytest.mark.parametrize('legacy', [False, True])
@pytest.mark.parametrize('name', list(hosts_own()))
def test_the_hosts_own_types_come_back(name: str, legacy: bool, tmp_path: Path) -> None:
    want = hosts_own()[name]
    check_loadable(dict(meta=dict(dataset_meta={name: want})))
    got = load_from_local(save(tmp_path / 'a.pth', want, legacy))
    assert type(got) is type(want) and without_address(got) == without_address(want)
    if name == 'config':
        assert got.sensor.bands[0].gain == 1.5 and type(got.sensor) is ConfigDict
    if name == 'pixels':
        assert torch.equal(got.data, want.data)


def without_address(value: Any) -> str:
    return re.sub(' at 0x[0-9a-f]+', '', str(value))


def test_nothing_of_the_hosts_schedulers_can_be_called(tmp_path: Path) -> None:
    for evil in (
        Call(OneCycleParamScheduler, 1, 2),
        Call(getattr, OneCycleParamScheduler, 'step'),
        Call(getattr, HistoryBuffer, '_annealing_cos'),
    ):
        with pytest.raises((UnsafeCheckpointError, RuntimeError)):
            load_from_local(save(tmp_path / 'a.pth', evil))


class Tracker:
    """What a user keeps, of a class of his own."""


def nested(value: Any) -> Any:
    return ConfigDict(parts=[0, dict(deep=value)])


@pytest.mark.parametrize(
    'checkpoint, words',
    [
        (
            dict(meta=dict(dataset_meta=dict(root=Path('a')))),
            r"\['meta'\]\['dataset_meta'\]\['root'\] is a pathlib.*metainfo of the dataset",
        ),
        (
            dict(message_hub=dict(runtime_info=collections.OrderedDict(tracker=[1, Tracker()]))),
            r"\['message_hub'\]\['runtime_info'\]\['tracker'\]\[1\] is a .*Tracker.*resumed=False",
        ),
        (
            dict(param_schedulers=[dict(), dict(rule=lambda: 1)]),
            r"\['param_schedulers'\]\[1\]\['rule'\] is a .*function.*state_dict",
        ),
        (
            dict(meta={}, extra=nested(datetime.date(2026, 1, 1))),
            r"\['extra'\]\['parts'\]\[1\]\['deep'\] is a datetime.date",
        ),
        (dict(extra={Path('a'): 1}), r"\['extra'\] has a key that is a pathlib"),
        (dict(optimizer=np.array([Tracker()])), r"\['optimizer'\] is a numpy.ndarray"),
    ],
)
def test_a_type_that_would_not_come_back_is_an_error_before_it_is_written(
    checkpoint: Any, words: str, tmp_path: Path
) -> None:
    state = dict(genuine(), **checkpoint)
    path = tmp_path / 'iter_1.pth'
    path.write_bytes(b'the one before')
    with pytest.raises(UnsafeCheckpointError, match=words):
        mmengine.runner.save_checkpoint(state, str(path))
    with pytest.raises(UnsafeCheckpointError, match=words):
        mmengine.runner.runner.save_checkpoint(state, str(path))
    assert path.read_bytes() == b'the one before'


def test_a_statistic_of_the_users_own_is_not_written(monkeypatch: Any, tmp_path: Path) -> None:
    state = genuine()
    buffer = state['message_hub']['log_scalars']['train/loss']
    methods = dict(buffer._statistics_methods, best=Tracker)
    monkeypatch.setattr(HistoryBuffer, '_statistics_methods', methods)
    check_loadable(state)
    assert len(buffer.data[0]) == 3
    torch.save(state, tmp_path / 'saved.pth')
    loaded = load_from_local(str(tmp_path / 'saved.pth'))
    assert len(loaded['message_hub']['log_scalars']['train/loss'].data[0]) == 3


def test_tensors_are_neither_copied_nor_changed_by_the_check() -> None:
    state = dict(genuine(), loop=[])
    state['loop'].append(state['loop'])  # a list that holds itself can be written and read
    large = torch.empty(1).expand(1 << 40)  # 4 TiB, if anybody wrote it
    state['state_dict']['large'], state['array'] = large, np.broadcast_to(np.float32(0), (1 << 40,))
    check_loadable(state)
    assert state['state_dict']['large'] is large
