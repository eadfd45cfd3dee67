"""What the extra adds to every run: its hook, and a comparison before all other checks."""

from __future__ import annotations

from typing import Any, Dict, List

from mapsage.engine.extensions import EXTENSIONS
from mapsage.engine.extensions.resume import Resume
from mapsage.engine.runner import hooks_to_register
from mapsage.extras.elastic.nodes_hook import NodesHook
from mapsage.extras.elastic.run_extensions import CheckpointCopies, Nodes


def default_kinds(settings: Dict[str, Any]) -> List[Any]:
    hooks = hooks_to_register(settings, [])
    return [hook['type'] for hook in hooks if isinstance(hook, dict)]


def test_the_hook_is_registered_unless_the_config_says_none() -> None:
    assert NodesHook in default_kinds({})
    assert NodesHook not in default_kinds(dict(nodes=None))


def test_machines_are_compared_first_and_copies_follow_the_resume() -> None:
    assert EXTENSIONS[0] is Nodes
    assert EXTENSIONS.index(CheckpointCopies) > EXTENSIONS.index(Resume)
