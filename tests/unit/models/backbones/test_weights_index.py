"""The index of a folder of safetensors with anything in it."""

from __future__ import annotations

from typing import Any

from fuzzing import documents
from hypothesis import example, given

from mapsage.models.backbones.weight_files import WeightsError, _safetensors_files


@given(documents(dict(weight_map=dict(a='1.safetensors', b='2.safetensors'))))
@example(b'{"weight_map": {"a": "../outside.safetensors"}}')
@example(b'{"weight_map": {"a": "/etc/hostname"}}')
@example(b'{"weight_map": {"a": 7}}')
def test_any_index(tmp_path_factory: Any, content: bytes) -> None:
    folder = tmp_path_factory.getbasetemp() / 'weights'
    folder.mkdir(exist_ok=True)
    (folder.parent / 'outside.safetensors').write_bytes(b'')
    for name in ('1.safetensors', '2.safetensors'):
        (folder / name).write_bytes(b'')
    (folder / 'model.safetensors.index.json').write_bytes(content)
    try:
        files = _safetensors_files(str(folder))
        assert set(files) <= {str(folder / f'{number}.safetensors') for number in (1, 2)}
    except WeightsError as error:
        assert 'model.safetensors.index.json' in str(error)
