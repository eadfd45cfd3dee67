"""The memory of mmengine's config text."""

from __future__ import annotations

import pytest
from mmengine.config import Config
from mmengine.config import config as module
from yapf.yapflib import yapf_api

import mapsage  # noqa: F401


def test_the_text_is_mmengines_and_follows_every_change() -> None:
    from mapsage.compat import config_text

    config = Config(dict(b=dict(c=[1, 2], d='x'), a=3))
    for change in (dict(), {'b.c': [1]}, {'b.e': dict(f=None)}, {'b.c': [1, 2]}):
        config.merge_from_dict(change)
        assert config.pretty_text == config_text._format(config)
    other = Config(dict(a=4))
    assert other.pretty_text == config_text._format(other) != config.pretty_text


def test_yapf_runs_once_for_a_config(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = yapf_api.FormatCode
    for place in (yapf_api, module):  # the fork imports it when it formats, 0.10.7 before
        monkeypatch.setattr(
            place,
            'FormatCode',
            raising=False,
            value=lambda *args, **kwargs: calls.append(args) or real(*args, **kwargs),
        )
    text = Config(dict(only_here=dict(number=17))).pretty_text
    once = len(calls)
    assert once
    assert Config(dict(only_here=dict(number=17))).pretty_text == text
    assert len(calls) == once
