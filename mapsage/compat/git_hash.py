"""Ask git for the commit once instead of at every checkpoint.

Gap: mmengine's ``Runner.save_checkpoint`` starts a git process each time, and waits until its pipe
is closed. If another thread forks a loader worker at that moment, the worker inherits the pipe and
keeps it open as long as it lives, and the training hangs. This happened with dynamic sampling ahead
of the training.
Remove when: ``get_git_hash`` of every supported mmengine caches its answer.
"""

from __future__ import annotations

import functools

from mmengine.runner import runner


def apply() -> None:
    """Give mmengine's Runner a function with a cache, which is filled before a training."""
    runner.get_git_hash = functools.lru_cache(maxsize=None)(runner.get_git_hash)
