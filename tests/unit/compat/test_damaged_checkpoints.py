"""Checkpoints with anything in them: read, or an error that names the file."""

from __future__ import annotations

import io
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzzing import JSON, changed, damaged, documents
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from mmengine.config import Config

from mapsage.compat.checkpoint_loading import UnsafeCheckpointError, load_from_local
from mapsage.engine.checkpoints.resume import UNREADABLE, read_choice
from mapsage.maps.errors import PredictError
from mapsage.maps.model import find_classes, load_weights, training_days

META = dict(
    seed=1,
    iter=7,
    epoch=0,
    virtual_ranks=2,
    dataset_meta=dict(
        classes=['a', 'b'], palette=[[0, 0, 0], [1, 1, 1]], stack_days=dict(s2=[100])
    ),
    weights_licenses=[dict(name='L', link='https://l', forbids='sale')],
)
LEFT_OUT = dict(META, left_out_weights=dict(names=['bias'], digest='0', source='a.pth'))


def weights() -> Any:
    return {'weight': torch.ones(2, 3), 'bias': torch.zeros(2)}


def checkpoint_bytes(meta: Any, legacy: bool = False) -> bytes:
    stream = io.BytesIO()
    torch.save(
        dict(meta=meta, state_dict=weights(), message_hub={}),
        stream,
        _use_new_zipfile_serialization=not legacy,
    )
    return stream.getvalue()


def load_for_maps(name: str) -> None:
    model = torch.nn.Linear(3, 2)
    model.num_classes, model.data_preprocessor = 2, None  # type: ignore[assignment]
    meta = load_weights(model, name)
    training_days(meta)
    find_classes(Config(), meta, model)


def try_all(path: Path) -> None:
    """Read a file as training, resuming and predicting do."""
    for read, errors in (
        (load_from_local, (UnsafeCheckpointError, RuntimeError)),
        (read_choice, UNREADABLE),
        (load_for_maps, PredictError),
    ):
        try:
            read(str(path))
        except errors as error:  # type: ignore[misc]
            assert any(
                text in str(error)
                for text in (path.name, 'names classes', "checkpoint's dataset_meta", 'no backbone')
            )


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_bytes(tmp_path_factory: Any, data: st.DataObject) -> None:
    path = tmp_path_factory.getbasetemp() / 'iter_7.pth'
    path.write_bytes(
        data.draw(
            st.one_of(
                st.binary(max_size=60),
                damaged(checkpoint_bytes(META)),
                damaged(checkpoint_bytes(META, True)),
            )
        )
    )
    try_all(path)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.one_of(JSON, changed(META), changed(LEFT_OUT)))
def test_any_meta(tmp_path_factory: Any, meta: Any) -> None:
    path = tmp_path_factory.getbasetemp() / 'iter_7.pth'
    path.write_bytes(checkpoint_bytes(meta))
    try_all(path)


@given(JSON)
def test_any_content(tmp_path_factory: Any, content: Any) -> None:
    path = tmp_path_factory.getbasetemp() / 'iter_7.pth'
    torch.save(content, str(path))
    try_all(path)


@given(documents(META))
@example(b'7')
@example(b'[]')
def test_any_meta_of_safetensors(tmp_path_factory: Any, meta: bytes) -> None:
    save = pytest.importorskip('safetensors.torch').save
    path = tmp_path_factory.getbasetemp() / 'a.safetensors'
    path.write_bytes(save(weights(), dict(meta=meta.decode('latin-1'))))
    try_all(path)


@given(st.data())
def test_any_header_of_safetensors(tmp_path_factory: Any, data: st.DataObject) -> None:
    content = pytest.importorskip('safetensors.torch').save(weights())
    length = int.from_bytes(content[:8], 'little')
    header = data.draw(documents(json.loads(content[8 : 8 + length])))
    path = tmp_path_factory.getbasetemp() / 'a.safetensors'
    path.write_bytes(
        data.draw(
            st.sampled_from(
                [
                    len(header).to_bytes(8, 'little') + header + content[8 + length :],
                    (1 << 62).to_bytes(8, 'little') + header,
                ]
            )
        )
    )
    try_all(path)


class Attack:
    """An object whose reading would run a command."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize('place', ['meta', 'state_dict', 'message_hub'])
def test_nothing_is_run(tmp_path: Path, place: str) -> None:
    content = dict(meta=META, state_dict=weights(), message_hub={})
    content[place] = dict(content[place], x=Attack(tmp_path / 'ran'))
    path = tmp_path / 'iter_7.pth'
    torch.save(content, str(path))
    try_all(path)
    assert not (tmp_path / 'ran').exists()
    pickle.loads(pickle.dumps(Attack(tmp_path / 'ran')))  # the attack works
    assert (tmp_path / 'ran').exists()
