"""What a checkpoint may hold, and what is said about one that holds anything else."""
from __future__ import annotations

import collections
import functools
import http.server
import io
import os
import pickle
import random
import threading
import zipfile
from pathlib import Path
from typing import Any, Callable, List, Tuple

import numpy as np
import pytest
import torch
from mmengine.logging import HistoryBuffer, MessageHub
from mmengine.runner.checkpoint import CheckpointLoader

from mapsage.compat.checkpoint_loading import UnsafeCheckpointError, load_from_local


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
        state_dict=model.state_dict(), message_hub=hub.state_dict(),
        optimizer=optimizer.state_dict(), extra=[torch.ones(2, dtype=torch.bfloat16),
                                                 torch.empty(0), torch.tensor(True)])


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
        Call(torch.load, mark), Call(torch.hub.load, 'a/b', 'c'), Call(pickle.loads, b'.'),
        Call(np.load, mark), Call(np.fromfile, mark), Call(torch.save, 1, mark),
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
DOTTED = (b'\x80\x04\x8c\x1fmmengine.logging.history_buffer'
          b'\x8c\x22HistoryBuffer.__init__.__globals__\x93.')


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


@pytest.mark.parametrize('content', [
    b'', b'\0' * 1000, b'version https://git-lfs.github.com/spec/v1\noid sha256:4d\nsize 12\n',
    b'<!DOCTYPE html><html></html>', b'hello world', b'{"message": "Not Found"}',
], ids=['empty', 'zeros', 'lfs', 'html', 'text', 'json'])
def test_no_checkpoint_at_all(tmp_path: Path, content: bytes) -> None:
    """A download that went wrong is damaged; nobody is told to trust its author."""
    (tmp_path / 'a.pth').write_bytes(content)
    with pytest.raises(RuntimeError, match='truncated or damaged'):
        load_from_local(str(tmp_path / 'a.pth'))


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


def test_downloads_are_read_as_local_files_are(served: Any, tmp_path: Path,
                                               monkeypatch: Any) -> None:
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
