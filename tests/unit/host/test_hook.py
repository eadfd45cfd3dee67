"""Hooks with MapSage's methods: of the base class, and of users."""

from __future__ import annotations

from pathlib import Path
from typing import Any, List

from mmengine.hooks import Hook
from toy_runs import toy_train

from mapsage.host import MapSageHook
from mapsage.host.hook import mapsage_hooks


class Gathers(MapSageHook):
    def __init__(self) -> None:
        self.saves: List[int] = []

    def gather_state(self, runner: Any) -> None:
        self.saves.append(runner.iter + 1)


class UsersHook(Hook):
    """A hook without the base class that has one of its methods."""

    uneven_batches = True

    def __init__(self) -> None:
        self.saves: List[int] = []

    def gather_state(self, runner: Any) -> None:
        self.saves.append(runner.iter + 1)


def test_methods_are_called_with_and_without_the_base_class(tmp_path: Path) -> None:
    gathers, users = Gathers(), UsersHook()
    toy_train(tmp_path, hooks=[gathers, users, Hook()])
    assert gathers.saves and users.saves == gathers.saves


def test_every_hook_has_the_methods_and_a_name() -> None:
    gathers, runner = Gathers(), None
    hooks = mapsage_hooks([gathers, UsersHook(), Hook()])
    assert hooks[0] is gathers
    assert [hook.name_in_messages for hook in hooks] == ['Gathers', 'UsersHook', 'Hook']
    assert [hook.uneven_batches for hook in hooks] == [False, True, False]
    for hook in hooks:
        hook.check_own_state(runner)
        hook.end_run(runner, None)
        assert hook.explain(runner) is None
