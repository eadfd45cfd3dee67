"""A training starts git before it forks workers, and not at its checkpoints."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any, List

import pytest
from mmengine.hooks import Hook
from mmengine.runner import runner as host_runner
from toy_runs import toy_train


def test_no_git_is_started_during_a_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: List[Any] = []
    popen = subprocess.Popen

    class Noted(popen):  # type: ignore[type-arg, misc, valid-type]
        def __init__(self, command: Any, *args: Any, **kwargs: Any) -> None:
            started.append(command)
            super().__init__(command, *args, **kwargs)

    class FromNow(Hook):
        def before_train(self, runner: Any) -> None:
            assert ['git', 'rev-parse', 'HEAD'] in started
            started.clear()

    host_runner.get_git_hash.cache_clear()
    monkeypatch.setattr(subprocess, 'Popen', Noted)
    toy_train(tmp_path, hooks=[FromNow()])
    assert list(tmp_path.glob('**/*.pth')) and started == []
